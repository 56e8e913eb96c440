"""The GRPO step: pure functions against published values and slow references. `pytest tests/test_train_grpo.py`.

The values are those of the unit tests of NeMo-RL, TRL, verl, OpenRLHF and slime. Theirs that have no test here, and why:

- KL terms weighted by importance (NeMo-RL), truncation from below (verl), rejection of whole sequences (verl, TRL's OPSM):
  no such option. IcePop is what drops tokens here; its out-of-bounds share, deviation and effective sample size are no metrics.
- mean over sequences of their token means (GRPO as first published): all losses but Dr. GRPO's take DAPO's token mean.
- PPO-KL as a mean of log-ratios: `gap_stats` counts |Δlogp| and k3, which cannot cancel.
- MaxRL advantages, standard deviations without the sample itself: no such scale.
- a reward that is None, or NaN in a group: refused by `score_together`. Groups of one: refused by `check_flags`.
- a masked sample outside its group's baseline (NeMo-RL): a cut completion stays in the baseline, as in TRL; only its loss goes.
- the mask by entropy (TRL): entropy is a metric.
- a length beyond the limit (NeMo-RL's fourth overlong value): the engine stops at the limit.
"""

import copy
import dataclasses
import json
import math
import random
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_model_nvfp4_models import ARCHITECTURES, MLA, SIZES, quantized, tiny_checkpoint

import train_grpo
from model_nvfp4 import UserError
from rollout import Sample
from train_grpo import (
    LOSSES,
    Segment,
    TokenLogprobs,
    arithmetic_problems,
    balance,
    balance_padded,
    gap_stats,
    group_advantages,
    importance_weights,
    learning_rate,
    loss_denominator,
    make_segments,
    next_problems,
    pack,
    per_sample,
    percentile,
    policy_loss,
    shape_rewards,
)

# --- Advantages ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "scale", "expected"),
    [
        # TRL's unbiased standard deviation plus 1e-4, centring only (Dr. GRPO), leave-one-out (NeMo-RL, prime-rl)
        ([1, 0, 0, 0], "std", [1.49970, -0.49990, -0.49990, -0.49990]),
        ([1, 0, 0, 0], "none", [0.75, -0.25, -0.25, -0.25]),
        ([1, 0, 0, 0], "loo", [1, -1 / 3, -1 / 3, -1 / 3]),
        ([1, 1, 0, 0], "std", [0.86588, 0.86588, -0.86588, -0.86588]),
        ([1, 1, 0, 0], "none", [0.5, 0.5, -0.5, -0.5]),
        ([1, 1, 0, 0], "loo", [2 / 3, 2 / 3, -2 / 3, -2 / 3]),
        ([1, 0], "std", [0.70701, -0.70701]),
        ([1, 0], "none", [0.5, -0.5]),
        ([1, 0], "loo", [1, -1]),
        ([1, 2, 3], "loo", [-1.5, 0, 1.5]),  # NeMo-RL: baselines 2.5, 2, 1.5
        ([4, 5, 6], "loo", [-1.5, 0, 1.5]),  # NeMo-RL: baselines 5.5, 5, 4.5
        ([0.3, 0.3, 0.3], "std", [0, 0, 0]),
        ([0.1, 0.1, 0.1], "none", [0, 0, 0]),
        ([-1, -1], "loo", [0, 0]),
    ],
)
def test_advantages(rewards, scale, expected):
    advantages = group_advantages(torch.tensor([rewards], dtype=torch.float32), scale)
    torch.testing.assert_close(advantages[0], torch.tensor(expected, dtype=torch.float32), atol=2e-5, rtol=0)


def test_a_group_without_spread_is_exactly_zero_beside_one_with():
    # Seven times .1 has a mean that is not .1 in fp32: centring alone would leave rounding noise to be divided by 1e-4.
    advantages = group_advantages(torch.tensor([[0.1] * 7, [0.0] * 6 + [1.0]]))
    assert (advantages[0] == 0).all()
    assert (advantages[1] != 0).all()


def test_a_group_of_one_is_refused():
    with pytest.raises(AssertionError, match="at least two samples"):
        group_advantages(torch.tensor([[1.0]]))


def test_a_tiny_spread_is_not_blown_up():
    # verl's [1, 1.00001] gives ±.62 with an epsilon of 1e-6; with ours (TRL's), ½·1e-5 / (1e-5/√2 + 1e-4) = .047
    advantages = group_advantages(torch.tensor([[1.0, 1.00001]]))
    torch.testing.assert_close(advantages, torch.tensor([[-0.047, 0.047]]), atol=1e-3, rtol=0)


# --- Loss ------------------------------------------------------------------------------------------------------------

# NeMo-RL's base case: advantages 1, −1, 2, old log-probs −1, ratios .5, 1, 1.5. Values below are those of the unit tests
# of NeMo-RL, verl, slime and OpenRLHF, recomputed by hand.
NEW, OLD, ADVANTAGES = torch.tensor([-1.69315, -1.0, -0.59453]), torch.full((3,), -1.0), torch.tensor([1.0, -1.0, 2.0])
SAMPLER = torch.tensor([-0.5, -1.5, -0.8])
ONE_SAMPLE = torch.zeros(3, dtype=torch.long)
NO_CLIP = {"clip_low": 0.2, "clip_high": 0.2}


def loss_of(loss, new=NEW, old=OLD, advantages=ADVANTAGES, samples=ONE_SAMPLE, **settings):
    return policy_loss(new, old, advantages, samples, len(new), loss=loss, **{**NO_CLIP, **settings})[0].item()


@pytest.mark.parametrize(
    ("settings", "per_token"),
    [
        ({"loss": "grpo"}, [-0.5, 1, -2.4]),
        ({"loss": "dapo"}, [-0.5, 1, -2.4]),
        ({"loss": "dr_grpo"}, [-0.5, 1, -2.4]),
        ({"loss": "dapo", "clip_high": 0.28}, [-0.5, 1, -2.56]),  # the wider upper clip
        ({"loss": "grpo", "clip_high": 0.28}, [-0.5, 1, -2.4]),  # symmetric whatever --clip-high says
        ({"loss": "gspo"}, [-0.90856, 0.90856, -1.81712]),  # one ratio, exp(mean log-ratio)
        ({"loss": "cispo"}, [1.3545, -1, 1.4269]),
    ],
)
def test_losses_on_the_base_case(settings, per_token):
    """NeMo-RL's means −.6333 (clip), −.6057 (GSPO), .5938 (CISPO), and the tokens' losses: a token's is ∂loss/∂(its weight)."""
    weights = torch.ones(3, requires_grad=True)
    loss, _ = policy_loss(NEW, OLD, ADVANTAGES, ONE_SAMPLE, 3, **NO_CLIP | settings, weights=weights)
    torch.testing.assert_close(torch.autograd.grad(loss, weights)[0] * 3, torch.tensor(per_token), atol=1e-4, rtol=0)
    assert loss_of(**settings) == pytest.approx(sum(per_token) / 3, abs=1e-4)
    means = {"grpo": -0.6333, "gspo": -0.6057, "cispo": 0.5938}
    assert "clip_high" in settings or loss_of(**settings) == pytest.approx(
        means.get(settings["loss"], -0.6333), abs=1e-4
    )


