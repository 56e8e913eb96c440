r"""Text in, float out: is the boxed answer of a completion equal to the reference answer?

    python reward.py --check pairs.jsonl                    # verdict table for lines {"gold": …, "pred": …}
    python reward.py --explain '\boxed{\frac{1}{2}}' 0.5    # one case, step by step

Reinforcement learning finds every hole of its grader, so every doubt counts as "not equal".
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_ANSWER_CHARS = 2_000  # a longer box is not an answer
MAX_DIGITS = 1_000  # of one number


@dataclass(frozen=True)
class Verdict:
    """What the grader decided about one completion. `reason` comes from a small fixed vocabulary, so it can be counted."""

    equal: bool
    reason: str
    answer: str | None = None

    @property
    def reward(self) -> float:
        return float(self.equal)


# ---------------------------------------------------------------------------------------------------------------------
# Extraction

THINKING_MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<thinking>", "</thinking>"))
BOX = re.compile(r"\\(?:boxed|fbox)\s*")
BOX_SEPARATOR = re.compile(r"(?:\s|\\[,;:!\s()\[\]]|\\q?quad\b|[$*.])*(?:[,;]|\\text\s*\{\s*,?\s*(?:and|or)\s*\}|\b(?:and|or)\b)"
                           r"(?:\s|\\[,;:!\s()\[\]]|\\q?quad\b|[$*]|\\text\s*\{\s*(?:and|or)\s*\}|\b(?:and|or)\b)*")


def _closing_brace(text: str, start: int) -> int:
    """Index of the brace that closes the one at `start`, or -1; escaped braces do not count."""
    depth, i, end = 0, start, min(len(text), start + 2 * MAX_ANSWER_CHARS)
    while i < end:
        c = text[i]
        if c == "\\":
            i += 1
        elif c == "{":
            depth += 1
        elif c == "}":
            depth -= 1
            if depth == 0:
                return i
        i += 1
    return -1


def _box_at(text: str, start: int) -> tuple[str, int] | None:
    """(content, end) of the box that starts at `start`; None for a mere mention of the command; ("", -1) if it never closes."""
    at = BOX.match(text, start).end()
    if text.startswith("{", at):
        end = _closing_brace(text, at)
        return ("", -1) if end < 0 else (text[at + 1 : end], end + 1)
    bare = re.compile(r"[-+]?\d+(?:\.\d+)?").match(text, at)  # the TeX form `\boxed 5`
    return (bare[0], bare.end()) if bare else None


def extract_answer(completion: str) -> str | None:
    """The content of the last box after the end of the thinking section, or None.

    Boxes that only a comma, "and" or "or" separates are one answer: `\\boxed{3}, \\boxed{5}` gives "3, 5".
    """
    start = 0
    for opening, closing in THINKING_MARKS:
        end = completion.rfind(closing)
        if completion.rfind(opening) > end:
            return None  # thinking never ended, so nothing was answered
        if end >= 0:
            start = max(start, end + len(closing))
    boxes: list[str] = []
    first = len(completion)  # where the earliest box taken so far starts
    position = len(completion)
    while len(boxes) < 64:
        position = max(completion.rfind("\\boxed", start, position), completion.rfind("\\fbox", start, position))
        if position < 0:
            break
        box = _box_at(completion, position)
        if box is None:
            continue
        content, end = box
        if end < 0 and not boxes:
            return None
        if boxes and not (end <= first and first - end < 80 and BOX_SEPARATOR.fullmatch(completion, end, first)):
            break
        if position > 0 and completion[position - 1] == "\\":  # JSON-escaped text: every backslash is doubled
            content = content.replace("\\\\", "\\")
        boxes.append(content.strip())
        first = position
    unique = list(dict.fromkeys(reversed(boxes)))
    return ", ".join(unique) if unique else None


# ---------------------------------------------------------------------------------------------------------------------
# The exact fast path: integers, decimals and fractions never touch the parser

INTEGER = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
EXACT_NUMBER = re.compile(
    rf"([-+−]?)\s*(?:({INTEGER}\.?|{INTEGER}?\.\d+)|\\[dt]?frac\s*\{{\s*(-?\d+)\s*\}}\s*\{{\s*(\d+)\s*\}}|(\d+)\s*/\s*(\d+))"
)


def exact_number(text: str) -> Fraction | None:
    r"""The value of a plainly written rational (`-7`, `073`, `1,024`, `.5`, `204.`, `3/4`, `\frac{3}{4}`), else None."""
    match = EXACT_NUMBER.fullmatch(text)
    if match is None or len(text) > MAX_DIGITS:
        return None
    sign, decimal, top, bottom, left, right = match.groups()
    if decimal is not None:
        decimal = decimal.replace(",", "")
        value = Fraction(decimal.removesuffix(".")) if "." in decimal else Fraction(int(decimal))
    else:
        denominator = int(bottom or right)
        if denominator == 0:
            return None
        value = Fraction(int(top or left), denominator)
    return -value if sign in ("-", "−") else value


def is_correct(answer: str | None, reference: str) -> Verdict:
    """Is `answer` the same mathematical object as `reference`? Symmetric."""
    if answer is None:
        return Verdict(False, "no answer")
    left, right = answer.strip().strip("$").strip(), reference.strip().strip("$").strip()
    if not right:
        return Verdict(False, "unreadable reference", answer)
    a, b = exact_number(left), exact_number(right)
    if a is not None and b is not None:
        return Verdict(a == b, "equal" if a == b else "different", answer)
    equal = left == right
    return Verdict(equal, "equal" if equal else "different", answer)


def reward(completion: str, reference: str) -> float:
    """1.0 if the completion's boxed answer equals the reference, else 0.0. In process, bounded, callable from any thread."""
    return is_correct(extract_answer(completion), reference).reward


def score(completions: list[str], references: list[str]) -> list[Verdict]:
    """One verdict per completion, in order."""
    assert len(completions) == len(references), (
        f"{len(completions)} completions but {len(references)} references: one each."
    )
    return [is_correct(extract_answer(c), r) for c, r in zip(completions, references)]


def close() -> None:
    """End the worker processes of `score`; the next call starts new ones."""
