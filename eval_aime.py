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
batch, and then a sample parts ways with its twin. Another number of ranks is therefore another, equally valid draw; a
resumed run favours short samples a little, since the ones that were cut short are drawn again. With `--exact` both give
the same samples.

What is left out, and why:
1. No binomial error over n·k samples: samples of one problem are not independent, and it would be far too small.
2. No bootstrap: with 30 problems it covers no better than the t interval, and the sign-flip test below is exact.
3. No greedy single run: one sample moves by 3.3 points per problem.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from model_nvfp4 import UserError, read_json

# Axis legend: n problems · k samples of a problem.

TEMPLATE = "{problem}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}."  # QwQ's line


# ---------------------------------------------------------------------------------------------------------------------
# Problems


@dataclass
class Problem:
    """A question with its reference answer; `messages` is a finished conversation and replaces the template."""

    id: str
    problem: str
    answer: str
    messages: list[dict[str, str]] | None = None
    max_tokens: int | None = None  # of a completion in training, where this problem should have fewer than the others


@dataclass(frozen=True)
class Benchmark:
    """Where a named benchmark comes from, and what must be true of any copy of it."""

    hub: str
    revision: str
    split: str
    rows: int
    prompt_key: str = "problem"
    configs: tuple[str | None, ...] = (None,)
    answers: str = ""  # AIME only: how sha256("2024-I-1=204 2024-I-2=25 …") begins, in the order of the exams


BENCHMARKS = {
    "aime2024": Benchmark(
        "HuggingFaceH4/aime_2024", "2fe88a2f1091d5048c0f36abc874fb997b3dd99a", "train", 30, answers="5b3672a0ab4d3f61"
    ),
    "aime2025": Benchmark(
        "opencompass/AIME2025", "a6ad95f611d72cf628a80b58bd0432ef6638f958", "test", 30, "question",
        ("AIME2025-I", "AIME2025-II"), "83f23433020ae8bf",
    ),
    "amc23": Benchmark("math-ai/amc23", "80815d37005feb82cd7f8fbc6901d5d3eff43057", "test", 40, "question"),
    "math500": Benchmark("HuggingFaceH4/MATH-500", "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be", "test", 500),
    "gsm8k": Benchmark(
        "openai/gsm8k", "740312add88f781978c0658806c59bc2815b9866", "test", 1319, "question", ("main",)
    ),
}  # fmt: skip


def read_problems(
    source: str | Path,
    *,
    prompt_key: str = "problem",
    answer_key: str = "answer",
    tokens_key: str | None = None,
    split: str | None = None,
    data_dir: str | Path | None = None,
) -> list[Problem]:
    """Problems of a named benchmark, a JSONL file or a Hub dataset; UserError names the file, the line and the key.

    A named benchmark comes from `data_dir/NAME.jsonl` or, without `data_dir`, from the Hub at its pinned revision, and
    is checked either way. `split` is for other Hub datasets (default "train"). `tokens_key` names the field that becomes
    `Problem.max_tokens`; a row may do without.
    """
    name = str(source)
    benchmark = BENCHMARKS.get(name)
    if benchmark and data_dir:
        paths = [Path(data_dir) / f"{name}{suffix}.jsonl" for suffix in ("", f"_{benchmark.split}")]
        rows = read_rows(paths[1] if paths[1].exists() else paths[0])
    elif benchmark:
        prompt_key = benchmark.prompt_key
        rows = [
            row
            for config in benchmark.configs
            for row in hub_rows(benchmark.hub, config, benchmark.split, benchmark.revision)
        ]
    elif Path(name).suffix in (".jsonl", ".json") or Path(name).is_file():
        rows = read_rows(Path(name))
    elif re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", name):
        dataset, _, config = name.partition(":")
        rows = hub_rows(dataset, config or None, split or "train", None)
    else:
        raise UserError(
            f"{name} is no benchmark ({', '.join(BENCHMARKS)}), no JSONL file and no Hub name OWNER/DATASET[:CONFIG]."
        )

    problems: list[Problem] = []
    for number, (place, row) in enumerate(rows, 1):
        for key in (prompt_key, answer_key):
            if key not in row:
                raise UserError(f"{place} has no key {key!r}, only {', '.join(row)} (see --prompt-key, --answer-key).")
            if not isinstance(row[key], str | int | float | None):  # of a chat or a list the repr would be trained on
                raise UserError(f"{place} has a {type(row[key]).__name__} as {key!r}; a text or a number is wanted.")
        text, answer = ("" if row[key] is None else str(row[key]).strip() for key in (prompt_key, answer_key))
        answer = answer.rpartition("####")[2].strip()  # GSM8K writes its solution before the answer
        if not text or not answer:
            raise UserError(f"{place} has an empty {(answer_key if text else prompt_key)!r}.")
        limit = row.get(tokens_key)
        if limit is not None and (type(limit) is not int or limit < 1):
            raise UserError(f"{place} has {limit!r} as {tokens_key!r}; a limit in tokens is a whole number from 1.")
        problems.append(Problem(problem_id(name, row, number), text, answer, max_tokens=limit))
    if not problems:
        raise UserError(f"{name} holds no problem.")
    if tokens_key and not any(tokens_key in row for _, row in rows):
        raise UserError(f"{name} has no row with {tokens_key!r} (see --tokens-key).")
    twice = [id for id, count in Counter(problem.id for problem in problems).items() if count > 1]
    if twice:
        raise UserError(f"{name} has {len(twice)} ids that occur more than once, the first is {twice[0]!r}.")
    if benchmark:
        check_benchmark(name, benchmark, problems)
    return problems