def test_gspo_with_a_second_completion():
    new, old = torch.cat([NEW, NEW]), torch.cat([OLD, torch.full((3,), -2.0)])
    samples = torch.tensor([0, 0, 0, 1, 1, 1])
    assert loss_of("gspo", new, old, ADVANTAGES.repeat(2), samples) == pytest.approx(-0.4912, abs=1e-4)


def test_truncated_importance_sampling():
    weights = importance_weights(OLD, SAMPLER, high=math.inf)
    torch.testing.assert_close(weights, torch.tensor([0.6065, 1.6487, 0.8187]), atol=1e-4, rtol=0)
    assert loss_of("grpo", weights=weights) == pytest.approx(-0.2065, abs=1e-4)
    assert loss_of("grpo", weights=importance_weights(OLD, SAMPLER, high=0.8)) == pytest.approx(-0.4744, abs=1e-4)
    sequence = per_sample(OLD, ONE_SAMPLE, "sum"), per_sample(SAMPLER, ONE_SAMPLE, "sum")
    weights = importance_weights(*sequence, high=0.8)  # exp(−.2) = .8187, capped
    assert loss_of("gspo", weights=weights) == pytest.approx(-0.4846, abs=1e-4)


def test_more_weights_of_other_programs():
    old, sampler = torch.tensor([-2.0, -2.0]), torch.tensor([-1.0, -2.5])  # verl
    torch.testing.assert_close(importance_weights(old, sampler), torch.tensor([0.368, 1.649]), atol=1e-3, rtol=0)
    raw = torch.tensor([0.1, 1.0, 3.0]).log()  # NeMo-RL's truncation at 2
    torch.testing.assert_close(importance_weights(raw, torch.zeros(3), high=2.0), torch.tensor([0.1, 1.0, 2.0]))


def test_icepop_drops_what_is_out_of_bounds():
    sampler = torch.tensor([-0.5, -3.5, -0.8])
    weights = importance_weights(OLD, sampler, "icepop", low=0.5, high=5.0)
    torch.testing.assert_close(weights, torch.tensor([0.6065, 0.0, 0.8187]), atol=1e-4, rtol=0)
    assert loss_of("grpo", new=OLD, weights=weights) == pytest.approx(-0.7480, abs=1e-4)
    raw = torch.log(torch.tensor([0.4, 0.8, 6.0]))  # verl's case
    weights = importance_weights(raw, torch.zeros(3), "icepop", low=0.5, high=5.0)
    torch.testing.assert_close(weights, torch.tensor([0.0, 0.8, 0.0]))


def test_a_missing_log_prob_weighs_nothing():
    weights = importance_weights(OLD, torch.tensor([-math.inf, math.nan, -1.0]))
    assert weights.tolist() == [0, 0, 1]


def test_a_log_prob_that_is_no_number_counts_as_on_policy():
    new = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    loss, _ = policy_loss(new, torch.tensor([math.nan, -math.inf, -1.0]), ADVANTAGES, ONE_SAMPLE, 3, loss="grpo")
    loss.backward()
    torch.testing.assert_close(new.grad, -ADVANTAGES / 3)
    assert gap_stats(new, torch.tensor([math.nan, -math.inf, -1.0]))["gap"].item() == 0


def test_dual_clip():
    ratios, advantages = torch.tensor([0.5, 1.0, 10.0]), torch.tensor([1.0, -1.0, -4.0])
    assert loss_of("grpo", ratios.log(), torch.zeros(3), advantages, dual_clip=3.0) == pytest.approx(4.1667, abs=1e-4)
    ratios, advantages = torch.tensor([2.0, 2.0, 0.5]), torch.tensor([2.0, -2.0, 2.0])  # slime: −2.4, 3, −1
    assert loss_of("grpo", ratios.log(), torch.zeros(3), advantages, dual_clip=1.5) == pytest.approx(-0.4 / 3, abs=1e-4)
    assert loss_of("grpo", ratios.log(), torch.zeros(3), advantages) == pytest.approx(0.6 / 3, abs=1e-4)  # 2nd is 4


def test_kl_to_the_base_is_k3():
    # new 0, −1, −2 against a base of −1: .3679, 0, .7183
    new, base = torch.tensor([0.0, -1.0, -2.0]), torch.full((3,), -1.0)
    loss, stats = policy_loss(new, new, torch.zeros(3), ONE_SAMPLE, 3, reference_logprobs=base, kl_coef=1.0)
    assert loss.item() == pytest.approx(0.3621, abs=1e-4)
    assert stats["reference_kl"].item() == pytest.approx(3 * 0.3621, abs=1e-3)


def test_reinforce_is_the_gradient_on_policy():
    # NeMo-RL's REINFORCE case: −Σ A·logp / 3 = .8333 for log-probs −.5, −1, −1.5; on policy every loss has its gradient.
    gradients = []
    for loss in LOSSES:
        new = torch.tensor([-0.5, -1.0, -1.5], requires_grad=True)
        policy_loss(new, new.detach(), ADVANTAGES, torch.arange(3), 3, loss=loss)[0].backward()
        gradients.append(new.grad)
    for gradient in gradients:
        torch.testing.assert_close(gradient, -ADVANTAGES / 3)
    assert -(ADVANTAGES * torch.tensor([-0.5, -1.0, -1.5])).mean().item() == pytest.approx(0.8333, abs=1e-4)


def test_cispo_gradient_goes_through_the_log_prob_only():
    ratios = torch.tensor([1.0, 1.14, 1.56, 0.4])
    new = ratios.log().requires_grad_()
    policy_loss(new, torch.zeros(4), torch.ones(4), torch.zeros(4, dtype=torch.long), 1, loss="cispo")[0].backward()
    torch.testing.assert_close(new.grad, -torch.tensor([1.0, 1.14, 1.28, 0.8]))  # slime's clamped weights


def test_one_denominator_whatever_the_split():
    # OpenRLHF's case: rows of 2, 3 and 2 tokens; full loss −.13641.
    logprobs = [[-0.2, -0.4], [-0.7, -0.3, -0.2], [-0.6, -0.5]]
    log_ratios = [[0.03, -0.04], [0.02, 0.05, -0.03], [0.04, -0.02]]
    advantages = [[1, -0.5], [0.3, -1.2, 0.5], [1.5, -0.7]]

    def loss(rows):
        new = torch.tensor([v for r in rows for v in logprobs[r]])
        old = new - torch.tensor([v for r in rows for v in log_ratios[r]])
        advantage = torch.tensor([v for r in rows for v in advantages[r]], dtype=torch.float32)
        samples = torch.tensor([i for i, r in enumerate(rows) for _ in logprobs[r]])
        return policy_loss(new, old, advantage, samples, 7, loss="grpo")[0].item()

    assert loss([0, 1, 2]) == pytest.approx(-0.13641, abs=1e-5)
    assert loss([0, 1]) + loss([2]) == pytest.approx(-0.13641, abs=1e-5)


