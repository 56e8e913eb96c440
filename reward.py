r"""A completion and its reference in, a verdict and a reward out.

    python reward.py --check pairs.jsonl                # verdict table for lines {"gold": "…", "pred": "…"}
    python reward.py --explain '\boxed{\frac{1}{2}}' 0.5  # one completion and its reference, step by step

The answer is what stands in the last box (`extract_answer`); math_answers.py says whether it is the reference. `score` does
that for many completions in worker processes, so that one ill-made answer can neither hang nor fill the trainer. A reward
function of your own (`--reward path.py:function`) is loaded here too. Left out: a language model as judge; partial credit.
"""

from __future__ import annotations

import argparse
import atexit
import collections
import contextlib
import importlib.util
import json
import math
import os
import re
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from errors import UserError, require
from math_answers import Verdict, is_correct, is_readable, plain_text, read, verdict_without_parsing
from math_reading import MAX_ANSWER_CHARS, MAX_ITEMS, TooLarge, exact_number

# ---------------------------------------------------------------------------------------------------------------------
# Extraction
THINKING_MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<thinking>", "</thinking>"))
BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
BARE_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")  # after `\boxed 5`
BLANK = r"(?:\s|\\[,;:!()\[\]]|\\q?quad\b|[$*]|\\text\s*\{\s*\})*"
AND_OR = r"(?:\\text\s*\{\s*,?\s*(?:and|or)\s*\}|\b(?:and|or)\b)"
BOX_SEPARATOR = re.compile(rf"{BLANK}(?:[,;]{BLANK})?(?:{AND_OR}{BLANK})?")
UNBOXED = [  # where to look without a box, the most explicit first
    re.compile(r"<answer>\s*(.*?)\s*</answer>", re.DOTALL),
    re.compile(
        r"(?:answer\W{0,5}(?:is|:)|####)[\s*:]*(?:the final answer is)?\s*(?:\\\(|\\\[|\$+)?\s*(.+?)"
        r"\s*(?:\\\)|\\\]|\$|\.?\s*\n|\.?\s*$|\. )",
        re.IGNORECASE,
    ),
    re.compile(r"(?:\$|\\\(|\\\[)\s*([^$]+?)\s*(?:\$|\\\)|\\\])"),
]


def _closing_brace(text: str, start: int) -> int:
    """Index of the brace that closes the one at `start`, or -1; escaped braces do not count."""
    depth, i, end = 0, start, min(len(text), start + 2 * MAX_ANSWER_CHARS)
    while i < end:
        if text[i] == "\\":
            i += 1
        elif text[i] == "{":
            depth += 1
        elif text[i] == "}":
            depth -= 1
            if depth == 0:
                return i
        i += 1
    return -1


def _read_box(text: str, start: int) -> tuple[str, int] | None:
    """(content, end) of the box at `start`; end is -1 if it never closes; None where the command is only mentioned."""
    at = BOX.match(text, start).end()
    if text.startswith("{", at):
        end = _closing_brace(text, at)
        return text[at + 1 : end], end + 1 if end >= 0 else -1
    bare = BARE_NUMBER.match(text, at)
    return (bare[0], bare.end()) if bare else None


