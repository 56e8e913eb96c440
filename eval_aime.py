"""Evaluation: avg@k on AIME 2024 and other benchmarks, with the error bars that thirty problems deserve.

    torchrun --nproc-per-node 8 eval_aime.py --model DIR --benchmark aime2024 --k 8          # the base model
    torchrun --nproc-per-node 8 eval_aime.py --model DIR --adapter runs/NAME/adapter         # the same with an adapter
    python eval_aime.py --compare runs/A/samples.jsonl runs/B/samples.jsonl                  # is B better than A?

The trainer calls `evaluate` too, so a training curve and the final number come from the same lines. Sampling is
`rollout.generate`, grading is `reward.score`; here is only what turns samples into numbers.

What the numbers are (n problems, k samples each, c of a problem's k right, p = c / k):
1. avg@k is the mean of p. Its standard error over problems, sd(p) / √n, says how far another exam of the same kind
   could be; that over sampling, √Σ p (1 − p) / (k − 1) / n, how far other seeds could be on these problems.
2. The 95 % interval is Student's t over problems, except below 10 % and above 90 %, where no symmetric interval holds:
   there it is the Beta (Clopper-Pearson) interval that counts every problem as one trial, which is wide on purpose.
3. pass@j is the unbiased estimate 1 − C(k − c, j) / C(k, j) (Chen et al. 2021); maj@k splits ties evenly, and a sample
   without an answer is no vote. A sample that ran into the token limit is wrong, whatever it had boxed by then.

Seeds depend on (seed, problem, sample) only, but an engine rounds a little differently when other requests are in the
batch, so another number of ranks is another, equally valid draw. A resumed run favours short samples a little, since
those that were cut short are drawn again. With `--exact` both give the same samples.

Left out: a binomial error over n·k samples (samples of one problem are not independent: far too small); a bootstrap (no
better than the t interval with 30 problems); a greedy single run (one sample moves by 3.3 points per problem).
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

import reward as grader
from adapter import check_adapter, read_adapter
from errors import UserError, read_json, require
from math_reading import exact_number
from run_folder import lock_run, write_atomically

from problems import (  # isort: skip
    BENCHMARKS, TEMPLATE, Problem, check_references, conversation, encode_prompts, exam_of, read_problems, sample_seed,
)  # fmt: skip

GRADER = ("reward.py", "math_answers.py", "math_reading.py")  # the files that a verdict depends on


# ---------------------------------------------------------------------------------------------------------------------
# Numbers: pure functions of the records


@lru_cache(maxsize=1000)
def beta_quantile(p: float, a: float, b: float) -> float:
    """The x with I_x(a, b) = p, by bisection: all that Student's t and Clopper-Pearson need."""
    import mpmath

    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if mpmath.betainc(a, b, 0, middle, regularized=True) < p else (low, middle)
    return low


def student_t(df: int) -> float:
    """The 97.5 % quantile of Student's t: t² = df (1 − x) / x where x is the 5 % quantile of Beta(df / 2, 1 / 2)."""
    x = beta_quantile(0.05, df / 2, 0.5)
    return math.sqrt(df * (1 - x) / x)


def interval_95(mean: float, se: float | None, n: int) -> tuple[float, float, str]:
    """(low, high, "t" or "Beta") for a mean over n problems, each between 0 and 1.

    By simulation t alone covers only .82 at 5 % and .90 at 10 %. Beta takes each problem for one trial, the most that a mean
    of n values in [0, 1] can vary, so it never promises too much.
    """
    if se and 0.1 <= mean <= 0.9:  # problems with equal counts have no spread, but that is no certainty
        half = student_t(n - 1) * se
        return max(0.0, mean - half), min(1.0, mean + half), "t"
    right = mean * n
    low = 0.0 if right == 0 else beta_quantile(0.025, right, n - right + 1)
    return low, 1.0 if right == n else beta_quantile(0.975, right + 1, n - right), "Beta"


def pass_at(right: int, k: int, j: int) -> float:
    """Unbiased chance that one of j samples is right, from `right` of k (Chen et al. 2021, equation 1)."""
    return 1 - math.comb(k - right, j) / math.comb(k, j)