@pytest.mark.parametrize(
    ("losses", "denominator", "expected"),
    [
        (
            [[1, 2], [3, 4, 5], [7]],
            6,
            3.6667,
        ),  # the token mean of OpenRLHF, verl and NeMo-RL, whichever way it is split
        ([[1, 2], [4, 6]], 1, 13),  # verl's token sum; its 52 is the times 4 ranks of `loss * world` in the loop
    ],
)
def test_aggregation_is_over_tokens(losses, denominator, expected):
    """On policy a token's loss is −advantage, so any losses can be aggregated, in one row or in one row each."""

    def total(rows):
        flat = torch.tensor([-float(v) for row in rows for v in row])
        which = torch.tensor([number for number, row in enumerate(rows) for _ in row])
        return policy_loss(torch.zeros(len(flat)), torch.zeros(len(flat)), flat, which, denominator)[0].item()

    assert total(losses) == pytest.approx(expected, abs=1e-4)
    assert sum(total([row]) for row in losses) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("loss", LOSSES)
def test_nothing_trained_is_exactly_zero(loss):
    new = torch.tensor([-0.5], requires_grad=True)  # what a rank without work computes; its weight is 0
    value, stats = policy_loss(new, torch.zeros(1), torch.zeros(1), torch.zeros(1, dtype=torch.long), 1, loss=loss)
    (value * 0.0).backward()
    assert (value * 0.0).item() == new.grad.item() == 0
    assert all(math.isfinite(v) for v in stats.values())


def test_clip_fractions_are_of_the_raw_ratios():
    # Base case: .5 with a good sample and 1.5 with a good one; only the second has lost its gradient.
    _, stats = policy_loss(NEW, OLD, ADVANTAGES, ONE_SAMPLE, 3, **NO_CLIP)
    assert (stats["clip_low"].item(), stats["clip_high"].item()) == (0, 1)
    assert stats["ratio_max"].item() == pytest.approx(1.5, abs=1e-4)
    _, stats = policy_loss(NEW, OLD, -ADVANTAGES, ONE_SAMPLE, 3, **NO_CLIP)
    assert (stats["clip_low"].item(), stats["clip_high"].item()) == (1, 0)


def test_denominators():
    """DAPO's constraint leaves groups without spread out of its batch; GRPO, GSPO and CISPO divide by all they sampled."""
    expected = {"dapo": 7, "grpo": 19, "gspo": 19, "cispo": 19, "dr_grpo": 120}
    assert {loss: loss_denominator(loss, 7, 19, 3, 40) for loss in LOSSES} == expected
    assert loss_denominator("dapo", 0, 19, 3, 40) == 1  # nothing to train: 0 / 1, not 0 / 0


def test_gap_counts_nats_and_kl_is_k3():
    # trainer 0, −1, −2 against sampler −1: exp(d) − 1 − d of d = 1, 0, −1 is .7183, 0, .3679, never negative
    stats = gap_stats(torch.tensor([0.0, -1.0, -2.0]), torch.full((3,), -1.0))
    assert stats["gap"].item() == 2
    assert stats["gap_max"].item() == 1
    assert stats["kl"].item() == pytest.approx(0.7183 + 0.3679, abs=1e-4)
    assert percentile(stats["gap_histogram"], 0.99) == pytest.approx(1.0, rel=0.13)
    assert percentile(torch.zeros(5), 0.99) == 0


def test_schedules():
    assert [learning_rate(1.0, s, 10, 4, "constant") for s in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    assert learning_rate(1.0, 0, 10, 0, "cosine") == 1
    assert learning_rate(1.0, 5, 10, 0, "cosine") == pytest.approx(0.55)
    assert learning_rate(1.0, 10, 10, 0, "cosine") == pytest.approx(0.1)


# --- Problems --------------------------------------------------------------------------------------------------------


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


# --- Rewards ---------------------------------------------------------------------------------------------------------


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


def test_unreadable_references_and_a_missing_reward_function_are_told_before_training(tmp_path):
    good, _ = arithmetic_problems(0)
    train_grpo.check_references(good[:5], None)
    bad = [good[0], dataclasses.replace(good[1], answer="???")]
    with pytest.raises(UserError, match=f"of problem {bad[1].id}"):
        train_grpo.check_references(bad, None)
    with pytest.raises(UserError, match="no such Python file"):
        train_grpo.load_own_reward("nowhere.py:reward")
    (tmp_path / "mine.py").write_text("def half(completion, reference):\n    return 0.5\n")
    assert train_grpo.load_own_reward(f"{tmp_path}/mine.py:half")("a", "b") == 0.5


@pytest.mark.parametrize(
    ("value", "paid"),
    [("np.float32(.5)", 0.5), ("np.bool_(True)", True), ("torch.tensor(2)", 2), ("True", True)]
    + [(value, None) for value in ("'1'", "(1, 2)", "np.array([1, 2])", "None", "float('nan')")],
)
def test_ones_own_reward_is_a_number_of_whatever_library(value, paid, tmp_path):
    (tmp_path / "mine.py").write_text(f"import numpy as np, torch\ndef own(c, r):\n    return {value}\n")
    said = train_grpo.load_own_reward(f"{tmp_path}/mine.py:own")("a", "b")
    json.dumps(said)  # it goes into samples.jsonl
    if paid is None:
        with pytest.raises(UserError, match="must return a finite number"):
            train_grpo.check_own_reward(said, "a", "b")
    else:
        train_grpo.check_own_reward(said, "a", "b")
        assert said == paid


def test_a_benchmark_file_is_read_as_the_dataset_is(tmp_path):
    for name, numbers in (("train", range(4)), ("test", range(3, 6))):
        gap = " " * len(name)  # copies of a problem differ in their spaces
        rows = [json.dumps({"question": f"{i} +{gap}{i}", "solution": str(2 * i)}) for i in numbers]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    words = ["--model", "any", "--dataset", f"{tmp_path}/train.jsonl", "--eval-benchmark", f"{tmp_path}/test.jsonl"]
    args = train_grpo.parse_args([*words, "--prompt-key", "question", "--answer-key", "solution"])
    train, heldout = train_grpo.read_data(args)
    assert sorted(p.answer for p in train) == ["0", "2", "4"]  # the one that is in both is not trained on
    assert [p.answer for p in heldout] == ["6", "8", "10"]


# --- Micro-batches ---------------------------------------------------------------------------------------------------


def sample(prompt, completion, logprob=-0.5):
    return Sample(prompt, completion, [logprob] * len(completion), "", "stop", 0)


def test_pack_writes_the_prompt_once_and_trains_every_completion_token():
    prompt = [7, 8, 9]
    samples = [sample(prompt, [1, 2, 3]), sample(prompt, [4, 5])]
    segments = make_segments(samples, torch.tensor([[1.0, -1.0]]), max_tokens=100)
    batch = pack(segments)
    assert batch.input_ids.tolist() == [[7, 8, 9, 1, 2, 4]]  # last tokens (3 and 5) are targets only
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 3]]
    assert batch.layout[0, 0].tolist() == [[6, 6, 6, 5, 5, 6], [0, 1, 2, 3, 4, 3]]
    assert batch.sources.tolist() == [2, 3, 4, 2, 5]
    assert batch.targets.tolist() == [1, 2, 3, 4, 5]  # end-of-sequence is the last of each, and it is there
    assert batch.picks.tolist() == [0, 1, 2, 3, 4]
    assert batch.advantages.tolist() == [1, 1, 1, -1, -1]
    assert batch.samples.tolist() == [0, 0, 0, 1, 1]