def read_rows(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """(place for messages, object) of each line of a JSONL file; empty lines are skipped."""
    if not path.is_file():
        raise UserError(f"There is no file {path}.")
    rows = []
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 (byte {error.start}).") from None
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path} line {number} is not JSON: {error.msg} at column {error.colno}.") from None
        if not isinstance(row, dict):
            raise UserError(f"{path} line {number} is not a JSON object.")
        rows.append((f"{path} line {number}", row))
    return rows


def hub_rows(name: str, config: str | None, split: str, revision: str | None) -> list[tuple[str, dict[str, Any]]]:
    """The same for a dataset of the Hub or of its cache; "exam" is the configuration (AIME 2025 has one for each)."""
    import datasets

    try:
        rows = datasets.load_dataset(name, config, split=split, revision=revision)
    except (OSError, ValueError) as error:  # not there, no network, no such split
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"{name} could not be had from the Hub ({reason}); give a JSONL file or --data-dir.") from error
    return [(f"{name} row {number}", {"exam": config, **row}) for number, row in enumerate(rows, 1)]


def problem_id(source: str, row: dict[str, Any], number: int) -> str:
    """The row's own id, else its number. AIME problems are always called like 2024-I-8, so that runs compare."""
    own = str(row.get("id", row.get("unique_id", "")))
    if source not in BENCHMARKS or not BENCHMARKS[source].answers or exam_of(own):
        return own or f"{Path(source).stem}-{number}"
    address = re.search(r"(\d{4})_AIME_(I{1,2})_Problems/Problem_(\d+)", str(row.get("url", "")))
    if address:
        return "-".join(address.groups())
    exam = "II" if str(row.get("exam", "")).endswith("II") else "I"
    return f"{source[-4:]}-{exam}-{(number - 1) % 15 + 1}"


def exam_of(problem_id: str) -> str | None:
    """ "I" or "II" for an AIME problem, else None."""
    found = re.fullmatch(r"\d{4}-(I{1,2})-\d+", problem_id)
    return found and found[1]


def check_benchmark(name: str, benchmark: Benchmark, problems: list[Problem]) -> None:
    """Row count, duplicates and, for AIME, exams and the answers themselves: public copies with wrong ones exist."""
    if len(problems) != benchmark.rows:
        raise UserError(f"{name} has {benchmark.rows} problems, this copy has {len(problems)}.")
    texts = {"".join(problem.problem.split()) for problem in problems}
    if len(texts) < len(problems):
        raise UserError(f"{name}: {len(problems) - len(texts)} problems of this copy occur twice.")
    if not benchmark.answers:
        return
    for problem in problems:
        answer = re.sub(r"\^\{?\\circ\}?$", "", problem.answer)  # "336^\circ" in two public copies of AIME 2025
        if not re.fullmatch(r"\d{1,3}", answer):
            raise UserError(f"{name} {problem.id}: an AIME answer is an integer from 0 to 999, not {answer!r}.")
        problem.answer = str(int(answer))
    exams = Counter(exam_of(problem.id) for problem in problems)
    if exams != {"I": 15, "II": 15}:
        raise UserError(f"{name} has 15 problems of exam I and 15 of exam II, this copy has {dict(exams)}.")
    problems.sort(key=lambda problem: (exam_of(problem.id), int(problem.id.rpartition("-")[2])))
    pairs = " ".join(f"{problem.id}={problem.answer}" for problem in problems)
    if not digest_of(pairs.encode()).startswith(benchmark.answers):
        raise UserError(f"{name}: this copy has a wrong answer (known bad copies of 2024: I-8 = 480, I-12 = 384).")


