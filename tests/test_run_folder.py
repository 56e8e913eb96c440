"""run_folder.py on its own. `pytest tests/test_run_folder.py`."""

import json
import resource
import signal
import subprocess
import sys

import pytest
import torch

import run_folder
import train_grpo
from errors import UserError
from ranks import dump_stacks
from run_folder import (
    RunFolder,
    append_jsonl,
    latest_checkpoint,
    load_optimizer_tensors,
    lock_run,
    open_logs,
    open_run,
    save_checkpoint,
)


def test_optimizer_tensors_are_copies_of_the_file():
    """Views of a mapped file would keep it open for the whole run, and a GPU's AdamW wants its step counter there too."""
    layer = torch.nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    tensors = {
        f"weight|{key}": torch.ones(()) if key == "step" else torch.ones(2, 2)
        for key in ("step", "exp_avg", "exp_avg_sq")
    }
    load_optimizer_tensors(layer, optimizer, tensors)
    state = optimizer.state[layer.weight]
    assert all(state[key].data_ptr() != tensors[f"weight|{key}"].data_ptr() for key in state)
    layer.weight.grad = torch.ones(2, 2)
    optimizer.step()
    assert state["step"].item() == 2
    assert tensors["weight|step"].item() == 1


def parsed(tmp_path, *words):
    return train_grpo.parse_args(["--model", "m", "--runs-dir", str(tmp_path), "--run-name", "run", *words])


