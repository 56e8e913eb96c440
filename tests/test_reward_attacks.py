"""What a policy could throw at the grader: properties on random input, code payloads, bombs, from threads.

pytest tests/test_reward_attacks.py
"""

import json
import subprocess
import sys
import threading
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from math_answers import is_correct
from reward import extract_answer, grade

ROOT = Path(__file__).parents[1]
DATA = ROOT.parent / "shared" / "data"
LIMIT_SECONDS = 2.0

# ---------------------------------------------------------------------------------------------------------------------
# Properties

rationals = st.fractions(min_value=-(10**6), max_value=10**6, max_denominator=10**4)


def spellings(value: Fraction) -> list[str]:
    n, d = value.numerator, value.denominator
    sign, n = ("-", -n) if n < 0 else ("", n)
    texts = [
        f"{sign}{n}/{d}",
        rf"{sign}\frac{{{n}}}{{{d}}}",
        rf"{sign}\dfrac{{{3 * n}}}{{{3 * d}}}",
        rf"x = {sign}\frac{{{n}}}{{{d}}}",
        rf"\frac{{{sign}{n}}}{{{d}}}",
        rf"$ {sign}{n} \cdot {d}^{{-1}} $",
        rf"{sign}\left(\frac{{{n}}}{{{d}}}\right)",
        rf"{sign}\frac{{{n}}}{{{d}}}\text{{ cm}}",
        rf"{sign}\sqrt{{\frac{{{n * n}}}{{{d * d}}}}}",
    ]
    if d == 1:
        texts += [f"{sign}{n:,}", f"{sign}{n}.0", f"{sign}0{n}", rf"\text{{{sign}{n}}}", f"{sign}{n}."]
    if n > d > 1:
        texts.append(rf"{sign}{n // d}\frac{{{n % d}}}{{{d}}}")
    return texts


@settings(max_examples=60, deadline=None)
@given(rationals, st.data())
def test_a_value_equals_its_spellings_and_nothing_next_to_it(value, data):
    a, b = data.draw(st.sampled_from(spellings(value))), data.draw(st.sampled_from(spellings(value)))
    assert is_correct(a, b).equal
    step = data.draw(st.sampled_from([Fraction(1), Fraction(-1), Fraction(1, 10**4), Fraction(1, 10**30)]))
    c = data.draw(st.sampled_from(spellings(value + step)))
    assert not is_correct(a, c).equal
    assert not is_correct(c, a).equal


@settings(max_examples=40, deadline=None)
@given(st.lists(rationals, min_size=2, max_size=6), st.randoms(use_true_random=False))
def test_lists_and_sets_are_unordered_tuples_are_not(values, random):
    texts = [spellings(value)[1] for value in values]
    shuffled = list(texts)
    random.shuffle(shuffled)
    assert is_correct(", ".join(shuffled), ", ".join(texts)).equal
    assert is_correct(r"\{" + ",".join(shuffled) + r"\}", r"\{" + ",".join(texts) + r"\}").equal
    assert is_correct(f"({','.join(shuffled)})", f"({','.join(texts)})").equal == (shuffled == texts)
    assert not is_correct(", ".join(texts[1:]), ", ".join(texts)).equal


polynomials = st.lists(st.integers(-9, 9), min_size=1, max_size=4)


@settings(max_examples=40, deadline=None)
@given(polynomials, polynomials, st.integers(1, 9))
def test_products_of_polynomials_expand(p, q, shift):
    def written(coefficients):
        return "+".join(f"({c})x^{{{k}}}" for k, c in enumerate(coefficients))

    product = [0] * (len(p) + len(q) - 1)
    for i, a in enumerate(p):
        for j, b in enumerate(q):
            product[i + j] += a * b
    assert is_correct(f"({written(p)})({written(q)})", written(product)).equal
    assert not is_correct(f"({written(p)})({written(q)})+{shift}", written(product)).equal
    assert not is_correct(f"({written(p)})({written(q)})+{shift}x^9", written(product)).equal


FRAGMENTS = r"""
    \frac \sqrt { } ( ) [ ] \{ \} | ^ _ + - * / = < > \le \ne , ; : ! ' % ^\circ \pm \cup \infty
    \text{and} \text{cm} . $ & \$ \sin \ln \log_2 \sum_{k=1}^{n} \begin{pmatrix} \end{pmatrix} \\ \pi e
    i x y f 0 1 2 42 3.5 \in \mathbb{R} \binom \left \right \overline \approx \lfloor \rfloor \ldots
    \mid and or \int \begin{cases} \end{cases} \text{where} sin exp
"""
LATEX = st.lists(st.sampled_from(FRAGMENTS.split()), max_size=25).map(" ".join)