def test_pack_writes_what_completions_begin_with_once():
    completions = [[4, 5, 6], [4, 7], [4, 5, 6], [4, 5], [3]]  # two are alike, one begins the two
    batch = pack([Segment([8, 9], [(c, [-1.0 * len(c)] * len(c), float(len(c))) for c in completions])])
    assert batch.input_ids.tolist() == [[8, 9, 4, 5]]  # 9 is answered by 4 or 3, 4 by 5 or 7, 5 by 6
    assert batch.layout[0, 0].tolist() == [[4] * 4, [0, 1, 2, 3]]
    assert list(zip(batch.sources.tolist(), batch.targets.tolist())) == [(1, 4), (2, 5), (3, 6), (2, 7), (1, 3)]
    assert batch.picks.tolist() == [0, 1, 2, 0, 3, 0, 1, 2, 0, 1, 4]
    assert batch.samples.tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 4]
    assert batch.advantages.tolist() == [3, 3, 3, 2, 2, 3, 3, 3, 2, 2, 1]
    assert batch.old_logprobs.tolist() == [-3, -3, -3, -2, -2, -3, -3, -3, -2, -2, -1]  # each sample's own


def test_segments_drop_groups_without_spread_and_masked_samples_and_cut_long_groups():
    samples = [sample([1] * 10, [2] * 5) for _ in range(4)] + [sample([3] * 10, [4] * 5) for _ in range(4)]
    advantages = torch.tensor([[0.0] * 4, [1.0, 0.0, -1.0, 0.0]])
    (segment,) = make_segments(samples, advantages, max_tokens=1000)
    assert segment.prompt_ids == [3] * 10
    assert [advantage for _, _, advantage in segment.completions] == [1, 0, -1, 0]  # zero inside a live group counts
    cut = make_segments(samples, advantages, max_tokens=20)
    assert [len(s.completions) for s in cut] == [2, 2]
    assert all(s.num_tokens <= 20 for s in cut)
    (masked,) = make_segments(samples, advantages, max_tokens=1000, masked=[False] * 5 + [True] + [False] * 2)
    assert len(masked.completions) == 3


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_every_rank_gets_equally_many_rows_within_the_budget(world):
    generator = torch.Generator().manual_seed(world)
    lengths = torch.randint(1, 60, (23,), generator=generator).tolist()
    segments = [Segment([0] * 5, [([1] * n, [0.0] * n, 1.0)]) for n in lengths]
    ranks = balance(segments, world, max_tokens=70)
    assert len({len(rows) for rows in ranks}) == 1
    rows = [row for rank in ranks for row in rank]
    assert sorted(s.num_tokens for row in rows for s in row) == sorted(s.num_tokens for s in segments)
    assert all(sum(s.num_tokens for s in row) <= 70 for row in rows)
    assert balance([], world, 70) == [[[]]] * world  # nothing to train: one stand-in row each keeps ranks in step


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_padding_counts_where_a_sample_is_a_row(world):
    generator = torch.Generator().manual_seed(world)
    lengths = [*torch.randint(1, 60, (23,), generator=generator).tolist(), 200]  # the last alone exceeds the budget
    segments = [Segment([0] * 5, [([1] * n, [0.0] * n, 1.0)]) for n in lengths]
    ranks = balance_padded(segments, world, max_tokens=150)
    assert len({len(batches) for batches in ranks}) == 1
    batches = [batch for rank in ranks for batch in rank]
    assert sorted(s.num_tokens for batch in batches for s in batch) == sorted(s.num_tokens for s in segments)
    padded = [pack(batch, sample_a_row=True).input_ids.shape for batch in batches]
    assert all(rows * tokens <= 150 or rows == 1 for rows, tokens in padded)
    # Neighbours in length leave little to pad; as `balance` deals them, padding would make these 1.4 to 1.6 times as many.
    assert sum(rows * tokens for rows, tokens in padded) <= 1.15 * sum(s.num_tokens for s in segments)
    assert balance_padded([], world, 150) == [[[]]] * world


# --- Attention and log-probs against the slow reference --------------------------------------------------------------


@pytest.fixture(scope="module", params=["llama", "sliding window", "softcap and sinks"])
def tiny_model(request):
    """A random model in fp32, and the same one with transformers' own eager attention."""
    from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig, MistralConfig

    size = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "attention_dropout": 0.0,
    }
    config = {
        "llama": lambda: LlamaConfig(**size),
        "sliding window": lambda: MistralConfig(**size, sliding_window=5),
        "softcap and sinks": lambda: GptOssConfig(**size, num_local_experts=4, num_experts_per_tok=2, sliding_window=5),
    }[request.param]()
    train_grpo.register_attention()
    torch.manual_seed(0)
    models = []
    for implementation in ("grouped", "eager"):
        copied = copy.deepcopy(config)  # a model keeps its implementation in its config
        models.append(AutoModelForCausalLM.from_config(copied, attn_implementation=implementation).float().eval())
    models[1].load_state_dict(models[0].state_dict())
    return models


def tree(shared=0):
    """Layout (1, 1, 2, T) of three groups whose prompts begin with the same `shared` tokens and whose completions, of two
    words, often do; and (T, T): whom a token sees by definition, those whose history begins its own."""
    rng = random.Random(shared)
    words = [[rng.randrange(2) for _ in range(n)] for n in [3, 1, 5, 4, 9, 3, 9, 2, 9, 1]]  # of 1: no input of its own
    groups = zip([7, 4, 12], [words[:5], words[5:9], words[9:]])
    row = [[5] * shared + [10 + length] * (length - shared) for length in (7, 4, 12)]
    row = [Segment(p, [(c, [0.0] * len(c), 1.0) for c in said]) for p, (_, said) in zip(row, groups)]
    batch, history, histories = pack(row), [], []
    for token, position in zip(batch.input_ids[0].tolist(), batch.position_ids[0].tolist()):
        history = [*history[:position], token]
        histories.append(history)
    inputs = [s.prompt_ids + c[:-1] for s in row for c, _, _ in s.completions]
    prefixes = {tuple(ids[: n + 1]) for ids in inputs for n in range(len(ids))}
    assert sorted(map(tuple, histories)) == sorted(prefixes)  # each once, none left out
    visible = torch.tensor([[own[: len(other)] == other for other in histories] for own in histories])  # (T, T)
    return batch.layout, visible


