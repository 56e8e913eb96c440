"""Which of the architectures of tests/test_model_nvfp4_models.py vLLM also serves on a CPU, in agreement with the trainer.

    python tests/benchmarks/bench_architectures.py [NAME …]

A tiny random checkpoint of each is quantized, loaded by both sides and sampled, without and with an adapter on all linear
layers. A row passes by the bars of tests/test_model_nvfp4_vllm.py; otherwise it says what vLLM said.
"""

import json
import os
import signal
import sys
import tempfile
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))
from test_model_nvfp4_models import ARCHITECTURES
from test_model_nvfp4_vllm import TINY, compare, tiny_folder

from vllm_cpu import prepare_cpu


def judge(name: str, work: Path) -> str:
    sizes = {key: ARCHITECTURES[name].get(key, value) for key, value in TINY.items()}
    experts = any("experts" in key for key in ARCHITECTURES[name])
    sizes |= {"std": 0.02 if experts else 0.0}  # with experts, rounding flips the router at weights of unit gain
    folder = tiny_folder(name, work, "compressed-tensors", a16=True, **sizes)
    result = compare(folder, "all-linear")["all-linear"]
    sound = result["base"] <= 0.012 and result["adapter"] <= 0.02 and result["effect"] >= 3 * result["adapter"]
    return ("pass" if sound else "FAIL") + "".join(f" · {key} {value:.4f}" for key, value in result.items())


def in_a_child(name: str) -> str:
    """A process of its own, because an engine cannot be rebuilt; forked, because the imports take longer than the rest."""
    with tempfile.TemporaryDirectory() as work:
        child = os.fork()
        if child == 0:
            signal.alarm(600)  # one that hangs must not keep the others waiting
            log = os.open(Path(work) / "log", os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 1), os.dup2(log, 2)
            try:
                verdict = judge(name, Path(work))
            except Exception as error:  # the reason is the result
                traceback.print_exc()
                verdict = f"FAIL · {type(error).__name__}: {' '.join(str(error).split())[:160]}"
            (Path(work) / "verdict").write_text(json.dumps(verdict))
            os._exit(0)
        os.waitpid(child, 0)
        verdict = Path(work) / "verdict"
        return json.loads(verdict.read_text()) if verdict.exists() else "FAIL · the process died"


def main() -> None:
    prepare_cpu()
    names = sys.argv[1:] or list(ARCHITECTURES)
    verdicts = []
    for name in names:
        verdicts.append(in_a_child(name))
        print(f"{name:12}{verdicts[-1]}", flush=True)
    print(f"{sum(verdict.startswith('pass') for verdict in verdicts)} of {len(names)} pass")


if __name__ == "__main__":
    main()
