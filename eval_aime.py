"""Evaluation: avg@k on AIME 2024 and other benchmarks, with the error bars that thirty problems deserve.

    torchrun --nproc-per-node 8 eval_aime.py --model DIR --benchmark aime2024 --k 8          # the base model
    torchrun --nproc-per-node 8 eval_aime.py --model DIR --adapter runs/NAME/adapter         # the same with an adapter
    python eval_aime.py --compare runs/A/samples.jsonl runs/B/samples.jsonl                  # is B better than A?

The trainer calls `evaluate` too, so a training curve and the final number come from the same lines. Sampling is
`rollout.generate`, grading is `reward.score`; here is only what turns samples into numbers.

What the numbers are (n problems, k samples each, c_i of them right):
1. avg@k = mean(c_i / k). Its standard error over problems, sd(c_i / k) / √n, says how far another exam of the same kind
   could be; the standard error over sampling, √Σ p_i (1 − p_i) / (k − 1) / n, how far other seeds could be on these.
2. The 95 % interval is Student's t over problems, except below 10 % and above 90 %, where no symmetric interval holds:
   there it is the Beta (Clopper-Pearson) interval that counts every problem as one trial, which is wide on purpose.
3. pass@j is the unbiased estimate 1 − C(k − c, j) / C(k, j) (Chen et al. 2021); maj@k splits ties evenly, and a sample
   without an answer is no vote. A sample that ran into the token limit is wrong, whatever it had boxed by then.

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
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from model_nvfp4 import UserError

# Axis legend: n problems · k samples of a problem.

TEMPLATE = (
    "{problem}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}."  # the line of QwQ's card
)


# ---------------------------------------------------------------------------------------------------------------------
# Problems


@dataclass
class Problem:
    """A question with its reference answer; `messages` is a finished conversation and replaces the template."""

    id: str
    problem: str
    answer: str
    messages: list[dict[str, str]] | None = None


@dataclass(frozen=True)
class Benchmark:
    """Where a named benchmark comes from and what must be true of it, whichever copy is used."""

    hub: str
    revision: str
    split: str
    rows: int
    configs: tuple[str | None, ...] = (None,)
    prompt_key: str = "problem"
    answers: str = ""  # first 16 hex digits of sha256("2024-I-1=204 2024-I-2=25 …"), in order of the exam; AIME only


BENCHMARKS = {
    "aime2024": Benchmark(
        "HuggingFaceH4/aime_2024", "2fe88a2f1091d5048c0f36abc874fb997b3dd99a", "train", 30, answers="5b3672a0ab4d3f61"
    ),
    "aime2025": Benchmark(
        "opencompass/AIME2025",
        "a6ad95f611d72cf628a80b58bd0432ef6638f958",
        "test",
        30,
        configs=("AIME2025-I", "AIME2025-II"),
        prompt_key="question",
        answers="83f23433020ae8bf",
    ),
    "amc23": Benchmark("math-ai/amc23", "80815d37005feb82cd7f8fbc6901d5d3eff43057", "test", 40, prompt_key="question"),
    "math500": Benchmark("HuggingFaceH4/MATH-500", "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be", "test", 500),
    "gsm8k": Benchmark(
        "openai/gsm8k",
        "740312add88f781978c0658806c59bc2815b9866",
        "test",
        1319,
        configs=("main",),
        prompt_key="question",
    ),
}


def read_problems(
    source: str | Path,
    *,
    prompt_key: str = "problem",
    answer_key: str = "answer",
    split: str | None = None,
    data_dir: str | Path | None = None,
) -> list[Problem]:
    """Problems of a named benchmark, a JSONL file or a Hub dataset; UserError names the file, the line and the key.

    A named benchmark comes from `data_dir/NAME.jsonl` or, without `data_dir`, from the Hub at its pinned revision, and
    is checked either way. `split` is for other Hub datasets (default "train").
    """
    name = str(source)
    benchmark = BENCHMARKS.get(name)
    if benchmark and data_dir:
        # A folder of exported JSONL files may keep the Hub's file name of GSM8K's test split.
        paths = [Path(data_dir) / f"{name}.jsonl", Path(data_dir) / f"{name}_test.jsonl"]
        rows = read_rows(next((path for path in paths if path.exists()), paths[0]))
    elif benchmark:
        prompt_key = benchmark.prompt_key
        rows = [
            (f"{benchmark.hub} {config or ''} row {row_number}", {"exam": config or "", **row})
            for config in benchmark.configs
            for row_number, row in enumerate(hub_rows(benchmark.hub, config, benchmark.split, benchmark.revision), 1)
        ]
    elif Path(name).suffix in (".jsonl", ".json") or Path(name).exists():
        rows = read_rows(Path(name))
    elif re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        rows = [(f"{name} row {i}", row) for i, row in enumerate(hub_rows(name, None, split or "train", None), 1)]
    else:
        raise UserError(
            f"{name} is no benchmark ({', '.join(BENCHMARKS)}), no JSONL file and no Hub name OWNER/DATASET."
        )

    problems: list[Problem] = []
    for row_number, (place, row) in enumerate(rows, 1):
        for key in (prompt_key, answer_key):
            if key not in row:
                raise UserError(
                    f"{place} has no key {key!r}; its keys are {', '.join(row)} (see --prompt-key, --answer-key)."
                )
        text, answer = str(row[prompt_key]).strip(), str(row[answer_key] if row[answer_key] is not None else "").strip()
        answer = answer.rpartition("####")[2].strip()  # GSM8K writes its solution before the answer
        if not text or not answer:
            raise UserError(f"{place} has an empty {prompt_key if not text else answer_key!r}.")
        if benchmark and benchmark.answers:
            answer = re.sub(r"\^\{?\\circ\}?", "", answer)  # "336^\circ" in two public copies of AIME 2025
        problems.append(Problem(problem_id(name, row, row_number), text, answer))
    if not problems:
        raise UserError(f"{name} holds no problem.")
    twice = [id for id, count in Counter(problem.id for problem in problems).items() if count > 1]
    if twice:
        raise UserError(f"{name} has {len(twice)} ids that occur more than once, the first is {twice[0]!r}.")
    if benchmark:
        check_benchmark(name, benchmark, problems)
    return problems


def read_rows(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """The objects of a JSONL file, each with its place for messages; empty lines are skipped."""
    if not path.is_file():
        raise UserError(f"There is no file {path}.")
    rows = []
    for line_number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path} line {line_number} is not JSON: {error.msg} at column {error.colno}.") from None
        if not isinstance(row, dict):
            raise UserError(f"{path} line {line_number} is not a JSON object.")
        rows.append((f"{path} line {line_number}", row))
    return rows


def hub_rows(name: str, config: str | None, split: str, revision: str | None) -> list[dict[str, Any]]:
    """Rows of a dataset of the Hub (or of its local cache)."""
    import datasets

    try:
        return list(datasets.load_dataset(name, config, split=split, revision=revision))
    except (OSError, ValueError) as error:  # not there, no network, no such split
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"{name} could not be had from the Hub ({reason}); give a JSONL file or --data-dir.") from error


def problem_id(source: str, row: dict[str, Any], row_number: int) -> str:
    """The row's own id. An AIME problem is always called 2024-I-8, so that runs on different copies can be compared."""
    own = str(row.get("id", row.get("unique_id", "")))
    if source not in BENCHMARKS or not BENCHMARKS[source].answers or re.fullmatch(r"\d{4}-I{1,2}-\d+", own):
        return own or f"{Path(source).stem}-{row_number}"
    by_url = re.search(r"(\d{4})_AIME_(I{1,2})_Problems/Problem_(\d+)", str(row.get("url", "")))
    if by_url:
        return "-".join(by_url.groups())
    exam = (
        "II" if str(row.get("exam", "")).endswith("II") else "I"
    )  # one configuration (or field) per exam, in its order
    return f"{source[-4:]}-{exam}-{(row_number - 1) % 15 + 1}"


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
        if not re.fullmatch(r"\d{1,3}", problem.answer):
            raise UserError(f"{name} {problem.id}: an AIME answer is an integer from 0 to 999, not {problem.answer!r}.")
        problem.answer = str(int(problem.answer))
    exams = Counter(exam_of(problem.id) for problem in problems)
    if exams != {"I": 15, "II": 15}:
        raise UserError(f"{name} has 15 problems of exam I and 15 of exam II, this copy has {dict(exams)}.")
    problems.sort(key=lambda problem: (exam_of(problem.id), int(problem.id.rpartition("-")[2])))
    digest = hashlib.sha256(" ".join(f"{problem.id}={problem.answer}" for problem in problems).encode()).hexdigest()
    if not digest.startswith(benchmark.answers):
        raise UserError(
            f"{name}: an answer of this copy is not the exam's (known bad copies of 2024: I-8 = 480, I-12 = 384)."
        )


