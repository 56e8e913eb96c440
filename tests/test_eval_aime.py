"""Numbers of eval_aime.py against closed forms, published values and simulation:  pytest tests/test_eval_aime.py"""

import itertools
import math

import numpy as np
import pytest

from errors import UserError
from eval_aime import (
    beta_quantile,
    compare,
    fisher_p,
    format_comparison,
    format_report,
    interval_95,
    majority,
    pass_at,
    plot_report,
    sign_flip_p,
    student_t,
    summarize,
)


def record(problem, sample, correct, *, answer="x", finish="stop", tokens=10):
    answer = "7" if correct else answer
    return {
        "problem": problem, "sample": sample, "seed": 0, "reference": "7", "answer": answer, "equal": correct,
        "correct": correct and finish == "stop", "reason": "", "finish_reason": finish, "tokens": tokens,
    }  # fmt: skip


def records_of(counts, k=8):
    """counts[i] right samples of k for problem i, named as AIME 2024 names them when there are 30."""
    names = [f"2024-{'I' if i < 15 else 'II'}-{i % 15 + 1}" for i in range(len(counts))]
    return [record(name, j, j < right) for name, right in zip(names, counts) for j in range(k)]


# ---------------------------------------------------------------------------------------------------------------------
# One run


def test_all_right_and_all_wrong():
    report = summarize(records_of([8] * 30))
    assert report["avg"] == report["maj"] == report["pass"]["1"] == report["pass"]["8"] == 1
    assert report["avg_se"] == report["avg_se_sampling"] == 0
    # Clopper-Pearson with all of 30 right: the low end is .025^(1/30), the high end 1.
    assert (report["interval"], report["avg_high"]) == ("Beta", 1.0)
    assert report["avg_low"] == pytest.approx(0.025 ** (1 / 30), abs=1e-9)
    assert report["exams"] == {"I": 1.0, "II": 1.0}
    report = summarize(records_of([0] * 30))
    assert report["avg"] == report["maj"] == report["pass"]["8"] == report["problems_solved"] == 0
    assert (report["avg_low"], report["avg_high"]) == (0.0, pytest.approx(1 - 0.025 ** (1 / 30), abs=1e-9))
    assert report["tokens_mean_right"] is None


def test_half_the_problems_right():
    """15 problems always right, 15 never: SE over problems √(.25 · 30/29) / √30 = .5 / √29, over sampling 0."""
    report = summarize(records_of([8] * 15 + [0] * 15))
    assert report["avg"] == 0.5
    assert report["avg_se"] == pytest.approx(0.5 / math.sqrt(29))
    assert report["avg_se_sampling"] == 0
    assert report["avg_high"] - 0.5 == pytest.approx(
        2.045 * 0.5 / math.sqrt(29), rel=1e-3
    )  # t(29) = 2.045 in any table
    assert report["exams"] == {"I": 1.0, "II": 0.0}
    assert (report["problems_solved"], report["samples_right"], report["samples"]) == (15, 120, 240)


def test_half_the_samples_right():
    """4 of 8 everywhere: no spread over problems; sampling √(30 · ¼ / 7) / 30; pass@2 = 1 − C(4,2)/C(8,2) = 11/14."""
    report = summarize(records_of([4] * 30))
    assert (report["avg"], report["avg_se"]) == (0.5, 0)
    assert report["avg_se_sampling"] == pytest.approx(math.sqrt(30 * 0.25 / 7) / 30)
    assert report["pass"]["8"] == 1
    assert report["pass"]["2"] == pytest.approx(11 / 14)
    assert report["maj"] == 0.5  # four votes for 7, four for x


def test_pass_at_is_the_share_of_subsets_with_a_right_sample():
    for k, right in itertools.product(range(1, 7), range(7)):
        for j in range(1, k + 1) if right <= k else []:
            subsets = list(itertools.combinations([i < right for i in range(k)], j))
            assert pass_at(right, k, j) == pytest.approx(np.mean([any(subset) for subset in subsets]))


def test_majority_splits_ties_and_ignores_missing_answers():
    def votes(*answers):
        return [record("p", i, a == "7", answer=a) for i, a in enumerate(answers)]

    assert majority(votes("7", "7", "1")) == 1
    assert majority(votes("7", "1")) == 0.5
    assert majority(votes("7", "1", "2")) == pytest.approx(1 / 3)
    assert majority(votes("7", None, None, None)) == 1
    assert majority(votes(None, None)) == 0
    assert majority(votes("073", "73", "7")) == 0  # two spellings of one wrong answer are one candidate
    truncated = [record("p", 0, True), *(record("p", i, False, answer="1", finish="length") for i in (1, 2, 3))]
    assert majority(truncated) == 1  # an answer that was cut off is no vote


