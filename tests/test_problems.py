"""problems.py on its own. `pytest tests/test_problems.py`."""

import dataclasses
import json
from collections import Counter
from pathlib import Path

import pytest

import problems
from errors import UserError
from problems import (
    Problem,
    arithmetic_problems,
    check_references,
    conversation,
    encode_prompts,
    next_problems,
    number_samples,
    read_problems,
    read_tasks,
    sample_seed,
)
from reward import load_own_reward


def test_arithmetic_is_disjoint_right_and_drawn_from_the_seed():
    train, heldout = arithmetic_problems(0)
    assert {p.problem for p in train}.isdisjoint(p.problem for p in heldout)
    assert not {"What is 3 + 5?", "What is 7 * 4?"} & {p.problem for p in train + heldout}
    assert len(heldout) == len({p.problem for p in heldout}) == 64
    for p in train + heldout:
        a, operation, b = p.problem.removeprefix("What is ").removesuffix("?").split()
        a, b = int(a), int(b)
        assert int(p.answer) == {"+": a + b, "-": a - b, "*": a * b}[operation]
        assert 0 <= int(p.answer) <= (81 if operation == "*" else 20)
        assert p.messages[-1] == {"role": "user", "content": p.problem}
    again, _ = arithmetic_problems(0)
    other, _ = arithmetic_problems(1)
    assert [p.problem for p in train] == [p.problem for p in again] != [p.problem for p in other]


def test_every_epoch_asks_every_problem_once():
    problems = arithmetic_problems(0, num_train=10)[0]
    asked = [p.id for step in range(5) for p in next_problems(problems, step, num_prompts=4, seed=3)]
    assert sorted(asked[:10]) == sorted(asked[10:]) == sorted(p.id for p in problems)
    assert asked[:10] != asked[10:]
    assert [p.id for p in next_problems(problems, 2, 4, 3)] == asked[8:12]  # a function of the step alone


def test_unreadable_references_and_a_missing_reward_function_are_told_before_training(tmp_path):
    good, _ = arithmetic_problems(0)
    check_references(good[:5], None)
    bad = [good[0], dataclasses.replace(good[1], answer="???")]
    with pytest.raises(UserError, match=f"of problem {bad[1].id}"):
        check_references(bad, None)
    with pytest.raises(UserError, match="no such Python file"):
        load_own_reward("nowhere.py:reward")
    (tmp_path / "mine.py").write_text("def half(completion, reference):\n    return 0.5\n")
    assert load_own_reward(f"{tmp_path}/mine.py:half")("a", "b") == 0.5


def test_a_benchmark_file_is_read_as_the_dataset_is(tmp_path):
    for name, numbers in (("train", range(4)), ("test", range(3, 6))):
        gap = " " * len(name)  # copies of a problem differ in their spaces
        rows = [json.dumps({"question": f"{i} +{gap}{i}", "solution": str(2 * i)}) for i in numbers]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    keys = {"prompt_key": "question", "answer_key": "solution"}
    train, heldout = read_tasks(
        f"{tmp_path}/train.jsonl", seed=0, num_heldout=64, benchmark=f"{tmp_path}/test.jsonl", **keys
    )
    assert sorted(p.answer for p in train) == ["0", "2", "4"]  # the one that is in both is not trained on
    assert [p.answer for p in heldout] == ["6", "8", "10"]


def test_a_problem_that_comes_twice_in_a_step_is_sampled_anew():
    problems = arithmetic_problems(0, num_train=2)[0]
    drawn = Counter()
    first = number_samples([problems[0], problems[1], problems[0]], 2, drawn)
    assert first == [(problems[i], n) for i, n in ((0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3))]
    assert [n for _, n in number_samples(problems, 2, drawn)] == [4, 5, 2, 3]  # the next round of --refill


def test_more_heldout_problems_than_there_are_products_are_refused():
    assert len(arithmetic_problems(0, num_heldout=188)[1]) == 188
    with pytest.raises(UserError, match="more than 188"):
        arithmetic_problems(0, num_heldout=189)


def test_a_model_without_a_chat_template_is_told():
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a")))
    with pytest.raises(UserError, match="has no chat template"):
        encode_prompts(tokenizer, [[{"role": "user", "content": "a"}]])


DATA = Path(__file__).parents[1].parent / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"no benchmark files in {DATA}")


@needs_data
@pytest.mark.parametrize(
    ("name", "rows"), [("aime2024", 30), ("aime2025", 30), ("amc23", 40), ("math500", 500), ("gsm8k", 1319)]
)
def test_benchmarks(name, rows):
    problems = read_problems(name, data_dir=DATA)
    assert len(problems) == len({problem.id for problem in problems}) == rows
    assert all(isinstance(problem.answer, str) and problem.answer for problem in problems)


