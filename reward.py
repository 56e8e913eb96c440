r"""Text in, float out: is the boxed answer of a completion the same mathematical object as the reference answer?

    python reward.py --check pairs.jsonl                # verdict table for lines {"gold": "…", "pred": "…"}
    python reward.py --explain '\boxed{\frac{1}{2}}' 0.5  # one completion and its reference, step by step

Reinforcement learning finds every hole of its grader, so every doubt counts as "not equal". A pair passes through

1. extraction of the last box, and exact fractions where both sides are plain numbers (all of AIME ends here);
2. a recursive-descent parser that knows a list of commands and refuses the rest. It builds tuples, nothing else: no
   `eval`, `sympify`, `parse_expr` or ANTLR ever sees model text, and sizes are checked before anything is computed;
3. containers item by item; for two expressions first *disproof* (50 digits at fixed points, relative tolerance), then
   *proof* (an identity modulo a prime, then sympy within a budget). What is neither disproved nor proved is not equal.

Conventions. `same(answer, reference)` is symmetric; below it stands for `is_correct(answer, reference).equal`.

>>> same = lambda answer, reference: is_correct(answer, reference).equal

Numbers are exact: a rounded decimal is not the number. Unevaluated and unreduced forms count as their value.
>>> same("0.5", r"\frac{2}{4}"), same("0.333333", r"\frac{1}{3}"), same("2^{10}", "1024"), same(r"0.\overline{9}", "1")
(True, False, True, True)

Commas group digits in threes at the top level and separate everywhere else; 1 1/2 is a mixed number.
>>> same("1,024", "1024"), same("32, 349", "32349"), same("(1,024)", "(1,24)"), same("1 1/2", "1.5")
(True, False, True, True)

A unit is dropped against a bare number, and two units must agree. Words that change the value are no unit.
>>> same(r"5\text{ cm}", "5"), same(r"5\text{ cm}", r"5\text{ m}"), same(r"5\text{ million}", "5"), same(r"\$5", "5")
(True, False, False, True)

Percent is a hundredth, or a unit above 1. A degree is π/180, or a unit; inside sin, cos, … it is always π/180.
>>> same(r"28\%", "0.28"), same(r"28\%", "28"), same(r"0.5\%", "0.5"), same(r"90^\circ", "90")
(True, True, False, True)
>>> same(r"90^\circ", r"\frac{\pi}{2}"), same(r"\sin 15^\circ", r"\sin 15")
(True, False)

A name before "=" is a label, and so is a name before "≈"; sides of a chain must agree. Letters are case-sensitive.
>>> same(r"\angle A = 60", "60"), same("2 + 2 = 4", "4"), same("41 = 42", "42"), same("x = 5", "y = 5")
(True, True, False, False)
>>> same("f(x) = 2x", "f(t) = 2t"), same("f(x) = 2x", "y = 2x"), same("x + 1", "X + 1")
(True, True, False)

Lists are unordered with repetitions, sets without; tuples are ordered, and so are values named by different letters.
>>> same("2, 1", r"1 \text{ and } 2"), same("1, 1, 2", "1, 2"), same(r"\{1,1,2\}", r"\{1,2\}"), same("(1,2)", "(2,1)")
(True, False, True, False)
>>> same("x = 1, y = 2", "1, 2"), same("x = 1, y = 2", "2, 1"), same("(1, 2)", "1, 2"), same(r"\{3\}", "3")
(True, False, True, False)

± is both values. Inequalities, intervals, unions and set-builder notation are sets of reals; end points count.
>>> same(r"1 \pm 2", "3, -1"), same(r"\pm 2", "2"), same(r"1 < x \le 2", "(1,2]"), same(r"\{x | x > 1\}", r"(1,\infty)")
(True, False, True, True)
>>> same("(1, 2)", "[1, 2]"), same(r"x \neq 3", r"(-\infty, 3) \cup (3, \infty)")
(False, True)

Equations are equal up to a constant factor. Variables are real: what counts is where both sides have real values.
>>> same("2x - y + 1 = 0", "y = 2x + 1"), same(r"\sqrt{x^2}", "|x|"), same(r"\sqrt{x^2}", "x")
(True, True, False)

A ratio is its quotient. A number with a base subscript equals only the same digits in the same base.
>>> same("6:8", "3:4"), same("1:2:3", "2:4:6"), same("12:00", "1:00"), same("52_8", "52_{8}"), same("52_8", "42")
(True, True, False, True, False)

Text is compared without wrappers, case, spaces and the final full stop; two bare words are no products of letters.
>>> same(r"\text{Evelyn}", "evelyn"), same(r"\textbf{(B)}", "B"), same("Yes", r"\text{no}"), same("no", "on")
(True, True, False, False)

Left out: no language model as judge; no decimal comma; no prose ("the sum is negative"); no renaming of parameters (kπ
is not nπ); no conversion of units; integrals, limits, piecewise functions and ellipses in sums are compared as text.
\log is \ln. A condition at the end ("where k is even", "for all x") counts only against another condition.
"""

from __future__ import annotations

import argparse
import atexit
import collections
import contextlib
import functools
import hashlib
import importlib.util
import itertools
import json
import math
import operator
import os
import re
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from fractions import Fraction

MAX_ANSWER_CHARS = 2_000  # a longer box is not an answer
MAX_DIGITS = 1_000  # of one number as written
MAX_BITS = 1 << 18  # of one exact number on the way; 10000! has 118,458
MAX_DEPTH = 40  # of nested brackets, fractions, roots
MAX_ITEMS = 200  # of a list, set or matrix
BUDGET_SECONDS = 1.0  # for one pair; a worker of `score` is killed a second later


@dataclass(frozen=True)
class Verdict:
    """What the grader decided about one completion. `reason` is one of few, so that it can be counted:

    equal, different, not proven, no answer, unreadable answer, unreadable reference, too large, timeout, crashed, error
    """

    equal: bool
    reason: str
    answer: str | None = None

    @property
    def reward(self) -> float:
        return float(self.equal)


class NotMath(Exception):
    """The text is not in the grammar; it can still be compared as text."""


class TooLarge(Exception):
    """A number, power or nesting beyond the limits above."""


class OutOfTime(BaseException):
    """The budget is spent. Not an Exception: sympy has `except Exception` in places."""


class Undefined(Exception):
    """No value: 0/0, log 0."""


# ---------------------------------------------------------------------------------------------------------------------
# Extraction

THINKING_MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<thinking>", "</thinking>"))
BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
BARE_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")  # after `\boxed 5`
BLANK = r"(?:\s|\\[,;:!()\[\]]|\\q?quad\b|[$*]|\\text\s*\{\s*\})*"
BOX_SEPARATOR = re.compile(
    rf"{BLANK}(?:[,;]{BLANK})?(?:(?:\\text\s*\{{\s*,?\s*(?:and|or)\s*\}}|\b(?:and|or)\b){BLANK})?"
)
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
    contents: list[str] = []
    next_start = -1
    for match in reversed(list(BOX.finditer(completion, start))):
        box = _read_box(completion, match.start())
        if box is None:
            continue
        content, end = box
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


# ---------------------------------------------------------------------------------------------------------------------
# The exact fast path: integers, decimals and fractions never reach the parser

INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
EXACT_NUMBER = re.compile(
    rf"\$?\s*([-+−]?)\s*(?:({INTEGER}\.?[0-9]*|\.[0-9]+)"
    r"|\\[dt]?frac\s*\{\s*(-?[0-9]+)\s*\}\s*\{\s*([0-9]+)\s*\}|([0-9]+)\s*/\s*([0-9]+))\s*\.?\s*\$?"
)


def exact_number(text: str) -> Fraction | None:
    r"""The value of a plainly written rational (`-7`, `073`, `1,024`, `.5`, `3/4`, `\frac{3}{4}`), else None."""
    if len(text) > MAX_DIGITS or (match := EXACT_NUMBER.fullmatch(text)) is None:
        return None
    sign, decimal, top, bottom, left, right = match.groups()
    if decimal is not None:
        whole, _, digits = decimal.replace(",", "").partition(".")
        value = Fraction(int(whole + digits), 10 ** len(digits)) if digits else Fraction(int(whole))
    elif int(bottom or right) == 0:
        return None
    else:
        value = Fraction(int(top or left), int(bottom or right))
    return -value if sign in ("-", "−") else value


# ---------------------------------------------------------------------------------------------------------------------
# Tokens


def table(text: str) -> dict[str, str]:
    """`key value key value …` as a dictionary."""
    words = text.split()
    return dict(zip(words[::2], words[1::2], strict=True))


SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻ⁿ", "0123456789-n"))
SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉ₙ", "0123456789n"))
SIGNS = table(
    r"""
    − - – - ∗ * ′ ' ’ ' ∣ | ٪ % × \times · \cdot ⋅ \cdot ÷ \div ∞ \infty π \pi √ \sqrt ≤ \le ≥ \ge ⩽ \le ⩾ \ge ≠ \ne
    ≈ \approx ∪ \cup ∩ \cap ∈ \in ± \pm ∓ \mp ° ^\circ ∅ \emptyset ∖ \setminus … \dots ⌊ \lfloor ⌋ \rfloor ⌈ \lceil
    ⌉ \rceil ½ \frac{1}{2} ⅓ \frac{1}{3} ⅔ \frac{2}{3} ¼ \frac{1}{4} ¾ \frac{3}{4} ⅕ \frac{1}{5} ⅙ \frac{1}{6}
    ⅛ \frac{1}{8} ℝ \mathbb{R} ℤ \mathbb{Z} α \alpha β \beta γ \gamma δ \delta ε \epsilon η \eta θ \theta λ \lambda
    μ \mu ν \nu ξ \xi ρ \rho σ \sigma τ \tau φ \phi χ \chi ψ \psi ω \omega
    """
)
FULL_WIDTH = {chr(code + 0xFEE0): chr(code) for code in range(ord("!"), ord("~") + 1)}
GREEK = set(
    """alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau
    upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell""".split()  # noqa: SIM905
)
TRIG = {"sin", "cos", "tan", "cot", "sec", "csc"}
FUNCTIONS = TRIG | set(
    """arcsin arccos arctan sinh cosh tanh arcsinh arccosh arctanh ln log lg exp sqrt cbrt abs floor ceil min max binom
    factorial""".split()  # noqa: SIM905
)
ALIASES = table(
    r"""
    asin arcsin acos arccos atan arctan cosec csc tg tan ctg cot arctg arctan ceiling ceil binomial binom dbinom binom
    tbinom binom Abs abs dfrac frac tfrac frac cfrac frac le <= leq <= leqslant <= ge >= geq >= geqslant >= ne != neq !=
    lt < gt > simeq approx sim approx times * cdot * ast * div / mid | vert | lvert | rvert | colon : lbrace \{
    rbrace \} lbrack [ rbrack ] cdots dots ldots dots dotsc dots varnothing emptyset degree circ infinity infty
    inf infty oo infty prime ' backslash setminus Pi pi
    """
)
SPACING = set(
    """left right middle big Big bigg Bigg bigl bigr Bigl Bigr displaystyle textstyle limits nolimits quad qquad
    thinspace enspace""".split()  # noqa: SIM905
)
WRAPPERS = {"overline", "vec", "hat", "widehat", "bar", "overrightarrow", "angle", "measuredangle", "triangle"}
TEXT_COMMANDS = (
    "text|mbox|hbox|textbf|textit|textrm|textsf|texttt|textnormal|mathrm|mathbf|mathit|mathsf|rm|bf|bold|boldsymbol|pmb"
    "|mathcal|emph|operatorname"
)
UNITS = set(  # words that may follow a value without \text
    """cm mm km dm ft inch inches foot feet mi mile miles yd yard yards meter meters metre metres centimeter centimeters
    kilometer kilometers kg gram grams mg lb lbs pound pounds oz ounce ounces ton tons liter liters litre litres ml hour
    hours hr hrs minute minutes min mins second seconds sec secs day days week weeks month months year years mph kph
    degree degrees deg radian radians rad percent pct unit units dollar dollars cent cents yuan euro euros rupees yen
    usd square cubic sq""".split()  # noqa: SIM905
)
UNIT_NAMES = table(
    """
    centimeter cm centimetre cm meter m metre m kilometer km kilometre km feet foot ft foot inches inch inche inch
    in inch hour hr hrs hr h hr minute min mins min second s sec s secs s kilogram kg gram g degrees degree
    squared 2 cubed 3
    """
)
MULTIPLIERS = {"dozen": 12, "hundred": 100, "thousand": 1_000, "million": 10**6, "billion": 10**9, "trillion": 10**12}
STOP_WORDS = set(  # words that change the value, or take it back: no unit
    """not no or and is are isn't if than when unless but never wrong incorrect false either neither nor was except
    maybe minus plus times divided over under of out to by mod modulo base remainder more less fewer greater least most
    half halves third thirds quarter quarters fourth fourths fifth fifths sixth sixths eighth eighths tenth tenths
    hundredth hundredths pi root factorial choose negative about between through only instead approximately""".split()  # noqa: SIM905
)
MEANINGS = {  # whole answers in words that are mathematics
    "allrealnumbers": ("reals",),
    "allreals": ("reals",),
    "nosolution": ("set",),
    "nosolutions": ("set",),
    "emptyset": ("set",),
    "infinity": ("inf", 1),
}

