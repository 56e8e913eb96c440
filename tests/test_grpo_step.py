"""One GRPO update on a tiny NVFP4 Llama: its gradient does not know how the batch was cut up, and a step that must not happen
does not. `pytest tests/test_grpo_step.py`; real ranks and the real model are in tests/test_main_job.py."""

import math

import pytest
import torch
import torch.distributed as dist
from test_model_nvfp4_models import quantized, tiny_checkpoint

import model_nvfp4
import train_grpo
from adapter import adapter_off, load_lora_state_dict, lora_state_dict
from attention import register_attention
from errors import UserError
from policy import Policy, token_logprobs
from problems import arithmetic_problems, next_problems
from rollout import Sample
from train_grpo import (
    LOSSES,
    annotate,
    group_advantages,
    importance_weights,
    loss_denominator,
    optimizer_step,
    policy_loss,
    score_together,
)
from tree import Segment, balance, make_segments, pack

LONGEST, TEMPERATURE = 12, 0.8


@pytest.fixture(scope="module")
def one_rank():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    work = tmp_path_factory.mktemp("llama")
    return quantized(tiny_checkpoint("Llama", work / "source", tie_word_embeddings=True), work / "nvfp4")


def build(folder, dtype=torch.float32, attention="grouped", **options):
    """The trainer's policy with real packed layers and an adapter whose B is not zero."""
    register_attention()
    options |= {"dtype": dtype, "attn_implementation": attention}
    model = model_nvfp4.build_model(folder, lora_rank=8, lora_alpha=16, **options)
    model_nvfp4.load_weights(model, folder)
    generator = torch.Generator().manual_seed(1)
    adapter = lora_state_dict(model)
    adapter = {k: torch.randn(v.shape, generator=generator) * 0.05 if "lora_B" in k else v for k, v in adapter.items()}
    load_lora_state_dict(model, adapter)
    return Policy(model).eval()


@pytest.fixture(scope="module")
def policy(folder):
    return build(folder)


@pytest.fixture(scope="module")
def naive(folder):
    return build(folder, attention="eager")


@pytest.fixture(scope="module")
def batch_of_groups():
    """(samples, advantages, masked): 7 groups of 4 with ragged lengths, one group without spread, three masked samples."""
    generator = torch.Generator().manual_seed(2)

    def ids(n):
        return torch.randint(2, 160, (n,), generator=generator).tolist()

    samples = []
    for group in range(7):
        prompt = ids(4 + 5 * group)
        for _ in range(4):
            n = int(torch.randint(1, LONGEST + 1, (), generator=generator))
            # About log(1/160), what a random model gives: ratios from .3 to 3, on both sides of both clips.
            logprobs = (-5.0 + 0.5 * torch.randn(n, generator=generator)).tolist()
            samples.append(Sample(prompt, [*ids(n - 1), 1], logprobs, "", "stop", 0))
    samples[1].completion_ids = samples[0].completion_ids  # the same, sampled twice
    samples[1].logprobs = [logprob + 0.5 for logprob in samples[0].logprobs]
    samples[3].completion_ids[:4] = samples[2].completion_ids[:4]  # of 9 and 10 tokens
    rewards = (torch.rand(7, 4, generator=generator) < 0.4).float()  # (P, G)
    rewards[3] = 1.0
    rewards[:3, 0], rewards[:3, 1] = 1.0, 0.0
    return samples, group_advantages(rewards), [index in (5, 16, 17) for index in range(28)]


CASES = {loss: {"loss": loss} for loss in LOSSES} | {
    "everything": {"loss": "dapo", "dual_clip": 1.5, "kl_coef": 0.3, "weights": "icepop"},
    "sequence weights": {"loss": "gspo", "kl_coef": 0.3, "weights": "tis"},
}


