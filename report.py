"""What people look at: a line a step, the outcome, six curves.

    python report.py runs/arithmetic-seed0            # prints a summary, redraws curves.png
    python report.py runs/a runs/b --out both.png     # several runs in one picture

Left out: live dashboards. metrics.jsonl has one JSON object a step; point your own tool at it.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from run_folder import RunFolder, read_jsonl


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


def outcome(evaluations: list[dict[str, Any]]) -> str:
    """The line that counts: `before .07 → after .71 (64 problems × 8 samples)`; of rewards where --reward gave them.

    `step 40: .71 (…)` where only one was made: a run that began at another's checkpoint, or has not ended.
    """
    name = "reward" if "reward" in evaluations[-1] else "avg"
    first, last = (f"{evaluation[name]:.2f}".removeprefix("0") for evaluation in (evaluations[0], evaluations[-1]))
    numbers = f"{evaluations[-1]['problems']} problems × {evaluations[-1]['k']} samples"
    line = f"before {first} → after {last}" if len(evaluations) > 1 else f"step {evaluations[0]['step']}: {first}"
    return f"{line} ({'mean reward, ' if name == 'reward' else ''}{numbers})"


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


def plot_run(folder: RunFolder) -> None:
    """Draw curves.png of a run, on rank 0, which has its lines."""
    if folder.metrics:
        plot_curves({folder.path.name: (folder.metrics, folder.evaluations)}, folder.path / "curves.png")


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