def exam_of(problem_id: str) -> str | None:
    """ "I" or "II" for an AIME problem."""
    found = re.fullmatch(r"\d{4}-(I{1,2})-\d+", problem_id)
    return found and found[1]


def conversation(problem: Problem, template: str) -> list[dict[str, str]]:
    """The problem as a chat of one user message, unless it brings its own messages."""
    return problem.messages or [{"role": "user", "content": template.format(problem=problem.problem)}]


def sample_seed(seed: int, step: int, problem_id: str, sample_index: int) -> int:
    """63 bits from these four and nothing else: the same draw in any batch, on any rank, in a resumed run."""
    digest = hashlib.sha256(f"{seed}/{step}/{problem_id}/{sample_index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


# ---------------------------------------------------------------------------------------------------------------------
# Numbers: pure functions of the records


@lru_cache(maxsize=1000)
def beta_quantile(p: float, a: float, b: float) -> float:
    """x with I_x(a, b) = p, by bisection; student_t and both ends of Clopper-Pearson are this one function."""
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
    if se is not None and 0.1 <= mean <= 0.9:
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
    """Chance that the most frequent answer of these samples is right; ties are split evenly, no answer is no vote."""
    votes = Counter(vote(record) for record in records)
    votes.pop(None, None)
    top = [answer for answer, count in votes.items() if count == max(votes.values())]
    return (RIGHT in top) / len(top) if top else 0.0


RIGHT = ("right",)  # what all answers equal to the reference vote for, however they are written


def vote(record: dict[str, Any]) -> Any:
    """What a sample votes for; wrong answers that differ only in spaces or leading zeros are the same."""
    if record["correct"]:
        return RIGHT
    if record["answer"] is None or record["finish_reason"] == "length":
        return None
    answer = re.sub(r"\s|\$", "", record["answer"])
    return str(int(answer)) if re.fullmatch(r"\d+", answer) else answer


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
    return groups


def summarize(records: list[dict[str, Any]]) -> dict[str, Any]:
    """All numbers of the report, as fractions of 1 and tokens; None where one sample or one problem cannot give it."""
    groups = by_problem(records)
    assert groups, "no samples to summarize"
    correct = np.array([[record["correct"] for record in group] for group in groups.values()], dtype=float)  # (n, k)
    n, k = correct.shape
    right = correct.sum(1).astype(int)  # (n,)
    mean = correct.mean(1)  # (n,)
    avg = float(correct.mean())
    avg_se = float(mean.std(ddof=1) / math.sqrt(n)) if n > 1 else None
    low, high, kind = interval_95(avg, avg_se, n)
    tokens = np.array([record["tokens"] for record in records])  # (n k,)
    is_right = np.array([record["correct"] for record in records])  # (n k,)
    truncated = [record for record in records if record["finish_reason"] == "length"]
    exams = {exam: [exam_of(name) == exam for name in groups] for exam in ("I", "II")}
    return {
        "problems": n,
        "k": k,
        "avg": avg,
        "avg_se": avg_se,
        "avg_low": low,
        "avg_high": high,
        "interval": kind,
        "avg_se_sampling": float(np.sqrt((mean * (1 - mean)).sum() / (k - 1)) / n) if k > 1 else None,
        "pass": {str(j): float(np.mean([pass_at(int(c), k, j) for c in right])) for j in range(1, k + 1)},
        "maj": float(np.mean([majority(group) for group in groups.values()])),
        "problems_solved": int((right > 0).sum()),
        "samples_right": int(right.sum()),
        "samples": n * k,
        "truncated": len(truncated) / (n * k),
        "truncated_with_right_answer": sum(record["equal"] for record in truncated),
        "no_answer": sum(record["answer"] is None for record in records) / (n * k),
        "tokens_mean": float(tokens.mean()),
        "tokens_median": float(np.median(tokens)),
        "tokens_mean_right": float(tokens[is_right].mean()) if is_right.any() else None,
        "tokens_mean_wrong": float(tokens[~is_right].mean()) if not is_right.all() else None,
        "exams": {exam: float(mean[mask].mean()) for exam, mask in exams.items() if any(mask)},
        "per_problem": {name: int(c) for name, c in zip(groups, right)},
    }


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
) -> dict[str, Any]:
    """k samples of every problem, graded and summarized. Collective: every rank calls it and returns the same report.

    Call inside `with awake(engine)`, after `push_adapter` when `use_adapter`. With `samples_path` (in a folder that all
    ranks see) each rank appends its samples to its own part file as they finish; a later call with the same settings,
    on any number of ranks, draws only what is missing and returns what an undisturbed run would have. `settings` is
    whatever else the report should state (model, adapter …); resuming compares it too.
    """
    import torch.distributed as dist
    from reward import score
    from tqdm import tqdm

    from rollout import encode_prompts, generate, versions

    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    prompts = encode_prompts(tokenizer, [conversation(problem, template) for problem in problems], chat_template_kwargs)
    contents = [(problem.id, problem.answer, ids) for problem, ids in zip(problems, prompts)]
    settings = {
        **(settings or {}),
        "k": k,
        "temperature": temperature,
        "top_p": top_p,
        "max_tokens": max_tokens,
        "seed": seed,
        "template": template,
        "use_adapter": use_adapter,
        "prompt_hash": digest_of(
            json.dumps(contents).encode()
        ),  # of ids, answers and token ids after the chat template
        "versions": versions() | {"reward.py": digest_of(Path(__file__).with_name("reward.py").read_bytes())},
    }

    done: list[dict[str, Any]] = []
    if samples_path:  # rank 0 alone reads, so that all ranks work on the same list; a refusal must reach them all too
        found: list[Any] = [resume(Path(samples_path), settings) if rank == 0 else None]
        if world > 1:
            dist.broadcast_object_list(found)
        done, refusal = found[0]
        if refusal:
            raise UserError(refusal)
    wanted = [(problem.id, sample) for problem in problems for sample in range(k)]
    have = {(record["problem"], record["sample"]): record for record in done}
    position = {problem.id: i for i, problem in enumerate(problems)}
    missing = [key for key in wanted if key not in have]

    part = part_path(samples_path, rank).open("a", buffering=1, encoding="utf-8") if samples_path else None
    # With several ranks the bar counts rank 0's share, whose size only rollout.generate knows.
    bar = tqdm(
        total=len(missing) if world == 1 else None,
        desc="evaluation" if world == 1 else f"evaluation, rank 0 of {world}",
        unit="sample",
        disable=rank > 0 or not progress,
        dynamic_ncols=True,
    )
    drawn: list[dict[str, Any]] = []

    def on_sample(index: int, sample: Any) -> None:
        name, number = missing[index]
        problem = problems[position[name]]
        verdict = score([sample.text], [problem.answer])[0]
        record = {
            "problem": name,
            "sample": number,
            "seed": sample.seed,
            "reference": problem.answer,
            "answer": verdict.answer,
            "equal": verdict.equal,
            "correct": verdict.equal and sample.finish_reason != "length",
            "reason": verdict.reason,
            "finish_reason": sample.finish_reason,
            "tokens": len(sample.completion_ids),
        }
        drawn.append(record)
        if part:
            part.write(json.dumps(record | {"text": sample.text}, ensure_ascii=False) + "\n")
        bar.set_postfix_str(f"accuracy {np.mean([record['correct'] for record in drawn]):.3f}", refresh=False)
        bar.update()

    generate(
        engine,
        [prompts[position[name]] for name, _ in missing],
        [sample_seed(seed, -1, name, number) for name, number in missing],
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        use_adapter=use_adapter,
        on_sample=on_sample,
        gather=False,  # the records are enough, and small
    )
    bar.close()
    if part:
        part.close()
    parts: list[list[dict[str, Any]]] = [drawn]
    if world > 1:
        parts = [[] for _ in range(world)]
        dist.all_gather_object(parts, drawn)  # also the moment after which every part file is complete
    for record in (record for records in parts for record in records):
        key = (record["problem"], record["sample"])
        assert key not in have, f"sample {key} was drawn twice"
        have[key] = record
    if samples_path and rank == 0:
        merge_parts(Path(samples_path), position)
    return summarize([have[key] for key in wanted]) | {"settings": settings}


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def part_path(samples_path: str | Path, rank: int | str) -> Path:
    return Path(f"{samples_path}.rank{rank}")