@needs_data
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows[7].update(answer=480), "I-8 = 480"),
        (lambda rows: rows[11].update(answer=384), "I-12 = 384"),
        (lambda rows: rows[0].update(answer=1000), "0 to 999"),
        (lambda rows: rows[0].update(answer="20.5"), "0 to 999"),
        (lambda rows: rows[0].update(answer=""), "line 1 has an empty 'answer'"),
        (lambda rows: rows[0].pop("answer"), "line 1 has no key 'answer'"),
        (lambda rows: rows.pop(), "this copy has 29"),
        (lambda rows: rows[3].update(problem=rows[4]["problem"] + " "), "occur twice"),
        (lambda rows: rows[3].update(id=rows[4]["id"]), "more than once"),
        (lambda rows: rows[3].update(id="2024-II-77"), "15 problems of exam I"),
    ],
)
def test_bad_copies_of_aime_are_refused(tmp_path, change, message):
    rows = [json.loads(line) for line in (DATA / "aime2024.jsonl").read_text().splitlines()]
    change(rows)
    (tmp_path / "aime2024.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match=message):
        read_problems("aime2024", data_dir=tmp_path)


@needs_data
def test_copies_of_other_shape_are_the_same_benchmark(tmp_path, monkeypatch):
    """The Hub's copies: other order, address instead of exam, three digits, a degree sign, two configurations."""
    reference = {year: read_problems(f"aime{year}", data_dir=DATA) for year in (2024, 2025)}
    rows_2024 = [
        {
            "id": 60 + i,
            "problem": p.problem,
            "answer": f"{int(p.answer):03}",
            "url": f"…/2024_AIME_{e}_Problems/Problem_{n}",
        }
        for i, p in enumerate(reversed(reference[2024]))
        for e, n in [p.id.split("-")[1:]]
    ]
    rows_2025 = {
        config: [
            {"question": p.problem, "answer": "336^\\circ" if p.answer == "336" else p.answer}
            for p in reference[2025]
            if p.id.split("-")[1] == config.split("-")[1]
        ]
        for config in ("AIME2025-I", "AIME2025-II")
    }

    def hub(name, config, split, revision):
        return [("", {"exam": config} | row) for row in rows_2025.get(config, rows_2024)]

    monkeypatch.setattr(problems, "hub_rows", hub)
    assert read_problems("aime2024") == reference[2024]
    assert read_problems("aime2025") == reference[2025]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"problem": "a", "answer": 1}\n{"problem": "b"', "line 2 is not JSON"),
        ('{"problem": "a", "answer": 1}\n\n[1]\n', "line 3 is not a JSON object"),
        ("\n", "holds no problem"),
        ('{"question": "a", "answer": 1}\n', "no key 'problem', only question, answer"),
        ('{"problem": " ", "answer": 1}\n', "empty 'problem'"),
        ('{"problem": "a", "answer": null}\n', "empty 'answer'"),
        (
            '{"problem": "a", "answer": 1, "most": 0}\n',
            "line 1 has 0 as 'most'; a limit in tokens is a whole number from 1",
        ),
        ('{"problem": "a", "answer": 1, "most": true}\n', "has True as 'most'"),
    ],
)
def test_bad_files_are_refused(tmp_path, text, message):
    path = tmp_path / "problems.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        read_problems(path, tokens_key="most")


def test_files_and_names(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"question": "1+1?", "answer": 2}\n{"question": "0?", "answer": "0 = 0\\n#### 0", "limit": 7}\n')
    problems = read_problems(path, prompt_key="question", tokens_key="limit")
    told = [(p.id, p.problem, p.answer, p.max_tokens) for p in problems]
    assert told == [("mine-1", "1+1?", "2", None), ("mine-2", "0?", "0", 7)]
    with pytest.raises(UserError, match="no file"):
        read_problems(tmp_path / "other.jsonl")
    with pytest.raises(UserError, match="no benchmark"):
        read_problems("aime24")


@pytest.mark.parametrize("field", ["problem", "answer"])
@pytest.mark.parametrize("value", [["2"], {"ground_truth": "2"}])
def test_a_field_that_is_no_text_is_refused(tmp_path, field, value):
    """verl's rows, say: what Python prints for a list would be a prompt, or an answer nobody can give."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"problem": "1 + 1?", "answer": 2} | {field: value}) + "\n")
    with pytest.raises(UserError, match=f"line 1 has a {type(value).__name__} as '{field}'"):
        read_problems(path)


def test_a_file_that_is_not_utf_8_is_told(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes('{"problem": "é", "answer": "2"}\n'.encode("latin-1"))
    with pytest.raises(UserError, match=r"rows.jsonl is not UTF-8 \(byte 13\)"):
        read_problems(tmp_path / "rows.jsonl")


def test_a_configuration_of_a_hub_dataset_can_be_named(monkeypatch):
    asked = []

    def hub(*words):
        asked.append(words)
        return [("row 1", {"problem": "1 + 1?", "answer": "2"})]

    monkeypatch.setattr(problems, "hub_rows", hub)
    assert [p.answer for p in read_problems("owner/set") + read_problems("owner/set:part")] == ["2", "2"]
    assert asked == [("owner/set", None, "train", None), ("owner/set", "part", "train", None)]


def test_sample_seeds():
    """63 bits, a function of the four arguments only; sha256("0/-1/2024-I-1/0") begins with the bytes below."""
    import hashlib

    want = int(hashlib.sha256(b"0/-1/2024-I-1/0").hexdigest()[:16], 16) // 2
    assert sample_seed(0, -1, "2024-I-1", 0) == want < 2**63
    seeds = {
        sample_seed(s, t, p, j) for s in range(3) for t in range(-1, 3) for p in ("a", "a/1", "b") for j in range(8)
    }
    assert len(seeds) == 3 * 4 * 3 * 8


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        (r"\boxed{} {problem}", "braces doubled"),
        ("{question}", "braces doubled"),
        ("Solve it.", "leaves the problem out"),
    ],
)
def test_a_template_that_cannot_work_is_refused(template, sentence):
    with pytest.raises(UserError, match=sentence):
        conversation(Problem("1", "What is 1 + 1?", "2"), template)
