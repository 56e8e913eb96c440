"""report.py on its own. `pytest tests/test_report.py`."""

import report


def test_an_outcome_without_a_before_names_its_step():
    first, last = ({"step": step, "avg": avg, "problems": 64, "k": 8} for step, avg in ((0, 0.08), (48, 0.71)))
    assert report.outcome([first, last]) == "before .08 → after .71 (64 problems × 8 samples)"
    assert report.outcome([last]) == "step 48: .71 (64 problems × 8 samples)"


def test_a_summary_tells_what_a_step_takes():
    rows = ((1, 0.1, 0.01, {"train": 2.0, "generate": 1.0}), (2, 0.5, 0.03, {"train": 4.0}))
    metrics = [dict(zip(("step", "reward", "gap", "seconds"), row)) for row in rows]
    steps, seconds = report.summary(metrics, []).splitlines()
    assert steps == "2 steps; reward 0.10 → 0.50; |Δlogp| mean 0.0200, worst step 0.0300"
    assert seconds == "seconds a step: generate 0.50, train 3.00"