def extract_answer(completion: str, lenient: bool = False) -> str | None:
    r"""The content of the last box after the end of the thinking section, or None. Linear in the text.

    No answer: no box, a last box that never closes, thinking that never ends. Boxes with only a comma, "and" or "or"
    between them are one answer. `lenient` is for evaluating models that were not asked for a box: without one it takes
    what follows "answer is", "Answer:" or "####", else the last formula. It reads prose: not for training.

    >>> extract_answer(r"First \boxed{5}, no: \boxed{7}."), extract_answer(r"\boxed{3}, \boxed{5} and $\boxed{7}$")
    ('7', '3, 5, 7')
    >>> extract_answer(r"<think> \boxed{5} </think> I give up."), extract_answer(r"\boxed 5")
    (None, '5')
    >>> extract_answer("So the answer is $12$."), extract_answer("So the answer is $12$.", lenient=True)
    (None, '12')
    """
    start = 0
    for opening, closing in THINKING_MARKS:  # a chat template may open the section, so the closing mark is enough
        end = completion.rfind(closing)
        if completion.rfind(opening) > end:
            return None
        if end >= 0:
            start = max(start, end + len(closing))
    contents, next_start = [], -1
    for match in reversed(list(BOX.finditer(completion, start))):
        content, end = _read_box(completion, match.start()) or (None, 0)
        if content is None:
            continue
        if not contents and end < 0:
            return None
        if contents:
            gap = completion[end:next_start] if 0 <= next_start - end < 80 and end >= 0 else "no separator"
            if len(contents) == MAX_ITEMS or not gap.strip(" $\n") or not BOX_SEPARATOR.fullmatch(gap):
                break
        if match.start() > 0 and completion[match.start() - 1] == "\\":  # JSON-escaped text doubles every backslash
            content = content.replace("\\\\", "\\")
        contents.append(content.strip())
        next_start = match.start()
    if contents or not lenient:
        return ", ".join(dict.fromkeys(reversed(contents))) if contents else None
    found = [m for pattern in UNBOXED if (m := pattern.findall(completion[start:][-MAX_ANSWER_CHARS:]))]
    return found[0][-1].strip(" *.$\n") if found else None


def grade(completion: str, reference: str) -> Verdict:
    """Is the boxed answer of a completion the reference? In this process, bounded, from any thread; `score` is for many."""
    return is_correct(extract_answer(completion), reference)


def unreadable_references(references: list[str]) -> list[int]:
    """Rows whose reference is neither mathematics nor text. Report them before training: no answer to them can be right."""
    return [row for row, reference in enumerate(references) if not is_readable(reference)]


# ---------------------------------------------------------------------------------------------------------------------
# Many pairs: long-lived worker processes with a memory limit, killed and replaced when one overruns.
# They are `python reward.py --worker`, not multiprocessing, whose spawn runs the caller's main module, torch and all.
WORKER_MEMORY_BYTES = 1 << 30
_pool_lock = threading.Lock()
_pool: list[dict] = []
_pool_owner = 0  # process id: a forked child must not talk to its parent's workers


def score(
    completions: list[str], references: list[str], *, workers: int | None = None, timeout: float = 2.0
) -> list[Verdict]:
    """One verdict per completion, in order; equal pairs are judged once. Callable from any thread and on every rank.

    Pairs of plain numbers, and completions without an answer, are decided here; the first other pair starts the workers
    (default: this rank's share of the CPUs, at most 4). `timeout` is in seconds for one pair.
    """
    counts = f"{len(completions)} completions but {len(references)} references"
    assert len(completions) == len(references), f"{counts}: one each."
    answers = [extract_answer(completion) for completion in completions]
    pairs = dict.fromkeys(zip(answers, references))
    for answer, reference in pairs:
        pairs[answer, reference] = verdict_without_parsing(answer, reference)
    undecided = [pair for pair, verdict in pairs.items() if verdict is None]
    if undecided:
        share = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        with _pool_lock:
            verdicts = _judge(undecided, workers or max(1, min(4, share)), timeout)
        pairs.update(zip(undecided, verdicts))
    return [pairs[pair] for pair in zip(answers, references)]