def test_a_truncated_sample_is_wrong_and_counted():
    report = summarize(
        [record("p", 0, True, finish="length"), record("p", 1, True), record("q", 0, False), record("q", 1, True)]
    )
    assert (report["avg"], report["truncated"], report["truncated_with_right_answer"]) == (0.5, 0.25, 1)


def test_tokens_and_no_answer():
    rows = [
        record("p", 0, True, tokens=10),
        record("p", 1, False, answer=None, tokens=40),
        record("q", 0, True, tokens=20),
    ]
    report = summarize([*rows, record("q", 1, False, tokens=100)])
    assert (report["tokens_mean"], report["tokens_median"]) == (42.5, 30)
    assert (report["tokens_mean_right"], report["tokens_mean_wrong"]) == (15, 70)
    assert report["no_answer"] == 0.25


def test_missing_and_duplicate_samples_are_refused():
    rows = records_of([4] * 3)
    with pytest.raises(UserError, match="once each"):
        summarize(rows[:-1])
    with pytest.raises(UserError, match="2024-I-3 has"):
        summarize([*rows, rows[-1]])


def test_one_problem_or_one_sample_has_no_error_but_a_report():
    report = summarize(records_of([1], k=1)) | {"settings": {}}
    assert report["avg_se"] is None
    assert report["avg_se_sampling"] is None
    assert "pass@j" in format_report(report)


def test_quantiles_against_tables():
    for df, t in [(1, 12.706), (2, 4.303), (9, 2.262), (29, 2.045), (120, 1.980)]:  # Student's table, 97.5 %
        assert student_t(df) == pytest.approx(t, abs=6e-4)
    assert beta_quantile(0.3, 1, 1) == pytest.approx(0.3)  # uniform
    assert beta_quantile(0.25, 2, 1) == pytest.approx(0.5)  # I_x(2, 1) = x²
    # Clopper and Pearson, Biometrika 26 (1934), n = 10: 1 of 10 → .0025 to .4450.
    low, high, kind = interval_95(0.1 - 1e-12, 0.1, 10)
    assert (low, high, kind) == (pytest.approx(0.0025, abs=5e-5), pytest.approx(0.4450, abs=5e-5), "Beta")
    # Three problems with 4 of 8 right each have no spread, which is no certainty: Beta(1.5, 2.5) and its mirror image.
    low, high, kind = interval_95(0.5, 0.0, 3)
    assert (low + high, kind) == (pytest.approx(1), "Beta")
    assert high - low > 0.8


@pytest.mark.parametrize(
    "spread", [0.3, 0.64, 2.0, 8.0]
)  # a + b of the Beta distribution of difficulty; .64 fits AIME runs
def test_the_printed_interval_covers(spread):
    """2000 simulated evaluations of 30 problems × 8 samples: the printed 95 % interval holds the truth in ≥ 93 %."""
    rng = np.random.default_rng(0)
    for truth in (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95):
        chance = rng.beta(truth * spread, (1 - truth) * spread, (2000, 30))
        means = rng.binomial(8, chance) / 8  # (2000, 30)
        hits = [
            low <= truth <= high
            for m in means
            for low, high, _ in [interval_95(float(m.mean()), float(m.std(ddof=1) / math.sqrt(30)), 30)]
        ]
        assert np.mean(hits) >= 0.93, f"coverage {np.mean(hits):.3f} at {truth}"


