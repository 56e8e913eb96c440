"""A run's folder: which run it is and where it goes on, one writer at a time, its lines, its checkpoints.

    runs/NAME/config.json           flags, versions, commit, machine: what `--resume` is compared with
              metrics.jsonl         one line a step      samples.jsonl      one line a sample
              evaluations.jsonl     one line an evaluation
              checkpoint/step-N/    a PEFT folder, the optimizer's moments, the position: complete or not there
              stacks/rank-N.txt     where each rank was when it crashed or was stopped (ranks.py)

Nothing is lost by a kill at any instant: files are written under another name and renamed, a half written line is dropped.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from adapter import save_adapter
from errors import UserError, read_json
from model_nvfp4 import whole

# ---------------------------------------------------------------------------------------------------------------------
# Files


def write_atomically(path: Path, text: str) -> None:
    """Either the old file or the new one, also after a power cut."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Complete lines only: a line that a killed process left half written is dropped. A missing file is an empty one."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def append_jsonl(path: Path, records: list[dict[str, Any]]) -> None:
    with open(path, "a") as file:
        file.write("".join(json.dumps(record) + "\n" for record in records))


# ---------------------------------------------------------------------------------------------------------------------
# Which run is it, and where does it go on?
# Flags that may change when a run goes on; any other difference is refused.
FREE_FLAGS = {
    "steps", "keep", "save_every", "eval_every", "run_name", "runs_dir", "resume", "timeout", "dry_run", "print_every",
    "gpu_memory_utilization", "sleep", "max_tokens", "activation_checkpointing", "no_probe",
}  # fmt: skip


def latest_checkpoint(run_dir: Path) -> Path | None:
    """The newest complete checkpoint: a folder is renamed to its final name only when everything in it is on disk."""
    found = sorted((run_dir / "checkpoint").glob("step-*"))
    return found[-1] if found else None


@dataclass
class RunFolder:
    """A run on disk. The lock, the lines so far and the writing of checkpoints are rank 0's."""

    path: Path
    checkpoint: Path | None = None  # the one to go on from
    start_step: int = 0
    lock: Any = None
    metrics: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    pending: list[tuple] = field(default_factory=list)  # a checkpoint in memory that `write_pending` writes
    writer: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    written: Future | None = None  # of the checkpoint that is being written

    @classmethod
    def at(cls, path: Path, checkpoint: Path | None, steps: int) -> RunFolder:
        step = json.loads((checkpoint / "state.json").read_text())["step"] if checkpoint else 0
        if step > steps:
            raise UserError(
                f"{checkpoint} is after step {step}, more than --steps {steps}; --steps counts from the start."
            )
        return cls(path, checkpoint, step)

    def put_checkpoint(self, *checkpoint: Any) -> None:
        """Keep what `save_checkpoint` takes after the folder; raises here what went wrong with the one before."""
        if self.written:
            self.written.result()
        self.pending.append((self.path, *checkpoint))

    def write_pending(self) -> None:
        """Start to write the kept checkpoint in a thread."""
        while self.pending:
            self.written = self.writer.submit(save_checkpoint, *self.pending.pop())

    def finish_checkpoints(self) -> None:
        self.write_pending()
        if self.written:
            self.written.result()


