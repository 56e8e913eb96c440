"""The answer checker against the labelled corpus, tables of answers in both directions, and the worker pool.

    pytest tests/test_reward.py

Expected verdicts come from mathematics. The corpus lies beside the project in ../shared/data and is skipped where
absent.
"""

import collections
import doctest
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import reward as grader
from reward import (
    Verdict,
    extract_answer,
    format_reward,
    is_correct,
    load_reward,
    overlong_penalty,
    reward,
    score,
    truncated_reward,
    unreadable_references,
)

ROOT = Path(__file__).parents[1]
DATA = ROOT.parent / "shared" / "data"

# Cases whose label needs another convention than "the last box is the answer".
OTHER_CONVENTION = {
    "v0165": "the box says 255; only the prose after it says 10,455, and prose is not graded where there is a box",
}


@pytest.fixture(scope="module", autouse=True)
def _end_workers():
    yield
    grader.close()


def test_doctests():
    result = doctest.testmod(grader)
    assert result.attempted > 20
    assert result.failed == 0


# ---------------------------------------------------------------------------------------------------------------------
# Extraction


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\fbox{7}", "7"),
        (r"\boxed 5", "5"),
        (r"\boxed{ \frac{1}{2} }", r"\frac{1}{2}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{x = \fbox{3}}", "3"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{5}. That was wrong. Final: \boxed{7}.", "7"),
        (r"\boxed{42}. I repeat: \boxed{42}", "42"),
        (r"$\boxed{42}$ $\boxed{42}$", "42"),
        (r"$\boxed{41}$ $\boxed{42}$", "42"),  # no separator between them: two answers, the last counts
        (r"\boxed{3}, \boxed{5}, \boxed{7}", "3, 5, 7"),
        (r"$$\boxed{(2, 2)} \quad \text{and} \quad \boxed{(6, 2)}$$", "(2, 2), (6, 2)"),
        (r"I will use \boxed as asked. \boxed{12}", "12"),
        (r"\boxed{12} is what \boxed asks for", "12"),
        (r"\\boxed{\\frac{1}{2}}", r"\frac{1}{2}"),  # JSON-escaped
        (r"\boxed{42}}", "42"),
        (r"\boxed{42", None),
        (r"\boxed{41} and then \boxed{42", None),  # cut off in the middle of the answer
        ("no box: 42", None),
        ("", None),
        (r"<think> \boxed{1} </think> \boxed{2}", "2"),
        (r"\boxed{1} </think> \boxed{2}", "2"),  # the chat template opened the section
        (r"<think> \boxed{1} </think> nothing", None),
        (r"<think> \boxed{1}", None),
        (r"<think>a</think> <think> \boxed{1}", None),
        (r"[THINK] \boxed{1} [/THINK] \boxed{2}", "2"),
        (r"[THINK] \boxed{1}", None),
        (r"\boxedtext{3}", None),
    ],
)
def test_extract_answer(completion, answer):
    assert extract_answer(completion) == answer


# ---------------------------------------------------------------------------------------------------------------------
# Equal and unequal pairs, by kind. Every pair is judged in both directions, every side against itself.

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
    assert is_correct(None, "1").reason == "no answer"
    assert is_correct("2", "1").reason == "different"
    assert is_correct("?", "1").reason == "unreadable answer"
    assert is_correct("1", "").reason == is_correct("", r"\,").reason == "unreadable reference"
    assert is_correct("9" * 200_000, "1").reason == is_correct("10^{10^{10}}", "1").reason == "too large"
    assert is_correct(r"1000-x", r"\sqrt{(x-1000)^2}").reason == "not proven"
    assert is_correct("1", "1") == Verdict(True, "equal", "1")
    assert is_correct("1", "1").reward == 1.0


def test_unreadable_references_are_named_by_row():
    assert unreadable_references(["4", "", r"\,", "B", r"\{\}", "9" * 5000]) == [1, 2, 5]


# ---------------------------------------------------------------------------------------------------------------------
# The labelled corpus: (accuracy on convention-free cases, false positives allowed)


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


# ---------------------------------------------------------------------------------------------------------------------
# The worker pool


def test_score_keeps_order_and_agrees_with_reward():
    answers = [r"2\sqrt2", "7", r"\sqrt8", r"x+1", "8", r"1+x", r"\frac{1}{2}"] * 30
    references = [r"\sqrt{8}", "7", "3", r"1+x", "7", r"x+2", "0.5"] * 30
    completions = [rf"So \boxed{{{answer}}}" for answer in answers]
    verdicts = score(completions, references, workers=2)
    assert [v.reward for v in verdicts] == [reward(c, r) for c, r in zip(completions, references)]
    assert [v.reward for v in verdicts[:7]] == [1, 1, 0, 1, 0, 0, 1]
    assert [v.answer for v in verdicts] == answers


def test_score_asserts_lengths():
    with pytest.raises(AssertionError, match="2 completions but 1 references"):
        score(["a", "b"], ["a"])


def test_plain_numbers_start_no_worker():
    grader.close()
    verdicts = score([r"\boxed{7}", r"\boxed{1/2}", "none"], ["7", "0.25", "3"])
    assert [v.reason for v in verdicts] == ["equal", "different", "no answer"]
    assert grader._pool == []