def _judge(pairs: list[tuple[str, str]], workers: int, timeout: float) -> list[Verdict]:
    global _pool_owner
    if _pool_owner != os.getpid():
        _pool.clear()
        _pool_owner = os.getpid()
    verdicts, waiting, tried = [None] * len(pairs), collections.deque(range(len(pairs))), set()
    while waiting or any(worker["row"] is not None for worker in _pool):
        while len(_pool) < min(workers, len(waiting)):
            _pool.append(_start_worker())
        for worker in _pool:
            if worker["row"] is None and waiting:
                worker["row"] = waiting.popleft()
                worker["deadline"] = time.monotonic() + (timeout if worker["ready"] else 60.0)
                with contextlib.suppress(BrokenPipeError):  # a dead worker is noticed when its output ends
                    worker["process"].stdin.write(json.dumps(pairs[worker["row"]]).encode() + b"\n")
        busy = [worker for worker in _pool if worker["row"] is not None]
        patience = max(0.0, min(worker["deadline"] for worker in busy) - time.monotonic())
        readable, _, _ = select.select([worker["process"].stdout for worker in busy], [], [], patience)
        for worker in busy:
            answer = pairs[worker["row"]][0]
            lines = _receive(worker) if worker["process"].stdout in readable else []
            if lines is None or (not lines and time.monotonic() > worker["deadline"]):
                if not worker["ready"]:
                    raise RuntimeError("A worker of reward.py did not start: `python reward.py --worker` says why.")
                if lines is None and worker["row"] not in tried:  # it may have been killed for another reason
                    tried.add(worker["row"])
                    waiting.appendleft(worker["row"])
                else:
                    verdicts[worker["row"]] = Verdict(False, "crashed" if lines is None else "timeout", answer)
                _end_worker(worker)
                _pool.remove(worker)
                continue
            for line in lines:
                if line == b"ready":
                    worker["ready"], worker["deadline"] = True, time.monotonic() + timeout
                else:
                    verdicts[worker["row"]] = Verdict(*json.loads(line), answer)
                    worker["row"] = None
    return verdicts


def _start_worker() -> dict[str, Any]:
    command = [sys.executable, os.path.abspath(__file__), "--worker"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=env)
    return {"process": process, "row": None, "deadline": 0.0, "ready": False, "buffer": b""}


def _receive(worker: dict) -> list[bytes] | None:
    """The complete lines that have arrived; None if the worker is gone."""
    data = os.read(worker["process"].stdout.fileno(), 1 << 16)
    if not data:
        return None
    *lines, worker["buffer"] = (worker["buffer"] + data).split(b"\n")
    return lines


def _end_worker(worker: dict) -> None:
    with worker["process"] as process:  # closes both pipes and waits
        process.kill()


def close() -> None:
    """End the worker processes of `score`; the next call starts new ones."""
    with _pool_lock:
        if _pool_owner == os.getpid():
            for worker in _pool:
                _end_worker(worker)
        _pool.clear()


atexit.register(close)


def work() -> None:
    """A worker: one JSON pair per line in, one JSON verdict per line out, until the caller goes away."""
    is_correct(r"\sqrt{(x-1000)^2}", "1000-x")  # imports and warms all that a proof needs
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the caller decides
    resource.setrlimit(resource.RLIMIT_AS, (WORKER_MEMORY_BYTES, WORKER_MEMORY_BYTES))
    output = os.dup(1)
    os.dup2(2, 1)  # whatever prints does not end up among the verdicts
    os.write(output, b"ready\n")
    for line in sys.stdin.buffer:
        verdict = is_correct(*json.loads(line))
        os.write(output, json.dumps([verdict.equal, verdict.reason]).encode() + b"\n")


# ---------------------------------------------------------------------------------------------------------------------
# Shaping, which is added for the loss (dynamic sampling and evaluation look at the unshaped reward); and own rewards.