OPERATORS = {"\\|": "|", "**": "^", "==": "=", ":=": "=", "\\%": "%", "\\&": "and"}
TOKEN = re.compile(
    r"(?P<space>\s+|~|\\[,;:! ])|\\(?:mathbb|Bbb)\s*\{?\s*(?P<numbers>[A-Z])\s*\}?"
    rf"|\\(?:{TEXT_COMMANDS})\s*\{{(?P<text>[^{{}}]*)\}}"
    r"|(?P<num>\d+\.(?!\.)\d*(?:[eE][+-]?\d+)?|\d+(?:[eE][+-]?\d+)?|\.\d+)"
    r"|(?P<newline>\\\\)|\\(?P<cmd>[A-Za-z]+)|(?P<word>[A-Za-z]+)|(?P<op>\*\*|<=|>=|!=|==|:=|\.\.\.+|\\[{}|%$&#]|.)",
    re.DOTALL,
)
THOUSANDS = re.compile(r"(?<![\d.,])(\d{1,3}(?:,\d{3})+)(?![\d,])")
CONDITION = re.compile(  # at the end: for all x; where k is even; k ∈ ℤ in brackets or after a comma
    r"(?<=\S)(?:[\s,]|\\[,;: ]|\\q?quad\b|\\text\s*\{)+(?:for\s+(?:all|any|every|each|some|integers?)|where)\b.*$"
    r"|(?<=\S)\s*[,(]\s*\(?\s*[a-z]\s*\\in\s*\\(?:mathbb|mathbf|Bbb)\s*\{?\s*[ZN]\s*\}?"
    r"(?:[_^]\{?[\d+*]+\}?)*\s*\)?\s*$",
    re.DOTALL,
)
SEPARATOR = re.compile(r",?\s*(?:and|or)\s*,?")
INLINE = re.compile(
    r"[-+]?\s*[\d.,/%()\s]*\d[\d.,/%()\s]*(?:[A-Za-z\s]*)|\(?\s*[A-Za-z]\s*\)?(?:\s*,\s*[A-Za-z])*[.:]?|\W*"
)
LEAD_IN = re.compile(
    r"(?:so|thus|hence|therefore)?,?\s*(?:the\s+)?(?:final\s+)?answer\s*(?:is|:|=)\s*:?\s*", re.IGNORECASE
)


def clean(text: str) -> str:
    """One spelling for the characters that have several: unicode signs, dollars, thin spaces inside numbers."""
    if not text.isascii():
        for mark, script in (("^", SUPERSCRIPTS), ("_", SUBSCRIPTS)):
            raised = re.compile(f"[{''.join(script)}]+")
            text = raised.sub(lambda m, mark=mark, s=script: f"{mark}{{{''.join(map(s.get, m[0]))}}}", text)
        text = "".join(FULL_WIDTH.get(c) or (f"{SIGNS[c]} " if c in SIGNS else c) for c in text)
    text = re.sub(rf"(\\(?:{TEXT_COMMANDS})\s*\{{[^{{}}]*)\\(?:{TEXT_COMMANDS})\s*\{{([^{{}}]*)\}}", r"\1\2", text)
    text = re.sub(r"(?<!\\)\$|\\[()\[\]]|[£€¥]|^\*\*|\*\*$|<br>|^\s*\\\\", " ", text)
    text = re.sub(r"(?<=\d)(?:,\s*\\!\s*|\{,\}|\\[!,]\s*)(?=\d)", "", text)  # 10,\!080  1{,}024  2\,0\,4
    text = re.sub(r"(?<![\d.,])(\d{1,3})((?: \d{3})+)(?!\d|\s*/)", lambda m: m[0].replace(" ", ""), text)  # 1 000
    text = text.strip().rstrip("\\").strip()
    return text[:-1].rstrip() if text.endswith(".") and not text.endswith("..") else text


def tokenize(text: str, thousands: bool) -> list[tuple[str, str]]:
    """(kind, text) pairs; kinds: num, word, cmd, op, text. Spaces survive only between a number and a number."""
    tokens: list[tuple[str, str]] = []
    depth, position = 0, 0
    while position < len(text):
        if thousands and depth == 0 and (grouped := THOUSANDS.match(text, position)):
            tokens.append(("num", grouped[0].replace(",", "")))
            position = grouped.end()
            if fraction := re.compile(r"\.\d+").match(text, position):
                tokens[-1] = ("num", tokens[-1][1] + fraction[0])
                position = fraction.end()
            continue
        match = TOKEN.match(text, position)
        position = match.end()
        kind, value = match.lastgroup, match[match.lastgroup]
        if kind == "space":
            if tokens and tokens[-1][0] == "num":
                tokens.append(("space", " "))
            continue
        if tokens and tokens[-1][0] == "space" and kind != "num":
            tokens.pop()
        if kind == "num" and sum(c.isdigit() for c in value) > MAX_DIGITS:
            raise TooLarge
        if kind == "text":
            inner = value.strip().rstrip(".")
            if SEPARATOR.fullmatch(inner):
                tokens.append(("op", "or" if "or" in inner else "and"))
            elif inner.endswith((" and", " or")):
                tokens += [("text", inner.rpartition(" ")[0]), ("op", inner.rpartition(" ")[2])]
            elif len(inner) < 100 and INLINE.fullmatch(inner):
                tokens += tokenize(inner, thousands and depth == 0)
            elif ALIASES.get(inner, inner) in FUNCTIONS and not (inner == "min" and tokens and tokens[-1][0] == "num"):
                tokens.append(("cmd", ALIASES.get(inner, inner)))
            else:
                tokens.append(("text", inner))
            continue
        if kind in ("cmd", "word"):
            if kind == "cmd" and value in SPACING:
                continue
            value = ALIASES.get(value, value) if kind == "cmd" or len(value) > 1 else value
            if value in ("and", "or") or not value.isalpha():
                kind = "op"
        if kind == "newline":
            kind = "op"
        value = "dots" if value.startswith("...") else OPERATORS.get(value, value)
        if kind == "op" and value in ("(", "[", "\\{"):
            depth += 1
        elif kind == "op" and value in (")", "]", "\\}"):
            depth -= 1
        tokens.append((kind, value))
    while tokens and tokens[-1][0] == "space":
        tokens.pop()
    if len(tokens) > MAX_ANSWER_CHARS // 2:
        raise TooLarge
    return tokens


# ---------------------------------------------------------------------------------------------------------------------
# Parser. A node is a tuple (kind, …):
#   scalars     ("num", Fraction) ("sym", name) ("pi",) ("e",) ("i",) ("inf", ±1) ("add", …) ("mul", …) ("div", a, b)
#               ("pow", a, b) ("fn", name, …) ("app", name, …): an unknown function
#               ("sum" | "prod", variable, low, high, body)
#   factors     ("pm", ±1): plus-minus  ("deg",): the degree sign  ("pct",): the percent sign
#   statements  ("rel", operators, sides), operators from = != < <= > >= approx in; ("where", element, condition)
#   containers  ("list", …) ("or", …) ("and", …) ("tuple", …) ("bracket", …) ("set", …) ("ratio", …) ("matrix", rows …)
#               ("interval", low, low is in, high, high is in) ("union", …) ("minus", a, b)
#   others      ("unit", value, name) ("base", digits, base) ("reals",)

ONE, MINUS_ONE = ("num", Fraction(1)), ("num", Fraction(-1))
RELATIONS = {"=", "!=", "<", "<=", ">", ">=", "approx", "in"}
POSTFIX = {"!", "%", "'", "circ", "^", "_"}
SETS = {"interval", "union", "minus", "where", "reals", "set", "and"}
COLLECTIONS = {"list", "or", "tuple", "bracket", "set", "ratio", "matrix"}
NOT_SCALAR = SETS | COLLECTIONS | {"rel", "unit", "base"}


def negative(node: tuple) -> tuple:
    if node[0] == "num":
        return ("num", -node[1])
    if node[0] == "inf":
        return ("inf", -node[1])
    if node[0] == "unit":
        return ("unit", negative(node[1]), node[2])
    if node[0] == "base":
        return ("base", "-" + node[1], node[2])
    return times(MINUS_ONE, node)


def scalar(node: tuple) -> tuple:
    if node[0] in NOT_SCALAR:
        raise NotMath
    return node


def times(*factors: tuple) -> tuple:
    matrices = [f for f in factors if f[0] == "matrix"]
    if len(matrices) == 1:  # a scalar times a matrix
        rest = [f for f in factors if f[0] != "matrix"]
        return ("matrix", *(tuple(times(*rest, cell) for cell in row) for row in matrices[0][1:]))
    return ("mul", *map(scalar, factors))


def substitute(node: tuple, old: tuple, new: tuple) -> tuple:
    if node == old:
        return new
    return tuple(substitute(part, old, new) if isinstance(part, tuple) else part for part in node)


def count(node: tuple, kind: str) -> int:
    """How many nodes of this kind are in it?"""
    return (node[:1] == (kind,)) + sum(count(part, kind) for part in node if isinstance(part, tuple))


