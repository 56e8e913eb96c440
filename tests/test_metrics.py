"""metrics.py on its own. `pytest tests/test_metrics.py`."""

import pytest
import torch

import train_grpo
from math_answers import Verdict
from metrics import gap_stats, percentile, step_metrics
from problems import arithmetic_problems
from rollout import Sample


def test_gap_counts_nats_and_kl_is_k3():
    # trainer 0, −1, −2 against sampler −1: exp(d) − 1 − d of d = 1, 0, −1 is .7183, 0, .3679, never negative
    stats = gap_stats(torch.tensor([0.0, -1.0, -2.0]), torch.full((3,), -1.0))
    assert stats["gap"].item() == 2
    assert stats["gap_max"].item() == 1
    assert stats["kl"].item() == pytest.approx(0.7183 + 0.3679, abs=1e-4)
    assert percentile(stats["gap_histogram"], 0.99) == pytest.approx(1.0, rel=0.13)
    assert percentile(torch.zeros(5), 0.99) == 0


def test_means_of_a_step_with_two_updates():
    """|Δlogp| .02 on 50 tokens of the first minibatch; the second adds tokens, a loss and a norm but no gap."""
    names = ("kl", "unknown", "reference_kl", "entropy", "clip_low", "clip_high", "experts_alike", "experts_known")
    totals = dict.fromkeys((*names, "gap_max", "ratio_max"), torch.tensor(0.0))
    totals |= {"gap": torch.tensor(1.0), "gap_tokens": torch.tensor(50.0), "tokens": torch.tensor(100.0)}
    totals |= {"loss": torch.tensor(3.0), "gap_histogram": torch.ones(162)}
    samples = [Sample([1], [2], [0.0], "", "stop", 0)] * 4
    problems, rewards = arithmetic_problems(0)[0][:2], [0.0, 1.0, 0.0, 1.0]
    rollouts = train_grpo.Rollouts(problems, samples, [Verdict(False, "different")] * 4, rewards)
    m = step_metrics(1, rollouts, rewards, 2, totals, [2.0, 4.0])
    assert m["gap"] == pytest.approx(0.02)
    assert (m["loss"], m["grad_norm"]) == (1.5, 3.0)  # means over the two updates