def resume(samples_path: Path, settings: dict[str, Any]) -> tuple[list[dict[str, Any]], str | None]:
    """(records already drawn, why they cannot be used or None); puts the settings beside the samples of a new run.

    `k` may differ: seeds do not depend on it, so a run with a larger k goes on from a smaller one.
    """
    settings_path = samples_path.with_suffix(".settings.json")
    samples_path.parent.mkdir(parents=True, exist_ok=True)
    if not settings_path.exists():
        replace_text(settings_path, json.dumps(settings, indent=1))
    before = json.loads(settings_path.read_text())
    differ = [key for key in settings.keys() | before.keys() if key != "k" and settings.get(key) != before.get(key)]
    if differ:
        changes = "; ".join(f"{key}: {before.get(key)!r}, now {settings.get(key)!r}" for key in sorted(differ))
        return [], f"{samples_path.parent} holds samples drawn with other settings ({changes}); choose another --out."
    light = [{key: value for key, value in record.items() if key != "text"} for record in merge_parts(samples_path, {})]
    return light, None


def merge_parts(samples_path: Path, position: dict[str, int]) -> list[dict[str, Any]]:
    """Gather what all ranks wrote into `samples_path`, each sample once, in order; no kill loses a sample."""
    part_files = sorted(samples_path.parent.glob(f"{samples_path.name}.rank*"))
    records: dict[tuple[str, int], dict[str, Any]] = {}
    for path in [samples_path, *part_files]:
        for record in read_samples(path) if path.exists() else []:
            records.setdefault((record["problem"], record["sample"]), record)
    ordered = sorted(records.values(), key=lambda record: (position.get(record["problem"], -1), record["sample"]))
    if part_files:
        replace_text(samples_path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in ordered))
        for path in part_files:
            path.unlink()
    return ordered