@settings(max_examples=250, deadline=None)
@given(LATEX | st.text(max_size=80), LATEX | st.text(max_size=80))
def test_any_text_is_judged_symmetrically_and_in_time(a, b):
    start = time.perf_counter()
    forward, backward = is_correct(a, b), is_correct(b, a)
    assert time.perf_counter() - start < 2 * LIMIT_SECONDS
    assert forward.equal == backward.equal
    assert "error" not in (forward.reason, backward.reason)
    assert grade(a, b).reward in (0.0, 1.0)


@settings(max_examples=100, deadline=None)
@given(LATEX)
def test_an_expression_is_not_itself_plus_one(text):
    assert not is_correct(text, f"({text})+1").equal
    assert not is_correct(f"({text})+1", text).equal


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="\\boxedf{}<>/think[]THINK 5\n", max_size=200))
def test_extraction_never_raises(text):
    assert extract_answer(text) is None or isinstance(extract_answer(text), str)


# ---------------------------------------------------------------------------------------------------------------------
# No input executes code

PAYLOADS = [
    "__import__('os').system('touch PWNED')",
    "[__import__('os').system('touch PWNED'),0]",
    "open('PWNED','w').write('x') or 0",
    "exec(\"open('PWNED','w')\") or 0",
    'eval(\'open("PWNED","w")\')',
    "(lambda: open('PWNED','w'))()",
    "().__class__.__bases__[0].__subclasses__()",
    "Symbol('x').func(open('PWNED','w'))",
    "f\"{open('PWNED','w')}\"",
    r"\sqrt{open('PWNED','w')}",
    r"\text{__import__('os').system('touch PWNED')}",
    r"\operatorname{eval}(open('PWNED','w'))",
    r"\mathrm{exec}(1)",
    r"\input{/etc/passwd}",
    r"\immediate\write18{touch PWNED}",
    r"\csname end\endcsname",
    "$(touch PWNED)",
    "`touch PWNED`",
    "0; touch PWNED",
    "{{7*7}}",
    "!!python/object/apply:os.system ['touch PWNED']",
    "sympify('0')",
    "0 if open('PWNED','w') else 0",
]

AUDIT = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
import mpmath, sympy, reward
from math_answers import is_correct
is_correct(r"e^{\\\\ln 3}", "3")            # imports whatever a proof imports
sympy.simplify("x").rewrite(sympy.exp)             # the one use of a string, before the watch begins
seen = []
def watch(event, arguments):
    if event in ("os.system", "subprocess.Popen", "os.exec", "os.fork", "socket.connect"):
        seen.append(event)
    if event == "exec" and getattr(arguments[0], "co_filename", "").startswith("<"):
        seen.append(f"exec of {arguments[0].co_filename}")
    if event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
        seen.append(f"write to {arguments[0]}")