def open_run(args: argparse.Namespace) -> tuple[Path, Path | None]:
    """The run's folder, and the checkpoint to go on from. Reads only; raises UserError before anything is touched."""
    run_dir = Path(args.runs_dir) / args.run_name
    existing = next(path for path in [run_dir, *run_dir.absolute().parents] if os.path.exists(path))
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(
            f"{existing} on {socket.gethostname()} is not a folder one can write to, so {run_dir} cannot hold the run; mend its "
            f"permissions or choose another --runs-dir."
        )
    saved = read_json(run_dir, "config.json")
    # `--resume never` and `--resume PATH` are for the first start; torchrun's restarts go on. It counts restarts on the node
    # that failed, not on those that start again with it: they know the job by its name.
    known = saved.get("job") == os.environ.get("TORCHELASTIC_RUN_ID", "")
    restarted = bool(saved) and (known or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0")
    start = None if args.resume in ("auto", "never") else Path(args.resume)
    again = bool(saved) and saved["flags"].get("resume") == args.resume  # the same command goes on with what it began
    if start and not restarted and not again:
        check_start(args, start)
        if saved:
            raise UserError(f"{run_dir} exists and did not start from {start}; choose another --run-name.")
        return run_dir, start
    if not saved:
        return run_dir, None
    if args.resume == "never" and not restarted:
        raise UserError(f"{run_dir} exists and --resume never forbids going on; choose another --run-name.")
    now = json.loads(json.dumps(vars(args)))
    off = {name: value and False for name, value in now.items()}  # what a flag was in a run older than it
    then = off | saved["flags"]
    differing = sorted(k for k in now.keys() | then.keys() if k not in FREE_FLAGS and now.get(k) != then.get(k))
    if differing:
        changes = ", ".join(f"--{k.replace('_', '-')} {then.get(k)} then, {now.get(k)} now" for k in differing)
        raise UserError(f"{run_dir} was made with other flags ({changes}); use those or another --run-name.")
    return run_dir, latest_checkpoint(run_dir) or start


def check_start(args: argparse.Namespace, checkpoint: Path) -> None:
    """UserError when `--resume PATH` is no checkpoint, or its adapter would count otherwise here than where it was trained."""
    for name in ("state.json", "adapter_config.json", "adapter_model.safetensors", "optimizer.safetensors"):
        if not (checkpoint / name).exists():
            raise UserError(
                f"--resume {checkpoint} is no checkpoint: it has no {name} (expected runs/NAME/checkpoint/step-…)."
            )
    adapter = read_json(checkpoint, "adapter_config.json")
    for flag, there in (("lora_rank", adapter.get("r")), ("lora_alpha", adapter.get("lora_alpha"))):
        if there != vars(args)[flag]:
            raise UserError(
                f"{checkpoint} was trained with --{flag.replace('_', '-')} {there}; use that, not {vars(args)[flag]}."
            )


def lock_run(run_dir: Path, patience: float = 0.0, flag: str = "--run-name") -> Any:
    """One writer per run folder. Returns the open file that holds the lock; the kernel lets go when the process ends.

    `patience` in seconds: after a restart the writer before may need a moment to die (a GPU's memory is unmapped first).
    """
    file = open(run_dir / ".lock", "w")  # noqa: SIM115
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError as error:
            if time.monotonic() >= deadline:
                raise UserError(f"another process writes in {run_dir}; stop it, or use another {flag}.") from error
        time.sleep(0.1)


# ---------------------------------------------------------------------------------------------------------------------
# Logs


def open_logs(folder: RunFolder, flags: dict[str, Any], versions: dict[str, str], world: int) -> None:
    """Read metrics and evaluations up to the start, on rank 0. Writes `config.json` if there is none: flags, versions, commit,
    machine, job. Later lines are dropped from all files: what was logged after the last complete step happens again.
    """
    run_dir = folder.path
    if not (run_dir / "config.json").exists():
        git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
        found = shutil.which("git") and subprocess.run(git, capture_output=True, text=True, check=False).stdout
        commit = (found or "").strip() or None
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        machine = {"platform": platform.platform(), "processors": os.cpu_count(), "ranks": world, "gpu": gpu}
        versions = {"python": platform.python_version(), **versions}
        job = os.environ.get("TORCHELASTIC_RUN_ID", "none")  # the same on all nodes and after restarts
        record = {"flags": flags, "versions": versions, "commit": commit, "machine": machine}
        record["job"] = None if job == "none" else job
        write_atomically(run_dir / "config.json", json.dumps(record, indent=1))
    kept = {}
    for name in ("metrics", "samples", "evaluations"):
        path = run_dir / f"{name}.jsonl"
        kept[name] = [record for record in read_jsonl(path) if record["step"] <= folder.start_step]
        write_atomically(path, "".join(json.dumps(record) + "\n" for record in kept[name]))
    folder.metrics, folder.evaluations = kept["metrics"], kept["evaluations"]


def sample_records(
    step: int, problems: list[Any], samples: list[Any], verdicts: list[Any], rewards: list[float]
) -> list[dict[str, Any]]:
    """Lines of samples.jsonl: the problem, the completion, the answer found in it, the verdict and the reward."""
    return [
        {
            "step": step,
            "problem": problems[index * len(problems) // len(samples)].id,
            "question": problems[index * len(problems) // len(samples)].problem,
            "reference": problems[index * len(problems) // len(samples)].answer,
            "completion": sample.text,
            "answer": verdict.answer,
            "reason": verdict.reason,
            "reward": rewards[index],
            "tokens": len(sample.completion_ids),
            "finish_reason": sample.finish_reason,
            "seed": sample.seed,
        }
        for index, (sample, verdict) in enumerate(zip(samples, verdicts))
    ]


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Adds the wall time of the block to `seconds[phase]`, less what phases inside it took: all phases add up to the step."""
    start, before = time.perf_counter(), sum(seconds.values())
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    inside = sum(seconds.values()) - before
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - start - inside


def memory_gib() -> float:
    """Peak memory of this rank so far in GiB: the GPU's where there is one, else the process's."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts KiB


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints


def save_checkpoint(
    run_dir: Path, step: int, adapter: dict[str, torch.Tensor], optimizer_state: dict[str, torch.Tensor],
    adapter_config: dict[str, Any], keep: int,
) -> None:  # fmt: skip
    """Rank 0 writes `checkpoint/step-NNNNNN`: a PEFT folder plus optimizer state, complete or not there at all.

    Everything is written under a temporary name, flushed to disk, then renamed; older ones beyond `keep` go last. All
    tensors are full (not sharded), so any number of ranks can go on from it. Raises UserError when the disk is full.
    """
    folder = run_dir / "checkpoint"
    temporary, final = folder / ".writing", folder / f"step-{step:06d}"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        save_adapter(temporary, adapter, **adapter_config)
        save_file(optimizer_state, temporary / "optimizer.safetensors")
        (temporary / "state.json").write_text(json.dumps({"step": step}))
        for path in [*temporary.iterdir(), temporary]:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        last = latest_checkpoint(run_dir)
        raise UserError(
            f"could not write the checkpoint of step {step} to {folder} ({error}); free some space and start the same command "
            f"again: it goes on from {last.name if last else 'the beginning'}."
        ) from error
    shutil.rmtree(final, ignore_errors=True)
    os.rename(temporary, final)
    for old in sorted(folder.glob("step-*"))[: -(keep + 1)]:
        shutil.rmtree(old, ignore_errors=True)


def optimizer_tensors(policy: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """AdamW's moments by parameter name, full CPU tensors of their own memory. Collective: every rank must call."""
    tensors = {}
    for name, parameter in policy.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}|{key}"] = whole(value).detach().to("cpu", copy=True).contiguous()
    return tensors


def load_optimizer_tensors(policy: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Any]) -> None:
    """The inverse: each rank keeps its shard of the full tensors."""
    for name, parameter in policy.named_parameters():
        for key in [k for k in ("step", "exp_avg", "exp_avg_sq") if f"{name}|{k}" in tensors]:
            # A copy: the file stays mapped as long as one of its tensors lives, and NFS cannot delete a mapped file.
            full = tensors[f"{name}|{key}"].to(parameter.device, copy=True)
            if key != "step" and isinstance(parameter, DTensor):
                full = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
            optimizer.state[parameter][key] = full