def read_samples(path: str | Path) -> list[dict[str, Any]]:
    """Records of a samples file. A last line without its newline was cut off by a kill and is dropped."""
    if not Path(path).is_file():
        raise UserError(f"There is no file {path}.")
    lines = Path(path).read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]


def replace_text(path: Path, text: str) -> None:
    """Write a file so that a reader, or a kill, never meets half of it."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


# ---------------------------------------------------------------------------------------------------------------------
# The report


def percent(fraction: float | None) -> str:
    return "–" if fraction is None else f"{100 * fraction:.1f}"


def format_report(report: dict[str, Any]) -> str:
    """The report as text; every rate in percent."""
    r, number = report, lambda tokens: "–" if tokens is None else f"{tokens:.0f}"
    js = [j for j in (1, 2, 4, 8, 16, 32, 64) if j < r["k"]] + [r["k"]]
    lines = [
        f"avg@{r['k']}     {percent(r['avg'])} %   SE over {r['problems']} problems {percent(r['avg_se'])} · "
        f"SE over sampling {percent(r['avg_se_sampling'])} · "
        f"95 % interval {percent(r['avg_low'])} to {percent(r['avg_high'])} ({r['interval']})",
        "pass@j    " + "   ".join(f"{j}: {percent(r['pass'][str(j)])}" for j in dict.fromkeys(js)),
        f"maj@{r['k']}     {percent(r['maj'])} %",
        f"counts    {r['problems_solved']} of {r['problems']} problems ever solved · "
        f"{r['samples_right']} of {r['samples']} samples right",
        f"samples   {percent(r['truncated'])} % truncated (counted as wrong, also the "
        f"{r['truncated_with_right_answer']} with the right answer) · {percent(r['no_answer'])} % without an answer",
        f"tokens    mean {number(r['tokens_mean'])} · median {number(r['tokens_median'])} · "
        f"right {number(r['tokens_mean_right'])} · wrong {number(r['tokens_mean_wrong'])}",
    ]
    if r["exams"]:
        lines.append("exams     " + " · ".join(f"{exam} {percent(value)} %" for exam, value in r["exams"].items()))
    lines += [
        f"{'settings' if i == 0 else '':9} {key} = {value!r}" for i, (key, value) in enumerate(r["settings"].items())
    ]
    if r["interval"] == "Beta":
        lines.append(
            "note      near 0 or 100 % no symmetric interval holds: this is a Beta interval with every problem as one "
            "trial; read the counts first."
        )
    return "\n".join(lines)


def plot_report(report: dict[str, Any], png: str | Path) -> None:
    """One bar per problem: how many of its k samples are right; the mean and its 95 % interval behind them."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names, right = list(report["per_problem"]), list(report["per_problem"].values())
    figure, axes = plt.subplots(figsize=(max(6.0, min(24.0, 0.3 * len(names))), 3.8), layout="constrained")
    axes.axhspan(100 * report["avg_low"], 100 * report["avg_high"], color="0.9", label=f"95 % ({report['interval']})")
    axes.axhline(100 * report["avg"], color="0.4", linewidth=1, label=f"avg@{report['k']} = {percent(report['avg'])} %")
    colors = ["tab:orange" if exam_of(name) == "II" else "tab:blue" for name in names]
    axes.bar(range(len(names)), [100 * c / report["k"] for c in right], color=colors)
    if len(names) <= 60:
        axes.set_xticks(range(len(names)), names, rotation=90, fontsize=7)
    axes.set(ylim=(0, 100), xlim=(-0.6, len(names) - 0.4), ylabel="samples right, %")
    axes.set_title(
        " · ".join(str(report["settings"].get(key)) for key in ("benchmark", "model", "adapter")), fontsize=8
    )
    axes.legend(fontsize=8)
    figure.savefig(png, dpi=120)
    plt.close(figure)