class Parser:
    """Recursive descent over the tokens; every method reads one rule of the grammar and returns its node."""

    def __init__(self, tokens: list[tuple[str, str]]):
        self.tokens, self.position, self.depth = tokens + [("end", "")] * 64, 0, 0
        self.bars: list[str] = []  # what a "|" closes: "abs", or "set" inside { x | … }

    # -- the token stream

    def peek(self, offset: int = 0) -> tuple[str, str]:
        return self.tokens[self.position + offset]

    def next(self) -> tuple[str, str]:
        token = self.tokens[self.position]
        self.position += token[0] != "end"
        return token

    def accept(self, *values: str) -> str | None:
        kind, value = self.tokens[self.position]
        if value in values and kind in ("op", "cmd", "word"):
            self.position += 1
            return value
        return None

    def expect(self, *values: str) -> str:
        found = self.accept(*values)
        if found is None:
            raise NotMath
        return found

    # -- answers, lists, statements

    def answer(self) -> tuple:
        node = self.items(closers=("",))
        if self.peek()[0] != "end":
            raise NotMath
        return node

    def items(self, closers: tuple[str, ...]) -> tuple:
        """statement (separator statement)*; a semicolon separates more strongly than a comma."""
        items, separators = [self.statement()], []
        while self.peek()[1] not in closers and self.peek()[0] != "end":
            separator = self.expect(",", ";", "and", "or")
            while also := self.accept(",", "and", "or"):
                separator = also
            if self.peek()[0] == "end" or self.peek()[1] in closers:
                break  # a trailing comma
            separators.append(separator)
            items.append(self.statement())
            if len(items) > MAX_ITEMS:
                raise TooLarge
        if len(items) == 1:
            return items[0]
        labels = {item[2][0] if item[0] == "rel" else None for item in items}
        for strong in (";", "or"):  # p=5, q=2; p=7, q=2 and x=1, y=2 or x=2, y=1, but not 1, 2, or 3
            if strong in separators and set(separators) != {strong} and (strong == ";" or len(labels - {None}) > 1):
                groups = [[items[0]]]
                for separator, item in zip(separators, items[1:]):
                    groups += [[item]] if separator == strong else []
                    groups[-1] += [] if separator == strong else [item]
                return ("list", *(g[0] if len(g) == 1 else ("list", *g) for g in groups))
        if "or" not in separators and all(map(is_inequality, items)):
            return ("and", *items)
        return ("or" if set(separators) == {"or"} else "list", *items)

    def statement(self) -> tuple:
        """side (relation side)*, or a worded label `Minimum: 1`."""
        (kind, word), following = self.peek(), self.peek(1)[1]
        if following in (":", "=") and len(word) > 3 and (kind == "text" or (kind == "word" and word[0].isupper())):
            self.position += 2 if word.lower() not in STOP_WORDS else 0  # a worded label, `Minimum: 1`, is dropped
        operators, sides = [], []
        if self.accept("approx"):
            return self.side()
        sides.append(self.side())
        while self.peek()[1] in RELATIONS and self.peek()[0] in ("op", "cmd"):
            operators.append(self.next()[1])
            sides.append(self.side())
        if not operators:
            return sides[0]
        return ("rel", tuple(operators), tuple(sides))

    def side(self) -> tuple:
        """A sum, a ratio `1:2:3` or a union of sets; a dollar sign or a unit may stand around it."""
        dollars = self.accept("\\$")
        node = self.sum()
        parts = [node]
        while self.peek()[1] == ":" and "set" not in self.bars:
            self.position += 1
            parts.append(self.dots() or self.sum())
        if len(parts) == 2:
            node = ("div", *parts) if not any(p[0] in NOT_SCALAR for p in parts) else ("ratio", *parts)
        elif len(parts) > 2:
            node = ("ratio", *parts)
        while operator := self.accept("cup", "setminus", "U"):
            right = self.sum()
            node = ("union", node, right) if operator != "setminus" else ("minus", node, right)
        kind, value = self.peek()
        if kind == "text" or (kind == "word" and value.lower() in UNITS) or (kind == "word" and self.plain_words()):
            node = self.units(node)
        return ("unit", scalar(node), "dollar") if (dollars or self.accept("\\$")) and node[0] != "unit" else node

    def plain_words(self) -> bool:
        """Do only words follow, as in `7 apples`?"""
        rest = self.tokens[self.position : self.tokens.index(("end", ""))]
        return (
            0 < len(rest) <= 3
            and all(k == "word" and len(v) > 2 and not is_known(v) for k, v in rest)
            and len(rest[0][1]) > 3
        )

    def units(self, value: tuple) -> tuple:
        """The words after a value: a unit, which is not compared with a bare number, or a factor (`5 million`)."""
        words: list[str] = []
        while True:
            kind, token = self.peek()
            if kind in ("text", "word"):
                words += token.lower().replace(".", " ").replace("/", " / ").split()
            elif token == "^" and words and (power := self.peek(1)[1] if self.peek(1)[0] == "num" else None):
                words.append(power)
                self.position += 1
            elif (
                token == "^"
                and words
                and self.peek(1)[1] == "{"
                and self.peek(2)[0] == "num"
                and self.peek(3)[1] == "}"
            ):
                words.append(self.peek(2)[1])
                self.position += 3
            elif token in ("*", "/") and words and self.peek(1)[0] in ("text", "word"):
                words.append(token)
            else:
                break
            self.position += 1
        while words and words[0] in MULTIPLIERS:
            value = times(value, ("num", Fraction(MULTIPLIERS[words.pop(0)])))
        if value[0] in NOT_SCALAR - {"list"} or len(words) > 6 or STOP_WORDS & set(words):
            raise NotMath
        if not all(w.isalpha() or w in ("2", "3", "/", "*", "%") for w in words):
            raise NotMath
        name = " ".join(UNIT_NAMES.get(w, w) for w in (w if len(w) < 4 else w.removesuffix("s") for w in words))
        if name in ("degree", "deg"):
            return times(value, ("deg",))
        if name in ("percent", "pct", "%"):
            return times(value, ("pct",))
        return ("unit", value, name) if name else value

    # -- arithmetic

    def sum(self) -> tuple:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise TooLarge
        if dots := self.dots():
            self.depth -= 1
            return dots
        terms, sign = [], self.accept("+", "-", "pm", "mp")
        while True:
            opposite = terms and self.accept("-")  # 14.0 + -1.0i
            term = negative(self.term()) if opposite else self.term()
            if sign == "-":
                term = negative(term)
            elif sign in ("pm", "mp"):
                term = times(("pm", 1 if sign == "pm" else -1), term)
            terms.append(term)
            sign = self.accept("+", "-", "pm", "mp")
            if sign is None:
                break
            if sign == "-" and len(terms) == 1 and terms[0][0] in SETS:
                terms = [("minus", terms[0], self.term())]
                sign = self.accept("+")
                break
        self.depth -= 1
        if len(terms) == 1:
            return terms[0]
        return ("add", *map(scalar, terms))

    def dots(self) -> tuple | None:
        """An ellipsis stands for itself as an item of a list; inside a sum it says too little to compare."""
        return ("sym", "…") if self.accept("dots") else None

    def term(self) -> tuple:
        node = self.power()
        while True:
            if self.accept("*"):
                node = times(node, self.signed_power())
            elif self.accept("/"):
                node = ("div", scalar(node), scalar(self.signed_power()))
            elif self.starts_factor():
                if node[0] == "num" and self.peek()[0] == "num":
                    raise NotMath
                node = times(node, self.power())
            else:
                return node

    def signed_power(self) -> tuple:
        sign = self.accept("+", "-")
        node = self.power()
        return negative(node) if sign == "-" else node

    def starts_factor(self) -> bool:
        kind, value = self.peek()
        if kind == "word":
            return (
                value.lower() not in UNITS
                and (len(value) <= 3 or is_known(value))
                and not (value == "U" and self.peek(1)[1] in ("(", "[", "\\{"))
            )
        if kind == "cmd":
            return (
                is_known(value)
                or value in GREEK
                or value in ("begin", "sum", "prod", "frac", "lfloor", "lceil")
                or value in WRAPPERS
            )
        if value == "|":
            return not self.bars
        return kind == "num" or value in ("(", "[", "{", "\\{")

    def power(self) -> tuple:
        node = self.atom()
        while self.peek()[1] in POSTFIX:
            if self.accept("!"):
                node = ("fn", "factorial", scalar(node))
            elif self.accept("%"):
                node = times(node, ("pct",))
            elif self.accept("'"):
                node = ("sym", node[1] + "'") if node[0] == "sym" else self.fail()
            elif self.accept("circ"):
                node = times(node, ("deg",))
            elif self.accept("^"):
                node = self.exponent(node)
            elif node[0] == "num" and node[1].denominator == 1 and self.accept("_"):
                node = ("base", str(node[1]), self.group_or_atom())
            else:
                break
        if node[0] == "sym" and self.peek()[1] == "(" and self.is_application(node[1]):
            self.position += 1
            arguments = self.items(closers=(")",))
            self.expect(")")
            node = ("app", node[1], *(arguments[1:] if arguments[0] == "list" else [arguments]))
        return node

    def is_application(self, name: str) -> bool:
        """f(x), g(x), h(x) are applied; another letter is only where an equation defines it: P(x) = …, T(10) = …"""
        if name in ("f", "g", "h") or name[:2] in ("f_", "g_", "h_", "f'", "g'", "h'"):
            return True
        depth = 0
        for offset in range(60):
            value = self.peek(offset)[1]
            depth += (value == "(") - (value == ")")
            if depth == 0:
                return self.peek(offset + 1) == ("op", "=")
        return False

    def exponent(self, base: tuple) -> tuple:
        if self.accept("circ"):
            return times(base, ("deg",))
        if self.accept("'"):
            return ("sym", base[1] + "'") if base[0] == "sym" else self.fail()
        mark = self.peek(1)[1]
        if self.peek()[1] == "{" and self.peek(2)[1] == "}" and mark in ("circ", "'", "th", "st", "nd", "rd"):
            self.position += 3
            if mark == "'":
                return ("sym", base[1] + "'") if base[0] == "sym" else self.fail()
            return times(base, ("deg",)) if mark == "circ" else base  # an ordinal: 12^{th} is 12
        sign = self.accept("+", "-")
        exponent = self.group_or_atom() if self.peek()[1] != "(" else self.brackets(self.next()[1])
        if self.accept("^"):
            exponent = self.exponent(exponent)
        return ("pow", scalar(base), negative(exponent) if sign == "-" else scalar(exponent))

    def fail(self):
        raise NotMath

    # -- atoms

    def atom(self) -> tuple:
        kind, value = self.next()
        if kind == "num":
            return self.number(value)
        if kind == "numbers":
            return ("reals",) if value == "R" else ("sym", f"set {value}")
        if kind in ("cmd", "word"):
            if value in FUNCTIONS:
                return self.function(value)
            if kind == "cmd" or is_known(value):
                return self.command(value)
            return self.letters(value)
        if kind == "text" and len(value) == 1:
            return ("sym", value)
        if value in ("(", "[", "{", "\\{"):
            return self.brackets(value)
        if value == "|":
            self.bars.append("abs")
            node = self.sum()
            self.expect("|")
            self.bars.pop()
            return ("fn", "abs", scalar(node))
        raise NotMath

    def number(self, digits: str) -> tuple:
        node = ("num", read_number(digits))
        if self.peek()[0] == "space":  # only `11 5/6` may have a space inside
            mixed = [self.peek(i) for i in range(1, 4)]
            if [k for k, _ in mixed] != ["num", "op", "num"] or mixed[1][1] != "/":
                raise NotMath
            self.position += 4
            return mixed_number(node, read_number(mixed[0][1]), read_number(mixed[2][1]))
        if self.peek() == ("cmd", "frac") and node[1].denominator == 1:
            self.position += 1
            top, bottom = self.short_argument(), self.short_argument()
            if top[0] == bottom[0] == "num" and digits.isdigit():
                return mixed_number(node, top[1], bottom[1])
            return times(node, ("div", top, bottom))
        if self.peek()[0] == "word" and self.peek()[1] in ("th", "st", "nd", "rd") and digits.isdigit():
            self.position += 1  # an ordinal: 15th is 15
        if "." in digits and self.peek() in (("cmd", "overline"), ("cmd", "dot"), ("cmd", "bar")):
            return self.repeating(digits)
        return node

    def repeating(self, digits: str) -> tuple:
        r"""`0.1\overline{6}`: the block repeats for ever."""
        self.position += 1
        braces = self.accept("{")
        block = self.next()
        if block[0] != "num" or not block[1].isdigit():
            raise NotMath
        if braces:
            self.expect("}")
        places = len(digits.partition(".")[2])
        tail = Fraction(int(block[1]), (10 ** len(block[1]) - 1) * 10**places)
        return ("num", read_number(digits) + tail)

    def short_argument(self) -> tuple:
        r"""The argument of \frac: a group, or one character (`\frac12` is one half)."""
        kind, value = self.peek()
        if kind == "space":
            self.position += 1
            kind, value = self.peek()
        if value == "{":
            return self.group_or_atom()
        if kind in ("num", "word") and len(value) > 1 and value[0].isalnum() and not is_known(value):
            self.tokens[self.position] = (kind, value[1:])
            return ("num", Fraction(int(value[0]))) if kind == "num" else self.symbol(value[0])
        return self.group_or_atom()

    def group_or_atom(self) -> tuple:
        r"""The argument of `^`, `_`, \sqrt: a group or one token; `\log_2 8` has no mixed number in it."""
        if self.accept("{"):
            node = self.sum()
            self.expect("}")
            return node
        if self.peek()[0] == "num":
            node = ("num", read_number(self.next()[1]))
            self.position += self.peek()[0] == "space"
            return node
        return self.atom()

    def command(self, name: str) -> tuple:
        if name in ("pi", "infty"):
            return ("pi",) if name == "pi" else ("inf", 1)
        if name == "emptyset":
            return ("set",)
        if name == "frac":
            return ("div", scalar(self.short_argument()), scalar(self.short_argument()))
        if name in WRAPPERS:
            return self.group_or_atom()
        if name in GREEK:
            return self.symbol(name)
        if name in ("lfloor", "lceil"):
            node = self.sum()
            self.expect("rfloor" if name == "lfloor" else "rceil")
            return ("fn", "floor" if name == "lfloor" else "ceil", scalar(node))
        if name == "langle":
            items = self.items(closers=("rangle",))
            self.expect("rangle")
            return ("tuple", *items[1:]) if items[0] == "list" else self.fail()
        if name in ("sum", "prod"):
            return self.big_operator(name)
        if name == "begin":
            return self.matrix()
        raise NotMath

    def letters(self, word: str) -> tuple:
        """A word is a function without its space (`sinx`), or a product of letters (`xy`), of which this reads one."""
        for name in ("sin", "cos", "tan", "ln", "log"):
            if word.startswith(name) and len(word) == len(name) + 1:
                return ("fn", name, self.symbol(word[-1]))
        if len(word) > 3:
            raise NotMath
        if len(word) > 1:
            self.position -= 1
            self.tokens[self.position] = ("word", word[1:])
        return self.symbol(word[0])

    def symbol(self, name: str) -> tuple:
        if self.peek() == ("op", "_"):
            self.position += 1
            return self.subscript(name)
        return {"e": ("e",), "i": ("i",)}.get(name, ("sym", name))

    def subscript(self, name: str) -> tuple:
        braces = self.accept("{")
        index = self.peek()[1] in set("ijkmnpqr")
        if index and (not braces or self.peek(1)[1] == "}"):  # a_k: an argument, as in a_{k+1}
            node = ("app", name + "_", self.symbol(self.next()[1]))
            return node if not braces or self.expect("}") else self.fail()
        if not braces:
            kind, value = self.next()
            return ("sym", f"{name}_{value}") if kind in ("num", "word", "cmd") else self.fail()
        start = self.position
        while self.peek()[1] != "}" and self.peek()[0] in ("num", "word", "cmd", "text"):
            self.position += 1
        if self.accept("}"):  # x_{max}: part of the name
            return ("sym", f"{name}_" + "".join(v for _, v in self.tokens[start : self.position - 1]))
        self.position = start
        node = self.items(closers=("}",))
        self.expect("}")
        return ("app", name + "_", node)

    def brackets(self, opening: str) -> tuple:
        closers = {"(": (")", "]"), "[": ("]", ")"), "{": ("}",), "\\{": ("\\}",)}[opening]
        if opening == "\\{":
            return self.braces()
        bars, self.bars = self.bars, []
        node = self.items(closers)
        self.bars = bars
        closing = self.expect(*closers)
        items = node[1:] if node[0] in ("list", "or") else (node,)
        if opening == "{":
            return node
        mixed = (opening == "(") != (closing == ")")
        if len(items) == 1:
            return items[0] if not mixed else self.fail()
        if mixed:
            return ("interval", items[0], opening == "[", items[1], closing == "]") if len(items) == 2 else self.fail()
        return ("tuple" if opening == "(" else "bracket", *items)

    def braces(self) -> tuple:
        r"""`\{1, 2\}` or `\{x | x > 1\}`."""
        if self.accept("\\}"):
            return ("set",)
        bars, self.bars = self.bars, ["set"]
        node = self.items(closers=("\\}", "|", ":"))
        if self.accept("|", ":"):
            node = ("where", node, self.items(closers=("\\}",)))
        else:
            node = ("set", *(node[1:] if node[0] in ("list", "or") else (node,)))
        self.bars = bars
        self.expect("\\}")
        return node

    def function(self, name: str) -> tuple:
        power, base = None, None
        for _ in range(2):
            if power is None and self.accept("^"):
                sign = self.accept("-")
                power = self.group_or_atom()
                power = negative(power) if sign else power
            elif base is None and name in ("log", "lg") and self.accept("_"):
                base = self.group_or_atom()
        if name == "sqrt":
            return self.root(power)
        if name == "binom" and self.peek()[1] == "{":
            node = ("fn", name, self.short_argument(), self.short_argument())
        elif self.peek()[1] in ("(", "{"):
            argument = self.brackets(self.next()[1])
            node = ("fn", name, *map(scalar, argument[1:] if argument[0] in ("tuple", "list") else (argument,)))
        else:  # `\sin 2x` takes the product that follows, up to an operator, a bracket or the next function
            sign = self.accept("+", "-")
            argument = self.power()
            while self.starts_factor() and self.peek()[1] not in FUNCTIONS and self.peek()[1] not in ("(", "[", "\\{"):
                argument = times(argument, self.power())
            node = ("fn", name, negative(argument) if sign == "-" else scalar(argument))
        if name in TRIG:
            node = substitute(node, ("deg",), ("div", ("pi",), ("num", Fraction(180))))
            if power == MINUS_ONE:
                return ("fn", "arc" + name, *node[2:])
        if name == "lg":
            node, base = ("fn", "log", *node[2:]), ("num", Fraction(10))
        if base is not None:
            node = ("div", ("fn", "ln", *node[2:]), ("fn", "ln", base))
        elif name == "log":
            node = ("fn", "ln", *node[2:]) if len(node) == 3 else ("div", ("fn", "ln", node[2]), ("fn", "ln", node[3]))
        elif name == "cbrt":
            node = ("pow", node[2], ("num", Fraction(1, 3)))
        elif name == "exp":
            node = ("pow", ("e",), node[2])
        if len(node) != 3 and node[0] == "fn" and name not in ("min", "max", "binom"):
            raise NotMath
        return node if power is None else ("pow", node, power)

    def root(self, power: tuple | None) -> tuple:
        degree = ("num", Fraction(2))
        if self.accept("["):
            degree = self.sum()
            self.expect("]")
        argument = self.group_or_atom() if self.peek()[1] != "(" else self.brackets(self.next()[1])
        node = ("pow", scalar(argument), ("div", ONE, scalar(degree)))
        return node if power is None else ("pow", node, power)

    def big_operator(self, name: str) -> tuple:
        low = high = None
        for _ in range(2):
            if self.accept("_"):
                self.expect("{")
                low = self.statement()
                self.expect("}")
            elif self.accept("^"):
                high = self.group_or_atom()
        if low is None or high is None or low[:2] != ("rel", ("=",)) or low[2][0][0] not in ("sym", "i"):
            raise NotMath
        variable = low[2][0]
        bound = ("sym", f"bound {self.position}")
        return (name, bound, low[2][1], high, substitute(self.term(), variable, bound))

    def matrix(self) -> tuple:
        self.expect("{")
        name = self.next()[1]
        self.expect("}")
        if name not in ("pmatrix", "bmatrix", "matrix", "array", "smallmatrix", "Bmatrix", "cases"):
            raise NotMath
        if name == "array" and self.accept("{"):
            while self.next()[1] not in ("}", ""):
                pass
        rows: list[tuple] = [()]
        while not self.accept("end"):
            if self.accept("\\\\"):
                rows.append(())
            elif not self.accept("&") and not (name == "cases" and self.accept(",")):
                rows[-1] += (self.statement() if name == "cases" else self.sum(),)
            if sum(map(len, rows)) > MAX_ITEMS or self.peek()[0] == "end":
                raise NotMath
        self.expect("{")
        if self.next()[1] != name:
            raise NotMath
        self.expect("}")
        if name == "cases":  # a system of equations; of a piecewise function only the text is compared
            return ("list", *(row[0] if len(row) == 1 else self.fail() for row in rows if row))
        return ("matrix", *(row for row in rows if row))


