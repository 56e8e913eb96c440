r"""Text in, float out: is the boxed answer of a completion equal to the reference answer?

    python reward.py --check pairs.jsonl                # verdict table for lines {"gold": "…", "pred": "…"}
    python reward.py --explain '\frac{1}{2}' '0.5'      # one pair (answer, reference), step by step

Reinforcement learning finds every hole of its grader, so every doubt counts as "not equal". A pair passes through:
extract the last box → exact fractions where both sides are plain numbers → own recursive-descent parser (an allow-list: no
`eval`, no `sympify`, no `parse_expr` ever sees model text; sizes are checked before anything is computed) → numeric *disproof*
at 50 digits → *proof* (identity of polynomials modulo a prime, root separation bound for radicals, sympy within a budget).

Conventions, each a doctest. `same(answer, reference)` stands for `is_correct(answer, reference).equal`.

>>> same = lambda answer, reference: is_correct(answer, reference).equal
"""
from __future__ import annotations

import functools
import itertools
import json
import math
import re
import sys
import threading
import time
from dataclasses import dataclass
from fractions import Fraction

MAX_ANSWER_CHARS = 2_000  # a longer box is not an answer
MAX_DIGITS = 1_000  # of one number as written
MAX_BITS = 1 << 17  # of one exact number on the way; 10000! has 118,458
MAX_DEPTH = 40  # of nested brackets, fractions, roots
MAX_ITEMS = 200  # of a list, set or matrix
BUDGET_SECONDS = 1.0  # for one pair; a worker of `score` is killed a second later


