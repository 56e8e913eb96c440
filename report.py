"""What a run folder holds and shows: its lines, its record of flags and machine, six curves. The trainer writes with these.

    python report.py runs/arithmetic-seed0            # prints a summary, redraws curves.png
    python report.py runs/a runs/b --out both.png     # several runs in one picture

Left out: live dashboards. metrics.jsonl has one JSON object a step; point your own tool at it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any


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


def describe_run(flags: dict[str, Any], versions: dict[str, str], world: int) -> dict[str, Any]:
    """What `config.json` records: flags, versions, git commit, machine."""
    import torch

    commit = None
    if shutil.which("git"):
        command = ["git", "rev-parse", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent, check=False).stdout
    return {
        "flags": flags,
        "versions": {"python": platform.python_version(), **versions},
        "commit": (commit or "").strip() or None,
        "machine": {
            "platform": platform.platform(),
            "processors": os.cpu_count(),
            "ranks": world,
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
    }


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


def memory_gib() -> float:
    """Peak memory of this rank so far in GiB: the GPU's where there is one, else the process's."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts KiB


def plot_curves(runs: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]], path: Path) -> None:
    """Six small plots of {name: (metrics, evaluations)}: reward, held-out accuracy, length, gap, gradient norm, seconds."""
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
    for run, (metrics, evaluations) in runs.items():
        steps = [m["step"] for m in metrics]
        for name, (title, axis) in curves.items():
            axis.plot(steps, [m[name] for m in metrics], marker=".", label=run)
            axis.set_title(title)
        accuracies, errors = [e["avg"] for e in evaluations], [e["avg_se"] or 0.0 for e in evaluations]
        axes[0, 1].errorbar([e["step"] for e in evaluations], accuracies, yerr=errors, marker="o", label=run)
    axes[0, 1].set_title("held-out accuracy (± standard error)")
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


def outcome(evaluations: list[dict[str, Any]]) -> str:
    """The line that counts: `before .07 → after .71 (64 problems × 8 samples)`."""
    first, last = (f"{evaluation['avg']:.2f}".removeprefix("0") for evaluation in (evaluations[0], evaluations[-1]))
    return f"before {first} → after {last} ({evaluations[-1]['problems']} problems × {evaluations[-1]['k']} samples)"


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
        found[run.name] = metrics, read_jsonl(run / "evaluations.jsonl")
        print(f"{run}: {summary(*found[run.name])}")
    out = args.out or args.runs[0] / "curves.png"
    plot_curves(found, out)
    print(f"curves in {out}")


if __name__ == "__main__":
    main()