def is_known(word: str) -> bool:
    return (
        word in FUNCTIONS
        or word in ("pi", "infty", "emptyset", "frac", "langle", "sum", "prod", "lfloor", "lceil")
        or (len(word) > 2 and word in GREEK)
    )


def read_number(digits: str) -> Fraction:
    if digits.isdigit() and len(digits) <= MAX_DIGITS:
        return Fraction(int(digits))
    mantissa, _, exponent = digits.lower().partition("e")
    if len(exponent) > 5 or abs(int(exponent or 0)) > 9_999 or len(mantissa) > MAX_DIGITS:
        raise TooLarge
    whole, _, decimals = mantissa.partition(".")
    return Fraction(int(whole + decimals), 10 ** len(decimals)) * Fraction(10) ** int(exponent or 0)


def mixed_number(whole: tuple, top: Fraction, bottom: Fraction) -> tuple:
    if top >= bottom or top.denominator != 1 or bottom.denominator != 1:  # 4 10/3 is no mixed number
        raise NotMath
    return ("num", whole[1] + top / bottom)


# ---------------------------------------------------------------------------------------------------------------------
# Values: exact fractions, residues modulo a prime, and complex numbers of many digits

_local = threading.local()  # the deadline and the number context of the pair this thread is working on


def check_time() -> None:
    if time.monotonic() > _local.deadline:
        raise OutOfTime


def bits(value: Fraction) -> int:
    return value.numerator.bit_length() + value.denominator.bit_length()


def bounded(operation, a: Fraction, b: Fraction) -> Fraction:
    if bits(a) + bits(b) > MAX_BITS:
        raise TooLarge
    return operation(a, b)


OPERATIONS = {"add": operator.add, "mul": operator.mul, "div": operator.truediv}


def rational(node: tuple) -> Fraction | None:
    """The exact value of a constant built from integers, or None. Raises TooLarge before a number outgrows MAX_BITS."""
    kind = node[0]
    if kind == "num":
        return node[1]
    if kind == "pct":
        return Fraction(1, 100)
    if kind in ("add", "mul", "div", "pow", "fn"):
        values = []
        for part in node[2:] if kind == "fn" else node[1:]:
            value = rational(part)
            if value is None:
                return None
            values.append(value)
        if kind == "fn":
            return rational_function(node[1], values)
        if kind == "pow":
            return rational_power(*values)
        if kind == "div" and values[1] == 0:
            raise Undefined
        return functools.reduce(functools.partial(bounded, OPERATIONS[kind]), values)
    if kind in ("sum", "prod") and (low := rational(node[2])) is not None and (high := rational(node[3])) is not None:
        return rational_sum(kind, node[1], low, high, node[4])
    return None