def overlong_penalty(length: int, max_length: int, buffer: int, penalty: float = 1.0) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13) times `penalty`; lengths in tokens.

    >>> [overlong_penalty(length, max_length=100, buffer=20) for length in (50, 80, 90, 100, 110)]
    [0.0, 0.0, -0.5, -1.0, -1.0]
    """
    assert 0 < buffer <= max_length, f"The overlong buffer {buffer} must lie between 1 and the longest, {max_length}."
    return 0.0 - penalty * min(max(length - (max_length - buffer), 0) / buffer, 1.0)


def truncated_reward(value: float, truncated: bool, policy: str) -> tuple[float, bool]:
    """(reward, is it trained on) of a completion that may have hit the token limit: `score`, `zero` or `mask` it.

    >>> [truncated_reward(1.0, True, policy) for policy in ("score", "zero", "mask")]
    [(1.0, True), (0.0, True), (0.0, False)]
    """
    assert policy in ("score", "zero", "mask"), f"A truncated completion is scored, zero or masked, not {policy!r}."
    return (value, True) if not truncated or policy == "score" else (0.0, policy == "zero")


def format_reward(completion: str, thinking: bool = False) -> float:
    """1.0 for a completion that ends in a readable box; with `thinking`, after exactly one closed thinking section.

    >>> format_reward(r"<think>…</think> \\boxed{4}", thinking=True), format_reward(r"\\boxed{4}", thinking=True)
    (1.0, 0.0)
    """
    sections = sum(completion.count(closing) for _, closing in THINKING_MARKS)
    return float(extract_answer(completion) is not None and (not thinking or sections == 1))


def load_own_reward(spec: str) -> Callable[[str, str], float]:
    """The function(completion, reference) that `--reward path.py:function` names; UserError if there is none.

    The file is imported like any program: it is the user's own code, never the model's. NumPy's and torch's numbers become
    Python's, which JSON can hold; what is no number becomes its text, which `check_own_reward` refuses where all ranks see it.
    """
    path, _, name = spec.rpartition(":")
    found = path.endswith(".py") and os.path.isfile(path)
    require(found, f"--reward {spec}: expected path.py:function, and {path or spec} is no such Python file.")
    module_spec = importlib.util.spec_from_file_location(os.path.basename(path)[:-3], path)
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    function = getattr(module, name, None)
    require(callable(function), f"--reward {spec}: {path} has no function {name}.")

    def own_reward(completion: str, reference: str) -> Any:
        value = function(completion, reference)
        if getattr(value, "shape", None) == ():
            value = value.item()
        return value if value is None or isinstance(value, int | float) else repr(value)

    return own_reward


def check_own_reward(value: Any, what: str, reference: str) -> None:
    """UserError unless the reward `value` of a completion, which the sentence calls `what`, is a finite number.

    NaN would make every advantage of its group NaN, and the mean of a report."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        wish = "it must return a finite number, such as 0 for what it cannot judge"
        raise UserError(f"--reward gave {value!r} for {what} against {reference!r}; {wish}.")


# ---------------------------------------------------------------------------------------------------------------------
# Command line


def check(path: str) -> None:
    """Print the verdict of every line {"gold": …, "pred": …}; a pred without a box is the answer itself."""
    reasons: collections.Counter = collections.Counter()
    print(f"{'row':>5}  {'verdict':<22}{'gold':<32}answer")
    with open(path) as file:
        for row, line in enumerate(file, start=1):
            record = json.loads(line)
            boxed = record["pred"] if "\\boxed" in record["pred"] or "\\fbox" in record["pred"] else None
            verdict = is_correct(extract_answer(boxed) if boxed else record["pred"], str(record["gold"]))
            reasons[verdict.reason] += 1
            print(f"{row:>5}  {verdict.reason:<22}{str(record['gold'])[:30]:<32}{str(verdict.answer)[:60]}")
    print(", ".join(f"{reason} {count}" for reason, count in reasons.most_common()))


def explain(completion: str, reference: str) -> None:
    """Print every step from the completion to the verdict."""
    answer = extract_answer(completion) if "box" in completion else completion
    print(f"answer      {answer!r}\nreference   {reference!r}")
    for name, text in [("answer", answer)] * (answer is not None) + [("reference", reference)]:
        print(f"{name:<12}exact number: {exact_number(text)}")
        try:
            node = read(text)
            how = f"parsed: {node}" if node else f"no mathematics, compared as text {plain_text(text)!r}"
        except TooLarge:
            how = "too large to parse"
        print(f"{name:<12}{how}")
    print(f"verdict     {is_correct(answer, reference)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", metavar="FILE", help='print a verdict per line {"gold": …, "pred": …}')
    parser.add_argument("--explain", nargs=2, metavar=("COMPLETION", "REFERENCE"), help="print one case step by step")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work()
    elif args.check:
        check(args.check)
    elif args.explain:
        explain(*args.explain)
    else:
        parser.error("give --check FILE or --explain COMPLETION REFERENCE")


if __name__ == "__main__":
    main()
