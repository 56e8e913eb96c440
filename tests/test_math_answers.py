"""math_answers.py on its own. `pytest tests/test_math_answers.py`."""

import collections
import json
import time
from pathlib import Path

import pytest

import math_answers
from math_answers import Verdict, is_correct
from reward import (
    extract_answer,
)


@pytest.fixture(autouse=True)
def _time_enough(monkeypatch):
    """Verdicts are tested here, not speed: on a slow or busy machine the first proof, which imports sympy, takes over a second."""
    monkeypatch.setattr(math_answers, "BUDGET_SECONDS", 30.0)


ROOT = Path(__file__).parents[1]
DATA = ROOT.parent / "shared" / "data"
# Cases whose label needs another convention than "the last box is the answer".
OTHER_CONVENTION = {
    "v0165": "the box says 255; only the prose after it says 10,455, and prose is not graded where there is a box",
}


EQUAL = r"""
7425000 ; 7,425,000 ; 7{,}425{,}000 ; 7\,425\,000 ; 7.425\times 10^6 ; 7.425e6
204 ; 204.0 ; 204. ; +204 ; 0204 ; $204$ ; \text{204} ; 204\text{ units} ; x=204 ; 204^\circ ; \mathbf{204}
-5 ; −5 ; -5.0 ; -\frac{10}{2} ; \frac{-10}{2} ; -(5)
\frac{1}{2} ; 1/2 ; 0.5 ; .5 ; \frac12 ; \dfrac{2}{4} ; ½ ; 2^{-1} ; 50\% ; \frac{1}{2}\text{ meters} ; k=\frac12
\frac{1}{3} ; 0.\overline{3} ; \frac{100}{300}
1 ; 0.\overline{9} ; \frac{3}{3} ; \sin^2 x+\cos^2 x
918\frac{1}{2} ; 918.5 ; 918 1/2 ; \frac{1837}{2}
\sqrt{8} ; 2\sqrt{2} ; 2\sqrt2 ; 8^{1/2} ; √8 ; 2*sqrt(2) ; \frac{4}{\sqrt2}
\frac{\sqrt{6}-\sqrt{2}}{4} ; \sin 15^\circ ; \cos 75^\circ ; \sin\frac{\pi}{12}
\sqrt{5+2\sqrt6} ; \sqrt2+\sqrt3
\frac18 ; \sin 10^\circ \sin 50^\circ \sin 70^\circ
2-\sqrt3 ; \tan 15^\circ ; \frac{1}{2+\sqrt{3}}
-2 ; \sqrt[3]{-8} ; (-8)^{1/3}
120 ; 5! ; \binom{10}{3} ; \prod_{k=1}^{5} k ; 3×40
55 ; \sum_{k=1}^{10} k
3 ; \lfloor 3.7 \rfloor ; \lceil 2.1 \rceil ; |-3| ; \log_2 8 ; \max(1,3) ; \log_{10} 1000
i ; \sqrt{-1} ; -\frac{1}{i}
14-i ; 14.0 + -1.0i ; -i+14
1+2i ; i(2-i)
\frac{\pi}{2} ; pi/2 ; \frac{1}{2}\pi ; 90^\circ ; \arcsin 1
3\ln 2 ; \ln 8 ; \log 8
\frac{\log 2}{\log 2-\log 3} ; -\frac{\ln 2}{\ln 3-\ln 2}
e^{16}-1 ; exp(16)-1 ; \mathrm{e}^{16}-1
28\% ; 28 ; 28 pct ; 0.28 %wrong
x^2+2x+1 ; (x+1)^2 ; x**2+2*x+1 ; (x+1)(x+1)
x+y ; y+x
\frac{x+2}{7} ; \frac{x}{7}+\frac{2}{7}
\frac{1+a+b+c}c ; \dfrac{a + b + c + 1}{c}
\tan^2(y)+1 ; \sec^2(y) ; \frac{1}{\cos^2 y}
\sin 2x ; 2\sin x\cos x
\cos x ; \sin(90^\circ-x) ; \sin(\frac{\pi}{2}-x)
7\sin(\frac{\pi}{5}x)+1 ; 7*sin(pi*x/5)+1
2^{n+1} ; 2\cdot 2^n ; \frac{4\cdot 2^n}{2}
\frac{x}{\sqrt3} ; \frac{\sqrt3 x}{3}
|x| ; \sqrt{x^2}
F_n=\sum_{k=0}^{n-1} F_k F_{n-k-1} ; F_n=\sum_{j=0}^{n-1} F_{n-j-1} F_j
1,2 ; 2,1 ; 1 \text{ and } 2 ; \{1,2\} ; {1,2} ; \boxed
1,2 ; x=1,y=2 ; 2 \text{ or } 1
\{1,1,2\} ; \{2,1\}
\pm 3 ; 3,-3 ; \{-3,3\} ; x=\pm 3
1\pm\sqrt{19} ; 1+\sqrt{19}, 1-\sqrt{19}
0,\pm 1 ; \{-1,0,1\}
(1,\frac92) ; (1,4.5) ; (x,y)=(1,\frac{9}{2}) ; \left(1,\frac{9}{2}\right)
(1,2),(3,4) ; (3,4), (1,2) ; \{(1,2),(3,4)\} ; x=1,y=2 \text{ or } x=3,y=4
(0;1),(2;3) ; (2,3),(0,1)
[1,2) ; 1\le x<2 ; x\in[1,2) ; \{x \mid 1 \leq x < 2\} ; 2>x\ge 1 ; x \ge 1 \text{ and } x<2
(2,\infty) ; x>2 ; 2<x ; 3x>6 ; (2,+\infty)
(-\infty,3)\cup(3,\infty) ; x\ne 3 ; \mathbb{R}\setminus\{3\} ; (−∞,3)∪(3,∞)
(1,4) ; (1,3)\cup(2,4)
x<1 \text{ or } x\ge 3 ; (-\infty,1)\cup[3,\infty)
\mathbb{R} ; (-\infty,\infty) ; \text{all real numbers}
\emptyset ; \varnothing ; \{\} ; \text{no solution}
\begin{pmatrix}1&2\\3&4\end{pmatrix} ; \begin{bmatrix}1&2\\3&4\end{bmatrix} ; [[1,2],[3,4]]
\begin{pmatrix}1&2\\3&4\end{pmatrix} ; \left[\begin{array}{cc}1 & 2 \\3 & 4\end{array}\right]
\begin{pmatrix}1/2\\1\end{pmatrix} ; \frac12\begin{pmatrix}1\\2\end{pmatrix} ; (0.5,1)
y=2x+1 ; 2x-y+1=0 ; 4x-2y+2=0
y=2x+1 ; 2x+1 ; f(x)=2x+1
x^2/4+y^2/3=1 ; x^2/16+y^2/12=1/4 ; 3x^2+4y^2=12
f(x)=x ; f(z)=z
3:4 ; 6:8 ; 3 : 4
1:2:3 ; 2:4:6
52_8 ; 52_{8}
\text{Evelyn} ; Evelyn ; evelyn ; \mbox{Evelyn}.
B ; \text{(B)} ; (B) ; \textbf{B} ; \mathrm{B}
yes ; \text{Yes} ; Yes.
5 \text{ cm} ; 5 ; 5cm ; 5\,\mathrm{cm} ; 5\text{ centimeters}
12\text{ cm}^2 ; 12 ; 12 \text{ square feet}wrong
5000000 ; 5 \text{ million}
\$18.90 ; 18.9 ; 18.90\text{ dollars}
f(x)=1 ; f(x) = 1 \text{ for all } x ; 1
k\pi ; k\pi, k \in \mathbb{Z} ; \pi k\ (k\in\mathbb{Z})
5\pm 2 ; 7,3
\{-1\}\cup[0,7) ; [0,7)\cup\{-1\}
\frac{6^6-5^6}{6^5}\approx 3.99 ; \frac{31031}{7776}
""".strip()
EQUAL_CLASSES = [
    [side.strip() for side in line.split(" ; ") if not side.endswith("wrong") and side != r"\boxed"]
    for line in EQUAL.splitlines()
]
UNEQUAL = r"""
42 ; 41 ; 42.0000001 ; \pm 42 ; 42,42 ; 42 \text{ and } 42 ; 41=42 ; 42=41 ; x>41 ; 0<x<100 ; \{42\} ; 42! ; 42i ; 42x
42 ; 42_5 ; 4242 ; 4 2 ; 42 \text{ or } 43 ; 42\text{ is wrong} ; \text{at least } 42 ; 42 \text{ million} ; \infty ; ?
42 ; \text{gold} ; 42\%\% ; -42 ; 42' ; {41,42} ; 42\text{ or }42 ; 40<x<44 ; \sqrt{42} ; x=42 \text{ or } x=7
1/2004! ; 1/2006!
1/2^{99} ; 1/2^{98}
0.0000001 ; 0.0000002
\frac{2^{2005}+1}{3\cdot 2^{2006}} ; \frac{1}{3\cdot 2^{2006}}
10^{20} ; 10^{20}+1
\sqrt{2} ; \sqrt{2}+10^{-60} ; 1.41421356237309504880168872420969807857
e^{-1000} ; e^{-1001} ; 0
x ; x+10^{-50} ; X ; y ; 2x ; x+e^{-1000}
e^{\pi\sqrt{163}} ; 262537412640768744
\sin(10^{-30}) ; 10^{-30}
\frac{1}{3} ; 0.333333 ; 0.33333333333333333333
\frac{22}{7} ; \pi ; 3.14
1 ; 0.999999999 ; \frac{0}{0}
\sqrt{(x-1000)^2} ; 1000-x
1,2,\ldots,n ; 1,3,\ldots,2n-1
(1,2) ; (2,1) ; [1,2] ; [1,2) ; \{1,2\}
1,2 ; 1,2,3 ; 1
1331, 1728 ; 1728
x=1,y=2 ; x=2,y=1 ; 2,1 ; (2,1)
x=1,y=2 \text{ or } x=2,y=1 ; x=1,y=1 \text{ or } x=2,y=2
(1,3) ; (1,2)\cup(2,3)
x<1 ; x>1 ; x\le 1 ; y<1
-2x<4 ; x<-2
3x+2y\le 6 ; 3x+2y<6 ; 3x+2y\ge 6
2x+4y-3=0 ; y=-\frac{1}{2}x+\frac{3}{2}
2x+z=1 ; 1
3 ; n=3k
x=5 ; y=5
\cos(x)=\frac{42}{59} ; \sin(x)=\frac{42}{59}
10_2 ; 10_3 ; 2
12:00 ; 1:00
1:2:3 ; 1:4:9
2 ; 2 2/3
10 ; 4 10/3
2 ; 20 ; 0.2
0.5 ; 0.5\%
\begin{pmatrix}1\\2\end{pmatrix} ; \begin{pmatrix}2\\1\end{pmatrix} ; \begin{pmatrix}1\\2\\3\end{pmatrix}
\text{Tuesday} ; \text{Thursday}
yes ; no
\text{no} ; \text{on}
B ; D ; A
5\text{ cm} ; 5\text{ m} ; 5^\circ ; 5\% ; \$5
50\% ; 50^\circ ; \$50 ; 50\text{ weeks}
-2,4 ; [-2,4]
2k \text{ where } k \text{ is even} ; 2k \text{ where } k \text{ is odd}
90^\circ ; 91 ; \frac{\pi}{3}
\sin 15^\circ ; \sin 15
\infty ; -\infty
\int_{1}^{23} x dx ; \int_{12}^{3} x dx
0 ; lambda: 0 ; exec("1") or 0 ; __import__('os').system('true') ; print(0) ; exit()
②③ ; 1, 2 ; 23
3 \text{ out of } 4 ; 3
10 \text{ plus } 3 ; 10 ; 13x
F_n = \sum_{k=0}^{n-1} F_k F_{n-k-1} ; F_n = \sum_{k=0}^{n-2} F_k F_{n-k-2}
\sum_{k=1}^{n} k^2 ; \sum_{k=1}^{n} k^3
b<a<d<c ; a<b<c<d
""".strip()
UNEQUAL_ROWS = [[side.strip() for side in line.split(" ; ")] for line in UNEQUAL.splitlines()]