def rational_sum(kind: str, bound: tuple, low: Fraction, high: Fraction, body: tuple) -> Fraction | None:
    if low.denominator != 1 or high.denominator != 1 or high - low > 2_000:
        return None
    result = Fraction(0 if kind == "sum" else 1)
    for k in range(int(low), int(high) + 1):
        check_time()
        term = rational(substitute(body, bound, ("num", Fraction(k))))
        if term is None:
            return None
        result = bounded(operator.add if kind == "sum" else operator.mul, result, term)
    return result


def rational_power(base: Fraction, exponent: Fraction) -> Fraction | None:
    if exponent.denominator != 1:
        return None
    if base == 0 and exponent <= 0:
        raise Undefined
    if abs(exponent) * bits(base) > MAX_BITS and base not in (0, 1, -1):
        raise TooLarge
    return base ** int(exponent) if base not in (1, -1) else base ** int(exponent % 2)


def rational_function(name: str, values: list[Fraction]) -> Fraction | None:
    integers = [int(v) for v in values if v.denominator == 1]
    x = values[0]
    if name == "abs":
        return abs(x)
    if name in ("floor", "ceil"):
        return Fraction(math.floor(x) if name == "floor" else math.ceil(x))
    if name in ("min", "max"):
        return min(values) if name == "min" else max(values)
    if len(integers) != len(values):
        return None
    if name == "factorial":
        if not 0 <= x <= 10_000:
            raise TooLarge
        return Fraction(math.factorial(int(x)))
    if name == "binom":
        if not 0 <= integers[1] <= 1_000 or not 0 <= integers[0] <= 10**6:
            raise TooLarge
        return Fraction(math.comb(*integers))
    return None


