r"""When are two mathematical answers the same? Never from a guess: what is not proved equal counts as different.

    is_correct(r"\frac{1}{2}", "0.5")  ->  Verdict(equal=True, reason="equal", answer=r"\frac{1}{2}")

Reinforcement learning finds every hole of its grader, so every doubt counts as "not equal". A pair passes through

1. exact fractions where both sides are plain numbers (all of AIME ends here);
2. the parser of math_reading.py;
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

import functools
import hashlib
import itertools
import math
import operator
import re
import sys
import threading
import time
from dataclasses import dataclass
from fractions import Fraction

from math_reading import (  # isort: skip
    COLLECTIONS, CONDITION, LEAD_IN, MAX_ANSWER_CHARS, MAX_BITS, MAX_ITEMS, MEANINGS, MINUS_ONE, NOT_SCALAR, ONE,
    TEXT_COMMANDS, THOUSANDS, TRIG, NotMath, Parser, TooLarge, clean, count, exact_number, is_inequality, negative,
    substitute, times, tokenize,
)  # fmt: skip

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


class OutOfTime(BaseException):
    """The budget is spent. Not an Exception: sympy has `except Exception` in places."""


class Undefined(Exception):
    """No value: 0/0, log 0."""


# ---------------------------------------------------------------------------------------------------------------------
# Values: exact fractions, residues modulo a prime, and complex numbers of many digits
_local = threading.local()  # the deadline and the number context of the pair this thread is working on


def check_time() -> None:
    """OutOfTime once the pair has used its budget."""
    if time.monotonic() > _local.deadline:
        raise OutOfTime


def bits(value: Fraction) -> int:
    return value.numerator.bit_length() + value.denominator.bit_length()


def bounded(operation, a: Fraction, b: Fraction) -> Fraction:
    """operation(a, b), or TooLarge."""
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

    One half is the number that twice makes 1, so a quotient and its value meet:

    >>> half = ("div", ("num", Fraction(1)), ("num", Fraction(2)))
    >>> residue(half, 0) == residue(("num", Fraction(1, 2)), 0), 2 * residue(half, 0) % P
    (True, 1)
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
    if kind in ("pi", "e"):
        return +getattr(mp, kind)
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


# ---------------------------------------------------------------------------------------------------------------------
# Two scalars: disprove, then prove


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
    membership = any(n[0] == "rel" and "in" in n[1] for n in (a, b))
    if (
        kinds & {"interval", "union", "minus", "where", "reals", "and"}
        or is_inequality(a)
        or is_inequality(b)
        or membership
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
        return None, [node[1:]]
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
    candidates = [s for s in sides if s[0] == "sym" and s in unknowns] or (unknowns if len(unknowns) == 1 else ())
    if not candidates:
        return None
    unknown = next(iter(candidates))
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
    if operators[0] == "!=":
        return unknown, punctured(ALL_REALS, bound)
    if operators[0] == "=":
        return unknown, [(bound, True, bound, True)]
    closed = operators[0] in ("<=", ">=")
    if (operators[0] in ("<", "<=")) == positive:
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
        ordered, closed = place(low[0]) < place(high[2]), low_in and high_in
        if (ordered and not same(low[0], high[2])) or (closed and same(low[0], high[2])):
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
    """Is a reference mathematics or text, and not too long?"""
    if len(reference) > MAX_ANSWER_CHARS:
        return False
    try:
        words = all(any(map(str.isalnum, text)) for text in (reference, plain_text(reference)))
        return words or read(reference) is not None
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
    except Exception:  # a fault of this file: counted, never rewarded, and no test may see one
        return Verdict(False, "error", answer)
    if equal:
        return Verdict(True, "equal", answer)
    if not any(map(str.isalnum, answer)):
        return Verdict(False, "unreadable answer", answer)
    return Verdict(False, "not proven" if _local.doubt else "different", answer)


def verdict_without_parsing(answer: str | None, reference: str) -> Verdict | None:
    """The verdict where there is no answer, where both sides are plain numbers or the answer is too long; otherwise None."""
    if answer is None:
        return Verdict(False, "no answer")
    a, b = exact_number(answer), exact_number(reference)
    if a is not None and b is not None:
        return Verdict(a == b, "equal" if a == b else "different", answer)
    if len(answer) > MAX_ANSWER_CHARS:
        return Verdict(False, "too large", answer)
    return None


def compare(answer: str, reference: str) -> bool:
    """Are the two the same, as words or as mathematics?"""
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