@dataclass(frozen=True)
class Verdict:
    """What the grader decided about one completion. `reason` is one of few words, so that it can be counted:

    equal · different · not proven · no answer · unreadable answer · unreadable reference · too large · timeout · crashed
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
BOX_SEPARATOR = re.compile(rf"{BLANK}(?:[,;]{BLANK})?(?:(?:\\text\s*\{{\s*,?\s*(?:and|or)\s*\}}|\b(?:and|or)\b){BLANK})?")


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


def extract_answer(completion: str) -> str | None:
    r"""The content of the last box after the end of the thinking section, or None. Linear in the text.

    No answer: no box, a last box that never closes, thinking that never ends.
    Boxes with only a comma, "and" or "or" between them are one answer.

    >>> extract_answer(r"First \boxed{5}, no: \boxed{7}."), extract_answer(r"\boxed{3}, \boxed{5} and $\boxed{7}$")
    ('7', '3, 5, 7')
    >>> extract_answer(r"<think> \boxed{5} </think> I give up."), extract_answer(r"\boxed 5")
    (None, '5')
    """
    start = 0
    for opening, closing in THINKING_MARKS:  # chat templates may open the section in the prompt: the closing mark is enough
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
    return ", ".join(dict.fromkeys(reversed(contents))) if contents else None


# ---------------------------------------------------------------------------------------------------------------------
# The exact fast path: integers, decimals and fractions never reach the parser

INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
EXACT_NUMBER = re.compile(
    rf"\$?\s*([-+−]?)\s*(?:({INTEGER}\.?[0-9]*|\.[0-9]+)"
    r"|\\[dt]?frac\s*\{\s*(-?[0-9]+)\s*\}\s*\{\s*([0-9]+)\s*\}|([0-9]+)\s*/\s*([0-9]+))\s*\.?\s*\$?"
)


def exact_number(text: str) -> Fraction | None:
    r"""The value of a plainly written rational (`-7`, `073`, `1,024`, `.5`, `204.`, `3/4`, `\frac{3}{4}`), else None."""
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

SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻ⁿ", "0123456789-n"))
SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉ₙ", "0123456789n"))
UNICODE = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∗": "*", "÷": r"\div ", "∞": r"\infty ",
    "π": r"\pi ", "√": r"\sqrt ", "≤": r"\le ", "≥": r"\ge ", "⩽": r"\le ", "⩾": r"\ge ", "≠": r"\ne ", "≈": r"\approx ",
    "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "±": r"\pm ", "∓": r"\mp ", "°": r"^\circ ", "∅": r"\emptyset ",
    "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
    "⅕": r"\frac{1}{5}", "⅙": r"\frac{1}{6}", "⅛": r"\frac{1}{8}", "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ",
    "⌉": r"\rceil ", "…": r"\dots ", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "\u00a0": " ", "′": "'", "’": "'",
    "∖": r"\setminus ", "∣": "|", "٪": "%", "％": "%",
    **{chr(ord("！") + i): chr(ord("!") + i) for i in range(94) if chr(ord("!") + i) != "%"},  # full-width ASCII
}  # fmt: skip
GREEK = (
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau upsilon "
    "phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell"
).split()
UNICODE |= {c: f"\\{name} " for c, name in zip("αβγδεζηθικλμνξρστυφχψω", "alpha beta gamma delta epsilon zeta eta theta iota "
            "kappa lambda mu nu xi rho sigma tau upsilon phi chi psi omega".split())}  # fmt: skip

FUNCTIONS = {
    "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "ln", "log", "lg", "exp",
    "sqrt", "abs", "floor", "ceil", "min", "max", "gcd", "lcm", "binom", "factorial", "cbrt", "arcsinh", "arccosh", "arctanh",
}  # fmt: skip
ALIASES = {
    "asin": "arcsin", "acos": "arccos", "atan": "arctan", "cosec": "csc", "tg": "tan", "ctg": "cot", "arctg": "arctan",
    "ceiling": "ceil", "binomial": "binom", "dbinom": "binom", "tbinom": "binom", "sgn": "sign", "Abs": "abs",
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "leq": "le", "leqslant": "le", "geq": "ge", "geqslant": "ge",
    "neq": "ne", "simeq": "approx", "sim": "approx", "times": "*", "cdot": "*", "ast": "*", "div": "/", "le": "<=",
    "ge": ">=", "ne": "!=", "lt": "<", "gt": ">", "mid": "|", "vert": "|", "lvert": "|", "rvert": "|", "colon": ":",
    "lbrace": r"\{", "rbrace": r"\}", "lbrack": "[", "rbrack": "]", "cdots": "dots", "ldots": "dots", "dotsc": "dots",
    "varnothing": "emptyset", "degree": "circ", "infinity": "infty", "inf": "infty", "oo": "infty", "prime": "'",
    "backslash": "setminus", "land": "and", "lor": "or", "Pi": "pi", "iff": "or", "wedge": "and", "vee": "or",
}  # fmt: skip
ALIASES |= {"leq": "<=", "leqslant": "<=", "geq": ">=", "geqslant": ">=", "neq": "!="}
SPACING = {
    "left", "right", "big", "Big", "bigg", "Bigg", "bigl", "bigr", "Bigl", "Bigr", "displaystyle", "textstyle", "limits",
    "nolimits", "quad", "qquad", "thinspace", "enspace", "mathstrut", "hfill", "middle",
}  # fmt: skip
WRAPPERS = {"overline", "vec", "hat", "bar", "angle", "triangle", "measuredangle", "overrightarrow", "widehat", "operatorname"}
TEXT_COMMANDS = r"text|mbox|hbox|textbf|textit|textrm|textsf|texttt|textnormal|mathrm|mathbf|mathit|mathsf|rm|bf|boldsymbol|operatorname|mathcal|emph|bold|pmb"
UNITS = set(
    "cm mm km dm ft inch inches foot feet mi mile miles yd yard yards meter meters metre metres centimeter centimeters "
    "kilometer kilometers kg gram grams mg lb lbs pound pounds oz ounce ounces ton tons liter liters litre litres ml hour "
    "hours hr hrs minute minutes min mins second seconds sec secs day days week weeks month months year years mph kph "
    "degree degrees deg radian radians rad percent pct unit units dollar dollars cent cents yuan euro euros rupees yen usd "
    "square cubic sq people students ways way times time point points apples coins km/h m/s".split()
)
UNIT_NAMES = {"centimeter": "cm", "centimetre": "cm", "meter": "m", "metre": "m", "kilometer": "km", "kilometre": "km", "feet": "foot", "ft": "foot",
    "inche": "inch", "in": "inch", "hour": "hr", "h": "hr", "minute": "min", "second": "sec", "kilogram": "kg", "gram": "g", "centimeter 2": "cm 2"}
STOP_WORDS = set("not no or and is are isn't if than when unless but never wrong either neither nor was except either or maybe".split())

TOKEN = re.compile(
    r"(?P<space>\s+|~|\\[,;:! ])|\\(?:mathbb|Bbb)\s*\{?\s*(?P<numbers>[A-Z])\s*\}?"
    rf"|\\(?:{TEXT_COMMANDS})\s*\{{(?P<text>[^{{}}]*)\}}"
    r"|(?P<num>\d+\.(?!\.)\d*(?:[eE][+-]?\d+)?|\d+(?:[eE][+-]?\d+)?|\.\d+)"
    r"|(?P<newline>\\\\)|\\(?P<cmd>[A-Za-z]+)|(?P<word>[A-Za-z]+)|(?P<op>\*\*|<=|>=|!=|==|:=|\.\.\.+|\\[{}|%$&#]|.)",
    re.DOTALL,
)
THOUSANDS = re.compile(r"(?<![\d.,])(\d{1,3}(?:,\d{3})+)(?![\d,])")
CONDITION = re.compile(r"(?:for\s+(?:all|any|every|each|some|integers?)|where|in\s+general)\b")
SEPARATOR = re.compile(r",?\s*(?:and|or)\s*,?")
INLINE = re.compile(r"[-+]?\s*[\d.,/%()\s]*\d[\d.,/%()\s]*(?:[A-Za-z\s]*)|\(?\s*[A-Za-z]\s*\)?[.:]?|\W*")
LEAD_IN = re.compile(r"(?:so|thus|hence|therefore)?,?\s*(?:the\s+)?(?:final\s+)?answer\s*(?:is|:|=)\s*:?\s*", re.IGNORECASE)


def clean(text: str) -> str:
    """One spelling for the characters that have several: unicode signs, dollars, thin spaces inside numbers."""
    if not text.isascii():
        text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻ⁿ]+", lambda m: "^{" + "".join(SUPERSCRIPTS[c] for c in m[0]) + "}", text)
        text = re.sub("[₀₁₂₃₄₅₆₇₈₉ₙ]+", lambda m: "_{" + "".join(SUBSCRIPTS[c] for c in m[0]) + "}", text)
        text = "".join(UNICODE.get(c, c) for c in text)
    text = re.sub(r"\\\$|\$|\\[()\[\]]|[£€¥]|^\*\*|\*\*$|<br>|^\s*\\\\", " ", text)
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
            elif CONDITION.match(inner) and depth == 0:
                break
            elif len(inner) < 100 and INLINE.fullmatch(inner):
                tokens += tokenize(inner, thousands and depth == 0)
            elif ALIASES.get(inner, inner) in FUNCTIONS:
                tokens.append(("cmd", ALIASES.get(inner, inner)))
            else:
                tokens.append(("text", inner))
            continue
        if kind in ("cmd", "word"):
            if kind == "cmd" and value in SPACING:
                continue
            value = ALIASES.get(value, value) if kind == "cmd" or len(value) > 1 else value
            if value in ("and", "or"):
                kind = "op"
            elif kind == "word" and value in ("for", "where") and depth == 0 and CONDITION.match(text, match.start()):
                break
            elif not value.isalpha():
                kind = "op"
        if kind == "newline":
            kind = "op"
        value = {"\\|": "|", "**": "^", "==": "=", ":=": "=", "\\%": "%", "\\&": "and"}.get(value, value)
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
#   scalars     ("num", Fraction) ("sym", name) ("pi",) ("e",) ("i",) ("inf", ±1) ("add", …) ("mul", …) ("div", a, b) ("pow", a, b)
#               ("fn", name, …) ("app", name, …): an unknown function ("sum"|"prod", variable, low, high, body)
#   factors     ("pm", ±1): plus-minus  ("deg",): the degree sign  ("pct",): the percent sign
#   statements  ("rel", operators, sides) with operators from = != < <= > >= approx in; ("where", element, condition)
#   containers  ("list", …) ("or", …) ("tuple", …) ("bracket", …) ("set", …) ("ratio", …) ("matrix", row tuples …)
#               ("interval", low, low is in, high, high is in) ("union", …) ("minus", a, b)
#   others      ("unit", value, name) ("base", digits, base) ("reals",)

ONE, MINUS_ONE = ("num", Fraction(1)), ("num", Fraction(-1))
RELATIONS = {"=", "!=", "<", "<=", ">", ">=", "approx", "in"}
SETS = {"interval", "union", "minus", "where", "reals", "set"}
COLLECTIONS = {"list", "or", "tuple", "bracket", "set", "ratio", "matrix"}
NOT_SCALAR = SETS | COLLECTIONS | {"rel", "unit", "base"}
TRIG = {"sin", "cos", "tan", "cot", "sec", "csc"}


def negative(node: tuple) -> tuple:
    if node[0] == "num":
        return ("num", -node[1])
    if node[0] == "inf":
        return ("inf", -node[1])
    if node[0] == "unit":
        return ("unit", negative(node[1]), node[2])
    return times(MINUS_ONE, node)


def times(*factors: tuple) -> tuple:
    matrices = [f for f in factors if f[0] == "matrix"]
    if len(matrices) == 1:  # a scalar times a matrix
        rest = [f for f in factors if f[0] != "matrix"]
        return ("matrix", *(tuple(times(*rest, cell) for cell in row) for row in matrices[0][1:]))
    if any(f[0] in NOT_SCALAR for f in factors):
        raise NotMath
    return ("mul", *factors)


def substitute(node: tuple, old: tuple, new: tuple) -> tuple:
    if node == old:
        return new
    return tuple(substitute(part, old, new) if isinstance(part, tuple) else part for part in node)


def contains(node: tuple, kinds: set[str]) -> bool:
    return node[:1] != () and (
        (isinstance(node[0], str) and node[0] in kinds) or any(isinstance(p, tuple) and contains(p, kinds) for p in node)
    )


class Parser:
    """Recursive descent over the tokens; every method reads one rule of the grammar and returns its node."""

    def __init__(self, tokens: list[tuple[str, str]]):
        self.tokens, self.position, self.depth = tokens, 0, 0
        self.bars: list[str] = []  # what a "|" closes: "abs", or "set" inside { x | … }

    # -- the token stream

    def peek(self, offset: int = 0) -> tuple[str, str]:
        at = self.position + offset
        return self.tokens[at] if at < len(self.tokens) else ("end", "")

    def next(self) -> tuple[str, str]:
        token = self.peek()
        self.position += 1
        return token

    def accept(self, *values: str) -> str | None:
        kind, value = self.peek()
        if kind in ("op", "cmd", "word") and value in values:
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
        groups, items, separators = [], [self.statement()], []
        while self.peek()[1] not in closers and self.peek()[0] != "end":
            separator = self.expect(",", ";", "and", "or")
            while also := self.accept(",", "and", "or"):
                separator = also
            if self.peek()[0] == "end" or self.peek()[1] in closers:
                break  # a trailing comma
            if separator == ";" and (groups or "," in separators):
                groups.append(items)
                items = []
            separators.append(separator)
            items.append(self.statement())
            if len(items) > MAX_ITEMS:
                raise TooLarge
        if ";" in separators and "," in separators:
            groups.append(items)
            items = [g[0] if len(g) == 1 else ("list", *g) for g in groups]
        if len(items) == 1:
            return items[0]
        return ("or" if set(separators) == {"or"} else "list", *items)

    def statement(self) -> tuple:
        """side (relation side)*, or a worded label `Minimum: 1`."""
        while self.peek()[0] in ("word", "text") and self.peek(1)[1] in (":", "=") and len(self.peek()[1]) > 3:
            if self.peek()[1] in UNITS or self.peek()[1] in ALIASES:
                break
            self.position += 2  # a worded label names the value and says no more
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
        """A sum, a ratio `1:2:3` or a union of sets."""
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
        if kind == "text" or (kind == "word" and value in UNITS) or (kind == "word" and self.plain_words()):
            node = self.units(node)
        return node

    def plain_words(self) -> bool:
        """Do only words follow, as in `7 apples`?"""
        rest = self.tokens[self.position :]
        return 0 < len(rest) <= 3 and all(k == "word" and len(v) > 3 for k, v in rest)

    def units(self, value: tuple) -> tuple:
        words = []
        while True:
            kind, token = self.peek()
            if kind in ("text", "word"):
                words += re.findall(r"[A-Za-z%]+|\S", token)
            elif token == "^" and self.peek(1)[1] in ("2", "3"):
                words.append(self.peek(1)[1])
                self.position += 1
            elif token == "^" and self.peek(1)[1] == "{" and self.peek(2)[1] in ("2", "3") and self.peek(3)[1] == "}":
                words.append(self.peek(2)[1])
                self.position += 3
            elif token != "/":
                break
            self.position += 1
        if value[0] in NOT_SCALAR - {"list"} or len(words) > 8 or STOP_WORDS & {w.lower() for w in words}:
            raise NotMath
        name = " ".join(w.lower().removesuffix("s") for w in words)
        if name in ("degree", "deg"):
            return times(value, ("deg",))
        if name in ("percent", "pct", "%"):
            return times(value, ("pct",))
        return ("unit", value, UNIT_NAMES.get(name, name))

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
        if any(t[0] in NOT_SCALAR for t in terms):
            if all(t[0] == "matrix" for t in terms):
                return add_matrices(terms)
            raise NotMath
        return ("add", *terms)

    def dots(self) -> tuple | None:
        """An ellipsis stands for itself as an item of a list; inside a sum it says too little to compare."""
        if self.accept("dots") or (self.peek()[1].startswith("...") and self.next()):
            return ("sym", "…")
        return None

    def term(self) -> tuple:
        node = self.power()
        while True:
            if self.peek()[1] == "\\div":
                self.position += 1
            if self.accept("*"):
                node = times(node, self.signed_power())
            elif self.accept("/"):
                right = self.signed_power()
                if node[0] in NOT_SCALAR or right[0] in NOT_SCALAR:
                    raise NotMath
                node = ("div", node, right)
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
            return value not in UNITS and (len(value) <= 3 or is_known(value)) and not (
                value == "U" and self.peek(1)[1] in ("(", "[", "\\{")
            )
        if kind == "cmd":
            return is_known(value) or value in GREEK or value in ("begin", "sum", "prod", "frac", "lfloor", "lceil") or value in WRAPPERS
        if value == "|":
            return not self.bars
        return kind == "num" or value in ("(", "[", "{", "\\{")

    def power(self) -> tuple:
        node = self.atom()
        while True:
            if self.accept("!"):
                node = ("fn", "factorial", node)
            elif self.accept("%"):
                node = times(node, ("pct",))
            elif self.accept("'"):
                if node[0] != "sym":
                    raise NotMath
                node = ("sym", node[1] + "'")
            elif self.accept("circ"):
                node = times(node, ("deg",))
            elif self.accept("^"):
                node = self.exponent(node)
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
        if name[0] in "fgh":
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
        if self.peek()[1] == "{" and self.peek(2)[1] == "}" and self.peek(1)[1] in ("circ", "'", "th", "st", "nd", "rd"):
            mark = self.peek(1)[1]
            self.position += 3
            if mark == "'":
                return ("sym", base[1] + "'") if base[0] == "sym" else self.fail()
            return times(base, ("deg",)) if mark == "circ" else base  # an ordinal: 12^{th} is 12
        sign = self.accept("+", "-")
        exponent = self.atom()
        if self.accept("^"):
            exponent = self.exponent(exponent)
        if base[0] in NOT_SCALAR or exponent[0] in NOT_SCALAR:
            raise NotMath
        return ("pow", base, negative(exponent) if sign == "-" else exponent)

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
            return ("fn", "abs", node)
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
        if self.peek() == ("op", "_"):
            self.position += 1
            base = self.group_or_atom()
            if base[0] != "num" or not digits.isdigit():
                raise NotMath
            return ("base", digits.lstrip("0"), base[1])
        if self.peek()[0] == "word" and self.peek()[1] in ("th", "st", "nd", "rd") and digits.isdigit():
            self.position += 1  # an ordinal: 15th is 15
        if digits.endswith(".") and self.peek() in (("cmd", "overline"), ("cmd", "dot"), ("cmd", "bar")):
            return self.repeating(digits)
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
        if kind in ("num", "word") and len(value) > 1 and not is_known(value):
            self.tokens[self.position] = (kind, value[1:])
            return ("num", Fraction(int(value[0]))) if kind == "num" and value[0].isdigit() else self.symbol(value[0])
        return self.atom()

    def group_or_atom(self) -> tuple:
        if self.accept("{"):
            node = self.sum()
            self.expect("}")
            return node
        return self.atom()

    def command(self, name: str) -> tuple:
        if name in ("pi", "infty"):
            return ("pi",) if name == "pi" else ("inf", 1)
        if name == "emptyset":
            return ("set",)
        if name == "frac":
            return self.fraction()
        if name in WRAPPERS:
            return self.group_or_atom()
        if name in GREEK:
            return self.symbol(name)
        if name in ("lfloor", "lceil"):
            node = self.sum()
            self.expect("rfloor" if name == "lfloor" else "rceil")
            return ("fn", "floor" if name == "lfloor" else "ceil", node)
        if name == "langle":
            items = self.items(closers=("rangle",))
            self.expect("rangle")
            return ("tuple", *items[1:]) if items[0] == "list" else self.fail()
        if name in ("sum", "prod"):
            return self.big_operator(name)
        if name == "begin":
            return self.matrix()
        raise NotMath

    def fraction(self) -> tuple:
        top, bottom = self.short_argument(), self.short_argument()
        if top[0] in NOT_SCALAR or bottom[0] in NOT_SCALAR:
            raise NotMath
        return ("div", top, bottom)

    def letters(self, word: str) -> tuple:
        """A word is a function without its space (`sinx`), or a product of letters (`xy`)."""
        for name in ("sin", "cos", "tan", "ln", "log"):
            if word.startswith(name) and len(word) == len(name) + 1:
                return ("fn", name, self.symbol(word[-1]))
        if len(word) > 3:
            raise NotMath
        return self.symbol(word) if len(word) == 1 else times(*(self.symbol(c) for c in word[:-1]), self.symbol(word[-1], True))

    def symbol(self, name: str, last: bool = True) -> tuple:
        if last and self.peek() == ("op", "_"):
            self.position += 1
            return self.subscript(name)
        return {"e": ("e",), "i": ("i",)}.get(name, ("sym", name))

    def subscript(self, name: str) -> tuple:
        if self.peek()[1] != "{":
            kind, value = self.next()
            return ("sym", f"{name}_{value}") if kind in ("num", "word", "cmd") else self.fail()
        self.position += 1
        start = self.position
        while self.peek()[1] != "}" and self.peek()[0] in ("num", "word", "cmd", "text"):
            self.position += 1
        if self.accept("}"):  # x_{max}: part of the name; a_{n+1}: an argument
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
            arguments = argument[1:] if argument[0] in ("tuple", "list") else (argument,)
            if any(a[0] in NOT_SCALAR for a in arguments):
                raise NotMath
            node = ("fn", name, *arguments)
        else:  # `\sin 2x` takes the product that follows, up to an operator, a bracket or the next function
            sign = self.accept("+", "-")
            argument = self.power()
            while self.starts_factor() and self.peek()[1] not in FUNCTIONS and self.peek()[1] not in ("(", "[", "\\{"):
                argument = times(argument, self.power())
            node = ("fn", name, negative(argument) if sign == "-" else argument)
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
        if len(node) != 3 and node[0] == "fn" and name not in ("min", "max", "gcd", "lcm", "binom"):
            raise NotMath
        return node if power is None else ("pow", node, power)

    def root(self, power: tuple | None) -> tuple:
        degree = ("num", Fraction(2))
        if self.accept("["):
            degree = self.sum()
            self.expect("]")
        argument = self.group_or_atom() if self.peek()[1] != "(" else self.brackets(self.next()[1])
        if argument[0] in NOT_SCALAR:
            raise NotMath
        node = ("pow", argument, ("div", ONE, degree))
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
        kind, name = self.next()
        self.expect("}")
        if name not in ("pmatrix", "bmatrix", "matrix", "array", "smallmatrix", "Bmatrix"):
            raise NotMath
        if name == "array" and self.accept("{"):
            while self.next()[1] not in ("}", ""):
                pass
        rows: list[tuple] = [()]
        while not self.accept("end"):
            if self.accept("\\\\"):
                rows.append(())
            elif not self.accept("&"):
                rows[-1] += (self.sum(),)
            if sum(map(len, rows)) > MAX_ITEMS or self.peek()[0] == "end":
                raise NotMath
        self.expect("{")
        if self.next()[1] != name:
            raise NotMath
        self.expect("}")
        return ("matrix", *(row for row in rows if row))


def is_known(word: str) -> bool:
    return word in FUNCTIONS or word in ("pi", "infty", "emptyset", "frac", "langle", "sum", "prod", "lfloor", "lceil") or (
        len(word) > 2 and word in GREEK
    )


def read_number(digits: str) -> Fraction:
    mantissa, _, exponent = digits.lower().partition("e")
    if len(exponent) > 5 or len(mantissa) > MAX_DIGITS:
        raise TooLarge
    whole, _, decimals = mantissa.partition(".")
    return Fraction(int(whole + decimals), 10 ** len(decimals)) * Fraction(10) ** int(exponent or 0)


def mixed_number(whole: tuple, top: Fraction, bottom: Fraction) -> tuple:
    if bottom == 0 or top.denominator != 1 or bottom.denominator != 1:
        raise NotMath
    if top >= bottom:  # 4 10/3 is no mixed number
        raise NotMath
    return ("num", whole[1] + top / bottom)


def add_matrices(matrices: list[tuple]) -> tuple:
    if len({tuple(map(len, m[1:])) for m in matrices}) != 1:
        raise NotMath
    return ("matrix", *(tuple(("add", *cells) for cells in zip(*rows)) for rows in zip(*(m[1:] for m in matrices))))


@functools.lru_cache(maxsize=8192)
def parse(text: str, thousands: bool = True) -> tuple:
    """The node of an answer. Raises NotMath or TooLarge."""
    return Parser(tokenize(clean(text), thousands)).answer()


# ---------------------------------------------------------------------------------------------------------------------
# Values: exact fractions, residues modulo a prime, and complex numbers of many digits

_local = threading.local()  # the deadline and the number context of the pair this thread is working on


def check_time() -> None:
    if time.monotonic() > _local.deadline:
        raise OutOfTime


def bits(value: Fraction) -> int:
    return value.numerator.bit_length() + value.denominator.bit_length()


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
        if kind == "add":
            result = sum(values)
        elif kind == "mul":
            result = math.prod(values)
        elif kind == "div":
            if values[1] == 0:
                raise Undefined
            result = values[0] / values[1]
        else:
            result = rational_power(*values)
        if result is not None and bits(result) > MAX_BITS:
            raise TooLarge
        return result
    return None


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
    if name in ("gcd", "lcm"):
        return Fraction(math.gcd(*integers) if name == "gcd" else math.lcm(*integers))
    if name == "factorial":
        if not 0 <= x <= 10_000:
            raise TooLarge
        return Fraction(math.factorial(int(x)))
    if name == "binom":
        if not 0 <= integers[1] <= 1_000 or not 0 <= integers[0] <= 10**6:
            raise TooLarge
        return Fraction(math.comb(*integers))
    return None


PRIME = 2**127 - 1


def residue(node: tuple, point: dict[tuple, int]) -> int:
    """The value modulo PRIME of a rational function with rational coefficients. Raises NotMath for anything else."""
    kind = node[0]
    if kind == "num":
        return node[1].numerator * pow(node[1].denominator, -1, PRIME) % PRIME
    if kind == "sym":
        return point[node]
    if kind == "add":
        return sum(residue(part, point) for part in node[1:]) % PRIME
    if kind == "mul":
        product = 1
        for part in node[1:]:
            product = product * residue(part, point) % PRIME
        return product
    if kind == "div":
        return residue(node[1], point) * pow(residue(node[2], point), -1, PRIME) % PRIME  # ValueError where it is zero
    if kind == "pow" and (exponent := rational(node[2])) is not None and exponent.denominator == 1 and abs(exponent) < 10**6:
        return pow(residue(node[1], point), int(exponent), PRIME)
    raise NotMath


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
    if name in ("gcd", "lcm"):
        raise NotMath
    short = {"arcsin": "asin", "arccos": "acos", "arctan": "atan", "arccot": "acot", "arcsec": "asec", "arccsc": "acsc",
             "arcsinh": "asinh", "arccosh": "acosh", "arctanh": "atanh", "abs": "fabs"}  # fmt: skip
    return getattr(mp, short.get(name, name))(x)


def unknown_value(name: str, values: list, mp):
    """An unknown function gets a fixed smooth value, so that f(1/2) = f(0.5) and f(1) differs from f(2) and from g(1)."""
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
    """Fixed rational points: small positive ones (inside the domain of roots, logs and arcs), larger ones, mixed signs."""
    points = []
    for index in range(9 if names else 1):
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


def differ(a: tuple, b: tuple, point: dict[tuple, Fraction]) -> bool | None:
    """True if a ≠ b at this point, None if the point says nothing (a value is undefined)."""
    x, y = value_at(a, point, 50), value_at(b, point, 50)
    if x is None or y is None:
        return None
    mp = _local.mp
    gap, size = abs(x - y), max(abs(x), abs(y))
    if gap <= size * mp.mpf(10) ** -35:
        return False
    if gap > size * mp.mpf(10) ** -6 and size > mp.mpf(10) ** -6:
        return True
    x, y = value_at(a, point, 150), value_at(b, point, 150)  # cancellation shrinks with more digits, a difference stays
    return abs(x - y) > gap * mp.mpf(10) ** -20


def is_real(value) -> bool:
    return abs(_local.mp.im(value)) <= abs(value) * _local.mp.mpf(10) ** -30


def disproved(a: tuple, b: tuple) -> bool:
    """Do the two differ somewhere? Symbols are real; what counts is where both sides are real (or where neither ever is)."""
    names = sorted(symbols(a) | symbols(b), key=str)
    explicit = contains(a, {"i"}) or contains(b, {"i"}) or not names
    both_complex, compared = [], 0
    for point in sample_points(names):
        x, y = value_at(a, point, 50), value_at(b, point, 50)
        if x is None or y is None:
            if names and (x is None) != (y is None) and "fn" in (a[0], b[0]):
                pass
            continue
        if not explicit:
            real = is_real(x), is_real(y)
            if real[0] != real[1]:
                return True
            if not real[0]:
                both_complex.append(point)
                continue
        compared += 1
        if differ(a, b, point):
            return True
    if compared == 0:
        return not both_complex or any(differ(a, b, point) for point in both_complex)
    return False


def proved(a: tuple, b: tuple) -> bool:
    """Is a = b certain? Only asked once no point has told them apart."""
    names = symbols(a) | symbols(b)
    if names:
        try:
            return same_residues(a, b, names)
        except NotMath:
            pass
    elif (bound := separation(("add", a, negative(b)))) is not None:
        if bound > 30_000:
            return False
        digits = int(bound * 0.302) + 40
        x, y = value_at(a, {}, digits), value_at(b, {}, digits)
        return x is not None and y is not None and abs(x - y) < _local.mp.mpf(2) ** -int(bound)
    return proved_by_sympy(a, b)


def same_residues(a: tuple, b: tuple, names: set[tuple]) -> bool:
    """Schwartz-Zippel: two rational functions of degree d agree at a random residue by chance with probability d / 2^127."""
    for trial in range(5):
        point = {name: pow(3 + 2 * trial, 10**9 + 7 * k * k + 13 * k, PRIME) for k, name in enumerate(sorted(names, key=str))}
        try:
            return residue(a, point) == residue(b, point)
        except ValueError:  # a denominator vanished
            continue
    return False


def separation(node: tuple) -> float | None:
    """Bits of precision at which a zero of this constant is a proof, or None if it is not built from roots and rational angles.

    The bound of Burnikel, Funke, Mehlhorn, Schirra and Schmitt: node = U/L with algebraic integers whose conjugates are at
    most u and l; if it is not zero then |node| ≥ 1 / (u^(D-1) l), where D is the degree, at most the product of all roots.
    """
    roots: set[tuple] = set()
    angles = [1]

    def walk(part: tuple) -> tuple[float, float]:  # (log2 u, log2 l)
        kind = part[0]
        if kind == "num":
            return math.log2(abs(part[1].numerator) or 1), math.log2(part[1].denominator)
        if kind == "i":
            angles.append(2)
            return 0.0, 0.0
        if kind == "mul":
            pairs = [walk(p) for p in part[1:]]
            return sum(p[0] for p in pairs), sum(p[1] for p in pairs)
        if kind == "add":
            pairs = [walk(p) for p in part[1:]]
            bottom = sum(p[1] for p in pairs)
            return max(p[0] + bottom - p[1] for p in pairs) + math.log2(len(pairs)), bottom
        if kind == "div":
            (a, b), (c, d) = walk(part[1]), walk(part[2])
            return a + d, b + c
        if kind == "pow" and (exponent := rational(part[2])) is not None:
            u, l = walk(part[1])
            if exponent < 0:
                u, l = l, u
            u, l, k = u * abs(exponent.numerator), l * abs(exponent.numerator), exponent.denominator
            if k == 1:
                return u, l
            roots.add((part[1], k))
            return ((u + l * (k - 1)) / k, l) if u >= l else (u, (u * (k - 1) + l) / k)
        if kind == "fn" and part[1] in TRIG:
            turn = rational(substitute(part[2], ("pi",), ONE))
            twice = rational(substitute(part[2], ("pi",), ("num", Fraction(2))))
            if turn is None or twice != 2 * turn:  # not a rational multiple of π
                raise NotMath
            angles.append(turn.denominator)
            u = {"sin": (1.0, 1.0), "cos": (1.0, 1.0)}.get(part[1], (2.0, 2.0 * turn.denominator))
            return u
        if kind == "fn" and part[1] == "abs":
            return walk(part[2])
        raise NotMath

    try:
        u, l = walk(node)
    except NotMath:
        return None
    degree = math.prod(k for _, k in roots) * 2 * math.lcm(*angles)
    return (degree - 1) * max(u, 0.0) + l + 2 * u + 64


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
            exponent = rational(node[2])
            if exponent is not None and abs(exponent) > 64 and not rational(node[1]):
                raise TooLarge  # expanding it would take for ever
            return sympy.Pow(build(node[1]), build(node[2]))
        if kind == "fn":
            table = {
                "ln": sympy.log, "arcsin": sympy.asin, "arccos": sympy.acos, "arctan": sympy.atan, "arcsinh": sympy.asinh,
                "arccosh": sympy.acosh, "arctanh": sympy.atanh, "abs": sympy.Abs, "ceil": sympy.ceiling, "min": sympy.Min,
                "max": sympy.Max, "binom": sympy.binomial, "factorial": sympy.factorial, "floor": sympy.floor,
                **{name: getattr(sympy, name) for name in TRIG | {"sinh", "cosh", "tanh"}},
            }  # fmt: skip
            if node[1] not in table:
                raise NotMath
            return table[node[1]](*map(build, node[2:]))
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
            sympy.simplify,
        )
        return any(attempt(difference) == 0 for attempt in attempts)

    with _sympy_lock:
        return bool(within_budget(prove))


_sympy_lock = threading.Lock()  # sympy's caches and mpmath's global precision are not made for several threads


def within_budget(function):
    """Run `function`, raising OutOfTime at the deadline: a trace function works in any thread, `signal.alarm` only in one."""
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
    """1 ± 2 is the list 1 + 2, 1 - 2; in one expression all signs go together, in a tuple each coordinate has its own."""
    if not contains(node, {"pm"}):
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
    if node[0] == "rel" and node[1] == ("=",) and not contains(node[2][0], {"pm"}):
        values = expand_plus_minus(node[2][1])
        return ("list", *(("rel", ("=",), (node[2][0], value)) for value in values[1:]))
    if node[0] in NOT_SCALAR - {"unit"}:
        raise NotMath
    signs = [substitute(substitute(node, ("pm", 1), s), ("pm", -1), negative(s)) for s in (ONE, MINUS_ONE)]
    return ("list", *signs)


def readings(node: tuple) -> list[tuple]:
    """The values that an expression with degree or percent signs can stand for: 30° is 30 or π/6, 28% is 28 or 0.28."""
    results = [node]
    if contains(node, {"deg"}):
        results = [substitute(r, ("deg",), v) for r in results for v in (ONE, ("div", ("pi",), ("num", Fraction(180))))]
    if contains(node, {"pct"}):
        bare = [substitute(r, ("pct",), ONE) for r in results]
        results = [substitute(r, ("pct",), ("num", Fraction(1, 100))) for r in results]
        results += [r for r in bare if (value := rational(r)) is not None and abs(value) > 1]
    return results


def same(a: tuple, b: tuple) -> bool:
    """Do two nodes stand for the same object? Symmetric."""
    if a == b:
        return True
    check_time()
    a, b = expand_plus_minus(a), expand_plus_minus(b)
    if a[0] == "unit" and b[0] == "unit":
        return a[2] == b[2] and same(a[1], b[1])
    a, b = (n[1] if n[0] == "unit" else n for n in (a, b))
    kinds = {a[0], b[0]}
    if kinds & {"interval", "union", "minus", "where", "reals"} or (is_inequality(a) or is_inequality(b)) or "in" in statement_operators(a, b):
        return same_sets(a, b)
    if "rel" in kinds:
        return same_statements(a, b)
    if kinds & {"base", "ratio"}:
        return a[0] == b[0] and same_ratios(a, b)
    if kinds & COLLECTIONS:
        return same_collections(a, b)
    for sign in ("deg", "pct"):
        if contains(a, {sign}) and contains(b, {sign}):
            a, b = (substitute(n, (sign,), ("num", Fraction(1, 100)) if sign == "pct" else ONE) for n in (a, b))
    return any(same_scalar(x, y) for x in readings(a) for y in readings(b))


def statement_operators(*nodes: tuple) -> set[str]:
    return {operator for node in nodes if node[0] == "rel" for operator in node[1]}


def is_inequality(node: tuple) -> bool:
    if node[0] == "or":
        return all(is_inequality(n) or n[0] in SETS or (n[0] == "rel" and n[1] == ("=",)) for n in node[1:]) and any(map(is_inequality, node[1:]))
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
        if "set" in (a[0], b[0]):
            xs, ys = without_repeats(xs), without_repeats(ys)
        return same_multisets(xs, ys)
    if a[0] != b[0] and not ("list" in (a[0], b[0]) and {a[0], b[0]} <= {"list", "tuple", "bracket"}):
        return False
    return len(a) == len(b) and all(map(same, a[1:], b[1:]))


def same_multisets(xs: list[tuple], ys: list[tuple]) -> bool:
    if len(xs) != len(ys):
        return False
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
    """(label, value) of `x = y = 3`, `3`, `2 + 2 = 4`; value is None for a statement that names no value, as x + y = 3."""
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
    if not all(same(sides[0], side) for side in sides[1:]):
        return None, None
    return label, sides[-1]


def same_labels(p: tuple, q: tuple) -> bool:
    return p == q or "app" in (p[0], q[0]) or p[0] not in ("sym",) or q[0] not in ("sym",)


def same_statements(a: tuple, b: tuple) -> bool:
    (p, x), (q, y) = read_statement(a), read_statement(b)
    if x is not None and y is not None:
        if p is None or q is None:
            return same(x, y)
        if p[0] == q[0] == "app" and p[1] == q[1] and len(p) == len(q) and all(n[0] == "sym" for n in p[2:] + q[2:]):
            for old, new in zip(q[2:], p[2:]):  # f(x) = x and f(t) = t define the same function
                y = substitute(y, old, new)
            return same(x, y)
        if (p == q or "app" in (p[0], q[0]) or "tuple" in (p[0], q[0])) and same(x, y):
            return not (p[0] == q[0] == "app") or p == q
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
    point = {name: ("num", Fraction(3 + 2 * k, 7)) for k, name in enumerate(names)}
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
        if a[0] == b[0] and a[0] in ("where", "union", "minus"):
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
    if kind == "set":
        return None, [(item, True, item, True) for item in node[1:]]
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
        upward = set(operators) <= {"<", "<="}
        if not upward and not set(operators) <= {">", ">="}:
            return None
        first, second = solve(operators[:1], sides[:2]), solve(operators[1:], sides[1:])
        if first is None or second is None or first[0] != second[0] or len(first[1]) != 1 or len(second[1]) != 1:
            return None
        p, q = first[1][0], second[1][0]
        low, high = (p, q) if p[2] == ("inf", 1) else (q, p)
        if low[2] != ("inf", 1) or high[0] != ("inf", -1):
            return None
        return first[0], [(low[0], low[1], high[2], high[3])]
    left, right = sides
    unknowns = symbols(left) ^ symbols(right) if "inf" not in (left[0], right[0]) else symbols(left) | symbols(right)
    unknown = next((s for s in sides if s[0] == "sym" and s in unknowns), None) or (unknowns.pop() if len(unknowns) == 1 else None)
    if unknown is None:
        return None
    operator = operators[0]
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
    if operator == "!=":
        return unknown, punctured(ALL_REALS, bound)
    if operator == "=":
        return unknown, [(bound, True, bound, True)]
    closed = operator in ("<=", ">=")
    if (operator in ("<", "<=")) == positive:
        return unknown, [(("inf", -1), False, bound, closed)]
    return unknown, [(bound, closed, ("inf", 1), False)]


def place(node: tuple) -> float | None:
    """Where an endpoint lies on the real line, for sorting only."""
    if node[0] == "inf":
        return math.inf * node[1]
    if node[0] in NOT_SCALAR or symbols(node):
        return None
    value = value_at(readings(node)[0], {}, 30)
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


def plain_text(text: str) -> str:
    """Text answers are compared without wrappers, case, spaces, quotes and the final full stop."""
    text = re.sub(r"\\(?:left|right|quad|qquad)\b|\\[,;:! ]", " ", text)
    text = re.sub(rf"\\(?:{TEXT_COMMANDS})\b|[{{}}$\"'*_]|\\", " ", text)
    return re.sub(r"\s+", "", text).casefold().strip(".")


def is_correct(answer: str | None, reference: str) -> Verdict:
    r"""Does `answer` stand for the same mathematical object as `reference`? Symmetric, bounded, never raises.

    >>> is_correct(r"\frac{2}{4}", "0.5")
    Verdict(equal=True, reason='equal', answer='\\frac{2}{4}')
    """
    if answer is None:
        return Verdict(False, "no answer")
    a, b = exact_number(answer), exact_number(reference)
    if a is not None and b is not None:
        return Verdict(a == b, "equal" if a == b else "different", answer)
    if len(reference) > MAX_ANSWER_CHARS or not any(map(str.isalnum, plain_text(reference))):
        return Verdict(False, "unreadable reference", answer)
    if len(answer) > MAX_ANSWER_CHARS:
        return Verdict(False, "too large", answer)
    _local.deadline, _local.doubt = time.monotonic() + BUDGET_SECONDS, False
    try:
        equal = compare(answer, reference)
    except (TooLarge, RecursionError, MemoryError, OverflowError):
        return Verdict(False, "too large", answer)
    except OutOfTime:
        return Verdict(False, "timeout", answer)
    except (NotMath, Undefined, ZeroDivisionError, ValueError, ArithmeticError, TypeError, AttributeError, NotImplementedError):
        return Verdict(False, "not proven", answer)
    if equal:
        return Verdict(True, "equal", answer)
    if not any(map(str.isalnum, answer)):
        return Verdict(False, "unreadable answer", answer)
    return Verdict(False, "not proven" if _local.doubt else "different", answer)


def compare(answer: str, reference: str) -> bool:
    answer, reference = (LEAD_IN.sub("", t, count=1) if "nswer" in t else t for t in (answer, reference))
    if "".join(answer.split()) == "".join(reference.split()):
        return True
    words = plain_text(answer), plain_text(reference)
    if words[0].isalpha() and words[1].isalpha() and min(map(len, words)) > 1 and "\\" not in clean(answer) + clean(reference):
        return words[0] == words[1]  # two words are words, not products of letters: "no" is not "on"
    times_ = [clean(t) for t in (answer, reference)]
    if all(CLOCK.fullmatch(t) for t in times_):
        return times_[0].lstrip("0") == times_[1].lstrip("0")
    nodes = []
    for text in (answer, reference):
        try:
            nodes.append(parse(text))
        except NotMath:
            nodes.append(None)
    if None in nodes:
        return words[0] == words[1] != ""
    if same(*nodes):
        return True
    if any(THOUSANDS.search(t) for t in (answer, reference)) and any(n[0] in COLLECTIONS for n in nodes):
        return same(parse(answer, False), parse(reference, False))  # 100,200 may be a list where the other side is one
    return False


CLOCK = re.compile(r"\d{1,2}:[0-5]\d")


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
