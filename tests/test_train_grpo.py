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

import math

import pytest
import torch
from test_model_nvfp4_models import quantized, tiny_checkpoint

import train_grpo
from errors import UserError
from metrics import gap_stats
from train_grpo import (
    LOSSES,
    group_advantages,
    importance_weights,
    learning_rate,
    loss_denominator,
    per_sample,
    policy_loss,
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


def test_schedules():
    assert [learning_rate(1.0, s, 10, 4, "constant") for s in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    assert learning_rate(1.0, 0, 10, 0, "cosine") == 1
    assert learning_rate(1.0, 5, 10, 0, "cosine") == pytest.approx(0.55)
    assert learning_rate(1.0, 10, 10, 0, "cosine") == pytest.approx(0.1)


# --- Problems --------------------------------------------------------------------------------------------------------


# --- Rewards ---------------------------------------------------------------------------------------------------------


# --- Micro-batches ---------------------------------------------------------------------------------------------------


# --- Attention and log-probs against the slow reference --------------------------------------------------------------


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


def test_an_engine_without_logprobs_stops_the_run():
    """NaN for a token is no gap (vLLM at p ≈ 1), NaN for many is no comparison."""
    stats = gap_stats(torch.zeros(4), torch.tensor([math.nan, -math.inf, -1.0, 0.0]))
    assert (stats["unknown"].item(), stats["gap"].item()) == (2, 1)
    healthy = {"step": 3, "gap": 0.01, "unknown": 0.0, "grad_norm": 1.0}
    train_grpo.check_step(healthy, 0.1, 0, "samples.jsonl")
    with pytest.raises(UserError, match="no finite log-prob for 50%"):
        train_grpo.check_step(healthy | {"unknown": 0.5}, 0.1, 0, "samples.jsonl")