def attention_by_definition(query, key, value, visible, position, scaling, window, softcap, sinks):
    """(1, heads, T, D): every pair of tokens scored, those that must not see each other set to −inf."""
    if window:
        visible = visible & (position > position[:, None] - window)
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * scaling
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(1, -1, scores.shape[2], 1)], -1)
    return scores.softmax(-1)[..., : query.shape[2]] @ value


@pytest.mark.parametrize("shared", [0, 3, 4])  # 4 tokens are the second prompt as a whole
@pytest.mark.parametrize("rows", [512, 5])
@pytest.mark.parametrize(
    ("window", "softcap", "with_sinks", "value_size"),
    [(None, None, False, 8), (4, None, False, 8), (None, 2.0, False, 8), (None, None, True, 8), (3, 1.5, True, 5)],
)
def test_block_attention_is_attention_by_its_definition(
    monkeypatch, shared, rows, window, softcap, with_sinks, value_size
):
    monkeypatch.setattr(train_grpo.BlockAttention, "ROWS", rows)
    torch.manual_seed(0)
    layout, visible = tree(shared)
    shapes = [(6, 8), (2, 8), (2, value_size)]
    exact = [torch.randn(1, h, layout.shape[-1], d, dtype=torch.float64, requires_grad=True) for h, d in shapes]
    ours = [tensor.detach().float().requires_grad_() for tensor in exact]
    sinks = torch.randn(6) if with_sinks else None
    expected = attention_by_definition(*exact, visible, layout[0, 0, 1], 0.3, window, softcap, sinks)
    for other_window in (99, window):  # layers of one model differ in it, and get the same layout
        output, _ = train_grpo.grouped_attention(
            None, *ours, layout, scaling=0.3, sliding_window=other_window, softcap=softcap, s_aux=sinks
        )
    grad = torch.randn_like(expected)
    expected.backward(grad)
    output.backward(grad.float().transpose(1, 2))
    torch.testing.assert_close(output.transpose(1, 2).double(), expected, atol=2e-6, rtol=1e-5)
    for mine, theirs in zip(ours, exact):
        torch.testing.assert_close(mine.grad.double(), theirs.grad, atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize("shared", [0, 3, 4])
@pytest.mark.parametrize("window", [None, 4])
def test_visits_are_the_same_attention_as_causal_pairs(window, shared):
    """What the flash kernel of a GPU gets, done with torch's own attention: causal, aligned at the last tokens."""
    torch.manual_seed(0)
    layout, visible = tree(shared)
    query, key, value = (torch.randn(1, heads, layout.shape[-1], 8) for heads in (6, 2, 2))
    seen, query_ends, key_ends = train_grpo.visits(layout[0, 0])
    assert (query_ends[-1], key_ends[-1]) == (layout.shape[-1], len(seen))
    outputs = []
    for visit in range(len(query_ends) - 1):
        rows, keys = slice(*query_ends[visit : visit + 2]), seen[slice(*key_ends[visit : visit + 2])]
        q = query[:, :, rows]
        causal = torch.ones(q.shape[2], len(keys), dtype=torch.bool).tril(len(keys) - q.shape[2])
        if window:  # flash attention's window_size = (window - 1, 0)
            causal = causal.triu(len(keys) - q.shape[2] - (window - 1))
        outputs.append(
            F.scaled_dot_product_attention(q, key[:, :, keys], value[:, :, keys], attn_mask=causal, enable_gqa=True)
        )
    expected = attention_by_definition(query, key, value, visible, layout[0, 0, 1], 8**-0.5, window, None, None)
    torch.testing.assert_close(torch.cat(outputs, 2), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("shared", [0, 2])  # tokens that all prompts begin with; 2 are the third prompt as a whole
def test_shared_prompts_give_the_gradients_of_separate_rows(tiny_model, shared):
    """One packed row of three groups against one forward per sample: log-probs, entropies and all gradients."""
    grouped, eager = tiny_model
    generator = torch.Generator().manual_seed(1)

    def ids(n):
        return torch.randint(0, 97, (n,), generator=generator).tolist()

    first = ids(shared)
    sizes = [(7, [4, 1, 9]), (12, [3, 6]), (2, [5])]
    groups = [(first + ids(n - shared), [ids(length) for length in lengths]) for n, lengths in sizes]
    groups[0][1][1:1] = [groups[0][1][0], groups[0][1][2][:5] + ids(3)]  # twice the same, and five tokens in common
    segments = [Segment(prompt, [(c, [0.0] * len(c), 1.0) for c in completions]) for prompt, completions in groups]
    batch = pack(segments)
    told = [(prompt, completion) for prompt, completions in groups for completion in completions]
    assert batch.input_ids.numel() == len({(*p, *c[:-1])[:n] for p, c in told for n in range(1, len(p + c))})
    assert len(batch.targets) == len({(*p, *c[:n]) for p, c in told for n in range(1, len(c) + 1)})
    weights = torch.randn(len(batch.picks), generator=generator)  # one weight a token, so that no error can cancel

    policy = train_grpo.Policy(SimpleNamespace(get_base_model=lambda: grouped))
    logprobs, entropy = train_grpo.token_logprobs(policy, batch, temperature=0.7)
    grouped.zero_grad()
    (logprobs * weights).sum().backward()

    expected, expected_entropy = [], []
    for prompt, completions in groups:
        for completion in completions:
            logits = eager(input_ids=torch.tensor([prompt + completion]), use_cache=False).logits[0].float() / 0.7
            table = F.log_softmax(logits[len(prompt) - 1 : -1], -1)  # (tokens, V)
            expected.append(table.gather(1, torch.tensor(completion)[:, None])[:, 0])
            expected_entropy.append(-(table.exp() * table).sum(-1))
    eager.zero_grad()
    (torch.cat(expected) * weights).sum().backward()

    torch.testing.assert_close(logprobs, torch.cat(expected), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, torch.cat(expected_entropy), atol=1e-5, rtol=1e-5)
    trained = dict(eager.named_parameters())
    for name, parameter in grouped.named_parameters():
        if "lm_head" in name:
            continue  # frozen by design: TokenLogprobs makes no gradient for the head
        if "sinks" in name:
            continue  # frozen too: BlockAttention makes none for them
        if "embed" in name and grouped.config.tie_word_embeddings:
            continue
        torch.testing.assert_close(parameter.grad, trained[name].grad, atol=2e-5, rtol=1e-4, msg=name)


def trainer_and_reference(name: str, **config):
    """A random model of the class `name` in fp32 twice: with our attention, and as transformers runs it."""
    import transformers

    train_grpo.register_attention()
    models = []
    for implementation in ("grouped", "eager"):
        torch.manual_seed(0)
        settings = getattr(transformers, f"{name}Config")(**SIZES | config)
        model = transformers.AutoModelForCausalLM.from_config(settings, attn_implementation=implementation)
        models.append(model.float().eval())
    models[1].load_state_dict(models[0].state_dict())
    return models


def reference_logprobs(model, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """(tokens,) of the completion, by the model's own forward of this sample alone."""
    logits = model(input_ids=torch.tensor([prompt + completion]), use_cache=False).logits[0]  # (T, V)
    table = F.log_softmax(logits[len(prompt) - 1 : -1], -1)  # (tokens, V)
    return table.gather(1, torch.tensor(completion)[:, None])[:, 0]


def some_samples(*lengths: int) -> list[Sample]:
    generator = torch.Generator().manual_seed(1)
    prompt, *said = (torch.randint(2, 97, (length,), generator=generator).tolist() for length in (8, *lengths))
    return [Sample(prompt, completion, [0.0] * len(completion), "", "stop", 0) for completion in said]


@pytest.mark.parametrize("name", ["Qwen3Next", "Lfm2"])  # linear attention, short convolutions
def test_no_state_runs_from_one_sample_into_the_next(name):
    """Such models get a padded row a sample; the reference is transformers' own forward and backward of each sample alone."""
    ours, theirs = trainer_and_reference(name, **ARCHITECTURES[name])
    samples, advantages = some_samples(9, 3, 17, 8), torch.tensor([[1.0, 0.5, -1.0, -0.5]])
    policy = train_grpo.Policy(SimpleNamespace(get_base_model=lambda: ours))
    assert policy.sample_a_row
    (dealt,) = balance_padded(make_segments(samples, advantages, 0), 1, 50)
    batches = [pack(row, policy.sample_a_row) for row in dealt]
    assert sorted(tuple(batch.input_ids.shape) for batch in batches) == [(2, 15), (2, 24)]
    told, expected = {}, {}
    for batch in batches:
        logprobs, _ = train_grpo.token_logprobs(policy, batch, 1.0)  # (S,)
        (logprobs * batch.advantages).sum().backward()
        told |= {a.item(): logprobs[batch.advantages == a].detach() for a in batch.advantages.unique()}
    for sample, advantage in zip(samples, advantages[0].tolist()):
        logprobs = reference_logprobs(theirs, sample.prompt_ids, sample.completion_ids)  # (tokens,)
        (logprobs * advantage).sum().backward()
        expected[advantage] = logprobs.detach()
    torch.testing.assert_close(told, expected, atol=1e-5, rtol=1e-5)
    trained = dict(theirs.named_parameters())
    for parameter_name, parameter in ours.named_parameters():
        if not {"lm_head", "embed_tokens"} & set(parameter_name.split(".")):  # frozen by design; one in LFM2
            grad = trained[parameter_name].grad
            torch.testing.assert_close(parameter.grad, grad, atol=2e-5, rtol=1e-4, msg=parameter_name)


@pytest.mark.parametrize(
    ("name", "config", "expected"),
    [
        ("Llama", {}, (1, None)),
        ("Granite", {"logits_scaling": 8.0}, (1 / 8, None)),  # divides
        ("HyperCLOVAX", {"logits_scaling": 8.0}, (8, None)),  # multiplies
        ("MiniCPM3", MLA | {"dim_model_base": 16}, (16 / 64, None)),  # before the head, by the hidden size
        ("Cohere", {"logit_scale": 0.0625}, (0.0625, None)),
        (
            "FalconH1",
            {"mamba_d_ssm": 128, "mamba_d_head": 16, "mamba_n_heads": 8, "lm_head_multiplier": 0.3},
            (0.3, None),
        ),
        ("Gemma2", {"final_logit_softcapping": 0.5}, (1, 0.5)),
        (
            "RecurrentGemma",
            {"lru_width": 64, "block_types": ("recurrent", "attention"), "logits_soft_cap": 0.5},
            (1, 0.5),
        ),
        ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64}, (1, None)),  # calls an inner decoder
    ],
)
def test_logits_are_scaled_as_the_model_does_it(name, config, expected):
    """Whatever its config calls that. The reference is transformers' own forward of each sample."""
    ours, theirs = trainer_and_reference(name, **config)
    samples = some_samples(9, 3)
    policy = train_grpo.Policy(SimpleNamespace(get_base_model=lambda: ours))
    with torch.no_grad():
        for sample in samples:
            batch = pack([Segment(sample.prompt_ids, [(sample.completion_ids, sample.logprobs, 1.0)])])
            logprobs, _ = train_grpo.token_logprobs(policy, batch, 1.0)  # (S,)
            reference = reference_logprobs(theirs, sample.prompt_ids, sample.completion_ids)  # (S,)
            torch.testing.assert_close(logprobs, reference, atol=1e-5, rtol=1e-5)
    assert policy.scale == pytest.approx(expected)


@pytest.mark.parametrize(
    "change", [lambda logits: logits**2, lambda logits: logits.clamp(-30, 30), lambda logits: logits + 1]
)
def test_logits_made_in_another_way_are_refused(monkeypatch, change):
    ours, _ = trainer_and_reference("Llama")
    forward = type(ours).forward

    def changed(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        output.logits = change(output.logits)
        return output

    monkeypatch.setattr(type(ours), "forward", changed)
    policy = train_grpo.Policy(SimpleNamespace(get_base_model=lambda: ours))
    with pytest.raises(UserError, match="LlamaForCausalLM makes its logits in a way of its own"):
        train_grpo.token_logprobs(policy, pack([Segment([5, 6], [([7, 1], [-5.0, -5.0], 1.0)])]), 1.0)


def test_models_of_attention_alone_share_rows(tiny_model):
    assert not train_grpo.has_state(tiny_model[0])


@pytest.mark.parametrize(
    ("temperature", "multiplier", "softcap"), [(1.0, 1.0, None), (0.6, 0.25, None), (1.3, 2.0, 5.0)]
)
def test_token_logprobs_is_log_softmax_with_its_gradient(temperature, multiplier, softcap):
    torch.manual_seed(0)
    hidden = torch.randn(50, 16, dtype=torch.float64, requires_grad=True)
    weight, bias = torch.randn(301, 16, dtype=torch.float64), torch.randn(301, dtype=torch.float64)
    targets, weights = torch.randint(0, 301, (50,)), torch.randn(50)
    logprobs, _ = TokenLogprobs.apply(hidden, weight, bias, targets, temperature, multiplier, softcap)
    (gradient,) = torch.autograd.grad((logprobs * weights).sum(), hidden)

    logits = F.linear(hidden, weight, bias) * multiplier
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    expected = F.log_softmax(logits / temperature, -1).gather(1, targets[:, None])[:, 0]
    (expected_gradient,) = torch.autograd.grad((expected * weights).sum(), hidden)
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_are_not_rounded_to_16_bits(dtype):
    """Log-probs of logits up to 60 against exact ones; logits in bf16 would be off by up to an eighth."""
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 64, generator=draw, dtype=torch.float64).to(dtype) for n in (50, 301))
    weight, bias = 2 * weight, torch.randn(301, generator=draw, dtype=torch.float64).to(dtype)
    targets, before = torch.randint(0, 301, (50,), generator=draw), torch.backends.mkldnn.matmul.fp32_precision
    logprobs, _ = TokenLogprobs.apply(hidden, weight, bias, targets, 1.0, 1.0, None)
    logits = F.linear(hidden.double(), weight.double(), bias.double())
    assert logits.max() > 40
    expected = F.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-4, rtol=0)
    assert torch.backends.mkldnn.matmul.fp32_precision == before  # other matmuls of fp32 stay what they are