def conversation(problem: Problem, template: str) -> list[dict[str, str]]:
    """The problem as a chat of one user message, unless it brings its own messages."""
    try:
        text = template.format(problem=problem.problem)
    except (KeyError, IndexError, ValueError) as error:
        raise UserError(
            f"--prompt-template {template!r}: {error!r}; write {{problem}} once and other braces doubled."
        ) from error
    if problem.problem not in text:
        raise UserError(f"--prompt-template {template!r} leaves the problem out; write {{problem}} where it belongs.")
    return problem.messages or [{"role": "user", "content": text}]


def sample_seed(seed: int, step: int, problem_id: str, sample_index: int) -> int:
    """63 bits from these four and nothing else: the same draw in any batch, on any rank, in a resumed run."""
    digest = hashlib.sha256(f"{seed}/{step}/{problem_id}/{sample_index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


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

    By simulation t alone covers only .82 at 5 % and .90 at 10 %. The Beta interval takes each problem for one trial,
    the most that a mean of n values in [0, 1] can vary, so it never promises too much.
    """
    if se and 0.1 <= mean <= 0.9:  # alike problems have no spread, but that is no certainty
        half = student_t(n - 1) * se
        return max(0.0, mean - half), min(1.0, mean + half), "t"
    right = mean * n
    low = 0.0 if right == 0 else beta_quantile(0.025, right, n - right + 1)
    high = 1.0 if right == n else beta_quantile(0.975, right + 1, n - right)
    return low, high, "Beta"


def pass_at(right: int, k: int, j: int) -> float:
    """Unbiased chance that one of j samples is right, from `right` of k (Chen et al. 2021, equation 1)."""
    return 1 - math.comb(k - right, j) / math.comb(k, j)


def majority(records: list[dict[str, Any]]) -> float:
    """Chance that the most frequent answer is right; ties are split evenly, no answer (or a cut-off one) is no vote."""
    from reward import exact_number

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
        numbers = [record["sample"] for record in group]
        if numbers != list(range(k)):
            raise UserError(f"Problem {name} has the samples {numbers}, not 0 to {k - 1} once each: an unfinished run?")
    if not groups:
        raise UserError("There are no samples.")
    return groups


def count_right(groups: dict[str, list[dict[str, Any]]]) -> np.ndarray:
    return np.array([sum(record["correct"] for record in group) for group in groups.values()])  # (n,)


def mean_rewards(groups: dict[str, list[dict[str, Any]]]) -> np.ndarray | None:
    """What --reward paid for each problem's samples, on average (n,); None when the run had no reward of its own."""
    if not all("reward" in record for group in groups.values() for record in group):
        return None
    return np.array([np.mean([record["reward"] for record in group]) for group in groups.values()])  # (n,)


def standard_error(p: np.ndarray) -> float | None:
    """Of the mean of p (n,) over problems."""
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
    tokens = np.array([record["tokens"] for record in records])  # (n k,)
    correct = np.array([record["correct"] for record in records])  # (n k,)
    truncated = [record for record in records if record["finish_reason"] == "length"]
    paid = mean_rewards(groups)  # (n,)
    rewards = {} if paid is None else {"reward": float(paid.mean()), "reward_se": standard_error(paid)}
    exams = {exam: [exam_of(name) == exam for name in groups] for exam in ("I", "II")}
    return {
        "problems": n, "k": k, "samples": n * k, **rewards,
        "avg": float(p.mean()), "avg_low": low, "avg_high": high, "interval": kind,
        "avg_se": standard_error(p),
        "avg_se_sampling": math.sqrt(sampling_variance(p, k)) if k > 1 else None,
        "pass": {str(j): float(np.mean([pass_at(int(c), k, j) for c in right])) for j in range(1, k + 1)},
        "maj": float(np.mean([majority(group) for group in groups.values()])),
        "problems_solved": int((right > 0).sum()), "samples_right": int(right.sum()),
        "truncated": len(truncated) / (n * k),
        "truncated_with_right_answer": sum(record["equal"] for record in truncated),
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
    engine: Any,
    tokenizer: Any,
    problems: list[Problem],
    *,
    k: int,
    temperature: float,
    top_p: float,
    max_tokens: int,
    seed: int,
    template: str,
    use_adapter: bool,
    samples_path: str | Path | None = None,
    progress: bool = True,
    settings: dict[str, Any] | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    stop: list[str] | None = None,
    own_reward: Callable[[str, str], float] | None = None,
) -> dict[str, Any]:
    """k samples of every problem, graded and summarized. Collective: every rank calls it and returns the same report.

    Call inside `with awake(engine)`, after `push_adapter` when `use_adapter`. With `samples_path` (in a folder that all
    ranks see) each rank appends its samples to its own part file as they finish; a later call with the same settings,
    on any number of ranks, draws only what is missing. `settings` is whatever else the report should state (model,
    adapter …); resuming compares it too. With `own_reward(completion, reference)` the report has its mean as well.
    """
    import torch.distributed as dist
    from tqdm import tqdm

    from reward import score
    from rollout import encode_prompts, generate, versions

    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    prompts = encode_prompts(tokenizer, [conversation(problem, template) for problem in problems], chat_template_kwargs)
    contents = [(problem.id, problem.answer, ids) for problem, ids in zip(problems, prompts)]
    settings = {
        **(settings or {}),
        "k": k, "temperature": temperature, "top_p": top_p, "max_tokens": max_tokens, "seed": seed,
        "template": template, "use_adapter": use_adapter,
        "prompt_hash": digest_of(json.dumps(contents).encode()),  # ids, answers, token ids after the chat template
        "versions": versions() | {"reward.py": digest_of(Path(__file__).with_name("reward.py").read_bytes())},
    }  # fmt: skip

    records: dict[tuple[str, int], dict[str, Any]] = {}
    if samples_path:  # rank 0 alone reads, so that all ranks work on the same list; a refusal must reach them all too
        found: list[Any] = [resume(Path(samples_path), settings) if rank == 0 else None]
        if world > 1:
            dist.broadcast_object_list(found)
        done, refusal = found[0]
        if refusal:
            raise UserError(refusal)
        records = {(record["problem"], record["sample"]): record for record in done}
    wanted = [(i, sample) for i in range(len(problems)) for sample in range(k)]
    missing = [(i, sample) for i, sample in wanted if (problems[i].id, sample) not in records]

    drawn: list[dict[str, Any]] = []
    tally: Counter[bool] = Counter()
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
            verdict = score([sample.text], [problems[i].answer])[0]
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
    parts: list[list[dict[str, Any]]] = [drawn]
    if world > 1:
        parts = [[] for _ in range(world)]
        dist.all_gather_object(parts, drawn)  # also the moment after which every part file is complete
    for record in (record for one in parts for record in one):
        key = (record["problem"], record["sample"])
        assert key not in records, f"sample {key} was drawn twice"
        records[key] = record
    if samples_path and rank == 0:
        merge_parts(Path(samples_path))
    for (problem, number), record in records.items() if own_reward else ():  # on file too; here all ranks see it
        check_own_reward(record["reward"], f"sample {number} of problem {problem}", record["reference"])
    return summarize([records[problems[i].id, number] for i, number in wanted]) | {"settings": settings}


def load_own_reward(spec: str) -> Callable[[str, str], float]:
    """The user's reward function; a wrong path is a user's mistake.

    NumPy's and torch's numbers become Python's, which JSON can hold; what is no number becomes its text, which
    `check_own_reward` refuses where all ranks see it.
    """
    from reward import load_reward

    try:
        function = load_reward(spec)
    except ValueError as error:
        raise UserError(str(error)) from error

    def own_reward(completion: str, reference: str) -> Any:
        value = function(completion, reference)
        if getattr(value, "shape", None) == ():
            value = value.item()
        return value if value is None or isinstance(value, int | float) else repr(value)

    return own_reward


def check_own_reward(value: Any, what: str, reference: str) -> None:
    """UserError unless `value`, paid for `what` (a completion, as it is called in the sentence), is a finite number: NaN would
    make every advantage of its group NaN, and the mean of a report.
    """
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise UserError(
            f"--reward gave {value!r} for {what} against {reference!r}; it must return a finite number, such as 0 for what it "
            f"cannot judge."
        )


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def resume(samples_path: Path, settings: dict[str, Any]) -> tuple[list[dict[str, Any]], str | None]:
    """(records already drawn, why they cannot be used or None); puts the settings beside the samples.

    `k` may differ: seeds do not depend on it, so a run with a larger k goes on from a smaller one. A run that failed before
    its first sample binds nobody.
    """
    settings_path = samples_path.with_suffix(".settings.json")
    samples_path.parent.mkdir(parents=True, exist_ok=True)
    records = merge_parts(samples_path)
    before = json.loads(settings_path.read_text()) if records and settings_path.exists() else settings
    differ = [key for key in settings.keys() | before.keys() if key != "k" and settings.get(key) != before.get(key)]
    if differ:
        changes = "; ".join(f"{key}: {before.get(key)!r}, now {settings.get(key)!r}" for key in sorted(differ))
        return [], f"{samples_path.parent} holds samples drawn with other settings ({changes}); choose another --out."
    replace_text(settings_path, json.dumps(settings, indent=1))
    return [{key: record[key] for key in record if key != "text"} for record in records], None


def merge_parts(samples_path: Path) -> list[dict[str, Any]]:
    """Gather what all ranks wrote into `samples_path`, each sample once; a kill at any instant loses none."""
    part_files = sorted(samples_path.parent.glob(f"{samples_path.name}.rank*"))
    records: dict[tuple[str, int], dict[str, Any]] = {}
    for path in [samples_path, *part_files]:
        for record in read_samples(path) if path.exists() else []:
            records.setdefault((record["problem"], record["sample"]), record)
    if part_files:
        records = dict(sorted(records.items()))
        replace_text(samples_path, "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records.values()))
        for path in part_files:
            path.unlink()
    return list(records.values())


def read_samples(path: str | Path) -> list[dict[str, Any]]:
    """Records of a samples file. A last line without its newline was cut off by a kill, even inside a letter: dropped."""
    if not Path(path).is_file():
        raise UserError(f"There is no file {path}.")
    records = []
    for number, line in enumerate(Path(path).read_bytes().split(b"\n")[:-1], 1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path} line {number} is not JSON ({error}).") from None
        if not {"problem", "sample", "correct"} <= set(record):
            raise UserError(
                f"{path} line {number} is no sample of an evaluation (runs/eval-…/samples.jsonl of eval_aime.py)."
            )
        records.append(record)
    return records


def replace_text(path: Path, text: str) -> None:
    """Write a file so that a reader, or a kill, never meets half of it."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


# ---------------------------------------------------------------------------------------------------------------------
# The report


def error_of(report: dict[str, Any], name: str) -> str:
    """The standard error over problems, which a single one does not give."""
    return "" if report[f"{name}_se"] is None else f" ± {report[f'{name}_se']:.3f}"


def percent(fraction: float | None) -> str:
    return "–" if fraction is None else f"{100 * fraction:.1f}"


def format_report(report: dict[str, Any]) -> str:
    """The report as text; rates in percent."""
    r, k = report, report["k"]
    tokens = [
        f"{name} {'–' if r[f'tokens_{key}'] is None else round(r[f'tokens_{key}'])}"
        for name, key in (("mean", "mean"), ("median", "median"), ("right", "mean_right"), ("wrong", "mean_wrong"))
    ]
    lines = {
        f"avg@{k}": f"{percent(r['avg'])} % · 95 % interval {percent(r['avg_low'])} to {percent(r['avg_high'])} "
        f"({r['interval']}) · SE over {r['problems']} problems {percent(r['avg_se'])} · SE over sampling "
        f"{percent(r['avg_se_sampling'])}",
        **({"reward": f"{r['reward']:.3f} by --reward{error_of(r, 'reward')}"} if "reward" in r else {}),
        "pass@j": " · ".join(f"{j}: {percent(v)}" for j, v in r["pass"].items() if int(j) in (1, 2, 4, 8, 16, 32, k)),
        f"maj@{k}": f"{percent(r['maj'])} %",
        "counts": f"{r['problems_solved']} of {r['problems']} problems ever solved · "
        f"{r['samples_right']} of {r['samples']} samples right",
        "truncated": f"{percent(r['truncated'])} % (counted as wrong, also {r['truncated_with_right_answer']} with the "
        "right answer)",
        "no answer": f"{percent(r['no_answer'])} %",
        "tokens": " · ".join(tokens),
        "exams": " · ".join(f"{exam} {percent(value)} %" for exam, value in r["exams"].items()) or "–",
        "settings": "\n          ".join(f"{key} = {value!r}" for key, value in r["settings"].items()),
    }
    if r["interval"] == "Beta":
        lines["note"] = (
            "no symmetric interval holds near 0 and 100 %: this one is Beta, each problem one trial; read the counts."
        )
    return "\n".join(f"{name:10}{text}" for name, text in lines.items())


def plot_report(report: dict[str, Any], png: str | Path) -> None:
    """One bar per problem: how many of its k samples are right; behind them the mean and its 95 % interval."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names, right = list(report["per_problem"]), np.array(list(report["per_problem"].values()))
    figure, axes = plt.subplots(figsize=(min(24, max(6, 0.3 * len(names))), 3.8), layout="constrained")
    axes.axhspan(100 * report["avg_low"], 100 * report["avg_high"], color="0.9", label=f"95 % ({report['interval']})")
    axes.axhline(100 * report["avg"], color="0.4", linewidth=1, label=f"avg@{report['k']} = {percent(report['avg'])} %")
    colors = ["tab:orange" if exam_of(name) == "II" else "tab:blue" for name in names]
    axes.bar(range(len(names)), 100 * right / report["k"], color=colors)
    if len(names) <= 60:
        axes.set_xticks(range(len(names)), names, rotation=90, fontsize=7)
    axes.set(ylim=(0, 100), xlim=(-0.6, len(names) - 0.4), ylabel="samples right, %")
    title = [report["settings"].get(key) for key in ("benchmark", "model", "adapter")]
    axes.set_title(" · ".join(str(part) for part in title if part), fontsize=8)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(png, dpi=120)
    plt.close(figure)


# ---------------------------------------------------------------------------------------------------------------------
# Is B better than A?


def sign_flip_p(differences: list[int]) -> float:
    """Two-sided p of Fisher's sign-flip test, exact: the share of all 2^n sign patterns whose sum is as far from zero.

    The differences are integers, so the distribution of the sum grows one problem at a time on a grid of 2 Σ|d| + 1
    values; nobody has to list the patterns.
    """
    total = sum(abs(d) for d in differences)
    chance = np.zeros(2 * total + 1)  # of the sums −total … total
    chance[total] = 1.0
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
    only = sorted(groups_a.keys() ^ groups_b.keys())
    if only:
        raise UserError(f"The runs have not the same problems: {len(only)} are in one only, the first is {only[0]}.")
    n, k_a, k_b = len(groups_a), len(a) // len(groups_a), len(b) // len(groups_b)
    groups_b = {name: groups_b[name] for name in groups_a}
    right_a, right_b = count_right(groups_a), count_right(groups_b)  # (n,), (n,)
    p_a, p_b = right_a / k_a, right_b / k_b
    difference, se = float((p_b - p_a).mean()), standard_error(p_b - p_a)
    variance_a, variance_b = sampling_variance(p_a, k_a), sampling_variance(p_b, k_b)
    needed = (1.96 / 0.02) ** 2 * (k_a * variance_a + k_b * variance_b)
    unit = math.lcm(k_a, k_b)

    p_values = [fisher_p(int(ca), k_a, int(cb), k_b) for ca, cb in zip(right_a, right_b)]
    verdicts = ["cannot tell"] * n
    for place, i in enumerate(sorted(range(n), key=p_values.__getitem__)):
        if p_values[i] > 0.05 / (n - place):  # Holm 1979: any false verdict in at most 5 % of tables
            break
        verdicts[i] = "better" if p_b[i] > p_a[i] else "worse"
    half = student_t(n - 1) * se if se else None  # equal differences say nothing of their error
    rewards, paid_a, paid_b = {}, mean_rewards(groups_a), mean_rewards(groups_b)  # (n,), (n,)
    if paid_a is not None and paid_b is not None:
        rewards = {"reward_a": float(paid_a.mean()), "reward_b": float(paid_b.mean())}
        rewards |= {"reward_difference": float((paid_b - paid_a).mean()), "reward_se": standard_error(paid_b - paid_a)}
    return {
        **rewards, "problems": n, "k_a": k_a, "k_b": k_b, "avg_a": float(p_a.mean()), "avg_b": float(p_b.mean()),
        "difference": difference, "se": se,
        "low": None if half is None else difference - half, "high": None if half is None else difference + half,
        "se_sampling": None if math.isnan(needed) else math.sqrt(variance_a + variance_b),
        "samples_needed": None if math.isnan(needed) else max(1, math.ceil(needed)),
        "p_sign_flip": sign_flip_p((right_b * (unit // k_b) - right_a * (unit // k_a)).tolist()),
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
        paid = f"A {c['reward_a']:.3f}, B {c['reward_b']:.3f}: B − A = {c['reward_difference']:+.3f}{error_of(c, 'reward')}"
        lines.insert(3, f"by --reward {paid} (SE over problems); all else here is accuracy")
    changed = [row for row in c["table"] if row["right_a"] * c["k_b"] != row["right_b"] * c["k_a"]]
    for row in changed:
        lines.append(f"{row['problem']:24}{row['right_a']:5}{row['right_b']:5}  {row['p']:<12.4f}{row['verdict']}")
    return "\n".join([*lines, f"{c['problems'] - len(changed)} problems with equal accuracy"])


def compare_files(path_a: Path, path_b: Path) -> str:
    """The comparison of two samples files as text, with the settings that differ."""
    lines = [format_comparison(compare(read_samples(path_a), read_samples(path_b)))]
    beside = [path.with_suffix(".settings.json") for path in (path_a, path_b)]
    a, b = (json.loads(path.read_text()) if path.exists() else {} for path in beside)
    lines += [
        f"{key}: {a.get(key)!r} in A, {b.get(key)!r} in B"
        for key in sorted(a.keys() | b.keys())
        if a.get(key) != b.get(key)
    ]
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------------
# Model and adapter, before anything heavy is loaded


def check_model(model: Path) -> int:
    """The context of a model folder in tokens; UserError when it is none."""
    if not (model / "config.json").is_file():
        raise UserError(f"--model {model} is no model folder: it has no config.json.")
    if not list(model.glob("*.safetensors")):
        raise UserError(f"--model {model} has no weights (*.safetensors).")
    config = read_json(model, "config.json")
    return config.get("text_config", config).get("max_position_embeddings", 2**20)


def check_adapter(adapter: Path, model: Path) -> int:
    """The rank of a PEFT folder that belongs on this model; UserError in one sentence when it does not.

    Shapes come from the headers of the adapter and from the model's modules on the meta device: no weights are read.
    Experts are left to vLLM, which names them one by one where transformers fuses them.
    """
    from safetensors import SafetensorError, safe_open

    weights = adapter / "adapter_model.safetensors"
    for path in (adapter / "adapter_config.json", weights):
        if not path.is_file():
            raise UserError(f"--adapter {adapter} is no PEFT folder: it has no {path.name}.")
    config = read_json(adapter, "adapter_config.json")
    base_name, rank = config.get("base_model_name_or_path"), config.get("r")
    if not isinstance(rank, int):
        raise UserError(f"--adapter {adapter} is no LoRA: its adapter_config.json names no rank r.")
    if base_name and Path(base_name).resolve().name != model.resolve().name:  # either may be a link
        raise UserError(
            f"--adapter {adapter} was trained on {base_name}, not on {model} (if that is the same model under another "
            "name, correct base_model_name_or_path in its adapter_config.json)."
        )
    try:
        with safe_open(weights, "numpy") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise UserError(f"{weights} is not a readable safetensors file ({error}).") from error

    import model_nvfp4

    modules = dict(model_nvfp4.empty_model(model_nvfp4.read_config(model)).named_modules())
    for name, shape in shapes.items():
        target = name.removeprefix("base_model.model.").partition(".lora_")[0]
        if ".experts" in target:
            continue
        if getattr(getattr(modules.get(target), "weight", None), "ndim", 0) != 2:
            raise UserError(f"--adapter {adapter} targets {target}, which is no linear layer of {model}.")
        n, k = modules[target].weight.shape
        expected = (rank, k) if ".lora_A." in name else (n, rank)
        if shape != expected:
            raise UserError(
                f"--adapter {adapter} does not fit: rank {rank} on the {n} × {k} weight of {model} makes {name} "
                f"{expected[0]} × {expected[1]}, but it is {shape[0]} × {shape[1]} (another rank or another model)."
            )
    return rank


# ---------------------------------------------------------------------------------------------------------------------
# The command


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="avg@k with error bars, for a model or an adapter. Under torchrun one rank per GPU, or on a CPU.",
        formatter_class=lambda prog: argparse.ArgumentDefaultsHelpFormatter(prog, max_help_position=32, width=110),
    )
    add = parser.add_argument_group("model").add_argument
    add("--model", type=Path, help="model folder, NVFP4 or any other that vLLM serves")
    add("--adapter", type=Path, help="PEFT folder trained on it, such as runs/NAME/adapter")
    add("--tp", type=int, default=1, help="consecutive ranks that share one engine; for models too big for one GPU")
    add(
        "--gpu-memory-utilization",
        type=float,
        default=0.9,
        help="share of a GPU that vLLM may use; more holds more samples",
    )
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
    if args.model is None:
        raise UserError("--model is missing (only --compare A B needs none).")
    for flag, least in {"k": 1, "tp": 1, "seed": 0, "temperature": 0}.items():
        if not least <= getattr(args, flag) < math.inf:
            raise UserError(f"--{flag} {getattr(args, flag)} must be at least {least}.")
    for flag in ("top_p", "gpu_memory_utilization"):
        if not 0 < getattr(args, flag) <= 1:
            raise UserError(f"--{flag.replace('_', '-')} {getattr(args, flag)} must be above 0 and at most 1.")
    if not isinstance(args.engine_args, dict) or not isinstance(args.chat_template_kwargs, dict):
        raise UserError("--engine-args and --chat-template-kwargs want a JSON object.")
    context = check_model(args.model)
    lora_rank = check_adapter(args.adapter, args.model) if args.adapter else 0
    problems = read_problems(
        args.benchmark, prompt_key=args.prompt_key, answer_key=args.answer_key, split=args.split, data_dir=args.data_dir
    )

    import torch
    import torch.distributed as dist
    from transformers import AutoTokenizer

    import reward
    import rollout
    from report import lock_run

    own_reward = load_own_reward(args.reward) if args.reward else None
    # One's own reward function reads its references itself.
    unreadable = [] if own_reward else reward.unreadable_references([problem.answer for problem in problems])
    if unreadable:
        first = problems[unreadable[0]]
        raise UserError(f"{len(unreadable)} unreadable reference answers, the first is {first.answer!r} of {first.id}.")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    conversations = [conversation(problem, args.prompt_template) for problem in problems]
    longest = max(map(len, rollout.encode_prompts(tokenizer, conversations, args.chat_template_kwargs)))
    max_tokens = min(32768, context - longest) if args.max_tokens is None else args.max_tokens
    if max_tokens < 1 or longest + max_tokens > context:
        raise UserError(
            f"--max-tokens {max_tokens} does not fit: the longest prompt has {longest} tokens and the context of "
            f"{args.model} is {context}, which leaves {context - longest}."
        )

    if args.dry_run:
        print(
            f"{args.model} on {args.benchmark}: {len(problems)} problems × {args.k} samples of at most {max_tokens} tokens"
        )
        return
    if os.environ.get("RANK", "0") == "0":
        args.out.mkdir(parents=True, exist_ok=True)
        lock = lock_run(args.out, patience=10, flag="--out")
    alone = {"max_num_seqs": 1, "enable_prefix_caching": False} if args.exact else {}
    engine_args = alone | args.engine_args
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
            rollout.push_adapter(engine, *rollout.read_adapter(args.adapter), version=0)
        report = evaluate(
            engine, tokenizer, problems,
            k=args.k, temperature=args.temperature, top_p=args.top_p, max_tokens=max_tokens, seed=args.seed,
            template=args.prompt_template, chat_template_kwargs=args.chat_template_kwargs,
            use_adapter=bool(args.adapter), samples_path=args.out / "samples.jsonl", own_reward=own_reward,
            settings={
                "benchmark": args.benchmark, "model": str(args.model),
                "adapter": args.adapter and str(args.adapter),
                "adapter_hash": args.adapter and digest_of((args.adapter / "adapter_model.safetensors").read_bytes()),
                "engine_args": engine_args,
                "reward": args.reward,
                "reward_hash": args.reward and digest_of(Path(args.reward.rpartition(":")[0]).read_bytes()),
            },
        )  # fmt: skip
    if not dist.is_initialized() or dist.get_rank() == 0:
        text = format_report(report)
        replace_text(args.out / "report.json", json.dumps(report, indent=1))
        replace_text(args.out / "report.txt", text + "\n")
        plot_report(report, args.out / "report.png")
        print(f"{text}\nwritten to {args.out}: samples.jsonl, report.json, report.txt, report.png")
        lock.close()
    rollout.shutdown(engine)
    reward.close()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        if args.compare:
            print(compare_files(*args.compare))
        else:
            run(args)
    except UserError as error:
        if os.environ.get("RANK", "0") == "0":  # every rank finds the same mistake
            print(f"eval_aime.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