# ---------------------------------------------------------------------------------------------------------------------
# Is B better than A?


def sign_flip_p(differences: list[int]) -> float:
    """Two-sided p of Fisher's sign-flip test, exact: the share of all 2^n sign patterns whose sum is as far from zero.

    The differences are integers, so the distribution of the sum is built one problem at a time on a grid, instead of
    listing the patterns: (n × Σ|d|) additions, a second for a thousand problems.
    """
    total = sum(abs(d) for d in differences)
    chance = np.zeros(2 * total + 1)  # of a sum of −total … total
    chance[total] = 1.0
    for d in differences:
        chance = (np.roll(chance, d) + np.roll(chance, -d)) / 2
    sums = np.abs(np.arange(-total, total + 1))
    return min(1.0, float(chance[sums >= abs(sum(differences))].sum()))


def fisher_p(right_a: int, k_a: int, right_b: int, k_b: int) -> float:
    """Two-sided p of Fisher's exact test that two problems' samples have one chance of being right."""
    right, ways = right_a + right_b, math.comb(k_a + k_b, right_a + right_b)
    chances = [math.comb(k_a, c) * math.comb(k_b, right - c) for c in range(max(0, right - k_b), min(k_a, right) + 1)]
    ours = math.comb(k_a, right_a) * math.comb(k_b, right_b)
    return sum(chance for chance in chances if chance <= ours) / ways