def test_a_killed_worker_is_replaced_and_costs_no_verdict():
    score([r"\boxed{\sqrt8}"], [r"2\sqrt2"], workers=1)
    grader._pool[0]["process"].kill()
    assert score([r"\boxed{\sqrt8}"], [r"2\sqrt2"], workers=1)[0].equal


def test_workers_have_a_memory_limit():
    score([r"\boxed{x+1}"], ["1+x"], workers=1)
    limits = Path(f"/proc/{grader._pool[0]['process'].pid}/limits").read_text().splitlines()
    line = next(line for line in limits if line.startswith("Max address space"))
    assert line.split()[3] == str(grader.WORKER_MEMORY_BYTES)


def test_an_overrun_is_killed_and_the_rest_is_judged():
    hard = (
        r"\boxed{(\sin x+\cos 2x)^{9}|x-1000|}"  # no point tells it from the reference, and no proof is found in time
    )
    completions = [hard, r"\boxed{x+1}"]
    references = [r"(\sin x+\cos 2x)^{9}(1000-x)", "1+x"]
    score(completions[1:], references[1:], workers=1)
    pid = grader._pool[0]["process"].pid
    verdicts = score(completions, references, workers=1, timeout=0.3)
    assert [v.reason for v in verdicts] == ["timeout", "equal"]
    assert grader._pool[0]["process"].pid != pid


def test_score_from_several_threads():
    results = {}

    def judge(k):
        results[k] = score([rf"\boxed{{\sqrt{{{k * k * 2}}}}}"] * 5, [rf"{k}\sqrt2"] * 4 + ["7"])

    threads = [threading.Thread(target=judge, args=(k,)) for k in range(2, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all([v.reward for v in results[k]] == [1, 1, 1, 1, 0] for k in range(2, 8))


def test_workers_run_neither_torch_nor_the_callers_main_module(tmp_path):
    script = tmp_path / "train.py"  # no `if __name__` guard, as a user's script may have none
    script.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "print('main module')\n"
        "import reward\n"
        "print(reward.score([r'\\boxed{\\sqrt8}'], [r'2\\sqrt2'])[0].reward)\n"
        "maps = open(f'/proc/{reward._pool[0][\"process\"].pid}/maps').read()\n"
        "print('torch' in maps, 'torch' in sys.modules)\n"
    )
    output = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, timeout=120).stdout
    assert output.split("\n")[:3] == ["main module", "1.0", "False False"]


# ---------------------------------------------------------------------------------------------------------------------
# Shaping: NeMo-RL's and TRL's test values, and the paper's formula


def test_overlong_penalty():
    # NeMo-RL: maximum 25, buffer 5, penalty .5, rewards 1, .8, .6 for lengths 10, 22, 25. (Its fourth value, -.6 at
    # length 30, lets the penalty grow past the maximum; the paper stops at -1, and no completion passes the maximum.)
    shaped = [value + overlong_penalty(n, 25, 5, 0.5) for n, value in ((10, 1.0), (22, 0.8), (25, 0.6))]
    assert shaped == pytest.approx([1.0, 0.6, 0.1])
    assert [overlong_penalty(n, 100, 20) for n in (50, 90, 110)] == [0.0, -0.5, -1.0]  # TRL
    with pytest.raises(AssertionError, match="buffer"):
        overlong_penalty(1, 10, 0)


def test_truncated_reward():
    assert [truncated_reward(0.7, False, policy) for policy in ("score", "zero", "mask")] == [(0.7, True)] * 3
    assert truncated_reward(0.7, True, "mask") == (0.0, False)


def test_format_reward():
    assert format_reward(r"\boxed{1}") == 1.0
    assert format_reward("1") == format_reward(r"<think> \boxed{1}", thinking=True) == 0.0
    assert format_reward(r"a </think> \boxed{1}", thinking=True) == 1.0
    assert format_reward(r"a </think> b </think> \boxed{1}", thinking=True) == 0.0


def test_load_reward(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def length(completion, reference):\n    return float(len(completion))\n")
    assert load_reward(f"{path}:length")("abc", "") == 3.0
    with pytest.raises(ValueError, match="no function other"):
        load_reward(f"{path}:other")
    with pytest.raises(ValueError, match="no such Python file"):
        load_reward("missing.py:f")
    with pytest.raises(ValueError, match=r"expected path\.py:function"):
        load_reward("nonsense")


# ---------------------------------------------------------------------------------------------------------------------
# Command line


def run(*arguments):
    return subprocess.run([sys.executable, ROOT / "reward.py", *arguments], capture_output=True, text=True, timeout=120)


def test_check_prints_a_table(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"gold": "1/2", "pred": "0.5"}\n{"gold": "3", "pred": "so \\\\boxed{4}"}\n')
    result = run("--check", path)
    assert result.returncode == 0
    rows = result.stdout.splitlines()
    assert rows[1].split() == ["1", "equal", "1/2", "0.5"]
    assert rows[2].split() == ["2", "different", "3", "4"]
    assert rows[-1] == "equal 1, different 1"


def test_explain_prints_the_steps():
    result = run("--explain", r"\boxed{\frac{2}{4}}", "x=0.5")
    assert result.returncode == 0
    assert "parsed: ('div'" in result.stdout
    assert "equal=True" in result.stdout.splitlines()[-1]