def test_empty_row_has_weight_zero_and_a_graph(tiny_model):
    batch = pack([])
    assert batch.weight == 0
    assert len(batch.targets) == 1
    policy = train_grpo.Policy(SimpleNamespace(get_base_model=lambda: tiny_model[0]))
    assert train_grpo.token_logprobs(policy, batch, 1.0)[0].requires_grad


# --- Flags -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "world", "sentence"),
    [
        (["--group-size", "1"], 1, "use 2 or more"),
        (["--prompts", "6"], 4, "4 or 8"),
        (["--prompts", "3"], 4, "the nearest that do: 4"),
        (["--tp", "3"], 4, "does not divide the 4 ranks"),
        (["--lora-rank", "1024"], 1, "above the largest that vLLM serves, 512"),
        (["--temperature", "0"], 1, "above 0"),
        (["--steps", "0"], 1, "at least 1"),
    ],
)
def test_flags_that_cannot_work_say_what_does(words, world, sentence):
    args = train_grpo.parse_args(["--model", "m", *words])
    with pytest.raises(UserError, match=sentence):
        train_grpo.check_flags(args, world)


@pytest.mark.parametrize(
    ("architecture", "rank", "sentence"), [("Llama", 8, "no routed experts"), ("Qwen3Moe", 12, "16")]
)
def test_an_adapter_on_experts_wants_experts_and_a_rank_that_can_be_grouped(tmp_path, architecture, rank, sentence):
    folder = str(quantized(tiny_checkpoint(architecture, tmp_path / "source"), tmp_path / "nvfp4"))
    words = ["--model", folder, "--lora-experts", "--lora-rank"]
    with pytest.raises(UserError, match=sentence):
        train_grpo.check_flags(train_grpo.parse_args([*words, str(rank)]), world=1)
    if architecture == "Qwen3Moe":
        train_grpo.check_flags(train_grpo.parse_args([*words, "16"]), world=1)
        named = ["16", "--engine-args", '{"lora_target_modules": ["q_proj"]}']
        with pytest.raises(UserError, match="leaves the experts out of the engine"):
            train_grpo.check_flags(train_grpo.parse_args([*words, *named]), world=1)
        with pytest.raises(UserError, match="--tp 1 only"):
            train_grpo.check_flags(train_grpo.parse_args([*words, "16", "--replay-experts", "--tp", "2"]), world=2)