def majority(records: list[dict[str, Any]]) -> float:
    """Chance that the most frequent answer is right; ties are split evenly, no answer (or a cut-off one) is no vote."""
    votes: Counter[Any] = Counter()
    for record in records:
        if record["correct"]:
            votes["right"] += 1  # however it is written
        elif record["answer"] is not None and record["finish_reason"] != "length":
            answer = "".join(record["answer"].split())
            value = exact_number(answer)
            votes["wrong", answer if value is None else value] += 1  # 073 and 73 are one candidate
    top = [answer for answer, count in votes.items() if count == max(votes.values())]
    return ("right" in top) / len(top) if top else 0.0


def by_problem(records: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Records grouped by problem, in order; every problem must have the same samples 0 … k − 1, each once."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault(record["problem"], []).append(record)
    k = max((record["sample"] for record in records), default=-1) + 1
    for name, group in groups.items():
        group.sort(key=lambda record: record["sample"])
        ids = [record["sample"] for record in group]
        sentence = f"Problem {name} has the samples {ids}, not 0 to {k - 1} once each: an unfinished run?"
        require(ids == [*range(k)], sentence)
    require(groups, "There are no samples.")
    return groups


def count_right(groups: dict[str, list[dict[str, Any]]]) -> np.ndarray:
    """How many samples of each problem are right (n,)."""
    return np.array([sum(record["correct"] for record in group) for group in groups.values()])  # (n,)


def mean_rewards(groups: dict[str, list[dict[str, Any]]]) -> np.ndarray | None:
    """The mean --reward of each problem's samples (n,); None when the run had no reward of its own."""
    if not all("reward" in record for group in groups.values() for record in group):
        return None
    return np.array([np.mean([record["reward"] for record in group]) for group in groups.values()])  # (n,)


def standard_error(p: np.ndarray) -> float | None:
    """The standard error of the mean of p (n,) over problems."""
    return float(p.std(ddof=1) / math.sqrt(len(p))) if len(p) > 1 else None


def sampling_variance(p: np.ndarray, k: int) -> float:
    """Unbiased variance of the mean of p (n,) over other draws of k samples of the same problems; NaN for k = 1."""
    return float((p * (1 - p)).sum()) / (k - 1) / len(p) ** 2 if k > 1 else math.nan


def summarize(records: list[dict[str, Any]]) -> dict[str, Any]:
    """All numbers of the report, as fractions of 1 and tokens; None where one sample or one problem cannot give it."""
    groups = by_problem(records)
    n, k, right = len(groups), len(records) // len(groups), count_right(groups)
    p = right / k  # (n,)
    low, high, kind = interval_95(float(p.mean()), standard_error(p), n)
    tokens, correct = (np.array([record[key] for record in records]) for key in ("tokens", "correct"))  # (n k,), (n k,)
    cut = [record["equal"] for record in records if record["finish_reason"] == "length"]
    means = mean_rewards(groups)  # (n,)
    rewards = {} if means is None else {"reward": float(means.mean()), "reward_se": standard_error(means)}
    exams = {exam: [exam_of(name) == exam for name in groups] for exam in ("I", "II")}
    return {
        "problems": n, "k": k, "samples": n * k, **rewards,
        "avg": float(p.mean()), "avg_low": low, "avg_high": high, "interval": kind, "avg_se": standard_error(p),
        "avg_se_sampling": math.sqrt(sampling_variance(p, k)) if k > 1 else None,
        "pass": {str(j): float(np.mean([pass_at(int(c), k, j) for c in right])) for j in range(1, k + 1)},
        "maj": float(np.mean([majority(group) for group in groups.values()])),
        "problems_solved": int((right > 0).sum()), "samples_right": int(right.sum()),
        "truncated": len(cut) / (n * k), "truncated_with_right_answer": sum(cut),
        "no_answer": sum(record["answer"] is None for record in records) / (n * k),
        "tokens_mean": float(tokens.mean()), "tokens_median": float(np.median(tokens)),
        "tokens_mean_right": float(tokens[correct].mean()) if correct.any() else None,
        "tokens_mean_wrong": float(tokens[~correct].mean()) if not correct.all() else None,
        "exams": {exam: float(p[mask].mean()) for exam, mask in exams.items() if any(mask)},
        "per_problem": {name: int(c) for name, c in zip(groups, right)},
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Sampling and grading: collective


def evaluate(
    engine: Any, tokenizer: Any, problems: list[Problem], *,
    k: int, temperature: float, top_p: float, max_tokens: int, seed: int, template: str, use_adapter: bool,
    samples_path: str | Path | None = None, progress: bool = True, settings: dict[str, Any] | None = None,
    chat_template_kwargs: dict[str, Any] | None = None, stop: list[str] | None = None,
    own_reward: Callable[[str, str], float] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """k samples of every problem, graded and summarized. Collective: every rank calls it and returns the same report.

    Call inside `with awake(engine)`, after `push_adapter` when `use_adapter`. With `samples_path` (in a folder that all
    ranks see) each rank appends its samples to its own part file as they finish; a later call with the same settings,
    on any number of ranks, draws only what is missing. `settings` is what else the report states and resuming compares
    (model, adapter …). With `own_reward(completion, reference)` the report has its mean as well.
    """
    import torch.distributed as dist
    from tqdm import tqdm

    from rollout import generate, versions

    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    prompts = encode_prompts(tokenizer, [conversation(problem, template) for problem in problems], chat_template_kwargs)
    contents = [(problem.id, problem.answer, ids) for problem, ids in zip(problems, prompts)]
    settings = {
        **(settings or {}), "k": k, "temperature": temperature, "top_p": top_p, "max_tokens": max_tokens, "seed": seed,
        "template": template, "use_adapter": use_adapter,
        "prompt_hash": digest_of(json.dumps(contents).encode()),  # ids, answers, token ids after the chat template
        "versions": versions() | {"grader": digest_of(b"".join(Path(__file__).with_name(n).read_bytes() for n in GRADER))},
    }  # fmt: skip

    records: dict[tuple[str, int], dict[str, Any]] = {}
    if samples_path:  # rank 0 alone reads, so that all ranks work on the same list; a refusal must reach them all too
        found: list[Any] = [resume(Path(samples_path), settings) if rank == 0 else None]
        if world > 1:
            dist.broadcast_object_list(found)
        done, refusal = found[0]
        require(not refusal, refusal)
        records = {(record["problem"], record["sample"]): record for record in done}
    wanted = [(i, sample) for i in range(len(problems)) for sample in range(k)]
    missing = [(i, sample) for i, sample in wanted if (problems[i].id, sample) not in records]
    drawn, tally = [], Counter()
    seeds = [sample_seed(seed, -1, problems[i].id, number) for i, number in missing]
    part_path = Path(f"{samples_path}.rank{rank}" if samples_path else os.devnull)
    # With several ranks the bar counts rank 0's share, whose size only rollout.generate knows.
    total, desc = (len(missing), "evaluation") if world == 1 else (None, f"evaluation, rank 0 of {world}")
    with (
        part_path.open("a", buffering=1, encoding="utf-8") as part,  # a line at a time
        tqdm(total=total, desc=desc, unit="sample", disable=rank > 0 or not progress) as bar,
    ):

        def on_sample(index: int, sample: Any) -> None:
            i, number = missing[index]
            verdict = grader.score([sample.text], [problems[i].answer])[0]
            record = {
                "problem": problems[i].id, "sample": number, "seed": sample.seed, "reference": problems[i].answer,
                "answer": verdict.answer, "equal": verdict.equal, "reason": verdict.reason,
                "correct": verdict.equal and sample.finish_reason != "length",
                "finish_reason": sample.finish_reason, "tokens": len(sample.completion_ids),
            }  # fmt: skip
            if own_reward:
                record["reward"] = own_reward(sample.text, problems[i].answer)
            drawn.append(record)
            part.write(json.dumps(record | {"text": sample.text}, ensure_ascii=False) + "\n")
            tally[record["correct"]] += 1
            bar.set_postfix_str(f"accuracy {tally[True] / tally.total():.3f}", refresh=False)
            bar.update()

        generate(
            engine, [prompts[i] for i, _ in missing], seeds, max_tokens=max_tokens, temperature=temperature,
            top_p=top_p, stop=stop, use_adapter=use_adapter, on_sample=on_sample, gather=False,  # the records are enough
        )  # fmt: skip
    parts = [drawn] * world
    if world > 1:
        dist.all_gather_object(parts, drawn)  # also the moment after which every part file is complete
    for record in itertools.chain(*parts):
        key = (record["problem"], record["sample"])
        assert key not in records, f"sample {key} was drawn twice"
        records[key] = record
    if samples_path and rank == 0:
        merge_parts(Path(samples_path))
    for (problem, number), record in records.items() if own_reward else ():  # on file too; here all ranks see it
        grader.check_own_reward(record["reward"], f"sample {number} of problem {problem}", record["reference"])
    return summarize([records[problems[i].id, number] for i, number in wanted]) | {"settings": settings}


def digest_of(data: bytes) -> str:
    """Sixteen hex digits of the SHA-256."""
    return hashlib.sha256(data).hexdigest()[:16]


def resume(samples_path: Path, settings: dict[str, Any]) -> tuple[list[dict[str, Any]], str | None]:
    """(records already drawn, why they cannot be used or None); puts the settings beside the samples. `k` may differ: seeds
    do not depend on it, so a larger k goes on from a smaller one. Settings without samples bind nobody."""
    settings_path = samples_path.with_suffix(".settings.json")
    samples_path.parent.mkdir(parents=True, exist_ok=True)
    records = merge_parts(samples_path)
    before = json.loads(settings_path.read_text()) if records and settings_path.exists() else settings
    differ = [key for key in settings.keys() | before.keys() if key != "k" and settings.get(key) != before.get(key)]
    if differ:
        changes = "; ".join(f"{key}: {before.get(key)!r}, now {settings.get(key)!r}" for key in sorted(differ))
        return [], f"{samples_path.parent} holds samples drawn with other settings ({changes}); choose another --out."
    write_atomically(settings_path, json.dumps(settings, indent=1))
    return [{key: record[key] for key in record if key != "text"} for record in records], None


def merge_parts(samples_path: Path) -> list[dict[str, Any]]:
    """What all ranks wrote, each sample once, gathered into `samples_path`; a kill at any instant loses none."""
    part_files, records = sorted(samples_path.parent.glob(f"{samples_path.name}.rank*")), {}
    for path in [samples_path, *part_files]:
        for record in read_samples(path) if path.exists() else []:
            records.setdefault((record["problem"], record["sample"]), record)
    if part_files:
        records = dict(sorted(records.items()))
        write_atomically(samples_path, "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records.values()))
        for path in part_files:
            path.unlink()
    return list(records.values())


def read_samples(path: str | Path) -> list[dict[str, Any]]:
    """Records of a samples file. A last line without its newline was cut off by a kill, even inside a letter: dropped."""
    require(Path(path).is_file(), f"There is no file {path}.")
    records = []
    for number, line in enumerate(Path(path).read_bytes().split(b"\n")[:-1], 1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path} line {number} is not JSON ({error}).") from None
        if not {"problem", "sample", "correct"} <= set(record):
            raise UserError(f"{path} line {number} is no sample of an evaluation (a samples.jsonl of eval_aime.py).")
        records.append(record)
    return records


# ---------------------------------------------------------------------------------------------------------------------
# Reports: of one run, and is B better than A?


def error_of(report: dict[str, Any], name: str) -> str:
    """The text " ± SE" over problems; empty for a single problem, which gives none."""
    return "" if report[f"{name}_se"] is None else f" ± {report[f'{name}_se']:.3f}"


def percent(fraction: float | None) -> str:
    """0.125 as 12.5; a dash for None."""
    return "–" if fraction is None else f"{100 * fraction:.1f}"


def format_report(report: dict[str, Any]) -> str:
    """The report as text; rates in percent."""
    r, k = report, report["k"]
    tokens = {key.split("_")[-1]: r[f"tokens_{key}"] for key in ("mean", "median", "mean_right", "mean_wrong")}
    lines = {
        f"avg@{k}": f"{percent(r['avg'])} % · 95 % interval {percent(r['avg_low'])} to {percent(r['avg_high'])} ({r['interval']})"
        f" · SE over {r['problems']} problems {percent(r['avg_se'])} · SE over sampling {percent(r['avg_se_sampling'])}",
        **({"reward": f"{r['reward']:.3f} by --reward{error_of(r, 'reward')}"} if "reward" in r else {}),
        "pass@j": " · ".join(f"{j}: {percent(v)}" for j, v in r["pass"].items() if int(j) in (1, 2, 4, 8, 16, 32, k)),
        f"maj@{k}": f"{percent(r['maj'])} %",
        "counts": "{problems_solved} of {problems} problems ever solved · {samples_right} of {samples} samples right".format_map(
            r
        ),
        "truncated": f"{percent(r['truncated'])} % (counted as wrong, also {r['truncated_with_right_answer']} with the "
        "right answer)",
        "no answer": f"{percent(r['no_answer'])} %",
        "tokens": " · ".join(f"{name} {'–' if count is None else round(count)}" for name, count in tokens.items()),
        "exams": " · ".join(f"{exam} {percent(value)} %" for exam, value in r["exams"].items()) or "–",
        "settings": "\n          ".join(f"{key} = {value!r}" for key, value in r["settings"].items()),
    }
    if r["interval"] == "Beta":
        reason = "no symmetric interval holds near 0 and 100 %"
        lines["note"] = f"{reason}: this one is Beta, each problem one trial; read the counts."
    return "\n".join(f"{name:10}{text}" for name, text in lines.items())


def plot_report(report: dict[str, Any], png: str | Path) -> None:
    """A picture with one bar per problem: how many of its k samples are right; behind them the mean and its 95 % interval."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names, right = zip(*report["per_problem"].items())
    figure, axes = plt.subplots(figsize=(min(24, max(6, 0.3 * len(names))), 3.8), layout="constrained")
    axes.axhspan(100 * report["avg_low"], 100 * report["avg_high"], color="0.9", label=f"95 % ({report['interval']})")
    axes.axhline(100 * report["avg"], color="0.4", linewidth=1, label=f"avg@{report['k']} = {percent(report['avg'])} %")
    colors = ["tab:orange" if exam_of(name) == "II" else "tab:blue" for name in names]
    axes.bar(range(len(names)), 100 * np.array(right) / report["k"], color=colors)
    if len(names) <= 60:
        axes.set_xticks(range(len(names)), names, rotation=90, fontsize=7)
    title = [report["settings"].get(key) for key in ("benchmark", "model", "adapter")]
    axes.set(ylim=(0, 100), xlim=(-0.6, len(names) - 0.4), ylabel="samples right, %")
    axes.set_title(" · ".join(str(part) for part in title if part), fontsize=8)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(png, dpi=120)
    plt.close(figure)


def sign_flip_p(differences: list[int]) -> float:
    """Two-sided p of Fisher's sign-flip test, exact: the share of all 2^n sign patterns whose sum is as far from zero.

    The differences are integers, so the sum's distribution grows one problem at a time on a grid of 2 Σ|d| + 1 values.
    """
    total = sum(map(abs, differences))
    chance = np.eye(1, 2 * total + 1, total)[0]  # of the sums −total … total
    for d in differences:
        chance = (np.roll(chance, d) + np.roll(chance, -d)) / 2
    sums = np.abs(np.arange(-total, total + 1))
    return min(1.0, float(chance[sums >= abs(sum(differences))].sum()))


def fisher_p(right_a: int, k_a: int, right_b: int, k_b: int) -> float:
    """Two-sided p of Fisher's exact test that both runs solve a problem with one chance."""
    right = right_a + right_b
    ways = {c: math.comb(k_a, c) * math.comb(k_b, right - c) for c in range(max(0, right - k_b), min(k_a, right) + 1)}
    return sum(way for way in ways.values() if way <= ways[right_a]) / math.comb(k_a + k_b, right)


def compare(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> dict[str, Any]:
    """B minus A, paired by problem; `samples_needed` is the k that brings the sampling error to ± 2 points (95 %)."""
    groups_a, groups_b = by_problem(a), by_problem(b)
    if only := sorted(groups_a.keys() ^ groups_b.keys()):
        raise UserError(f"The runs have not the same problems: {len(only)} are in one only, the first is {only[0]}.")
    n, k_a, k_b = len(groups_a), len(a) // len(groups_a), len(b) // len(groups_b)
    groups_b = {name: groups_b[name] for name in groups_a}
    right_a, right_b = count_right(groups_a), count_right(groups_b)  # (n,), (n,)
    p_a, p_b = right_a / k_a, right_b / k_b
    difference, se = float((p_b - p_a).mean()), standard_error(p_b - p_a)
    variance_a, variance_b = sampling_variance(p_a, k_a), sampling_variance(p_b, k_b)
    needed = (1.96 / 0.02) ** 2 * (k_a * variance_a + k_b * variance_b)
    p_values = [fisher_p(int(ca), k_a, int(cb), k_b) for ca, cb in zip(right_a, right_b)]
    verdicts = ["cannot tell"] * n
    for place, i in enumerate(sorted(range(n), key=p_values.__getitem__)):
        if p_values[i] > 0.05 / (n - place):  # Holm 1979: any false verdict in at most 5 % of tables
            break
        verdicts[i] = "better" if p_b[i] > p_a[i] else "worse"
    half = student_t(n - 1) * se if se else None  # equal differences say nothing of their error
    rewards, means_a, means_b = {}, mean_rewards(groups_a), mean_rewards(groups_b)  # (n,), (n,)
    if means_a is not None and means_b is not None:
        gain = means_b - means_a
        rewards = {"reward_a": float(means_a.mean()), "reward_b": float(means_b.mean())}
        rewards |= {"reward_difference": float(gain.mean()), "reward_se": standard_error(gain)}
    return {
        **rewards, "problems": n, "k_a": k_a, "k_b": k_b, "avg_a": float(p_a.mean()), "avg_b": float(p_b.mean()),
        "difference": difference, "se": se,
        "low": None if half is None else difference - half, "high": None if half is None else difference + half,
        "se_sampling": None if math.isnan(needed) else math.sqrt(variance_a + variance_b),
        "samples_needed": None if math.isnan(needed) else max(1, math.ceil(needed)),
        "p_sign_flip": sign_flip_p(((right_b * k_a - right_a * k_b) // math.gcd(k_a, k_b)).tolist()),
        "table": [
            {"problem": name, "right_a": int(ca), "right_b": int(cb), "p": p_value, "verdict": verdict}
            for name, ca, cb, p_value, verdict in zip(groups_a, right_a, right_b, p_values, verdicts)
        ],
    }  # fmt: skip


def format_comparison(c: dict[str, Any]) -> str:
    """The comparison as text; problems with equal accuracy are only counted."""
    lines = [
        f"A {percent(c['avg_a'])} %, B {percent(c['avg_b'])} % over {c['problems']} problems ({c['k_a']} and "
        f"{c['k_b']} samples each): B − A = {100 * c['difference']:+.1f} points",
        f"SE over problems {percent(c['se'])} (95 % {percent(c['low'])} to {percent(c['high'])}) · SE over sampling "
        f"{percent(c['se_sampling'])} · exact sign-flip test p = {c['p_sign_flip']:.4f}",
        f"for ± 2 points of sampling error (95 %) each run needs k = {c['samples_needed'] or '– (unknown from k = 1)'}",
        f"{'problem':24}{'A':>5}{'B':>5}  {'p (Fisher)':12}at this k (Holm, 5 % over the table)",
    ]
    if "reward_a" in c:
        means = f"A {c['reward_a']:.3f}, B {c['reward_b']:.3f}: B − A = {c['reward_difference']:+.3f}{error_of(c, 'reward')}"
        lines.insert(3, f"by --reward {means} (SE over problems); all else here is accuracy")
    changed = [r for r in c["table"] if r["right_a"] * c["k_b"] != r["right_b"] * c["k_a"]]
    lines += [f"{r['problem']:24}{r['right_a']:5}{r['right_b']:5}  {r['p']:<12.4f}{r['verdict']}" for r in changed]
    return "\n".join([*lines, f"{c['problems'] - len(changed)} problems with equal accuracy"])


def compare_files(path_a: Path, path_b: Path) -> str:
    """The comparison of two samples files as text, with the settings that differ."""
    text = format_comparison(compare(read_samples(path_a), read_samples(path_b)))
    beside = [path.with_suffix(".settings.json") for path in (path_a, path_b)]
    a, b = (json.loads(path.read_text()) if path.exists() else {} for path in beside)
    differ = [key for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)]
    return "\n".join([text, *(f"{key}: {a.get(key)!r} in A, {b.get(key)!r} in B" for key in differ)])


# ---------------------------------------------------------------------------------------------------------------------
# The command


def check_model(model: Path) -> int:
    """The context of a model folder in tokens; UserError when it is none."""
    require((model / "config.json").is_file(), f"--model {model} is no model folder: it has no config.json.")
    require(any(model.glob("*.safetensors")), f"--model {model} has no weights (*.safetensors).")
    config = read_json(model, "config.json")
    return config.get("text_config", config).get("max_position_embeddings", 2**20)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    what = "avg@k with error bars, for a model or an adapter. Under torchrun one rank per GPU, or on a CPU."
    layout = lambda prog: argparse.ArgumentDefaultsHelpFormatter(prog, max_help_position=32, width=110)  # noqa: E731
    parser = argparse.ArgumentParser(description=what, formatter_class=layout)
    add = parser.add_argument_group("model").add_argument
    add("--model", type=Path, help="model folder, NVFP4 or any other that vLLM serves")
    add("--adapter", type=Path, help="PEFT folder trained on it, such as runs/NAME/adapter")
    add("--tp", type=int, default=1, help="consecutive ranks that share one engine; for models too big for one GPU")
    add("--gpu-memory-utilization", type=float, default=0.9, help="share of a GPU for vLLM; more holds more samples")
    add("--engine-args", type=json.loads, default={}, help="JSON of further arguments of vllm.LLM")
    add = parser.add_argument_group("problems").add_argument
    add("--benchmark", default="aime2024", help=f"{', '.join(BENCHMARKS)}, a JSONL file, or a Hub name")
    add("--data-dir", type=Path, help="folder with NAME.jsonl of the named benchmarks, instead of the Hub")
    add("--prompt-key", default="problem", help="field of a row with the question")
    add("--answer-key", default="answer", help="field of a row with the reference answer")
    add("--split", default="train", help="of a Hub name that is no named benchmark")
    add("--reward", help="path.py:function(completion, reference) -> float, whose mean is reported beside the accuracy")
    add("--prompt-template", default=TEMPLATE, help="the user message; {problem} is replaced")
    add("--chat-template-kwargs", type=json.loads, default={}, help='JSON, such as {"enable_thinking": false}')
    add = parser.add_argument_group("sampling (one setting for before and after)").add_argument
    add("--k", type=int, default=8, help="samples per problem; SE over sampling falls with its root")
    add("--temperature", type=float, default=0.6, help="0.6 is usual for AIME; 1.0 to compare with DAPO's numbers")
    add("--top-p", type=float, default=0.95, help="0.95 is usual for AIME; 0.7 to compare with DAPO's numbers")
    add("--max-tokens", type=int, help="longest completion; default 32768 or what the context leaves")
    add("--seed", type=int, default=0, help="same seed, same draws, on any number of ranks")
    add("--exact", action="store_true", help="one request at a time: slow, but the same samples to the bit (see top)")
    add = parser.add_argument_group("output").add_argument
    add("--out", type=Path, help="folder for samples and report, resumed if unfinished; default runs/eval-…")
    add("--dry-run", action="store_true", help="check flags, model, adapter and problems, and stop")
    add("--compare", type=Path, nargs=2, metavar=("A", "B"), help="two samples.jsonl: is B better than A?")
    args = parser.parse_args(argv)
    if args.out is None and args.model:
        names = ["eval", Path(args.benchmark).stem, args.model.resolve().name]
        names += [args.adapter.resolve().parent.name, args.adapter.name] if args.adapter else []
        args.out = Path("runs") / "-".join([*names, f"seed{args.seed}"])
    return args


def run(args: argparse.Namespace) -> None:
    """Check everything, then load, sample, report. Collective."""
    require(args.model, "--model is missing (only --compare A B needs none).")
    for flag, least in {"k": 1, "tp": 1, "seed": 0, "temperature": 0}.items():
        value = getattr(args, flag)
        require(least <= value < math.inf, f"--{flag} {value} must be at least {least}.")
    for flag in ("top_p", "gpu_memory_utilization"):
        value = getattr(args, flag)
        require(0 < value <= 1, f"--{flag.replace('_', '-')} {value} must be above 0 and at most 1.")
    objects = isinstance(args.engine_args, dict) and isinstance(args.chat_template_kwargs, dict)
    require(objects, "--engine-args and --chat-template-kwargs want a JSON object.")
    context = check_model(args.model)
    lora_rank = check_adapter(args.adapter, args.model) if args.adapter else 0
    how = {name: getattr(args, name) for name in ("prompt_key", "answer_key", "split", "data_dir")}
    problems = read_problems(args.benchmark, **how)

    import torch
    import torch.distributed as dist
    from transformers import AutoTokenizer

    import rollout

    own_reward = grader.load_own_reward(args.reward) if args.reward else None
    check_references(problems, args.reward)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    conversations = [conversation(problem, args.prompt_template) for problem in problems]
    longest = max(map(len, encode_prompts(tokenizer, conversations, args.chat_template_kwargs)))
    max_tokens = min(32768, context - longest) if args.max_tokens is None else args.max_tokens
    room = f"the longest prompt has {longest} tokens and the context of {args.model} is {context}"
    fits = 1 <= max_tokens <= context - longest
    require(fits, f"--max-tokens {max_tokens} does not fit: {room}, which leaves {context - longest}.")
    if args.dry_run:
        work = f"{len(problems)} problems × {args.k} samples of at most {max_tokens} tokens"
        return print(f"{args.model} on {args.benchmark}: {work}")
    if os.environ.get("RANK", "0") == "0":
        args.out.mkdir(parents=True, exist_ok=True)
        lock = lock_run(args.out, patience=10, flag="--out")
    engine_args = ({"max_num_seqs": 1, "enable_prefix_caching": False} if args.exact else {}) | args.engine_args
    if "RANK" in os.environ:  # started by torchrun
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        # A replica that is done early waits for the longest completion of all, which may be hours away.
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, timeout=timedelta(days=1))
    engine = rollout.build_engine(
        str(args.model), max_model_len=longest + max_tokens, max_lora_rank=lora_rank, seed=args.seed, tp=args.tp,
        sleep="off", gpu_memory_utilization=args.gpu_memory_utilization, engine_args=engine_args,
    )  # fmt: skip
    with rollout.awake(engine):
        if args.adapter:
            rollout.push_adapter(engine, *read_adapter(args.adapter), version=0)
        report = evaluate(
            engine, tokenizer, problems, k=args.k, temperature=args.temperature, top_p=args.top_p, max_tokens=max_tokens,
            seed=args.seed, template=args.prompt_template, chat_template_kwargs=args.chat_template_kwargs,
            use_adapter=bool(args.adapter), samples_path=args.out / "samples.jsonl", own_reward=own_reward,
            settings={
                "benchmark": args.benchmark, "model": str(args.model), "adapter": args.adapter and str(args.adapter),
                "adapter_hash": args.adapter and digest_of((args.adapter / "adapter_model.safetensors").read_bytes()),
                "engine_args": engine_args, "reward": args.reward,
                "reward_hash": args.reward and digest_of(Path(args.reward.rpartition(":")[0]).read_bytes()),
            },
        )  # fmt: skip
    if not dist.is_initialized() or dist.get_rank() == 0:
        text = format_report(report)
        write_atomically(args.out / "report.json", json.dumps(report, indent=1))
        write_atomically(args.out / "report.txt", text + "\n")
        plot_report(report, args.out / "report.png")
        print(f"{text}\nwritten to {args.out}: samples.jsonl, report.json, report.txt, report.png")
        lock.close()
    rollout.shutdown(engine)
    grader.close()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        print(compare_files(*args.compare)) if args.compare else run(args)
    except UserError as error:
        if os.environ.get("RANK", "0") == "0":  # every rank finds the same mistake
            print(f"eval_aime.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
