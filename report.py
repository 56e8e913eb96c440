"""What a run folder holds and shows: its lock, its lines, its record of flags and machine, stacks and the sentence of what
ended it, six curves. The trainer writes with these; nothing here knows the algorithm.

    python report.py runs/arithmetic-seed0            # prints a summary, redraws curves.png
    python report.py runs/a runs/b --out both.png     # several runs in one picture

Left out: live dashboards. metrics.jsonl has one JSON object a step; point your own tool at it.
"""

from __future__ import annotations

import argparse
import errno
import faulthandler
import fcntl
import json
import os
import platform
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from model_nvfp4 import UserError, read_json

stacks_path: Path | None = None  # the file this rank's stack goes to; set by dump_stacks, for report_failure


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


# Flags that may change when a run goes on; any other difference is refused.
FREE_FLAGS = {
    "steps", "keep", "save_every", "eval_every", "run_name", "runs_dir", "resume", "timeout", "dry_run", "print_every",
    "gpu_memory_utilization", "sleep", "max_tokens", "activation_checkpointing", "no_probe",
}  # fmt: skip


def latest_checkpoint(run_dir: Path) -> Path | None:
    """The newest complete checkpoint: a folder is renamed to its final name only when everything in it is on disk."""
    found = sorted((run_dir / "checkpoint").glob("step-*"))
    return found[-1] if found else None


def open_run(args: argparse.Namespace) -> tuple[Path, Path | None]:
    """The run's folder and the checkpoint to go on from. Reads only; raises UserError before anything is touched."""
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
        told = ", ".join(f"--{k.replace('_', '-')} {then.get(k)} then, {now.get(k)} now" for k in differing)
        raise UserError(f"{run_dir} was made with other flags ({told}); use those or another --run-name.")
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


def open_logs(
    run_dir: Path, start_step: int, flags: dict[str, Any], versions: dict[str, str], world: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(metrics, evaluations) up to `start_step`, on rank 0. Writes `config.json` if there is none: flags, versions, commit,
    machine, job. Later lines are dropped from all files: what was logged after the last complete step happens again.
    """
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
        kept[name] = [record for record in read_jsonl(path) if record["step"] <= start_step]
        write_atomically(path, "".join(json.dumps(record) + "\n" for record in kept[name]))
    return kept["metrics"], kept["evaluations"]


def sample_records(
    step: int, problems: list[Any], samples: list[Any], verdicts: list[Any], rewards: list[float]
) -> list[dict[str, Any]]:
    """Lines of samples.jsonl: what was asked, said, extracted and paid."""
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


def report_step(bar: Any, m: dict[str, Any], steps: int, example: Any | None) -> None:
    """The bar, one dense line, and now and then a whole completion: what a person can judge."""
    seconds = m["seconds"]
    total = sum(seconds.values())
    bar.update(1)
    bar.set_postfix_str(
        f"reward {m['reward']:.2f} length {m['completion_tokens']:.1f} |Δlogp| {m['gap']:.4f} "
        f"{m['sampled_tokens'] / total:.0f} tok/s"
    )
    bar.write(
        f"step {m['step']:4d}/{steps}  reward {m['reward']:.3f}  mixed {m['groups_mixed']:.2f}  "
        f"length {m['completion_tokens']:.1f}  cut {m['truncated']:.2f}  |Δlogp| {m['gap']:.4f}  kl {m['kl']:.5f}  "
        f"entropy {m['entropy']:.2f}  grad {m['grad_norm']:.3f}  "
        f"generate {seconds['generate']:.1f} s  train {seconds['train']:.1f} s"
    )
    if example:
        bar.write(f"  completion: {example.text.strip()!r}")


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


def plot_curves(runs: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]], path: Path) -> None:
    """Six small plots of {name: (metrics, evaluations)}: reward, held-out accuracy (or the mean of one's own reward), length,
    gap, gradient norm, seconds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(12, 6), layout="constrained")
    curves = {
        "reward": ("reward (mean of the step)", axes[0, 0]),
        "completion_tokens": ("completion length (tokens)", axes[0, 2]),
        "gap": ("|Δlogp| trainer − engine (nats)", axes[1, 0]),
        "grad_norm": ("gradient norm", axes[1, 1]),
    }
    judgements = [e for _, evaluations in runs.values() for e in evaluations]
    judged = "reward" if judgements and all("reward" in e for e in judgements) else "avg"
    for run, (metrics, evaluations) in runs.items():
        steps = [m["step"] for m in metrics]
        for name, (title, axis) in curves.items():
            axis.plot(steps, [m[name] for m in metrics], marker=".", label=run)
            axis.set_title(title)
        means, errors = [e[judged] for e in evaluations], [e[f"{judged}_se"] or 0.0 for e in evaluations]
        axes[0, 1].errorbar([e["step"] for e in evaluations], means, yerr=errors, marker="o", label=run)
    axes[0, 1].set_title(f"held-out {'reward' if judged == 'reward' else 'accuracy'} (± standard error)")
    if judged == "avg":
        axes[0, 1].set_ylim(0, 1)
    if len(runs) == 1:
        phases = sorted({phase for m in metrics for phase in m["seconds"]})
        axes[1, 2].stackplot(
            steps, [[m["seconds"].get(phase, 0.0) for m in metrics] for phase in phases], labels=phases
        )
    else:
        axes[0, 0].legend(fontsize=8)
        for run, (metrics, _) in runs.items():
            totals = [sum(m["seconds"].values()) for m in metrics]
            axes[1, 2].plot([m["step"] for m in metrics], totals, marker=".", label=run)
    axes[1, 2].set_title("seconds by phase" if len(runs) == 1 else "seconds a step")
    axes[1, 2].legend(fontsize=8)
    for axis in axes.flat:
        axis.set_xlabel("step")
    temporary = path.with_name(f".{path.name}.tmp")
    figure.savefig(temporary, format="png", dpi=110)
    plt.close(figure)
    os.replace(temporary, path)


def dump_stacks(run_dir: Path, rank: int) -> None:
    """From now on this rank writes its stack to `stacks/rank-N.txt` when it crashes or is told to stop.

    torchrun sends SIGTERM to all other ranks as soon as it sees one fail, so the ranks that hung or waited are shown where
    they were. Raises UserError when this rank cannot write to the run folder.
    """
    path = run_dir / "stacks" / f"rank-{rank}.txt"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)  # never closed: a crash may come at the very end
    except OSError as error:
        raise UserError(
            f"rank {rank} on {socket.gethostname()} cannot write to {run_dir} ({error.strerror}); mend its permissions or choose "
            f"another --runs-dir."
        ) from error
    global stacks_path
    stacks_path = path
    os.write(file, f"--- {time.strftime('%F %T')}, {socket.gethostname()}, process {os.getpid()}\n".encode())
    faulthandler.enable(file)
    faulthandler.register(signal.SIGTERM, file, chain=True)