def test_a_run_folder_that_cannot_be_made_is_told_at_once(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(UserError, match=r"file on .* is not a folder one can write to"):
        open_run(parsed(tmp_path / "file"))
    with pytest.raises(UserError, match=r"rank 3 on .* cannot write to .*\(Not a directory\)"):
        dump_stacks(tmp_path / "file" / "run", 3)


def test_a_restarted_job_goes_on_whatever_it_was_started_with(tmp_path, monkeypatch):
    """`--resume never` protects what exists; what the job itself has made is not that."""
    (tmp_path / "run" / "checkpoint" / "step-000003").mkdir(parents=True)
    args = parsed(tmp_path, "--resume", "never")
    config = tmp_path / "run" / "config.json"
    for job in (None, "4711"):
        config.write_text(json.dumps({"flags": vars(args), "job": job}))
        with pytest.raises(UserError):
            open_run(args)
    for name, value in (("TORCHELASTIC_RESTART_COUNT", "1"), ("TORCHELASTIC_RUN_ID", "4711")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert open_run(args)[1] == tmp_path / "run" / "checkpoint" / "step-000003"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # torchrun's name for a job without one
    with pytest.raises(UserError):
        open_run(args)


def test_the_same_command_goes_on_with_a_run_that_began_at_a_path(tmp_path):
    """README: the same command again goes on. Another start into the same folder is refused, a new run keeps its start."""
    made = tmp_path / "run" / "checkpoint" / "step-000040"
    made.mkdir(parents=True)
    other = tmp_path / "other"
    other.mkdir()
    for name in ("state.json", "adapter_config.json", "adapter_model.safetensors", "optimizer.safetensors"):
        (other / name).write_text(json.dumps({"r": 16, "lora_alpha": 32}))
    args = parsed(tmp_path, "--resume", "begun-here")
    (tmp_path / "run" / "config.json").write_text(json.dumps({"flags": vars(args), "job": None}))
    assert open_run(args) == (tmp_path / "run", made)
    with pytest.raises(UserError, match=r"did not start from .*other"):
        open_run(parsed(tmp_path, "--resume", str(other), "--lora-rank", "16", "--lora-alpha", "32"))


def test_resume_from_a_path_wants_the_adapter_to_count_as_it_did(tmp_path, monkeypatch):
    start = tmp_path / "step-000003"
    start.mkdir()
    args = parsed(tmp_path, "--resume", str(start), "--lora-alpha", "32")
    for name in ("state.json", "adapter_config.json", "adapter_model.safetensors", "optimizer.safetensors"):
        with pytest.raises(UserError, match=f"no checkpoint: it has no {name}"):
            open_run(args)
        (start / name).write_text(json.dumps({"step": 3, "r": 16, "lora_alpha": 64}))
    with pytest.raises(UserError, match="was trained with --lora-alpha 64; use that, not 32"):
        open_run(args)
    args.lora_alpha = 64
    assert open_run(args) == (tmp_path / "run", start)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps({"flags": vars(args) | {"lr": 1.0}, "job": None}))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(UserError, match=r"--lr 1\.0 then"):  # a restart goes on with the same flags only
        open_run(args)


def test_a_run_made_before_a_flag_existed_goes_on_without_it(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    args = parsed(tmp_path)
    older = {name: value for name, value in vars(args).items() if name != "lora_experts"}
    (run / "config.json").write_text(json.dumps({"flags": older}))
    assert open_run(args) == (run, None)
    with pytest.raises(UserError, match="--lora-experts False then, True now"):
        open_run(parsed(tmp_path, "--lora-experts"))


def test_the_lock_waits_for_the_writer_before(tmp_path):
    lock = f"import fcntl, time; f = open({str(tmp_path / '.lock')!r}, 'w'); fcntl.flock(f, fcntl.LOCK_EX)"
    holder = lock + "; print(1, flush=True); time.sleep(.5)"
    with subprocess.Popen([sys.executable, "-c", holder], stdout=subprocess.PIPE) as process:
        process.stdout.read(1)
        with pytest.raises(UserError, match="another process writes in"):
            lock_run(tmp_path)
        lock_run(tmp_path, patience=10).close()


def test_full_disk_keeps_the_old_checkpoint(tmp_path):
    """A file-size limit stands for the full disk: the write fails in the same place, with an error of the same kind."""
    adapter = {"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": torch.ones(8, 64)}
    config = {"lora_rank": 8, "lora_alpha": 8, "base_model": "m"}
    save_checkpoint(tmp_path, 1, adapter, {"a|exp_avg": torch.ones(8, 64)}, config, keep=0)
    old = {p.name: p.read_bytes() for p in (tmp_path / "checkpoint" / "step-000001").iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(UserError, match="it goes on from step-000001"):
            save_checkpoint(tmp_path, 2, adapter, {"a|exp_avg": torch.ones(500, 64)}, config, keep=0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert [p.name for p in (tmp_path / "checkpoint").iterdir()] == ["step-000001"]
    assert {p.name: p.read_bytes() for p in (tmp_path / "checkpoint" / "step-000001").iterdir()} == old
    save_checkpoint(tmp_path, 2, adapter, {"a|exp_avg": torch.ones(500, 64)}, config, keep=0)
    assert latest_checkpoint(tmp_path).name == "step-000002"


@pytest.mark.parametrize("where", ["save_adapter", "save_file", "os.fsync", "os.rename"])
def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before(tmp_path, monkeypatch, where):
    """KeyboardInterrupt stands for the kill, since nothing tidies up after it. Of three, `keep` 1 leaves two."""
    adapter = {"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": torch.ones(8, 64)}
    config = {"lora_rank": 8, "lora_alpha": 8, "base_model": "m"}

    def save(step, keep):
        save_checkpoint(tmp_path, step, adapter, {"a|exp_avg": torch.ones(8, 64)}, config, keep)

    def killed(*_, **__):
        raise KeyboardInterrupt

    for step in (1, 2, 3):
        before = latest_checkpoint(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(f"run_folder.{where}", killed)
            with pytest.raises(KeyboardInterrupt):
                save(step, 1)
        assert latest_checkpoint(tmp_path) == before
        save(step, 1)
        assert latest_checkpoint(tmp_path).name == f"step-{step:06d}"
    assert sorted(p.name for p in (tmp_path / "checkpoint").iterdir()) == ["step-000002", "step-000003"]


def test_lines_after_the_last_checkpoint_and_half_a_line_are_dropped(tmp_path):
    names = ("metrics", "samples", "evaluations")
    for name in names:
        append_jsonl(tmp_path / f"{name}.jsonl", [{"step": step} for step in (1, 2, 3, 4)])
        with open(tmp_path / f"{name}.jsonl", "a") as file:
            file.write('{"step": 1, "rew')  # as a kill leaves it
    folder = RunFolder(tmp_path, start_step=3)
    open_logs(folder, {"lr": 0.1}, {}, 1)
    assert folder.metrics == folder.evaluations == [{"step": 1}, {"step": 2}, {"step": 3}]
    for name in names:
        assert (tmp_path / f"{name}.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'
    assert run_folder.read_json(tmp_path, "config.json")["flags"] == {"lr": 0.1}


def test_one_writer_per_run(tmp_path):
    lock = lock_run(tmp_path)
    with pytest.raises(UserError, match="another process writes in"):
        lock_run(tmp_path)
    lock.close()
    lock_run(tmp_path).close()