def gradient(policy, batch_of_groups, case, world=1, max_tokens=10_000, shared=True):
    """The gradient of a step whose rows are dealt to `world` ranks one after the other; FSDP takes the mean over ranks."""
    samples, advantages, masked = batch_of_groups
    case = dict(case)
    weights = case.pop("weights", None)
    segments = make_segments(samples, advantages, max_tokens, masked, keep_all="kl_coef" in case)
    if not shared:
        segments = [Segment(s.prompt_ids, [completion]) for s in segments for completion in s.completions]
    trained = sum(len(ids) for s in segments for ids, _, _ in s.completions)
    sampled = sum(len(s.completion_ids) for s, left_out in zip(samples, masked) if not left_out)
    denominator = loss_denominator(case["loss"], trained, sampled, len(samples), LONGEST)
    policy.zero_grad()
    for rows in balance(segments, world, max_tokens):
        for batch in map(pack, rows):
            if weights:
                annotate(policy, [batch], TEMPERATURE, "trainer", weights, reference=True)
                batch.old_logprobs = batch.old_logprobs + 0.3 * torch.sin(
                    batch.targets[batch.picks]
                )  # as after some updates
            logprobs, _ = token_logprobs(policy, batch, TEMPERATURE)
            loss, _ = policy_loss(
                logprobs,
                batch.old_logprobs,
                batch.advantages,
                batch.samples,
                denominator,
                weights=batch.corrections,
                reference_logprobs=batch.reference_logprobs,
                **case,
            )
            (loss * batch.weight * world).backward()
    return torch.cat([p.grad.flatten() / world for p in policy.parameters() if p.requires_grad])


def padded_gradient(policy, batch_of_groups, case, extra_padding=0):
    """The same step written down naively: all samples in one padded batch, dense attention, log_softmax over (N, T, V).

    A token mean is over all samples that are not masked: a group without spread has a loss of zero, and with a KL term more
    than that. DAPO's paper leaves such a group out.
    """
    samples, advantages, masked = batch_of_groups
    case = dict(case)
    weights = case.pop("weights", None)
    kept = [i for i in range(len(samples)) if not masked[i]]
    rows = [samples[i].prompt_ids + samples[i].completion_ids for i in kept]
    width = max(map(len, rows)) + extra_padding
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows])  # (N, T)
    visible = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])  # (N, T)

    def forward():
        logits = policy.model(input_ids=tokens, attention_mask=visible).logits.float()[:, :-1] / TEMPERATURE
        table = logits.log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]  # (N, T-1)
        return torch.cat([table[n, len(samples[i].prompt_ids) - 1 : len(rows[n]) - 1] for n, i in enumerate(kept)])

    logprobs = forward()  # (S,)
    sampler = torch.cat([torch.tensor(samples[i].logprobs) for i in kept])  # (S,)
    old, corrections, reference = sampler, None, None
    if weights:
        old, corrections = logprobs.detach(), importance_weights(logprobs.detach(), sampler, weights)
        targets = torch.cat([torch.tensor(samples[i].completion_ids) for i in kept])
        old = old + 0.3 * torch.sin(targets)
        with torch.no_grad(), policy.model.disable_adapter():
            reference = forward()
    lengths = torch.tensor([len(samples[i].completion_ids) for i in kept])
    which = torch.arange(len(kept)).repeat_interleave(lengths)  # (S,)
    denominator = 28 * LONGEST if case["loss"] == "dr_grpo" else len(logprobs)
    advantage = advantages.flatten()[kept][which]  # (S,)
    if case == {"loss": "dapo"}:
        denominator = (advantage != 0).sum().item()
    loss, _ = policy_loss(
        logprobs, old, advantage, which, denominator, weights=corrections, reference_logprobs=reference, **case
    )
    policy.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters() if p.requires_grad])


def difference(a, b):
    return ((a - b).norm() / b.norm()).item()


SPLITS = {
    "one row": {},
    "groups cut into segments": {"max_tokens": 40},
    "a segment for each sample, small rows": {"shared": False, "max_tokens": 150},
    "2 ranks": {"world": 2, "max_tokens": 80},
    "4 ranks, small rows": {"world": 4, "max_tokens": 40},
    "8 ranks, some with nothing": {"world": 8},
}