def test_the_text_and_the_picture(tmp_path):
    report = summarize(records_of([8] * 10 + [2] * 20)) | {"settings": {"benchmark": "aime2024", "temperature": 0.6}}
    text = format_report(report)
    assert "avg@8     50.0 % · 95 % interval" in text
    assert "30 of 30 problems ever solved · 120 of 240 samples right" in text
    assert "temperature = 0.6" in text
    assert "Beta" in format_report(summarize(records_of([0] * 29 + [8])) | {"settings": {}})
    plot_report(report, tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


# ---------------------------------------------------------------------------------------------------------------------
# Two runs


def test_sign_flip_on_darwins_maize():
    """Fisher, The Design of Experiments (1935) §21: 863 of 2^15 sums reach the observed 314, two-sided 1726."""
    darwin = [49, -67, 8, 16, 6, 23, 28, 41, 14, 29, 56, 24, 75, 60, -48]
    assert sign_flip_p(darwin) == 1726 / 2**15


def test_sign_flip_is_the_enumeration():
    rng = np.random.default_rng(1)
    for n in (1, 2, 5, 9):
        d = rng.integers(-8, 9, n)
        sums = [abs(sum(s * x for s, x in zip(signs, d))) for signs in itertools.product((1, -1), repeat=n)]
        assert sign_flip_p(d.tolist()) == pytest.approx(np.mean(np.array(sums) >= abs(d.sum())))
    assert sign_flip_p([0, 0, 0]) == 1
    assert sign_flip_p([8] * 30) == 2 / 2**30


def test_fisher_exact_on_the_lady_tasting_tea():
    """Fisher 1935 §5: three of four cups right is 17 tables of 70 on one side, 34 on both; all four 2 of 70."""
    assert fisher_p(3, 4, 1, 4) == pytest.approx(34 / 70)
    assert fisher_p(4, 4, 0, 4) == pytest.approx(2 / 70)
    assert fisher_p(0, 8, 8, 8) == pytest.approx(2 / math.comb(16, 8))


def test_compare_is_paired():
    """B solves one more sample of 8 in each problem: difference 1/8 with no error over problems, p = 2 / 2^30."""
    a, b = records_of([2] * 30), records_of([3] * 30)
    c = compare(a, b)
    assert (c["difference"], c["se"], c["p_sign_flip"]) == (0.125, 0, 2 / 2**30)
    assert c["low"] is c["high"] is None  # no interval of width 0
    assert c["se_sampling"] == pytest.approx(math.sqrt(30 * (2 / 8 * 6 / 8 + 3 / 8 * 5 / 8) / 7) / 30)
    assert {row["verdict"] for row in c["table"]} == {"cannot tell"}
    # ± 2 points: 1.96 √(Σ (v_A + v_B) / k) / 30 ≤ .02, with the unbiased variances v = p (1 − p) 8 / 7
    v = 30 * (2 / 8 * 6 / 8 + 3 / 8 * 5 / 8) * 8 / 7
    k = c["samples_needed"]
    assert 1.96 * math.sqrt(v / k) / 30 <= 0.02 < 1.96 * math.sqrt(v / (k - 1)) / 30
    assert compare(b, a)["difference"] == -0.125
    assert compare(a, a)["p_sign_flip"] == 1


def test_compare_tells_which_problems_changed():
    c = compare(records_of([0, 8, 4] + [1] * 27), records_of([8, 0, 5] + [1] * 27))
    assert [row["verdict"] for row in c["table"][:4]] == ["better", "worse", "cannot tell", "cannot tell"]
    assert c["difference"] == pytest.approx(1 / 240)
    text = format_comparison(c)
    assert "27 problems with equal accuracy" in text
    assert "better" in text


def test_compare_pairs_ones_own_rewards_too():
    """Problems earn 0, 1 and 2 in A and 1, 4 and 4 in B (in another order): differences 1, 3, 2, mean 2, spread 1."""
    a, b = records_of([1, 1, 1], k=2), records_of([1, 1, 1], k=2)[::-1]
    for records, low in ((a, [0, 1, 2]), (b, [0, 3, 3])):
        for record in records:
            i = int(record["problem"].rpartition("-")[2]) - 1
            record["reward"] = low[i] + (records is b) * 2 * record["sample"]  # on average 1 more in B
    c = compare(a, b)
    assert (c["reward_a"], c["reward_b"], c["reward_difference"]) == (1, 3, 2)
    assert c["reward_se"] == pytest.approx(1 / math.sqrt(3))
    assert "by --reward A 1.000, B 3.000: B − A = +2.000 ± 0.577" in format_comparison(c)
    assert "--reward" not in format_comparison(compare(a, records_of([1, 1, 1], k=2)))


def test_compare_with_different_k_and_other_problems():
    c = compare(records_of([1, 2], k=2), records_of([2, 4], k=4))
    assert (c["difference"], c["p_sign_flip"]) == (0, 1)
    with pytest.raises(UserError, match="not the same problems"):
        compare(records_of([1, 2]), records_of([1]))


def test_false_alarms_of_the_comparison_are_rare():
    """Two runs of one model: p < .05 in about 5 % of 400 pairs, any verdict on a problem in at most 5 % of tables."""
    rng = np.random.default_rng(2)
    alarms = verdicts = 0
    for _ in range(400):
        chance = rng.beta(0.3, 0.3, 30)
        c = compare(*(records_of(rng.binomial(8, chance)) for _ in range(2)))
        alarms += c["p_sign_flip"] < 0.05
        verdicts += any(row["verdict"] != "cannot tell" for row in c["table"])
    assert alarms / 400 < 0.08  # 5 % plus three standard errors of 400 trials
    assert verdicts / 400 < 0.08


# ---------------------------------------------------------------------------------------------------------------------
# Problems
