"""Rows of a dataset to problems, problems to prompts: the same for training, evaluation and benchmarks.

    problems = read_problems("train.jsonl", prompt_key="question", answer_key="answer")
    problems = read_problems("aime2024")                        # a named benchmark, checked against its known answers
    prompts = encode_prompts(tokenizer, [conversation(p, TEMPLATE) for p in problems])      # token ids

What a step asks is a function of (seed, step) alone (`next_problems`, `sample_seed`), so a resumed run and another number of
ranks ask the same.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import reward
from errors import UserError

TEMPLATE = "{problem}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}."  # QwQ's line


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


# ---------------------------------------------------------------------------------------------------------------------
# Rows of a dataset


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
    if not hashlib.sha256(pairs.encode()).hexdigest().startswith(benchmark.answers):
        raise UserError(f"{name}: this copy has a wrong answer (known bad copies of 2024: I-8 = 480, I-12 = 384).")


# ---------------------------------------------------------------------------------------------------------------------
# The embedded task


def arithmetic_problems(seed: int, num_train: int = 4096, num_heldout: int = 64) -> tuple[list[Problem], list[Problem]]:
    """The embedded task: sums and differences up to 20, products of 2 to 9, two worked examples in the prompt.

    Returns (train, held-out), drawn from `seed`, with no problem in both and neither of the examples in any. The three
    operations are equally frequent; training problems repeat, since there are fewer than 500 of them.
    """
    examples = []
    for question, answer in [("What is 3 + 5?", r"3 + 5 = \boxed{8}"), ("What is 7 * 4?", r"7 * 4 = \boxed{28}")]:
        examples += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    pools = {
        "+": [(a, b, a + b) for a in range(1, 20) for b in range(1, 20) if a + b <= 20 and (a, b) != (3, 5)],
        "-": [(a, b, a - b) for a in range(1, 21) for b in range(1, a + 1)],
        "*": [(a, b, a * b) for a in range(2, 10) for b in range(2, 10) if (a, b) != (7, 4)],
    }
    most = 3 * min(map(len, pools.values())) - 1
    if num_heldout > most:
        raise UserError(f"--heldout {num_heldout}: arithmetic has too few products for more than {most}.")
    rng = random.Random(f"arithmetic {seed}")

    def problem(name: str, operation: str, a: int, b: int, answer: int) -> Problem:
        question = f"What is {a} {operation} {b}?"
        return Problem(name, question, str(answer), messages=[*examples, {"role": "user", "content": question}])

    for pool in pools.values():
        rng.shuffle(pool)
    operations = [(index, "+-*"[index % 3]) for index in range(num_heldout)]
    heldout = [problem(f"heldout-{index}", operation, *pools[operation].pop()) for index, operation in operations]
    requests = ((index, rng.choice("+-*")) for index in range(num_train))
    train = [problem(f"train-{index}", operation, *rng.choice(pools[operation])) for index, operation in requests]
    return train, heldout


# ---------------------------------------------------------------------------------------------------------------------
# From problems to prompts


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


def encode_prompts(
    tokenizer: Any, conversations: list[list[dict[str, str]]], chat_template_kwargs: dict[str, Any] | None = None
) -> list[list[int]]:
    """Conversations to token ids through the model's chat template, with the generation prompt added."""
    if getattr(tokenizer, "chat_template", "") is None:
        raise UserError(
            f"{tokenizer.name_or_path} has no chat template (a base model, perhaps); put one beside the model as "
            f"chat_template.jinja."
        )
    prompts = []
    for conversation in conversations:
        ids = tokenizer.apply_chat_template(
            conversation, add_generation_prompt=True, tokenize=True, return_dict=False, **(chat_template_kwargs or {})
        )
        prompts.append(list(ids))
    return prompts


@dataclass
class Task:
    """What a run trains on and is judged by, as token ids; `prompt_ids` and `room` by the problem's text."""

    tokenizer: Any
    train: list[Problem]
    heldout: list[Problem]
    prompt_ids: dict[str, list[int]]
    room: dict[str, int]  # tokens that a completion may have
    context: int  # tokens of the longest prompt with its completion

    def checksum(self) -> int:
        """The same on all ranks that read the same problems."""
        contents = [
            (p.problem, p.answer, self.prompt_ids[p.problem], self.room[p.problem]) for p in self.train + self.heldout
        ]
        return zlib.crc32(json.dumps(contents).encode())