@pytest.mark.parametrize("case", CASES)
def test_any_split_gives_the_gradient_of_one_padded_batch(policy, naive, batch_of_groups, case):
    """Micro-batches × ranks × packing × prefix sharing, in fp32; the other losses differ by no split that dapo's do not see."""
    expected = padded_gradient(naive, batch_of_groups, CASES[case])
    assert expected.norm() > 0
    for name in SPLITS if case == "dapo" else ["one row", "8 ranks, some with nothing"]:
        assert difference(gradient(policy, batch_of_groups, CASES[case], **SPLITS[name]), expected) < 1e-5, name


def test_in_bf16_a_split_is_noise_and_no_more_of_it_than_padding_makes(folder, naive, batch_of_groups):
    """Against fp32 both are off by rounding, ours by no more than the padded batch; splits among themselves by 2e-2 at most."""
    dr_grpo = CASES["dr_grpo"]  # its clip is the least likely to flip
    exact = padded_gradient(naive, batch_of_groups, dr_grpo)
    padded = padded_gradient(build(folder, torch.bfloat16, "eager"), batch_of_groups, dr_grpo)
    policy = build(folder, torch.bfloat16)
    one, *others = [
        gradient(policy, batch_of_groups, dr_grpo, **SPLITS[name])
        for name in ("one row", "a segment for each sample, small rows", "4 ranks, small rows")
    ]
    assert max(difference(other, one) for other in others) < 2e-2
    assert max(difference(g, exact) for g in (one, *others)) < 1.3 * difference(padded, exact)


def test_the_token_that_ends_a_completion_is_trained(folder):
    """A completion of the end-of-sequence token alone: one step makes it likelier."""
    policy = build(folder)
    batch = pack(make_segments([Sample([5, 6], [1], [-5.0], "", "stop", 0)] * 2, torch.tensor([[1.0, 0.0]]), 100))
    before, _ = token_logprobs(policy, batch, 1.0)
    policy_loss(before, before.detach(), batch.advantages, batch.samples, 2)[0].backward()
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter -= 0.1 * parameter.grad
    after, _ = token_logprobs(policy, batch, 1.0)
    assert (after > before).all()


@pytest.mark.usefixtures("one_rank")
def test_the_base_may_be_the_first_that_is_asked(folder):
    """`--kl-coef --no-probe` under FSDP, which settles in its first forward what is trained and in which precision."""
    policy = Policy(model_nvfp4.build_model(folder, lora_rank=8, lora_alpha=16, attn_implementation="grouped"))
    model_nvfp4.shard(policy)
    model_nvfp4.load_weights(policy, folder)
    batch = pack([Segment([5, 6], [([7, 1], [-5.0, -5.0], 1.0)])])
    annotate(policy, [batch], 1.0, "sampler", "tis", reference=True)
    logprobs, _ = token_logprobs(policy, batch, 1.0)
    assert torch.equal(logprobs, batch.reference_logprobs)  # B is still zero
    logprobs.sum().backward()
    gradients = [p.grad.full_tensor() for n, p in policy.named_parameters() if "lora_B" in n]
    assert all(g.dtype == torch.float32 for g in gradients)
    assert any(g.any() for g in gradients)


@pytest.mark.usefixtures("one_rank")
def test_without_its_adapter_a_policy_with_adapted_experts_is_the_base(tmp_path):
    """The base is computed by the same layers with B = 0, so the log-probs are equal to the bit."""
    folder = quantized(tiny_checkpoint("Qwen3Moe", tmp_path / "source"), tmp_path / "nvfp4")
    policy = build(folder, lora_experts=True)
    batch = pack([Segment([5, 6], [([7, 9, 1], [-5.0] * 3, 1.0)])])
    adapter = lora_state_dict(policy)
    with torch.no_grad():
        adapted, _ = token_logprobs(policy, batch, 1.0)
        with adapter_off(policy):
            off, _ = token_logprobs(policy, batch, 1.0)
        again, _ = token_logprobs(policy, batch, 1.0)
        load_lora_state_dict(
            policy, {k: v * 0 if "lora_B" in k and ".experts." in k else v for k, v in adapter.items()}
        )
        attention_only, _ = token_logprobs(policy, batch, 1.0)
        load_lora_state_dict(policy, {k: v * 0 if "lora_B" in k else v for k, v in adapter.items()})
        base, _ = token_logprobs(policy, batch, 1.0)
    assert torch.equal(off, base)
    assert torch.equal(again, adapted)
    assert (adapted - attention_only).abs().max() > 1e-3, "the experts' adapter must show"