def test_the_gate_names_what_to_check():
    healthy = {"step": 3, "gap": 0.01, "unknown": 0.0, "grad_norm": 1.0}
    train_grpo.check_step(healthy, 0.1, 0, "samples.jsonl")
    with pytest.raises(UserError, match="ignore the adapter"):
        train_grpo.check_step(healthy | {"gap": 0.2}, 0.1, 0, "samples.jsonl")
    with pytest.raises(UserError, match="last lines of samples"):
        train_grpo.check_step(healthy | {"grad_norm": math.nan}, 0.1, 3, "samples.jsonl")


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("tp", 0),
        ("minibatches", 0),
        ("print_every", 0),
        ("keep", -1),
        ("heldout", -1),
        ("kl_coef", -0.1),
        ("lora_alpha", 0),
        ("seed", -1),
        ("eval_tokens", 0),
        ("eval_temperature", -1.0),
        ("format_bonus", math.nan),
    ],
)
def test_values_that_cannot_work_are_refused(flag, value):
    args = train_grpo.parse_args(["--model", "anything"])
    train_grpo.check_flags(args, world=1)
    setattr(args, flag, value)
    with pytest.raises(UserError, match=f"--{flag.replace('_', '-')} {value} must be at least"):
        train_grpo.check_flags(args, world=1)


@pytest.mark.parametrize(
    "words",
    [
        "--lr -1",
        "--lr nan",
        "--max-grad-norm 0",
        "--timeout 0",
        "--timeout inf",
        "--eval-top-p 95",
        "--gpu-memory-utilization 85",
        "--dual-clip .5",
        "--temperature nan",
        "--engine-args 5",
        "--chat-template-kwargs [1]",
        "--stop x ",
    ],
)
def test_more_values_that_cannot_work_are_refused(words):
    """A negative norm would reverse the gradient, a dual clip below 1 drop that of bad samples, the rest fail after loading."""
    with pytest.raises(UserError, match=words.split()[0]):
        train_grpo.check_flags(train_grpo.parse_args(["--model", "anything", *words.split(" ")]), world=1)


def test_a_problem_that_comes_twice_in_a_step_is_sampled_anew():
    problems = arithmetic_problems(0, num_train=2)[0]
    drawn = Counter()
    first = train_grpo.number_samples([problems[0], problems[1], problems[0]], 2, drawn)
    assert first == [(problems[i], n) for i, n in ((0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3))]
    assert [n for _, n in train_grpo.number_samples(problems, 2, drawn)] == [4, 5, 2, 3]  # the next round of --refill


def test_means_of_a_step_with_two_updates():
    """|Δlogp| .02 on 50 tokens of the first minibatch; the second adds tokens, a loss and a norm but no gap."""
    names = ("kl", "unknown", "reference_kl", "entropy", "clip_low", "clip_high", "experts_alike", "experts_known")
    totals = dict.fromkeys((*names, "gap_max", "ratio_max"), torch.tensor(0.0))
    totals |= {"gap": torch.tensor(1.0), "gap_tokens": torch.tensor(50.0), "tokens": torch.tensor(100.0)}
    totals |= {"loss": torch.tensor(3.0), "gap_histogram": torch.ones(162)}
    samples = [Sample([1], [2], [0.0], "", "stop", 0)] * 4
    rewards = torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    m = train_grpo.step_metrics(1, samples, rewards, rewards, 2, totals, [2.0, 4.0])
    assert m["gap"] == pytest.approx(0.02)
    assert (m["loss"], m["grad_norm"]) == (1.5, 3.0)  # means over the two updates