def compare(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> dict[str, Any]:
    """B minus A, paired by problem; `samples_needed` is the k that brings the sampling error to ± 2 points (95 %)."""
    groups_a, groups_b = by_problem(a), by_problem(b)
    if groups_a.keys() != groups_b.keys():
        only = sorted(groups_a.keys() ^ groups_b.keys())
        raise UserError(
            f"The two runs have not the same problems: {len(only)} are in one only, the first is {only[0]}."
        )
    right_a = np.array([sum(record["correct"] for record in group) for group in groups_a.values()])  # (n,)
    right_b = np.array([sum(record["correct"] for record in groups_b[name]) for name in groups_a])  # (n,)
    n, k_a, k_b = len(groups_a), len(a) // len(groups_a), len(b) // len(groups_b)
    mean_a, mean_b = right_a / k_a, right_b / k_b
    d = mean_b - mean_a  # (n,)
    difference, se = float(d.mean()), float(d.std(ddof=1) / math.sqrt(n)) if n > 1 else None
    half = student_t(n - 1) * se if se is not None else None
    unit = math.lcm(k_a, k_b)
    one_sample = None  # variance of a problem's difference if each run had one sample
    if k_a > 1 and k_b > 1:
        one_sample = float((mean_a * (1 - mean_a) * k_a / (k_a - 1) + mean_b * (1 - mean_b) * k_b / (k_b - 1)).sum())

    p = [fisher_p(int(ca), k_a, int(cb), k_b) for ca, cb in zip(right_a, right_b)]
    verdicts = ["cannot tell"] * n
    for rank, i in enumerate(
        sorted(range(n), key=p.__getitem__)
    ):  # Holm 1979: all n verdicts together err in 5 % of tables
        if p[i] > 0.05 / (n - rank):
            break
        verdicts[i] = "better" if d[i] > 0 else "worse"
    return {
        "problems": n,
        "k_a": k_a,
        "k_b": k_b,
        "avg_a": float(mean_a.mean()),
        "avg_b": float(mean_b.mean()),
        "difference": difference,
        "se": se,
        "low": None if half is None else difference - half,
        "high": None if half is None else difference + half,
        "se_sampling": None
        if one_sample is None
        else math.sqrt(float((mean_a * (1 - mean_a)).sum() / (k_a - 1) + (mean_b * (1 - mean_b)).sum() / (k_b - 1)))
        / n,
        "p_sign_flip": sign_flip_p(
            [int(cb) * (unit // k_b) - int(ca) * (unit // k_a) for ca, cb in zip(right_a, right_b)]
        ),
        "samples_needed": None if one_sample is None else max(1, math.ceil((1.96 / 0.02) ** 2 * one_sample / n**2)),
        "table": [
            {"problem": name, "right_a": int(ca), "right_b": int(cb), "p": float(p_i), "verdict": verdict}
            for name, ca, cb, p_i, verdict in zip(groups_a, right_a, right_b, p, verdicts)
        ],
    }


def format_comparison(c: dict[str, Any]) -> str:
    """The comparison as text, problems with equal counts in one line at the end."""
    ks = f"{c['k_a']}" if c["k_a"] == c["k_b"] else f"{c['k_a']} and {c['k_b']}"
    lines = [
        f"A {percent(c['avg_a'])} %   B {percent(c['avg_b'])} %   B − A {100 * c['difference']:+.1f} points over "
        f"{c['problems']} problems, {ks} samples each",
        f"SE over problems {percent(c['se'])} (95 % {percent(c['low'])} to {percent(c['high'])}) · "
        f"SE over sampling {percent(c['se_sampling'])} · exact sign-flip test p = {c['p_sign_flip']:.4f}",
        f"samples per problem for ± 2 points of sampling error (95 %): {c['samples_needed'] or '– (needs k > 1)'}",
        f"{'problem':24}{'A':>6}{'B':>6}   p (Fisher)  at this k (Holm over all problems, 5 %)",
    ]
    changed = [row for row in c["table"] if row["right_a"] * c["k_b"] != row["right_b"] * c["k_a"]]
    lines += [
        f"{row['problem']:24}{row['right_a']:>6}{row['right_b']:>6}   {row['p']:<10.4f}  {row['verdict']}"
        for row in changed
    ]
    return "\n".join([*lines, f"{c['problems'] - len(changed)} problems with equal accuracy"])


# ---------------------------------------------------------------------------------------------------------------------
# The adapter, before anything heavy is loaded


def tensor_shapes(folder: Path, pattern: str) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors in a folder's safetensors files, from the headers; a packed 4-bit row counts its codes."""
    from safetensors import SafetensorError, safe_open

    shapes = {}
    for path in sorted(folder.glob(pattern)):
        try:
            with safe_open(path, "numpy") as file:
                for name in file.keys():  # noqa: SIM118 (no mapping)
                    one = file.get_slice(name)
                    shape = tuple(one.get_shape())
                    packed = one.get_dtype() == "U8" and len(shape) > 1 and not name.endswith("scale")
                    shapes[name] = (*shape[:-1], 2 * shape[-1]) if packed else shape
        except SafetensorError as error:
            raise UserError(f"{path} is not a readable safetensors file: {error}.") from error
    return shapes


def check_adapter(adapter: Path, model: Path) -> int:
    """The rank of a PEFT folder that belongs on this model; UserError in one sentence when it does not.

    The adapter's modules are looked up in the checkpoint from "layers.N." on, since wrappers change what stands before;
    modules of experts are left to vLLM, since checkpoints and modules name them differently.
    """
    config_path = adapter / "adapter_config.json"
    if not config_path.is_file():
        raise UserError(f"--adapter {adapter} is no PEFT folder: it has no adapter_config.json.")
    config = json.loads(config_path.read_text())
    trained_on = config.get("base_model_name_or_path") or model.name
    if Path(trained_on).name != model.resolve().name:
        raise UserError(
            f"--adapter {adapter} was trained on {trained_on}, not on {model} (if that is the same model under another "
            "name, correct base_model_name_or_path in its adapter_config.json)."
        )
    lora = tensor_shapes(adapter, "adapter_model.safetensors")
    if not lora:
        raise UserError(f"--adapter {adapter} has no adapter_model.safetensors.")
    rank = config.get("r")
    base = {
        name[name.find("layers.") :].rpartition(".")[0]: shape  # "layers.0.self_attn.q_proj": (N, K)
        for name, shape in tensor_shapes(model, "*.safetensors").items()
        if name.endswith((".weight", ".weight_packed"))
    }
    for name, shape in lora.items():
        module = name[name.find("layers.") :].partition(".lora_")[0]
        ours, theirs = (0, 1) if ".lora_A" in name else (1, 0)  # A is (rank, K), B is (N, rank)
        if shape[ours] != rank:
            raise UserError(f"--adapter {adapter} says rank {rank}, but its tensor {name} has rank {shape[ours]}.")
        if "expert" in module:
            continue
        if module not in base:
            raise UserError(f"--adapter {adapter} targets {module}, which {model} has not.")
        if shape[theirs] != base[module][theirs]:
            raise UserError(
                f"--adapter {adapter} belongs to another model: {name} is {shape[theirs]} wide, but the weight in "
                f"{model} is {base[module][0]} × {base[module][1]}."
            )
    return rank


def check_model(model: Path) -> dict[str, Any]:
    """The configuration of a model folder that can be served; UserError when the folder cannot be one."""
    if not (model / "config.json").is_file():
        raise UserError(f"--model {model} is no model folder: it has no config.json.")
    if not list(model.glob("*.safetensors")):
        raise UserError(f"--model {model} has no weights (*.safetensors).")
    return json.loads((model / "config.json").read_text())


# ---------------------------------------------------------------------------------------------------------------------
# The command


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="avg@k with error bars, for a model or an adapter. Under torchrun one rank per GPU, or on a CPU.",
        formatter_class=lambda prog: argparse.ArgumentDefaultsHelpFormatter(prog, max_help_position=32, width=110),
    )
    group = parser.add_argument_group("model")
    group.add_argument("--model", type=Path, help="model folder, NVFP4 or any other that vLLM serves")
    group.add_argument("--adapter", type=Path, help="PEFT folder trained on it, such as runs/NAME/adapter")
    group.add_argument(
        "--tp", type=int, default=1, help="consecutive ranks that share one engine; for models too big for one GPU"
    )
    group.add_argument(
        "--gpu-memory", type=float, default=0.9, help="share of a GPU that vLLM may use; more holds more samples"
    )
    group.add_argument("--engine-args", type=json.loads, default={}, help="JSON of further arguments of vllm.LLM")

    group = parser.add_argument_group("problems")
    group.add_argument("--benchmark", default="aime2024", help=f"{', '.join(BENCHMARKS)}, a JSONL file, or a Hub name")
    group.add_argument(
        "--data-dir", type=Path, help="folder with NAME.jsonl for the named benchmarks, instead of the Hub"
    )
    group.add_argument("--prompt-key", default="problem", help="field of a row with the question")
    group.add_argument("--answer-key", default="answer", help="field of a row with the reference answer")
    group.add_argument("--split", default="train", help="of a Hub name that is no named benchmark")
    group.add_argument("--prompt-template", default=TEMPLATE, help="the user message; {problem} is replaced")
    group.add_argument(
        "--chat-template-kwargs", type=json.loads, default={}, help='JSON, e.g. {"enable_thinking": false}'
    )

    group = parser.add_argument_group("sampling (keep one setting for before and after)")
    group.add_argument("--k", type=int, default=8, help="samples per problem; SE over sampling falls with its root")
    group.add_argument(
        "--temperature", type=float, default=0.6, help="0.6 is usual for AIME; 1.0 to compare with DAPO's numbers"
    )
    group.add_argument(
        "--top-p", type=float, default=0.95, help="0.95 is usual for AIME; 0.7 to compare with DAPO's numbers"
    )
    group.add_argument("--max-tokens", type=int, help="longest completion (default: 32768, or what the context leaves)")
    group.add_argument("--seed", type=int, default=0, help="same seed, same samples, on any number of ranks")

    group = parser.add_argument_group("output")
    group.add_argument(
        "--out", type=Path, help="folder for samples and report; an unfinished one is resumed (default: from names)"
    )
    group.add_argument(
        "--compare", type=Path, nargs=2, metavar=("A", "B"), help="two samples.jsonl: is B better than A? No model"
    )

    args = parser.parse_args(argv)
    if args.out is None and args.model is not None:
        names = [Path(args.benchmark).stem, args.model.resolve().name]
        names += [args.adapter.resolve().parent.name or "adapter"] if args.adapter else []
        args.out = Path("runs") / "-".join(["eval", *names, f"seed{args.seed}"])
    return args


def compare_files(path_a: Path, path_b: Path) -> str:
    """The comparison of two samples files as text, with a line for the settings that differ."""
    text = format_comparison(compare(read_samples(path_a), read_samples(path_b)))
    settings = [path.with_suffix(".settings.json") for path in (path_a, path_b)]
    if all(path.exists() for path in settings):
        a, b = (json.loads(path.read_text()) for path in settings)
        differ = sorted(key for key in a.keys() | b.keys() if a.get(key) != b.get(key))
        text += "".join(f"\ndiffers: {key}: {a.get(key)!r} in A, {b.get(key)!r} in B" for key in differ)
    return text


def run(args: argparse.Namespace, rank: int) -> None:
    """Check everything, then load, sample, report. Collective."""
    for flag in ("k", "tp"):
        if getattr(args, flag) < 1:
            raise UserError(f"--{flag} {getattr(args, flag)} must be at least 1.")
    if args.model is None:
        raise UserError("--model is missing (or --compare A B, which needs none).")
    config = check_model(args.model)
    lora_rank = check_adapter(args.adapter, args.model) if args.adapter else 0
    problems = read_problems(
        args.benchmark,
        prompt_key=args.prompt_key,
        answer_key=args.answer_key,
        split=args.split,
        data_dir=args.data_dir,
    )

    import torch
    import torch.distributed as dist
    from transformers import AutoTokenizer

    import rollout

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    conversations = [conversation(problem, args.prompt_template) for problem in problems]
    longest = max(map(len, rollout.encode_prompts(tokenizer, conversations, args.chat_template_kwargs)))
    context = config.get("max_position_embeddings") or config.get("text_config", {}).get(
        "max_position_embeddings", 2**20
    )
    max_tokens = args.max_tokens or min(32768, context - longest)
    if max_tokens < 1 or longest + max_tokens > context:
        raise UserError(
            f"The longest prompt has {longest} tokens and the context of {args.model} is {context}: that leaves "
            f"{max(0, context - longest)} for the completion, not --max-tokens {args.max_tokens or 1}."
        )

    if "RANK" in os.environ:  # started by torchrun
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    engine = rollout.build_engine(
        str(args.model),
        max_model_len=longest + max_tokens,
        max_lora_rank=lora_rank,
        seed=args.seed,
        tp=args.tp,
        sleep="off",  # nobody else wants the GPU
        gpu_memory_utilization=args.gpu_memory,
        engine_args=args.engine_args,
    )
    with rollout.awake(engine):
        if args.adapter:
            rollout.push_adapter(engine, args.adapter, version=0)
        report = evaluate(
            engine,
            tokenizer,
            problems,
            k=args.k,
            temperature=args.temperature,
            top_p=args.top_p,
            max_tokens=max_tokens,
            seed=args.seed,
            template=args.prompt_template,
            use_adapter=bool(args.adapter),
            samples_path=args.out / "samples.jsonl",
            chat_template_kwargs=args.chat_template_kwargs,
            settings={
                "benchmark": args.benchmark,
                "model": str(args.model),
                "adapter": str(args.adapter) if args.adapter else None,
                "adapter_hash": digest_of((args.adapter / "adapter_model.safetensors").read_bytes())
                if args.adapter
                else None,
                "engine_args": args.engine_args,
                "chat_template_kwargs": args.chat_template_kwargs,
            },
        )
    if rank == 0:
        text = format_report(report)
        replace_text(args.out / "report.json", json.dumps(report, indent=1))
        replace_text(args.out / "report.txt", text + "\n")
        plot_report(report, args.out / "report.png")
        print(f"{text}\nwritten to {args.out}: samples.jsonl, report.json, report.txt, report.png")
    rollout.shutdown(engine)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def main(argv: list[str] | None = None) -> int:
    args, rank = parse_args(argv), int(os.environ.get("RANK", 0))
    try:
        if args.compare:
            print(compare_files(*args.compare))
        else:
            run(args, rank)
    except UserError as error:
        if rank == 0:
            print(f"eval_aime.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