# --- Steps that must not happen --------------------------------------------------------------------------------------


def trainable(policy):
    return [p for p in policy.parameters() if p.requires_grad]


@pytest.mark.usefixtures("one_rank")
def test_a_batch_in_which_all_is_masked_has_no_loss_no_gradient_and_no_step(folder, batch_of_groups):
    policy = build(folder)
    optimizer = torch.optim.AdamW(trainable(policy), lr=0.1)
    gradient(policy, batch_of_groups, CASES["dapo"])
    assert optimizer_step(optimizer, torch.tensor(0.5), 100, 1.0) > 0  # now there is momentum to move with
    before = [p.detach().clone() for p in trainable(policy)]

    samples, advantages, _ = batch_of_groups
    for advantage, masked in ((advantages, [True] * 28), (torch.zeros(7, 4), [False] * 28)):
        segments = make_segments(samples, advantage, 100, masked)
        total = torch.zeros(())
        for rows in balance(segments, 2, 100):
            assert len(rows) == 1  # every rank runs one pass, or the others would wait for it
            batch = pack(rows[0])
            logprobs, _ = token_logprobs(policy, batch, TEMPERATURE)
            loss, _ = policy_loss(
                logprobs,
                batch.old_logprobs,
                batch.advantages,
                batch.samples,
                loss_denominator("dapo", 0, 0, 28, LONGEST),
            )
            (loss * batch.weight).backward()
            total += loss.detach() * batch.weight
        assert total.item() == 0
        assert all((p.grad == 0).all() for p in trainable(policy))
        assert optimizer_step(optimizer, total, 0, 1.0) == 0  # finite: nothing to do is no fault
        assert all(torch.equal(a, b) for a, b in zip(before, trainable(policy)))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["gradient", "loss"])
def test_a_step_that_is_no_number_is_skipped_and_the_next_one_is_not(where, bad):
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    parameter.grad = torch.tensor([1.0, bad if where == "gradient" else 1.0, 1.0])
    norm = optimizer_step(optimizer, torch.tensor(bad if where == "loss" else 1.0), 10, 1.0)
    assert not math.isfinite(norm)
    assert parameter.tolist() == [1, 1, 1]
    assert not optimizer.state[parameter]  # no moments either: one NaN in them would stay for ever
    assert parameter.grad is None
    parameter.grad = torch.tensor([3.0, 4.0, 0.0])
    assert optimizer_step(optimizer, torch.tensor(1.0), 10, max_norm=1.0) == pytest.approx(5)
    # AdamW's first step is lr · sign(g), however the gradient was scaled, and weight decay takes lr · .01
    torch.testing.assert_close(parameter.detach(), torch.tensor([0.899, 0.899, 0.999]), atol=1e-5, rtol=0)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("max_norm", [0.1, 1e6])
