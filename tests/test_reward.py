"""The answer checker against the labelled corpus, tables of answers in both directions, and the worker pool.

    pytest tests/test_reward.py

Expected verdicts come from mathematics. The corpus lies beside the project in ../shared/data and is skipped where
absent.
"""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import math_answers
import reward as grader
from errors import UserError
from reward import (
    check_own_reward,
    extract_answer,
    format_reward,
    grade,
    load_own_reward,
    overlong_penalty,
    score,
    truncated_reward,
    unreadable_references,
)
from rollout import Sample
from train_grpo import (
    shape_rewards,
)

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _time_enough(monkeypatch):
    """In this process the first proof imports sympy, which takes over a second on a slow machine; workers do it beforehand."""
    monkeypatch.setattr(math_answers, "BUDGET_SECONDS", 30.0)


@pytest.fixture(scope="module", autouse=True)
def _end_workers():
    yield
    grader.close()


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


def test_unreadable_references_are_named_by_row():
    assert unreadable_references(["4", "", r"\,", "B", r"\{\}", "9" * 5000]) == [1, 2, 5]


# ---------------------------------------------------------------------------------------------------------------------
# The labelled corpus: (accuracy on convention-free cases, false positives allowed)


# ---------------------------------------------------------------------------------------------------------------------
# The worker pool


def test_score_keeps_order_and_agrees_with_reward():
    answers = [r"2\sqrt2", "7", r"\sqrt8", r"x+1", "8", r"1+x", r"\frac{1}{2}"] * 30
    references = [r"\sqrt{8}", "7", "3", r"1+x", "7", r"x+2", "0.5"] * 30
    completions = [rf"So \boxed{{{answer}}}" for answer in answers]
    verdicts = score(completions, references, workers=2)
    assert [v.reward for v in verdicts] == [grade(c, r).reward for c, r in zip(completions, references)]
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


def test_load_own_reward(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def length(completion, reference):\n    return float(len(completion))\n")
    assert load_own_reward(f"{path}:length")("abc", "") == 3.0
    with pytest.raises(ValueError, match="no function other"):
        load_own_reward(f"{path}:other")
    with pytest.raises(ValueError, match="no such Python file"):
        load_own_reward("missing.py:f")
    with pytest.raises(ValueError, match=r"expected path\.py:function"):
        load_own_reward("nonsense")


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


def test_rewards_are_shaped_by_flags_alone():
    def finished(length, reason, text=r"\boxed{1}"):
        return Sample([1], [2] * length, [0.0] * length, text, reason, 0)

    samples = [finished(50, "stop"), finished(90, "stop"), finished(100, "length"), finished(10, "stop", "no box")]
    values = [1.0, 1.0, 1.0, 0.0]
    plain = {"truncated": "score", "limits": [100] * 4, "overlong_buffer": 0, "format_bonus": 0.0}
    assert shape_rewards(samples, values, **plain) == ([1, 1, 1, 0], [False] * 4)
    assert shape_rewards(samples, values, **plain | {"truncated": "zero"}) == ([1, 1, 0, 0], [False] * 4)
    masked = shape_rewards(samples, values, **plain | {"truncated": "mask"})
    assert masked == ([1, 1, 0, 0], [False, False, True, False])
    # TRL's soft overlong values: of 100 with a buffer of 20, length 50 costs 0, 90 costs .5, 100 costs 1
    rewards, _ = shape_rewards(samples, values, **plain | {"overlong_buffer": 20})
    assert rewards == pytest.approx([1, 0.5, 0, 0])
    # the same against each sample's own limit: 50 of 50 is as much at the end as 100 of 100
    own = {"limits": [50, 110, 100, 100], "overlong_buffer": 20}
    assert shape_rewards(samples, values, **plain | own)[0] == pytest.approx([0, 1, 0, 0])
    rewards, _ = shape_rewards(samples, values, **plain | {"format_bonus": 0.1})
    assert rewards == pytest.approx([1.1, 1.1, 1.1, 0])
    # TRL: a completion whose end-of-sequence token is exactly the last that fits is not truncated; the engine says so itself.
    fits = [finished(100, "stop")]
    assert shape_rewards(fits, [1.0], **plain | {"truncated": "mask", "limits": [100]}) == ([1], [False])


@pytest.mark.parametrize(
    ("value", "paid"),
    [("np.float32(.5)", 0.5), ("np.bool_(True)", True), ("torch.tensor(2)", 2), ("True", True)]
    + [(value, None) for value in ("'1'", "(1, 2)", "np.array([1, 2])", "None", "float('nan')")],
)
def test_ones_own_reward_is_a_number_of_whatever_library(value, paid, tmp_path):
    (tmp_path / "mine.py").write_text(f"import numpy as np, torch\ndef own(c, r):\n    return {value}\n")
    said = load_own_reward(f"{tmp_path}/mine.py:own")("a", "b")
    json.dumps(said)  # it goes into samples.jsonl
    if paid is None:
        with pytest.raises(UserError, match="must return a finite number"):
            check_own_reward(said, "a", "b")
    else:
        check_own_reward(said, "a", "b")
        assert said == paid