sys.addaudithook(watch)
payloads = json.loads(sys.stdin.read())
paid = [p for p in payloads if reward.grade("\\\\boxed{" + p + "}", "0").equal or is_correct(p, "1").equal]
print(json.dumps([seen, paid, os.path.exists("PWNED")]))
"""


def test_payloads_are_neither_run_nor_paid(tmp_path):
    payloads = list(PAYLOADS)
    path = DATA / "verifier_adversarial_cases.jsonl"
    if path.is_file():
        cases = [json.loads(line) for line in path.read_text().splitlines()]
        payloads += [extract_answer(c["pred"]) for c in cases if not c["equal"] and extract_answer(c["pred"])]
    script = tmp_path / "audit.py"
    script.write_text(AUDIT.replace("\\\\\\\\", "\\\\"))
    result = subprocess.run(
        [sys.executable, script, ROOT],
        input=json.dumps(payloads),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    seen, paid, exists = json.loads(result.stdout)
    assert seen == []
    assert not exists
    # the adversarial file has wrong answers for other references, among them expressions that are 0 or 1
    assert not set(paid) & set(PAYLOADS)


# ---------------------------------------------------------------------------------------------------------------------
# Bombs: inside the limit, from a worker thread, with little memory

BOMBS = {
    "1 MB of prose": "word " * 200_000 + r"\boxed{10^{10^{10}}}",
    "1 MB box": r"\boxed{" + "1+" * 500_000 + "1}",
    "100k unclosed boxes": r"\boxed{" * 100_000,
    "100k mentions": r"\boxed " * 100_000,
    "100k adjacent boxes": r"\boxed{1}, " * 100_000,
    "100k braces": r"\boxed{" + "{" * 100_000 + "}" * 100_000 + "}",
    "thinking marks": "<think></think>" * 60_000,
    "power tower": r"\boxed{9^{9^{9^{9^{9}}}}}",
    "program tower": r"\boxed{9**9**9**9**9}",
    "symbol tower": r"\boxed{" + "x^{" * 300 + "x" + "}" * 300 + "}",
    "tower of e": r"\boxed{e^{e^{e^{e^{e^{e}}}}}}",
    "huge sine": r"\boxed{\sin(10^{10^{5}})}",
    "factorial": r"\boxed{1000000000!}",
    "nested factorials": r"\boxed{((9!)!)!}",
    "binomial": r"\boxed{\binom{10^{9}}{10^{8}}}",
    "sum": r"\boxed{\sum_{k=1}^{10^{9}} k^{k}}",
    "nested sums": r"\boxed{\sum_{a=1}^{2000}\sum_{b=1}^{2000}\sum_{c=1}^{2000} abc}",
    "product": r"\boxed{\prod_{n=1}^{10^{9}} n}",
    "small base": r"\boxed{(1/3)^{10^{8}}}",
    "huge exponent": r"\boxed{1e999999999}",
    "expansion": r"\boxed{(x+y+z+w)^{5000}-(w+z+y+x)^{5000}+x}",
    "slow expansion": r"\boxed{\left(\sqrt{2}+\sqrt{3}\right)^{100000}-\left(\sqrt{3}-\sqrt{2}\right)^{-100000}+4}",
    "deep parentheses": r"\boxed{" + "(" * 900 + "4" + ")" * 900 + "+1}",
    "deep roots": r"\boxed{" + r"\sqrt{" * 300 + "4" + "}" * 300 + "}",
    "deep fractions": r"\boxed{" + r"\frac{1}{1+" * 150 + "1" + "}" * 150 + "}",
    "many roots": r"\boxed{" + "+".join(rf"\sqrt{{{k}}}" for k in range(2, 200)) + "}",
    "long list": r"\boxed{" + ",".join(rf"\sqrt{{{k}}}" for k in range(190)) + "}",
    "slow simplify": r"\boxed{\frac{\sin(x)^{100}+\cos(x)^{100}+x^{77}-3}{\tan(x)^{55}+\log(x)^{33}+e^{x^{9}}}}",
    "digits": r"\boxed{" + "9" * 1_900 + "}",
    "minus signs": r"\boxed{" + "-" * 1_900 + "4}",
    "commas": r"\boxed{" + "," * 1_900 + "}",
    "spaces": r"\boxed{" + "4" + " " * 1_900 + "5}",
    "NUL": r"\boxed{" + "\x00" * 1_000 + "}",
}
REFERENCES = ["4", r"\sqrt{2}+\sqrt{3}", r"\{1,2,3\}", "x^2+1", r"(-\infty,2)\cup(3,\infty)"]

MEASURE = """
import json, resource, sys, threading, time
sys.path.insert(0, sys.argv[1])
import reward
bombs, references = json.loads(sys.stdin.read())
results = {}
def run():
    for name, completion in bombs.items():
        start = time.perf_counter()
        paid = [r for r in references if reward.grade(completion, r).equal]
        results[name] = [(time.perf_counter() - start) / len(references), paid]
threading.Thread(target=run).start()
for thread in threading.enumerate()[1:]:
    thread.join()
print(json.dumps([results, int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) // 1024]))
"""


def test_bombs_from_a_thread_stay_inside_time_and_memory(tmp_path):
    script = tmp_path / "measure.py"
    script.write_text(MEASURE)
    result = subprocess.run(
        [sys.executable, script, ROOT],
        input=json.dumps([BOMBS, REFERENCES]),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    results, megabytes = json.loads(result.stdout)
    assert set(results) == set(BOMBS)
    slow = {name: seconds for name, (seconds, _) in results.items() if seconds > LIMIT_SECONDS}
    assert not slow
    assert not {name: paid for name, (_, paid) in results.items() if paid}
    assert megabytes < 512


@pytest.mark.parametrize("name", ["slow simplify", "expansion", "power tower"])
def test_the_budget_holds_in_several_threads_at_once(name):
    seconds = []

    def run():
        start = time.perf_counter()
        assert grade(BOMBS[name], r"\sin x + 1").reward == 0.0
        seconds.append(time.perf_counter() - start)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seconds) == 4
    assert max(seconds) < 4 * LIMIT_SECONDS  # four threads share one interpreter lock


def test_a_proof_that_takes_for_ever_is_cut_off_in_any_thread():
    verdicts = []

    def run():
        start = time.perf_counter()
        verdict = is_correct(
            r"(\sin x+\cos 2x)^{9}|x-1000|", r"(\sin x+\cos 2x)^{9}(1000-x)"
        )  # equal below x = 1000 only
        verdicts.append((verdict.reason, time.perf_counter() - start))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert verdicts[0][0] == "timeout"
    assert verdicts[0][1] < LIMIT_SECONDS