def report_failure(error: Exception, seconds_for_the_first: float = 5.0) -> int:
    """Say what ended this rank so that the first cause is read last; the exit code is 2 for a user's mistake, else 1.

    torchrun's report ends with the error file of the rank that it saw fail first, so the sentence goes there. A rank that
    merely lost a peer in a collective waits: torchrun then has the time to see the real one and to end this one unheard.
    """
    # torchrun's SIGTERM may come within milliseconds; it then waits until the error's own stack is in the file, since a
    # dump of this function would tell nothing.
    told_to_stop: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: told_to_stop.append(number))
    rank, host = int(os.environ.get("RANK", 0)), socket.gethostname()
    try:
        told, stack = " ".join(str(error).split()), "".join(traceback.format_exception(error))
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE)
        full = full or "(os error 28)" in told  # safetensors' words for ENOSPC
        if stacks_path and not full:
            with open(stacks_path, "a") as file:
                file.write(stack)
    except OSError as fault:  # of the error that ended the rank the user must hear all the same
        print(f"error: no stack in {stacks_path} ({fault})", file=sys.stderr)
    finally:
        signal.signal(signal.SIGTERM, before)  # as Python knows it, so from here on without a dump of this rank
        for number in told_to_stop:
            signal.raise_signal(number)
    if isinstance(error, UserError):
        sentence = told
    elif full:
        sentence = (
            f"rank {rank} on {host} could not write ({told}); free some space or mend the disk, then start the same command again: "
            f"it goes on from the last checkpoint."
        )
    elif isinstance(error, dist.DistError) or "gloo" in told:
        time.sleep(seconds_for_the_first)
        sentence = (
            f"rank {rank} on {host} lost another rank, which died, hung or never came ({told}); stacks/ in the run folder shows "
            f"where each rank was."
        )
    else:
        print(stack, file=sys.stderr)
        sentence = f"rank {rank} on {host} failed: {type(error).__name__}: {told}"
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not error_file or rank == 0 or not isinstance(error, UserError):  # all ranks see a wrong flag, one tells it
        print(f"error: {sentence}", file=sys.stderr, flush=True)
    if error_file:
        Path(error_file).write_text(json.dumps({"message": sentence, "timestamp": int(time.time())}))
    return 2 if full or isinstance(error, UserError) else 1


def outcome(evaluations: list[dict[str, Any]]) -> str:
    """The line that counts: `before .07 → after .71 (64 problems × 8 samples)`; of rewards where --reward gave them.

    `step 40: .71 (…)` where only one was made: a run that began at another's checkpoint, or has not ended.
    """
    name = "reward" if "reward" in evaluations[-1] else "avg"
    first, last = (f"{evaluation[name]:.2f}".removeprefix("0") for evaluation in (evaluations[0], evaluations[-1]))
    numbers = f"{evaluations[-1]['problems']} problems × {evaluations[-1]['k']} samples"
    told = f"before {first} → after {last}" if len(evaluations) > 1 else f"step {evaluations[0]['step']}: {first}"
    return f"{told} ({'mean reward, ' if name == 'reward' else ''}{numbers})"


def summary(metrics: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> str:
    """Where the run stands and where its time went."""
    seconds: dict[str, float] = {}
    for m in metrics:
        for phase, value in m["seconds"].items():
            seconds[phase] = seconds.get(phase, 0.0) + value
    gaps = [m["gap"] for m in metrics]
    lines = [
        f"{metrics[-1]['step']} steps; reward {metrics[0]['reward']:.2f} → {metrics[-1]['reward']:.2f}; "
        f"|Δlogp| mean {sum(gaps) / len(gaps):.4f}, worst step {max(gaps):.4f}",
        "seconds a step: "
        + ", ".join(f"{phase} {total / len(metrics):.2f}" for phase, total in sorted(seconds.items())),
    ]
    if evaluations:
        lines.insert(0, outcome(evaluations))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Summarise run folders and draw their curves.")
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    parser.add_argument("--out", type=Path, help="picture to write; default curves.png in the (first) run folder")
    args = parser.parse_args()
    found = {}
    for run in args.runs:
        metrics = read_jsonl(run / "metrics.jsonl")
        if not metrics:
            print(
                f"error: {run} is no run folder with steps: it has no metrics.jsonl or an empty one.", file=sys.stderr
            )
            sys.exit(2)
        found[str(run)] = metrics, read_jsonl(run / "evaluations.jsonl")
        print(f"{run}: {summary(*found[str(run)])}")
    out = args.out or args.runs[0] / "curves.png"
    plot_curves(found, out)
    print(f"curves in {out}")


if __name__ == "__main__":
    main()
