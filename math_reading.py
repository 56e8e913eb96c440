r"""What a mathematical answer says: LaTeX or plain text in, a small tree of tuples out.

    read_expression(r"\frac{1}{2}")  ->  ("div", ("num", 1), ("num", 2))

A recursive-descent parser that knows a list of commands and refuses the rest (`NotMath`). It builds tuples, nothing else: no
`eval`, `sympify`, `parse_expr` or ANTLR ever sees model text, and sizes are checked before anything is computed (`TooLarge`).
Whether two trees stand for the same object is math_answers.py's question.
"""

from __future__ import annotations

import re
from fractions import Fraction

MAX_ANSWER_CHARS = 2_000  # a longer box is not an answer
MAX_DIGITS = 1_000  # of one number as written
MAX_BITS = 1 << 18  # of one exact number on the way; 10000! has 118,458
MAX_DEPTH = 40  # of nested brackets, fractions, roots
MAX_ITEMS = 200  # of a list, set or matrix


class NotMath(Exception):
    """The text is not in the grammar; it can still be compared as text."""


class TooLarge(Exception):
    """A number, power or nesting beyond the limits above."""


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
# Parser
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


def is_inequality(node: tuple) -> bool:
    if node[0] == "or":
        return all(is_inequality(n) or n[0] in SETS or (n[0] == "rel" and n[1] == ("=",)) for n in node[1:]) and any(
            map(is_inequality, node[1:])
        )
    return node[0] == "rel" and bool(set(node[1]) & {"<", ">", "<=", ">=", "!="})


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