# Identities are proved modulo a prime. P = 2 D Q + 1 and Q are primes, 23 generates the non-zero residues mod P; so
# there is a W of order 2 D, which plays e^(iπ/D), and an H of order Q: its exponents live mod Q, where fractions exist.
D = 720_720
Q = 2**100 + 525
P = 2 * D * Q + 1
W, H = pow(23, Q, P), pow(23, 2 * D, P)
I = {P: pow(W, D // 2, P), Q: pow(2, (Q - 1) // 4, Q)}  # a square root of -1


def draw(modulus: int, *key) -> int:
    """A residue that looks random and is the same for the same key: the value of a symbol or of an unknown function."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=24).digest(), "big") % modulus


def residue(node: tuple, trial: int, modulus: int = P) -> int:
    """The value of a node modulo a prime at point number `trial`.

    Sums, products, quotients, powers, exp and trigonometry keep their laws; every other function is an unknown of its
    argument's residue. So two nodes that agree are equal for all values (Schwartz-Zippel: but for a chance of about
    2^-100), and two that differ are different if they are made of +, -, *, / and integer powers only.
    """
    kind = node[0]
    if kind == "num":
        return node[1].numerator * pow(node[1].denominator, -1, modulus) % modulus
    if kind == "i":
        return I[modulus]
    if kind == "e" and modulus == P:
        return H
    if kind in ("sym", "pi", "e"):
        return draw(modulus, trial, node)
    if kind == "add":
        return sum(residue(part, trial, modulus) for part in node[1:]) % modulus
    if kind == "mul":
        product = 1
        for part in node[1:]:
            product = product * residue(part, trial, modulus) % modulus
        return product
    if kind == "div":
        return residue(node[1], trial, modulus) * pow(residue(node[2], trial, modulus), -1, modulus) % modulus
    if kind == "pow":
        return residue_power(node[1], node[2], trial, modulus)
    if kind == "fn" and node[1] in TRIG | {"sinh", "cosh", "tanh"} and modulus == P:
        return residue_trig(node[1], node[2], trial)
    if kind == "fn":
        values = [residue(part, trial, modulus) for part in node[2:]]
        if node[1] == "abs":
            values = [min(values[0], modulus - values[0])]  # |-x| = |x|
        return draw(modulus, node[1], *(sorted(values) if node[1] in ("min", "max") else values))
    if kind == "app":
        return draw(modulus, node[0], node[1], *(residue(part, trial, modulus) for part in node[2:]))
    if kind in ("sum", "prod"):
        bound = ("sym", f"bound at height {repr(node[4]).count('bound')}")  # the names of bound variables do not matter
        parts = (node[2], node[3], substitute(node[4], node[1], bound))
        return draw(modulus, kind, *(residue(part, trial, modulus) for part in parts))
    raise NotMath


def residue_power(base: tuple, exponent: tuple, trial: int, modulus: int) -> int:
    """x^(7/3) is x^2 times an unknown, the cube root of x; b^u is h^u, with an unknown h for each base and e = H."""
    power, value = rational(exponent), residue(base, trial, modulus)
    if power is not None:
        whole, rest = divmod(power.numerator, power.denominator)
        root = draw(modulus, "root", power.denominator, value) if rest else 1
        return pow(value, whole, modulus) * pow(root, rest, modulus) % modulus
    if modulus != P or (count(exponent, "pi") and count(exponent, "i")):  # e^(iπ) = -1 is not known here
        raise NotMath
    return pow(H, (1 if base == ("e",) else draw(Q, "base", value)) * residue(exponent, trial, Q), P)


def residue_trig(name: str, angle: tuple, trial: int) -> int:
    """Through exponentials: with t = e^(ix), cos x = (t + 1/t) / 2. The multiple of π in x becomes a root of unity."""
    rotation = 1
    if name in TRIG and count(angle, "pi"):
        without = substitute(angle, ("pi",), ("num", Fraction(0)))
        slope = ("add", substitute(angle, ("pi",), ONE), negative(without))
        for symbol in symbols(slope):
            slope = substitute(slope, symbol, ("num", Fraction(0)))
        turns = rational(slope)
        if turns is None or (turns * D).denominator != 1:
            raise NotMath
        rest = (residue(angle, trial, Q) - residue(times(("num", turns), ("pi",)), trial, Q)) % Q
        if rest != residue(without, trial, Q):
            raise NotMath
        rotation, angle = pow(W, int(turns * D), P), without
    unit = I[P] if name in TRIG else 1
    t = rotation * pow(H, (I[Q] if name in TRIG else 1) * residue(angle, trial, Q), P) % P
    inverse = pow(t, -1, P)
    sine, cosine = (t - inverse) * pow(2 * unit, -1, P) % P, (t + inverse) * pow(2, -1, P) % P
    top = {"sin": sine, "tan": sine, "cos": cosine, "cot": cosine}.get(name.removesuffix("h"), 1)
    bottom = {"tan": cosine, "sec": cosine, "cot": sine, "csc": sine}.get(name.removesuffix("h"), 1)
    return top * pow(bottom, -1, P) % P


def is_rational_function(node: tuple) -> bool:
    if node[0] == "pow":
        exponent = rational(node[2])
        return exponent is not None and exponent.denominator == 1 and is_rational_function(node[1])
    return node[0] in ("num", "sym") or (node[0] in ("add", "mul", "div") and all(map(is_rational_function, node[1:])))


def symbols(node: tuple) -> set[tuple]:
    if node[:1] == ("sym",):
        return {node}
    return set().union(*(symbols(part) for part in node if isinstance(part, tuple)))


def odd_root(node: tuple) -> Fraction | None:
    """The exponent p/q of a power with odd q: it has a real value for a negative base, and that is the one meant."""
    value = rational(node)
    return value if value is not None and value.denominator % 2 == 1 and value.denominator > 1 else None


def number(node: tuple, point: dict[tuple, object], mp) -> object:
    """The complex value at `point` in the mpmath context `mp`."""
    check_time()
    kind = node[0]
    if kind == "num":
        return mp.mpf(node[1].numerator) / node[1].denominator
    if kind == "sym":
        return point[node]
    if kind == "pi":
        return +mp.pi
    if kind == "e":
        return +mp.e
    if kind == "i":
        return mp.mpc(0, 1)
    if kind == "add":
        return mp.fsum(number(part, point, mp) for part in node[1:])
    if kind == "mul":
        product = mp.mpf(1)
        for part in node[1:]:
            product *= number(part, point, mp)
        return product
    if kind == "div":
        return number(node[1], point, mp) / number(node[2], point, mp)
    if kind == "pow":
        return power_value(number(node[1], point, mp), node[2], point, mp)
    if kind == "fn":
        return function_value(node[1], [number(part, point, mp) for part in node[2:]], mp)
    if kind == "app":
        return unknown_value(node[1], [number(part, point, mp) for part in node[2:]], mp)
    if kind in ("sum", "prod"):
        return big_operator_value(node, point, mp)
    raise NotMath


def power_value(base, exponent_node: tuple, point: dict, mp):
    root = odd_root(exponent_node)
    if root is not None and mp.im(base) == 0 and mp.re(base) < 0:
        return (-1) ** (root.numerator % 2) * mp.power(-mp.re(base), mp.mpf(root.numerator) / root.denominator)
    exponent = number(exponent_node, point, mp)
    if base == 0:
        if mp.re(exponent) <= 0:
            raise Undefined
        return mp.mpf(0)
    if mp.mag(exponent) + max(mp.mag(mp.log(base)), -10) > 60:
        raise TooLarge
    return mp.power(base, exponent)


ARCS = {f"arc{name}": f"a{name}" for name in TRIG | {"sinh", "cosh", "tanh"}}
MPMATH_NAMES = ARCS | {"abs": "fabs"}
SYMPY_NAMES = ARCS | {"ln": "log", "abs": "Abs", "ceil": "ceiling", "min": "Min", "max": "Max", "binom": "binomial"}


def function_value(name: str, values: list, mp):
    x = values[0]
    if mp.mag(x) > 200 and name not in ("abs", "ln"):
        raise TooLarge
    if name == "ln":
        if x == 0:
            raise Undefined
        return mp.log(x)
    if name in ("factorial", "binom"):
        if any(abs(v) > 10**6 for v in values):
            raise TooLarge
        return mp.gamma(x + 1) if name == "factorial" else mp.binomial(*values)
    if name in ("floor", "ceil"):
        nearest = mp.nint(mp.re(x))
        if mp.im(x) != 0 or (mp.almosteq(mp.re(x), nearest) and mp.re(x) != nearest):
            raise Undefined  # too close to a jump to tell
        return mp.floor(x) if name == "floor" else mp.ceil(x)
    if name in ("min", "max"):
        if any(mp.im(v) != 0 for v in values):
            raise Undefined
        return min(values) if name == "min" else max(values)
    return getattr(mp, MPMATH_NAMES.get(name, name))(x)


def unknown_value(name: str, values: list, mp):
    """An unknown function gets a fixed smooth value: f(1/2) = f(0.5), and f(1) differs from f(2) and from g(1)."""
    seed = int.from_bytes(name.encode(), "big") % 1_000_003
    return mp.sin(mp.fsum(v * mp.sqrt(seed + 2 + 7 * k) for k, v in enumerate(values)) + seed)


def big_operator_value(node: tuple, point: dict, mp):
    kind, bound, low, high, body = node
    ends = [number(low, point, mp), number(high, point, mp)]
    if not symbols(low) | symbols(high) and all(mp.isint(end) for end in ends) and abs(ends[1] - ends[0]) <= 2_000:
        terms = [number(body, {**point, bound: mp.mpf(k)}, mp) for k in range(int(ends[0]), int(ends[1]) + 1)]
        return mp.fsum(terms) if kind == "sum" else mp.fprod(terms)
    probes = [number(body, {**point, bound: mp.mpf(k) / 7}, mp) for k in (9, 16)]
    return unknown_value(kind, ends + probes, mp)


def context(digits: int):
    """An mpmath context of this thread only: mpmath's global one is shared by all threads."""
    if not hasattr(_local, "mp"):
        import mpmath

        _local.mp = mpmath.MPContext()
    _local.mp.dps = digits
    return _local.mp


# ---------------------------------------------------------------------------------------------------------------------
# Two scalars: disprove, then prove


def sample_points(names: list[tuple]) -> list[dict[tuple, Fraction]]:
    """Fixed rational points: below 1 (in the domain of roots, logs and arcs), above 1, of either sign."""
    points = []
    for index in range(6 if names else 1):
        low, high = ((1, 96), (101, 397), (-297, 301))[index % 3]
        values = {}
        for k, name in enumerate(names):
            step = (index * 7919 + k * 104729 + 31 * index * k + 12345) * 2654435761 % 2**32
            values[name] = Fraction(low * 1009 + step % ((high - low) * 1009), 97 * 1009)
        points.append(values)
    return points


def value_at(node: tuple, point: dict[tuple, Fraction], digits: int):
    mp = context(digits)
    try:
        value = number(node, {k: mp.mpf(v.numerator) / v.denominator for k, v in point.items()}, mp)
    except (ZeroDivisionError, Undefined, ValueError, OverflowError):
        return None
    return value if mp.isfinite(value) else None


def differ(a: tuple, b: tuple, x, y, point: dict[tuple, Fraction]) -> bool:
    """Are the values x and y of a and b at this point different?"""
    gap, size = abs(x - y), max(abs(x), abs(y))
    if gap <= size * 1e-35:
        return False
    if gap > size * 1e-6 and size > 1e-6:
        return True
    x, y = value_at(a, point, 150), value_at(b, point, 150)  # cancellation shrinks with more digits, a difference stays
    return x is None or y is None or abs(x - y) > gap * 1e-20


def is_real(value) -> bool:
    imaginary = value.imag
    return imaginary == 0 or abs(imaginary) <= abs(value) * 1e-30


def disproved(a: tuple, b: tuple) -> bool:
    """Do the two differ somewhere? Symbols are real; what counts is where both sides are, or all if none."""
    names = sorted(symbols(a) | symbols(b), key=str)
    explicit = count(a, "i") or count(b, "i") or not names
    both_complex, compared = [], 0
    for point in sample_points(names):
        x, y = value_at(a, point, 50), value_at(b, point, 50)
        if x is None or y is None:
            continue
        if not explicit and is_real(x) != is_real(y):
            return True
        if not explicit and not is_real(x):
            both_complex.append((x, y, point))
            continue
        compared += 1
        if differ(a, b, x, y, point):
            return True
    return compared == 0 and (not both_complex or any(differ(a, b, *values) for values in both_complex))


def proved(a: tuple, b: tuple) -> bool:
    """Is a = b certain? Only asked once no point has told them apart."""
    for trial in range(3):
        try:
            if residue(a, trial) == residue(b, trial):
                return True
            if is_rational_function(a) and is_rational_function(b):
                return False
            break
        except ValueError:  # a denominator is zero at this point
            continue
        except NotMath:
            break
    return proved_by_sympy(a, b)


def proved_by_sympy(a: tuple, b: tuple) -> bool:
    import sympy

    memo: dict[tuple, object] = {}

    def build(node: tuple):
        check_time()
        if node not in memo:
            memo[node] = construct(node)
        return memo[node]

    def construct(node: tuple):
        kind = node[0]
        if kind == "num":
            return sympy.Rational(node[1].numerator, node[1].denominator)
        if kind == "sym":
            return sympy.Symbol(node[1], real=True)
        if kind in ("pi", "e", "i"):
            return {"pi": sympy.pi, "e": sympy.E, "i": sympy.I}[kind]
        if kind == "add":
            return sympy.Add(*map(build, node[1:]))
        if kind == "mul":
            return sympy.Mul(*map(build, node[1:]))
        if kind == "div":
            return build(node[1]) / build(node[2])
        if kind == "pow":
            base, exponent = rational(node[1]), rational(node[2])
            if base is None and exponent is not None and abs(exponent) > 64:
                raise TooLarge  # expanding it would take for ever
            if base is not None and base < 0 and odd_root(node[2]) is not None:
                return (-1) ** (exponent.numerator % 2) * sympy.Pow(-build(node[1]), build(node[2]))
            return sympy.Pow(build(node[1]), build(node[2]))
        if kind == "fn":
            return getattr(sympy, SYMPY_NAMES.get(node[1], node[1]))(*map(build, node[2:]))
        if kind in ("app", "sum", "prod"):
            name = node[1] if kind == "app" else kind
            return sympy.Function(f"unknown {name}")(*map(build, node[2:]))
        raise NotMath

    def prove() -> bool:
        difference = sympy.expand(build(a) - build(b))
        if difference == 0:
            return True
        attempts = (
            lambda d: sympy.expand(sympy.together(d).as_numer_denom()[0]),
            lambda d: sympy.expand(sympy.expand_log(d, force=True, factor=True)),
            lambda d: sympy.expand(sympy.together(sympy.expand(d.rewrite(sympy.exp), func=True)).as_numer_denom()[0]),
            lambda d: sympy.expand(sympy.powdenest(sympy.posify(d)[0], force=True)),
            sympy.expand_complex if count(a, "i") or count(b, "i") else sympy.simplify,
        )
        return any(attempt(difference) == 0 for attempt in attempts)

    try:
        with _sympy_lock:
            return within_budget(prove)
    except (NotMath, TooLarge):
        return False
    except Exception:  # sympy raises nearly anything on odd input; what it cannot do is not proven
        return False


_sympy_lock = threading.Lock()  # sympy's caches and mpmath's global precision are not made for several threads


def within_budget(function):
    """Run `function`, raising OutOfTime at the deadline. A trace function works in any thread, an alarm in one."""
    deadline = _local.deadline

    def tracer(frame, event, argument):
        if time.monotonic() > deadline:
            raise OutOfTime

    previous = sys.gettrace()
    sys.settrace(tracer)
    try:
        return function()
    finally:
        sys.settrace(previous)


def same_scalar(a: tuple, b: tuple) -> bool:
    if a == b:
        return True
    check_time()
    if "inf" in (a[0], b[0]):
        return False
    x, y = rational(a), rational(b)
    if x is not None and y is not None:
        return x == y
    return not disproved(a, b) and (proved(a, b) or _not_proven())


def _not_proven() -> bool:
    _local.doubt = True
    return False


# ---------------------------------------------------------------------------------------------------------------------
# Two answers of any kind


def expand_plus_minus(node: tuple) -> tuple:
    """1 ± 2 is the list 1 + 2, 1 - 2. One expression has one sign, each coordinate of a tuple its own."""
    if not count(node, "pm"):
        return node
    if node[0] in ("list", "or", "set"):
        items = []
        for item in node[1:]:
            expanded = expand_plus_minus(item)
            items += expanded[1:] if expanded[0] == "list" else [expanded]
        return (node[0], *items)
    if node[0] == "tuple":
        choices = [e[1:] if e[0] == "list" else (e,) for e in map(expand_plus_minus, node[1:])]
        if math.prod(map(len, choices)) > MAX_ITEMS:
            raise TooLarge
        return ("list", *(("tuple", *items) for items in itertools.product(*choices)))
    if node[0] == "rel" and node[1] == ("=",) and not count(node[2][0], "pm"):
        values = expand_plus_minus(node[2][1])
        return ("list", *(("rel", ("=",), (node[2][0], value)) for value in values[1:]))
    if node[0] in NOT_SCALAR - {"unit"}:
        raise NotMath
    signs = [substitute(substitute(node, ("pm", 1), s), ("pm", -1), negative(s)) for s in (ONE, MINUS_ONE)]
    return ("list", *signs)


def readings(node: tuple) -> list[tuple]:
    """What an expression with degree or percent signs can stand for: 30° is 30 or π/6, 28% is 28 or 0.28."""
    results = [node]
    if count(node, "deg"):
        results = [substitute(r, ("deg",), v) for r in results for v in (ONE, ("div", ("pi",), ("num", Fraction(180))))]
    if percents := count(node, "pct"):
        bare = [substitute(r, ("pct",), ONE) for r in results]
        results = [substitute(r, ("pct",), ("num", Fraction(1, 100))) for r in results]
        results += [r for r in bare if percents == 1 and (value := rational(r)) is not None and abs(value) > 1]
    return results


def measure(node: tuple) -> str | None:
    """What a single value is counted in: a unit, degrees, percent."""
    if node[0] == "unit":
        return node[2]
    return next((sign for sign in ("deg", "pct") if node[0] not in NOT_SCALAR and count(node, sign)), None)


def same(a: tuple, b: tuple) -> bool:
    """Do two nodes stand for the same object? Symmetric."""
    if a == b:
        return True
    check_time()
    p, q = measure(a), measure(b)
    if p and q and p != q:
        return False
    a, b = (n[1] if n[0] == "unit" else n for n in (a, b))
    kinds = {a[0], b[0]}
    if (
        kinds & {"interval", "union", "minus", "where", "reals", "and"}
        or (is_inequality(a) or is_inequality(b))
        or "in" in statement_operators(a, b)
    ):
        return same_sets(a, b)
    if "rel" in kinds:
        return same_statements(a, b)
    if kinds & {"base", "ratio"}:
        return a[0] == b[0] and same_ratios(a, b)
    if kinds & COLLECTIONS:
        return same_collections(a, b)
    for sign in ("deg", "pct"):
        if count(a, sign) and count(b, sign):
            a, b = (substitute(n, (sign,), ("num", Fraction(1, 100)) if sign == "pct" else ONE) for n in (a, b))
    return any(same_scalar(x, y) for x in readings(a) for y in readings(b))


def statement_operators(*nodes: tuple) -> set[str]:
    return {operator for node in nodes if node[0] == "rel" for operator in node[1]}


def is_inequality(node: tuple) -> bool:
    if node[0] == "or":
        return all(is_inequality(n) or n[0] in SETS or (n[0] == "rel" and n[1] == ("=",)) for n in node[1:]) and any(
            map(is_inequality, node[1:])
        )
    return node[0] == "rel" and bool(set(node[1]) & {"<", ">", "<=", ">=", "!="})


def same_ratios(a: tuple, b: tuple) -> bool:
    if a[0] == "base" or len(a) != len(b):
        return False  # equal digits and base were equal nodes
    return all(same(times(x, b[1]), times(y, a[1])) for x, y in zip(a[2:], b[2:]))


def same_collections(a: tuple, b: tuple) -> bool:
    """Lists and sets are unordered, tuples are ordered; a list against a tuple is compared in order."""
    unordered = {"list", "or", "set"}
    if a[0] == "matrix" and b[0] == "matrix":
        return len(a) == len(b) and all(len(r) == len(s) and all(map(same, r, s)) for r, s in zip(a[1:], b[1:]))
    if "matrix" in (a[0], b[0]):
        matrix, other = (a, b) if a[0] == "matrix" else (b, a)
        cells = [cell for row in matrix[1:] for cell in row]
        if other[0] == "bracket" and all(row[0] == "bracket" for row in other[1:]):
            return same(matrix, ("matrix", *(row[1:] for row in other[1:])))
        is_vector = 1 in (len(matrix) - 1, len(matrix[1]))
        return is_vector and other[0] == "tuple" and len(cells) == len(other) - 1 and all(map(same, cells, other[1:]))
    if a[0] in unordered and b[0] in unordered:
        xs, ys = list(a[1:]), list(b[1:])
        if names_several(xs) != names_several(ys):  # x = 1, y = 2 against 1, 2: the order says which is which
            return len(xs) == len(ys) and all(map(same, xs, ys))
        if "set" in (a[0], b[0]):
            xs, ys = without_repeats(xs), without_repeats(ys)
        return same_multisets(xs, ys)
    if a[0] != b[0] and not ("list" in (a[0], b[0]) and {a[0], b[0]} <= {"list", "tuple", "bracket"}):
        return False
    if a[0] != b[0] and "bracket" in (a[0], b[0]) and len(a) == 3:
        return False  # [1, 2] is an interval
    return len(a) == len(b) and all(map(same, a[1:], b[1:]))


def names_several(items: list[tuple]) -> bool:
    """Are these equations for different letters? x_1 = 2, x_2 = 3 are two values of one."""
    labels = [item[2][0] for item in items if item[0] == "rel" and item[1] == ("=",) and item[2][0][0] == "sym"]
    return len(labels) == len(items) and len({label[1].partition("_")[0] for label in labels}) > 1


def same_multisets(xs: list[tuple], ys: list[tuple]) -> bool:
    """Both ways round, because readings such as 28% = 28 and 28% = 0.28 make the first match depend on the order."""
    return len(xs) == len(ys) and (matches(xs, ys) or matches(ys, xs))


def matches(xs: list[tuple], ys: list[tuple]) -> bool:
    left = list(ys)
    for x in xs:
        match = next((k for k, y in enumerate(left) if same(x, y)), None)
        if match is None:
            return False
        del left[match]
    return True


def without_repeats(items: list[tuple]) -> list[tuple]:
    kept: list[tuple] = []
    for item in items:
        if not any(same(item, other) for other in kept):
            kept.append(item)
    return kept


# -- statements: labels, equations


def is_label(node: tuple) -> bool:
    """Can this stand on the left of "=" as the name of what is on the right: x, f(x), |AB|, AB/CD, cos A, (p, q)?"""
    if node[0] in ("sym", "app", "e", "i"):
        return True
    if node[0] in ("mul", "div", "tuple", "ratio", "list"):
        return all(map(is_label, node[1:]))
    return node[0] == "fn" and node[1] in TRIG | {"abs"} and is_label(node[2])


def read_statement(node: tuple) -> tuple[tuple | None, tuple | None]:
    """(label, value) of `x = y = 3`, `3`, `2 + 2 = 4`; the value is None where no value is named, as in x + y = 3."""
    if node[0] != "rel":
        return None, node
    sides = list(node[2])
    if "approx" in node[1]:  # 1/3 ≈ 0.33 says 1/3; x ≈ 11 says 11
        cut = node[1].index("approx") + 1
        if not is_label(sides[cut - 1]):
            sides = sides[:cut]
    if set(node[1]) - {"=", "approx"}:
        return None, None
    label = None
    while len(sides) > 1 and is_label(sides[0]):
        label = label or sides[0]
        sides.pop(0)
    if len(sides) == 2 and label is None and is_label(sides[1]):
        return sides[1], sides[0]  # 5 = x
    if not all(same(sides[0], side) for side in sides[1:]):
        return None, None
    return label, sides[-1]


def same_statements(a: tuple, b: tuple) -> bool:
    (p, x), (q, y) = read_statement(a), read_statement(b)
    if x is not None and y is not None:
        if p is None or q is None:
            return same(x, y)
        if p[0] == q[0] == "app" and p[1] == q[1] and len(p) == len(q) and all(n[0] == "sym" for n in p[2:] + q[2:]):
            for old, new in zip(q[2:], p[2:]):  # f(x) = x and f(t) = t define the same function
                y = substitute(y, old, new)
            return same(x, y)
        if p == q or {p[0], q[0]} == {"app", "sym"}:  # f(x) = 2x and y = 2x
            return same(x, y)
    if a[0] == b[0] == "rel" and a[1] == b[1] == ("=",):
        return same_equations(*a[2], *b[2])
    if a[0] == b[0] == "rel" and a[1] == b[1]:
        return all(map(same, a[2], b[2]))
    return False


def same_equations(a: tuple, b: tuple, c: tuple, d: tuple) -> bool:
    """Is a - b a constant multiple of c - d? Then a = b and c = d are one equation."""
    if any(n[0] in NOT_SCALAR for n in (a, b, c, d)):
        return (same(a, c) and same(b, d)) or (same(a, d) and same(b, c))
    return proportional(("add", a, negative(b)), ("add", c, negative(d))) is not None


def proportional(f: tuple, g: tuple) -> float | None:
    """The sign of the constant c with f = c g, or None."""
    names = sorted(symbols(f) | symbols(g), key=str)
    if not names or symbols(f) != symbols(g):
        return None
    point = {name: ("num", Fraction(1009 + 2 * k, 97)) for k, name in enumerate(names)}
    top, bottom = f, g
    for name, value in point.items():
        top, bottom = substitute(top, name, value), substitute(bottom, name, value)
    ratio = value_at(("div", top, bottom), {}, 30)
    if not ratio or not is_real(ratio):
        return None
    return float(ratio.real) if same_scalar(times(f, bottom), times(g, top)) else None


# -- sets of real numbers

ALL_REALS = (("inf", -1), False, ("inf", 1), False)  # (low, low is in, high, high is in)


def same_sets(a: tuple, b: tuple) -> bool:
    if is_inequality(a) and is_inequality(b) and a[0] == b[0] == "rel" and same_inequalities(a, b):
        return True
    x, y = real_set(a), real_set(b)
    if x is None or y is None:
        if a[0] == b[0] and a[0] in ("where", "union", "minus", "and"):
            return len(a) == len(b) and all(map(same, a[1:], b[1:]))
        if a[0] == b[0] == "rel" and a[1] == b[1] == ("in",):
            return all(map(same, a[2], b[2]))
        return False
    if x[0] and y[0] and x[0] != y[0]:
        return False  # x > 1 and y > 1 speak of different things
    xs, ys = merge(x[1]), merge(y[1])
    return len(xs) == len(ys) and all(
        p[1] == q[1] and p[3] == q[3] and same(p[0], q[0]) and same(p[2], q[2]) for p, q in zip(xs, ys)
    )


def same_inequalities(a: tuple, b: tuple) -> bool:
    flip = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "!=": "!=", "=": "="}
    for operators, sides in ((b[1], b[2]), (tuple(flip.get(o, o) for o in reversed(b[1])), tuple(reversed(b[2])))):
        if operators == a[1] and all(map(same, a[2], sides)):
            return True
        if len(sides) == 2 == len(a[2]) and not any(s[0] in NOT_SCALAR for s in sides + a[2]) and operators == a[1]:
            sign = proportional(("add", a[2][0], negative(a[2][1])), ("add", sides[0], negative(sides[1])))
            if sign is not None and (sign > 0 or operators == ("!=",)):
                return True
    return False