def make_task(
    model_dir: str,
    train: list[Problem],
    heldout: list[Problem],
    *,
    template: str,
    chat_template_kwargs: dict[str, Any],
    completion_tokens: int,
    eval_tokens: int,
) -> Task:
    """Problems through the model's chat template; UserError when one does not fit into the model's context."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    conversations = {p.problem: conversation(p, template) for p in [*train, *heldout]}
    prompt_ids = dict(zip(conversations, encode_prompts(tokenizer, list(conversations.values()), chat_template_kwargs)))
    room = {p.problem: min(p.max_tokens or completion_tokens, completion_tokens) for p in train}
    room |= {p.problem: eval_tokens for p in heldout}
    return Task(tokenizer, train, heldout, prompt_ids, room, longest_context(model_dir, prompt_ids, room))


def longest_context(model_dir: str, prompt_ids: dict[str, list[int]], room: dict[str, int]) -> int:
    """Tokens of the longest prompt with the `room` for its completion, both by problem text; UserError if the model has fewer."""
    from transformers import AutoConfig

    longest = max(room, key=lambda text: len(prompt_ids[text]) + room[text])
    context = len(prompt_ids[longest]) + room[longest]
    model_context = AutoConfig.from_pretrained(model_dir).get_text_config().max_position_embeddings
    if context > model_context:
        raise UserError(
            f"the longest prompt has {len(prompt_ids[longest])} tokens ({longest[:60]!r}…) and its completion may have "
            f"{room[longest]} (--completion-tokens, --eval-tokens), together above the model's context of {model_context}; "
            f"drop that problem or ask for less."
        )
    return context


def check_references(problems: list[Problem], own_reward: Any) -> None:
    """An answer that the checker cannot read could never be earned: a mistake in the data, told before training."""
    # One's own reward function reads its references itself.
    rows = [] if own_reward else reward.unreadable_references([problem.answer for problem in problems])
    if rows:
        first = problems[rows[0]]
        raise UserError(
            f"{len(rows)} reference answers cannot be read, the first of problem {first.id}: {first.answer[:60]!r}; drop these "
            f"rows, or grade them yourself with --reward path.py:function."
        )


def read_tasks(
    dataset: str,
    *,
    seed: int,
    num_heldout: int,
    benchmark: str | None = None,
    data_dir: str | None = None,
    prompt_key: str = "problem",
    answer_key: str = "answer",
    tokens_key: str | None = None,
) -> tuple[list[Problem], list[Problem]]:
    """(training, held-out) problems, disjoint; held out are `num_heldout` of the dataset, or all of `benchmark`.

    Raises UserError naming file, line or key, or when nothing is left to train on.
    """
    if dataset == "arithmetic":
        problems, heldout = arithmetic_problems(seed, num_heldout=0 if benchmark else num_heldout)
    else:
        problems = read_problems(dataset, prompt_key=prompt_key, answer_key=answer_key, tokens_key=tokens_key)
        random.Random(f"split {seed}").shuffle(problems)
        heldout = problems[:num_heldout]
    if benchmark:
        # A file of the user's is written as the training set is.
        keys = {} if benchmark in BENCHMARKS else {"prompt_key": prompt_key, "answer_key": answer_key}
        heldout = read_problems(benchmark, **keys, data_dir=data_dir)
    texts = {"".join(problem.problem.split()) for problem in heldout}  # copies differ in their spaces
    train = [problem for problem in problems if "".join(problem.problem.split()) not in texts]
    if not train:
        judge = f"--eval-benchmark {benchmark}" if benchmark else f"--heldout {num_heldout}"
        raise UserError(f"--dataset {dataset} has {len(problems)} problems and {judge} leaves none to train on.")
    return train, heldout


# ---------------------------------------------------------------------------------------------------------------------
# What a step asks


def next_problems(problems: list[Problem], step: int, num_prompts: int, seed: int, refill: int = 0) -> list[Problem]:
    """The P problems of `step`: a new shuffle each epoch, a function of (seed, step) alone, the same on every rank.

    Round `refill` ≥ 1 of dynamic sampling requests from all problems instead: how many a step needs depends on the answers, and
    an order that moved on with them could not be found again by a resumed run.
    """
    if refill:
        order = np.random.default_rng([seed, step, refill]).permutation(len(problems))  # (problems,)
        return [problems[order[position % len(problems)]] for position in range(num_prompts)]
    chosen = []
    for position in range(step * num_prompts, (step + 1) * num_prompts):
        epoch, offset = divmod(position, len(problems))
        order = np.random.default_rng([seed, epoch]).permutation(len(problems))  # (problems,)
        chosen.append(problems[order[offset]])
    return chosen


def number_samples(problems: list[Problem], group_size: int, drawn: Counter[str]) -> list[tuple[Problem, int]]:
    """(problem, which of its samples in this step) for each sample to draw; `drawn` counts them by problem over the step.

    The number goes into the seed: a problem that comes twice in a step, from a small dataset or by refill, is sampled anew.
    """
    requests = []
    for problem in problems:
        requests += [(problem, drawn[problem.id] + member) for member in range(group_size)]
        drawn[problem.id] += group_size
    return requests


def sample_seed(seed: int, step: int, problem_id: str, sample_index: int) -> int:
    """63 bits from these four and nothing else: the same draw in any batch, on any rank, in a resumed run."""
    digest = hashlib.sha256(f"{seed}/{step}/{problem_id}/{sample_index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