def test_an_optimizer_by_layers_is_one_over_all(folder, batch_of_groups, max_norm):
    """Against torch's clip_grad_norm_ and one AdamW, two steps: their norm and their parameters."""
    policy, reference = build(folder), build(folder)
    reference.load_state_dict(policy.state_dict())
    layered = train_grpo.build_optimizer(policy, 0.01)
    whole = torch.optim.AdamW(trainable(reference), lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    assert len(layered.param_groups) == policy.model.config.num_hidden_layers > 1
    for _ in range(2):
        gradient(policy, batch_of_groups, CASES["dapo"])
        gradient(reference, batch_of_groups, CASES["dapo"])
        norm = torch.nn.utils.clip_grad_norm_(trainable(reference), max_norm)
        whole.step()
        assert optimizer_step(layered, torch.tensor(0.5), 100, max_norm) == pytest.approx(norm.item(), rel=1e-5)
    for ours, theirs in zip(trainable(policy), trainable(reference)):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


# --- Dynamic sampling ------------------------------------------------------------------------------------------------


def test_refills_are_drawn_from_seed_step_and_round_alone():
    problems = arithmetic_problems(0)[0]

    def names(*where, n=16):
        return [p.id for p in next_problems(problems, where[1], n, where[0], where[2])]

    assert names(0, 5, 1) == names(0, 5, 1)
    assert names(0, 5, 1)[:7] == names(0, 5, 1, n=7)  # how many are missing does not change which
    draws = [names(*where) for where in ((0, 5, 0), (0, 5, 1), (0, 5, 2), (0, 6, 1), (1, 5, 1))]
    assert len({tuple(draw) for draw in draws}) == 5
    assert all(len(set(draw)) == 16 for draw in draws)
    assert len(next_problems(problems[:3], 5, 7, 0, refill=1)) == 7  # more than there are: they come again


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("number", [1, 2])
def test_minibatches_divide_one_denominator_and_leave_out_what_was_replaced(batch_of_groups, number):
    """Of the first group others were sampled in place, in the fourth all earned the same, three samples are masked."""
    samples, advantages, masked = batch_of_groups
    kept = [index for index in range(4, 28) if not masked[index]]
    lengths = {index: len(samples[index].completion_ids) for index in kept}
    live = sum(length for index, length in lengths.items() if advantages[index // 4].any())
    assert live < sum(lengths.values())
    rollouts = train_grpo.Rollouts([None] * 7, samples, replaced=[True] * 4 + [False] * 24)
    for loss, tokens in (("dapo", live), ("grpo", sum(lengths.values())), ("dr_grpo", 28 * LONGEST)):
        minibatches = train_grpo.make_minibatches(
            rollouts, advantages, masked, number=number, loss=loss, num_samples=28, max_tokens=60, sample_a_row=False,
            keep_all=False, completion_tokens=LONGEST, device=torch.device("cpu"),
        )  # fmt: skip
        assert [minibatch.denominator for minibatch in minibatches] == [tokens / number] * number
        batches = [batch for minibatch in minibatches for batch in minibatch.batches]
        assert sum(len(batch.advantages) for batch in batches if batch.weight) == live
        assert all(minibatch.num_segments > 0 for minibatch in minibatches)


@pytest.mark.usefixtures("one_rank")
def test_a_reward_function_that_gives_no_number_is_named():
    samples = [Sample([1], [2], [0.0], text, "stop", 0) for text in (r"\boxed{1}", r"\boxed{2}", "none")]
    verdicts, values = score_together(samples, ["1"] * 3)
    assert values == [1, 0, 0]
    assert [v.reason for v in verdicts] == ["equal", "different", "no answer"]
    assert score_together(samples, ["1"] * 3, lambda completion, _: len(completion))[1] == [9, 9, 4]
    for nothing in (None, math.nan, math.inf):
        with pytest.raises(UserError, match="must return a finite number"):
            score_together(
                samples, ["1"] * 3, lambda completion, _, nothing=nothing: 1.0 if "box" in completion else nothing
            )


def test_layers_are_computed_again_in_backward_although_the_model_is_in_eval_mode(folder, one_rank, batch_of_groups):
    """In the trainer's own order of calls: transformers checkpoints a layer only while it believes to be in training."""
    gradients = []
    for checkpointing in (False, True):
        register_attention()
        model = model_nvfp4.build_model(folder, lora_rank=8, lora_alpha=16, attn_implementation="grouped")
        policy = Policy(model)
        model_nvfp4.shard(policy, activation_checkpointing=checkpointing, dtype=torch.float32)
        model_nvfp4.load_weights(policy, folder)
        policy.eval()
        model_nvfp4.checkpoint_in_eval(policy)
        calls = []
        model.get_base_model().model.layers[0].mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        batch = pack(make_segments(*batch_of_groups[:2], 10_000)[:2])
        token_logprobs(policy, batch, TEMPERATURE)[0].sum().backward()
        assert len(calls) == 1 + checkpointing
        gradients.append([p.grad.full_tensor() for p in policy.parameters() if p.grad is not None])
    torch.testing.assert_close(*gradients, atol=0, rtol=0)