def real_set(node: tuple) -> tuple[tuple | None, list[tuple]] | None:
    """(variable or None, pieces) of anything that describes a set of reals, else None."""
    kind = node[0]
    if kind == "reals":
        return None, [ALL_REALS]
    if kind == "interval":
        return None, [(node[1], node[2], node[3], node[4])]
    if kind in ("tuple", "bracket") and len(node) == 3:
        return None, [(node[1], kind == "bracket", node[2], kind == "bracket")]
    if kind in ("set", "list"):
        return None, [(item, True, item, True) for item in node[1:]]
    if kind == "and":
        parts = [real_set(part) for part in node[1:]]
        if None in parts or len({variable for variable, _ in parts}) > 1:
            return None
        return parts[0][0], functools.reduce(intersection, (merge(pieces) for _, pieces in parts))
    if kind in ("union", "or"):
        parts = [real_set(part) for part in node[1:]]
        if None in parts or len({variable for variable, _ in parts if variable}) > 1:
            return None
        return next((v for v, _ in parts if v), None), [piece for _, pieces in parts for piece in pieces]
    if kind == "minus":
        whole, hole = real_set(node[1]), real_set(node[2])
        if whole is None or hole is None or any(p[0] != p[2] for p in hole[1]):
            return None
        pieces = whole[1]
        for point in hole[1]:
            pieces = [part for piece in pieces for part in punctured(piece, point[0])]
        return whole[0], pieces
    if kind == "where":
        found = real_set(node[2])
        element = node[1][2][0] if node[1][0] == "rel" and node[1][1] == ("in",) else node[1]
        return (None, found[1]) if found is not None and found[0] in (None, element) else None
    if kind == "rel":
        return solve(node[1], node[2])
    return None


def solve(operators: tuple[str, ...], sides: tuple[tuple, ...]) -> tuple[tuple | None, list[tuple]] | None:
    """The solutions of x > 1, -2x ≤ 6, 1 < x ≤ 2, x ≠ 3, x ∈ S, x = 3 for the one unknown in it."""
    if operators == ("in",):
        found = real_set(sides[1])
        return (sides[0], found[1]) if found is not None else None
    if any(s[0] in NOT_SCALAR for s in sides) or len(sides) > 3:
        return None
    if len(sides) == 3:
        return real_set(("and", ("rel", operators[:1], sides[:2]), ("rel", operators[1:], sides[1:])))
    left, right = sides
    unknowns = symbols(left) ^ symbols(right) if "inf" not in (left[0], right[0]) else symbols(left) | symbols(right)
    unknown = next((s for s in sides if s[0] == "sym" and s in unknowns), None) or (
        unknowns.pop() if len(unknowns) == 1 else None
    )
    if unknown is None:
        return None
    relation = operators[0]
    if left == unknown:
        bound, positive = right, True
    elif right == unknown:
        bound, positive = left, False
    else:
        f = ("add", left, negative(right))
        constant, total = substitute(f, unknown, ("num", Fraction(0))), substitute(f, unknown, ONE)
        slope = ("add", total, negative(constant))
        value = value_at(slope, {}, 30) if not symbols(slope) else None
        if not value or not is_real(value) or not same_scalar(f, ("add", times(slope, unknown), constant)):
            return None
        bound, positive = ("div", negative(constant), slope), value.real > 0
    if relation == "!=":
        return unknown, punctured(ALL_REALS, bound)
    if relation == "=":
        return unknown, [(bound, True, bound, True)]
    closed = relation in ("<=", ">=")
    if (relation in ("<", "<=")) == positive:
        return unknown, [(("inf", -1), False, bound, closed)]
    return unknown, [(bound, closed, ("inf", 1), False)]


def intersection(xs: list[tuple], ys: list[tuple]) -> list[tuple]:
    pieces = []
    for x, y in itertools.product(xs, ys):
        ends = [place(x[0]), place(y[0]), place(x[2]), place(y[2])]
        if None in ends:
            raise NotMath
        low, high = (x if ends[0] > ends[1] else y), (x if ends[2] < ends[3] else y)
        low_in = x[1] and y[1] if same(x[0], y[0]) else low[1]
        high_in = x[3] and y[3] if same(x[2], y[2]) else high[3]
        if (place(low[0]) < place(high[2]) and not same(low[0], high[2])) or (
            low_in and high_in and same(low[0], high[2])
        ):
            pieces.append((low[0], low_in, high[2], high_in))
    return pieces