def test_more_heldout_problems_than_there_are_products_are_refused():
    assert len(arithmetic_problems(0, num_heldout=188)[1]) == 188
    with pytest.raises(UserError, match="more than 188"):
        arithmetic_problems(0, num_heldout=189)


@pytest.mark.parametrize("prompts", [[[7, 8, 1, 2], [7, 8, 3]], [[1, 2], [3]], [[5, 6, 7]]])
def test_replayed_experts_lie_beside_their_tokens(prompts):
    """Choices that spell the token's id: the row's must spell its ids, also where only one sample knows the prompt's."""

    def sample(prompt, completion, known):
        ids = np.array(prompt + completion[:-1], np.int16)
        experts = np.stack([np.stack([ids, ids + 100], 1), np.stack([ids + 200, ids + 300], 1)], 1)  # (T, layers, k)
        experts[: 0 if known else len(prompt) - 1] = -1  # served from the prefix cache
        return Sample(prompt, completion, [0.0] * len(completion), "", "stop", 0, experts)

    samples = [
        sample(prompt, completion, known=number == 1)
        for prompt in prompts
        for number, completion in enumerate(([11, 12], [13], [14, 15, 16]))
    ]
    segments = make_segments(samples, torch.tensor([[1.0, 0.0, -1.0]] * len(prompts)), 100)
    batch = pack(segments)
    ids = batch.input_ids[0]
    assert batch.experts.tolist() == torch.stack([ids, ids + 100, ids + 200, ids + 300]).view(2, 2, -1).mT.tolist()
    assert pack([]).experts is None


def test_completions_that_begin_alike_part_where_their_experts_do():
    """Three samples of [5, 6] → [7, 8, 9]: the second was routed as the first as far as anybody knows, the third not from 7 on."""
    experts = np.array([[[[1]], [[2]], [[3]], [[4]]], [[[-1]], [[2]], [[3]], [[-1]]], [[[-1]], [[-1]], [[30]], [[4]]]])
    samples = [Sample([5, 6], [7, 8, 9], [0.0] * 3, "", "stop", 0, choice) for choice in experts]  # (T, layers, k) each
    batch = pack(make_segments(samples, torch.tensor([[1.0, 0.0, -1.0]]), 100))
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 7, 8]]
    assert batch.experts.tolist() == [[[1], [2], [3], [4], [30], [4]]]
    assert batch.layout[0, 0].tolist() == [[6, 6, 4, 4, 6, 6], [0, 1, 2, 3, 2, 3]]
    assert batch.sources.tolist() == [1, 2, 3, 4, 5]
    assert batch.picks.tolist() == [0, 1, 2, 0, 1, 2, 0, 3, 4]


def test_padded_rows_keep_the_experts_of_their_samples():
    """Two samples of 4 and 2 tokens of input: a row each, no choice for the padding, a visit of flash attention each."""
    choices = [np.array([[[1]], [[2]], [[3]], [[4]]]), np.array([[[5]], [[6]]])]  # (tokens, layers, k)
    said = [Sample([5, 6], ids, [0.0] * len(ids), "", "stop", 0, own) for ids, own in zip(([7, 8, 9], [7]), choices)]
    batch = pack(make_segments(said, torch.tensor([[1.0, -1.0]]), 0), sample_a_row=True)
    assert batch.input_ids.tolist() == [[5, 6, 0, 0], [5, 6, 7, 8]]  # in lexical order
    assert batch.experts.tolist() == [[[5], [6], [-1], [-1], [1], [2], [3], [4]]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3]] * 2
    assert batch.layout[0, 0, 0].tolist() == [4] * 4 + [8] * 4
    pairs = list(zip(batch.sources.tolist(), batch.targets.tolist()))
    assert [pairs[pick] for pick in batch.picks] == [(5, 7), (6, 8), (7, 9), (1, 7)]
    seen, query_ends, key_ends = train_grpo.visits(batch.layout[0, 0])
    assert (seen.tolist(), query_ends.tolist(), key_ends.tolist()) == ([*range(8)], [0, 4, 8], [0, 4, 8])


def test_what_attention_notes_goes_with_the_graph(tiny_model):
    """Masks of all rows of a step together could be larger than the weights."""
    batch = pack([Segment([5, 6], [([7, 8, 9], [0.0] * 3, 1.0)])])
    policy = train_grpo.Policy(SimpleNamespace(get_base_model=lambda: tiny_model[0]))
    train_grpo.token_logprobs(policy, batch, 1.0)[0].sum().backward()
    assert not vars(batch.layout)


def test_an_engine_without_logprobs_stops_the_run():
    """NaN for a token is no gap (vLLM at p ≈ 1), NaN for many is no comparison."""
    stats = gap_stats(torch.zeros(4), torch.tensor([math.nan, -math.inf, -1.0, 0.0]))
    assert (stats["unknown"].item(), stats["gap"].item()) == (2, 1)
    healthy = {"step": 3, "gap": 0.01, "unknown": 0.0, "grad_norm": 1.0}
    train_grpo.check_step(healthy, 0.1, 0, "samples.jsonl")
    with pytest.raises(UserError, match="no finite log-prob for 50%"):
        train_grpo.check_step(healthy | {"unknown": 0.5}, 0.1, 0, "samples.jsonl")


def test_the_average_is_the_mean_then_fades():
    """Of adapters 4, 8, 6, 9 with a window of 3: means of one, two and three, then a third of the way to the fourth."""
    average, seen = {"a": torch.tensor([100.0])}, []  # what there was before any update counts nothing
    for updates, value in enumerate([4.0, 8.0, 6.0, 9.0], start=1):
        average = train_grpo.averaged(average, {"a": torch.tensor([value])}, updates, 3)
        seen.append(average["a"].item())
    assert seen == pytest.approx([4, 6, 6, 7])
    last = {"a": torch.tensor([9.0])}
    assert train_grpo.averaged(average, last, 5, 1) is last


def test_optimizer_tensors_are_copies_of_the_file():
    """Views of a mapped file would keep it open for the whole run, and a GPU's AdamW wants its step counter there too."""
    layer = torch.nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    tensors = {
        f"weight|{key}": torch.ones(()) if key == "step" else torch.ones(2, 2)
        for key in ("step", "exp_avg", "exp_avg_sq")
    }
    train_grpo.load_optimizer_tensors(layer, optimizer, tensors)
    state = optimizer.state[layer.weight]
    assert all(state[key].data_ptr() != tensors[f"weight|{key}"].data_ptr() for key in state)
    layer.weight.grad = torch.ones(2, 2)
    optimizer.step()
    assert state["step"].item() == 2
    assert tensors["weight|step"].item() == 1