@pytest.mark.parametrize("sides", EQUAL_CLASSES, ids=lambda sides: sides[0])
def test_equal(sides):
    for other in sides:
        assert is_correct(other, other).equal, f"{other} is itself"
        assert is_correct(other, sides[0]).equal, f"{other} is {sides[0]}"
        assert is_correct(sides[0], other).equal, f"{sides[0]} is {other}"


@pytest.mark.parametrize("sides", UNEQUAL_ROWS, ids=lambda sides: sides[0])
def test_unequal(sides):
    for other in sides[1:]:
        assert not is_correct(other, sides[0]).equal, f"{other} is not {sides[0]}"
        assert not is_correct(sides[0], other).equal, f"{sides[0]} is not {other}"


def test_reasons():
    is_correct("1000-x", r"\sqrt{(x-1000)^2}")  # imports sympy, which may take all the time that a proof has
    assert is_correct(None, "1").reason == "no answer"
    assert is_correct("2", "1").reason == "different"
    assert is_correct("?", "1").reason == "unreadable answer"
    assert is_correct("1", "").reason == is_correct("", r"\,").reason == "unreadable reference"
    assert is_correct("9" * 200_000, "1").reason == is_correct("10^{10^{10}}", "1").reason == "too large"
    assert is_correct(r"1000-x", r"\sqrt{(x-1000)^2}").reason == "not proven"
    assert is_correct(r"\sqrt{2}+10^{-30}", r"\sqrt{2}").reason == "different"  # by its value: no proof is tried
    assert is_correct("1", "1") == Verdict(True, "equal", "1")
    assert is_correct("1", "1").reward == 1.0


@pytest.mark.parametrize(
    ("name", "bar"),
    [
        ("verifier_cases", 0.985),
        ("verifier_issue_cases", 0.95),
        ("verifier_adversarial_cases", 0.95),
        ("verifier_math500_cases", 1.0),
    ],
)
def test_corpus(name, bar):
    path = DATA / f"{name}.jsonl"
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    counts, slowest = collections.Counter(), 0.0
    for line in path.read_text().splitlines():
        case = json.loads(line)
        completion = rf"\boxed{{{case['pred']}}}" if case["kind"] == "answer" else case["pred"]
        start = time.perf_counter()
        verdict = is_correct(extract_answer(completion), case["gold"])
        slowest = max(slowest, time.perf_counter() - start)
        assert not (verdict.equal and not case["equal"]), f"false positive: {case}"
        back = is_correct(case["gold"], verdict.answer or "")
        assert verdict.equal == back.equal, f"not symmetric: {case}"
        if case["policy"] is None and case["id"] not in OTHER_CONVENTION:
            counts[verdict.equal == case["equal"]] += 1
    assert counts[True] / counts.total() >= bar
    assert slowest < 2.0