def place(node: tuple) -> float | None:
    """Where an endpoint lies on the real line, for sorting only."""
    if node[0] == "inf":
        return math.inf * node[1]
    if node[0] in NOT_SCALAR or symbols(node):
        return None
    node = readings(node)[0]
    exact = rational(node)
    if exact is not None:
        return float(exact) if bits(exact) < 1_000 else None
    value = value_at(node, {}, 30)
    return float(value.real) if value is not None and is_real(value) else None


def punctured(piece: tuple, point: tuple) -> list[tuple]:
    low, low_in, high, high_in = piece
    ends = [place(low), place(high), place(point)]
    if None not in ends and not ends[0] <= ends[2] <= ends[1]:
        return [piece]
    if same(low, point):
        return [(low, False, high, high_in)]
    if same(high, point):
        return [(low, low_in, high, False)]
    return [(low, low_in, point, False), (point, False, high, high_in)]


def merge(pieces: list[tuple]) -> list[tuple]:
    """Sorted, with pieces that touch or overlap joined; left alone where an endpoint is a symbol."""
    if any(place(p[0]) is None or place(p[2]) is None for p in pieces):
        return pieces
    joined: list[tuple] = []
    for piece in sorted(pieces, key=lambda p: (place(p[0]), not p[1], place(p[2]))):
        if joined:
            low, low_in, high, high_in = joined[-1]
            touching = same(piece[0], high) and (piece[1] or high_in)
            if touching or (place(piece[0]) < place(high) and not same(piece[0], high)):
                if same(piece[2], high):
                    joined[-1] = (low, low_in, high, high_in or piece[3])
                elif place(piece[2]) > place(high):
                    joined[-1] = (low, low_in, piece[2], piece[3])
                continue
        joined.append(piece)
    return joined


# ---------------------------------------------------------------------------------------------------------------------
# Verdicts


@functools.lru_cache(maxsize=8192)
def plain_text(text: str) -> str:
    """Text answers are compared without wrappers, spaces, quotes and the final full stop; words also without case."""
    text = re.sub(r"\\(?:left|right|quad|qquad)(?![A-Za-z])|\\[,;:! ]|[$\"“”~]", " ", text)
    for _ in range(3 * ("\\" in text)):
        text = re.sub(rf"\\(?:{TEXT_COMMANDS})\s*\{{([^{{}}]*)\}}", r"\1", text)
    text = re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text).strip(".")  # "4 2" is not 42
    return text if re.search(r"[\\^_{}\d]", text) else text.casefold()


@functools.lru_cache(maxsize=8192)  # a group of completions shares its reference
def read(text: str, thousands: bool = True) -> tuple | None:
    """The node of an answer, or None for one that can only be compared as text. Raises TooLarge."""
    try:
        return MEANINGS.get(plain_text(text)) or Parser(tokenize(clean(text), thousands)).answer()
    except NotMath:
        return None


def is_readable(reference: str) -> bool:
    if len(reference) > MAX_ANSWER_CHARS:
        return False
    try:
        return (any(map(str.isalnum, reference)) and any(map(str.isalnum, plain_text(reference)))) or read(
            reference
        ) is not None
    except TooLarge:
        return False


def is_correct(answer: str | None, reference: str) -> Verdict:
    r"""Does `answer` stand for the same mathematical object as `reference`? Symmetric, bounded, never raises.

    >>> is_correct(r"\frac{2}{4}", "0.5")
    Verdict(equal=True, reason='equal', answer='\\frac{2}{4}')
    """
    verdict = verdict_without_parsing(answer, reference)
    if verdict is not None:
        return verdict
    _local.deadline, _local.doubt = time.monotonic() + BUDGET_SECONDS, False
    try:
        if not is_readable(reference):
            return Verdict(False, "unreadable reference", answer)
        equal = compare(answer, reference)
    except (TooLarge, RecursionError, MemoryError):
        return Verdict(False, "too large", answer)
    except OutOfTime:
        return Verdict(False, "timeout", answer)
    except (NotMath, Undefined):  # read well, but the comparison is not one that can be made
        return Verdict(False, "not proven", answer)
    except Exception:  # a fault of this file: counted, never paid, and no test may see one
        return Verdict(False, "error", answer)
    if equal:
        return Verdict(True, "equal", answer)
    if not any(map(str.isalnum, answer)):
        return Verdict(False, "unreadable answer", answer)
    return Verdict(False, "not proven" if _local.doubt else "different", answer)


def verdict_without_parsing(answer: str | None, reference: str) -> Verdict | None:
    if answer is None:
        return Verdict(False, "no answer")
    a, b = exact_number(answer), exact_number(reference)
    if a is not None and b is not None:
        return Verdict(a == b, "equal" if a == b else "different", answer)
    if len(answer) > MAX_ANSWER_CHARS:
        return Verdict(False, "too large", answer)
    return None


def compare(answer: str, reference: str) -> bool:
    answer, reference = (LEAD_IN.sub("", t, count=1) if "nswer" in t else t for t in (answer, reference))
    if answer.split() == reference.split():
        return True
    conditions = [CONDITION.search(text) for text in (answer, reference)]
    if all(conditions) and plain_text(conditions[0][0]) != plain_text(conditions[1][0]):
        return False
    answer, reference = (CONDITION.sub("", text) for text in (answer, reference))
    words = plain_text(answer), plain_text(reference)
    if all(word.isascii() and word.isalpha() and len(word) > 1 for word in words):
        return words[0] == words[1]  # two words are words, not products of letters: "no" is not "on"
    if CLOCK.fullmatch(words[0]) and CLOCK.fullmatch(words[1]):
        return words[0].lstrip("0") == words[1].lstrip("0")
    nodes = [expand_plus_minus(node) if node else None for node in (read(answer), read(reference))]
    if None in nodes:
        return words[0] == words[1] != ""
    if same(*nodes):
        return True
    if any(THOUSANDS.search(t) for t in (answer, reference)) and any(n[0] in COLLECTIONS for n in nodes):
        return same(read(answer, False), read(reference, False))  # 100,200 may be a list where the other side is one
    return False


CLOCK = re.compile(r"\d{1,2}:[0-5]\d")


def reward(completion: str, reference: str) -> float:
    """1.0 if the completion's boxed answer equals the reference, else 0.0. In process, bounded, from any thread."""
    return is_correct(extract_answer(completion), reference).reward


def unreadable_references(references: list[str]) -> list[int]:
    """Rows whose reference is neither mathematics nor text. Report them before training: no answer to them is paid."""
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
    assert len(completions) == len(references), (
        f"{len(completions)} completions but {len(references)} references: one each."
    )
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
    verdicts: list[Verdict | None] = [None] * len(pairs)
    waiting, tried = collections.deque(range(len(pairs))), set()
    while waiting or any(worker["row"] is not None for worker in _pool):
        while len(_pool) < min(workers, len(waiting)):
            _pool.append(_start_worker())
        for worker in _pool:
            if worker["row"] is None and waiting:
                worker["row"] = waiting.popleft()
                worker["deadline"] = time.monotonic() + (timeout if worker["ready"] else 60.0)
                _send(worker, pairs[worker["row"]])
        busy = [worker for worker in _pool if worker["row"] is not None]
        patience = max(0.0, min(worker["deadline"] for worker in busy) - time.monotonic())
        readable, _, _ = select.select([worker["process"].stdout for worker in busy], [], [], patience)
        for worker in busy:
            answer = pairs[worker["row"]][0]
            lines = _receive(worker) if worker["process"].stdout in readable else []
            if lines is None or (not lines and time.monotonic() > worker["deadline"]):
                if not worker["ready"]:
                    raise RuntimeError(
                        "A worker of reward.py did not start: run `python reward.py --worker` to see why."
                    )
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


def _start_worker() -> dict:
    process = subprocess.Popen(
        [sys.executable, os.path.abspath(__file__), "--worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    return {"process": process, "row": None, "deadline": 0.0, "ready": False, "buffer": b""}


def _send(worker: dict, pair: tuple[str, str]) -> None:
    with contextlib.suppress(BrokenPipeError):  # a dead worker is noticed when its output ends
        worker["process"].stdin.write(json.dumps(pair).encode() + b"\n")


def _receive(worker: dict) -> list[bytes] | None:
    """The complete lines that have arrived; None if the worker is gone."""
    data = os.read(worker["process"].stdout.fileno(), 1 << 16)
    if not data:
        return None
    *lines, worker["buffer"] = (worker["buffer"] + data).split(b"\n")
    return lines


def _end_worker(worker: dict) -> None:
    worker["process"].kill()
    worker["process"].wait()
    worker["process"].stdin.close()
    worker["process"].stdout.close()


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
# Shaping. Dynamic sampling and evaluation look at the unshaped reward; these are added for the loss.


def overlong_penalty(length: int, max_length: int, buffer: int, penalty: float = 1.0) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13) times `penalty`; lengths in tokens.

    >>> [overlong_penalty(length, max_length=100, buffer=20) for length in (50, 80, 90, 100, 110)]
    [0.0, 0.0, -0.5, -1.0, -1.0]
    """
    assert 0 < buffer <= max_length, (
        f"The overlong buffer {buffer} must lie between 1 and the maximal length {max_length}."
    )
    return 0.0 - penalty * min(max(length - (max_length - buffer), 0) / buffer, 1.0)


def truncated_reward(value: float, truncated: bool, policy: str) -> tuple[float, bool]:
    """(reward, is it trained on) of a completion that may have hit the token limit: `score`, `zero` or `mask` it.

    >>> [truncated_reward(1.0, True, policy) for policy in ("score", "zero", "mask")]
    [(1.0, True), (0.0, True), (0.0, False)]
    """
    assert policy in ("score", "zero", "mask"), f"A truncated completion is scored, zero or masked, not {policy!r}."
    if not truncated or policy == "score":
        return value, True
    return 0.0, policy == "zero"


def format_reward(completion: str, thinking: bool = False) -> float:
    """1.0 for a completion that ends in a readable box; with `thinking`, after exactly one closed thinking section.

    >>> format_reward(r"<think>…</think> \\boxed{4}", thinking=True), format_reward(r"\\boxed{4}", thinking=True)
    (1.0, 0.0)
    """
    sections = sum(completion.count(closing) for _, closing in THINKING_MARKS)
    return float(extract_answer(completion) is not None and (not thinking or sections == 1))


def load_reward(spec: str):
    """One's own reward for `--reward path.py:function`: called as `function(completion, reference)`, gives a float.

    The file is imported like any program: it is the user's own code, never the model's.
    """
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py") or not os.path.isfile(path):
        raise ValueError(f"--reward {spec}: expected path.py:function, and {path or spec} is no such Python file.")
    module_spec = importlib.util.spec_from_file_location(os.path.basename(path)[:-3], path)
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    if not callable(getattr(module, name, None)):
        raise ValueError(f"--reward {spec}: {path} has no function {name}.")
    return getattr(module, name)


# ---------------------------------------------------------------------------------------------------------------------
# Command line


def check(path: str) -> int:
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
    return 0


def explain(completion: str, reference: str) -> None:
    """Print every step from the completion to the verdict."""
    answer = extract_answer(completion) if "box" in completion else completion
    print(f"answer      {answer!r}\nreference   {reference!r}")
    for name, text in (("answer", answer), ("reference", reference)):
        if text is None:
            continue
        print(f"{name:<12}exact number: {exact_number(text)}")
        try:
            node = read(text)
        except TooLarge:
            print(f"{name:<12}too large to parse")
            continue
        print(f"{name:<12}" + (f"parsed: {node}" if node else f"no mathematics, compared as text {plain_text(text)!r}"))
    print(f"verdict     {is_correct(answer, reference)}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
