"""GRPO on a frozen NVFP4 checkpoint with LoRA: flags, set-up, the loop. Start here.

    torchrun --nproc-per-node 1 train_grpo.py --model models/SmolLM2-135M-Instruct-NVFP4 --dataset arithmetic
    bash launch.sh                                    # the same with set-up; `--recipe NAME` picks written-out flags

Every rank runs this file. It owns a vLLM engine (rollouts) and an FSDP2 shard of the same 4-bit checkpoint (training) on the
same GPU and hands the GPU's memory from one to the other each step. `main()` is at the end and holds the loop; what it calls
is above it, in the order of a step: sample, rewards, advantages, loss, optimizer, trust.

What we left out of the papers, and why:
1. No value network and no reward model: the reward is a verdict on the answer, the baseline is the group's mean (GRPO).
2. No second forward for old log-probs: they are the sampler's own, so one clipped ratio π_trainer/π_sampler corrects both
   staleness and the difference between the two programs.
3. No reference model: the frozen base under the adapter is one, `--kl-coef` switches the adapter off to ask it.
4. No padding and nothing twice: a row is a tree of tokens, in which what samples begin with alike is computed once (tree.py).

Axis legend: P prompts of a step (all ranks) · G samples per prompt · N = P·G · S trained tokens of a micro-batch. Sums over
tokens run over completion tokens only, end-of-sequence included.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import math
import os
import sys
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from tqdm import tqdm

import model_nvfp4
import problems
import ranks
import report
import reward
import rollout
import run_folder
from adapter import adapter_off, averaged, load_lora_state_dict, lora_state_dict, save_adapter
from attention import register_attention
from checkpoint import check_checkpoint, has_experts
from errors import UserError
from eval_aime import error_of, evaluate
from metrics import gap_stats, reduce_stats, step_metrics
from policy import Policy, replay_stats, token_logprobs
from problems import Problem, Task, next_problems, number_samples, sample_seed
from rollout import Sample, awake, generate, push_adapter
from run_folder import timed
from tree import Batch, Segment, make_batches, make_segments, pack

# ---------------------------------------------------------------------------------------------------------------------
# What a step samples


@dataclass
class Rollouts:
    """What a step sampled: P groups of G, and with --refill those sampled in place of groups without spread."""

    problems: list[Problem] = field(default_factory=list)  # one a group
    samples: list[Sample] = field(default_factory=list)  # group-contiguous
    verdicts: list[reward.Verdict] = field(default_factory=list)
    values: list[float] = field(default_factory=list)  # what each sample earned, before shaping
    replaced: list[bool] = field(default_factory=list)  # of a group in whose place others were sampled

    def unshaped(self) -> torch.Tensor:
        return torch.tensor(self.values).view(len(self.problems), -1)  # (groups, G)


# ---------------------------------------------------------------------------------------------------------------------
# Rewards and advantages


def has_spread(rewards: torch.Tensor) -> torch.Tensor:
    """(groups, G) rewards to (groups, 1) true or false: do the samples of a group earn differently? If not, it teaches nothing."""
    return rewards.amax(1, keepdim=True) > rewards.amin(1, keepdim=True)  # (groups, 1)


def group_advantages(rewards: torch.Tensor, scale: str = "std") -> torch.Tensor:
    """(P, G) rewards to (P, G) advantages: reward minus the group's mean, over the group's spread unless scale is "none".

    GRPO (Shao et al. 2024, eq. 3) with the unbiased standard deviation plus 1e-4; `none` is Dr. GRPO (Liu et al. 2025);
    "loo" is leave-one-out (Ahmadian et al. 2024): against the mean of the *other* samples. A group in which all samples
    earn the same is exactly zero.
    """
    num_samples = rewards.shape[1]
    assert num_samples > 1, "a group needs at least two samples: with one, the advantage is always zero"
    centred = rewards - rewards.mean(1, keepdim=True)  # (P, G)
    if scale == "std":
        centred = centred / (rewards.std(1, keepdim=True) + 1e-4)  # (P, G)
    elif scale == "loo":
        centred = centred * num_samples / (num_samples - 1)  # (P, G)
    return centred * has_spread(rewards)  # (P, G)


def shape_rewards(
    samples: list[Sample], values: list[float], *,
    truncated: str, limits: list[int], overlong_buffer: int, format_bonus: float,
) -> tuple[list[float], list[bool]]:  # fmt: skip
    """(N rewards, N masks): what the flags add to N values, the verdicts' (or those of one's own reward function).

    A completion that was cut is scored, zeroed or masked out of the loss; DAPO's soft penalty grows over the last
    `overlong_buffer` tokens before the sample's limit (N `limits`); `format_bonus` is added for a readable box, right or wrong.
    """
    assert len(values) == len(samples), f"{len(values)} rewards for {len(samples)} samples"
    rewards, masks = [], []
    for sample, value, limit in zip(samples, values, limits, strict=True):
        value, trained = reward.truncated_reward(value, sample.finish_reason == "length", truncated)
        if overlong_buffer:
            value += reward.overlong_penalty(len(sample.completion_ids), limit, overlong_buffer)
        if format_bonus:
            value += format_bonus * reward.format_reward(sample.text)
        rewards.append(float(value))
        masks.append(not trained)
    return rewards, masks


def score_together(
    samples: list[Sample], references: list[str], own_reward: Any = None
) -> tuple[list[reward.Verdict], list[float]]:
    """(N verdicts, N values) of N samples; a value is the verdict's unless `own_reward(completion, reference)` is given.

    Each rank grades every world-th sample and all ranks get all. Collective. Were each to grade everything, a proof that one
    rank's clock cut off (or a reward that draws) would have them drop different groups and wait for each other for ever.
    Raises UserError where the user's function gave no finite number: it would make every advantage of its group NaN.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = list(zip(samples, references))[rank::world]
    verdicts = reward.score([sample.text for sample, _ in mine], [reference for _, reference in mine])
    values = [verdict.reward for verdict in verdicts]
    if own_reward:
        values = [own_reward(sample.text, reference) for sample, reference in mine]
    parts: list[Any] = [None] * world
    dist.all_gather_object(parts, list(zip(verdicts, values)))
    judged = [parts[index % world][index // world] for index in range(len(samples))]
    for sample, reference, (_, value) in zip(samples, references, judged):
        reward.check_own_reward(value, repr(sample.text[-60:]), reference)
    return [verdict for verdict, _ in judged], [float(value) for _, value in judged]


# ---------------------------------------------------------------------------------------------------------------------
# The loss
LOSSES = {  # name: (ratio per "token" or "sequence", mean over "trained" or all "sampled" tokens or a "constant", symmetric clip)
    # Yu et al. 2025: the upper clip is wider than the lower; a group without spread is not in the batch, so nor are its tokens.
    "dapo": ("token", "trained", False),
    "grpo": ("token", "sampled", True),  # Shao et al. 2024, with a token mean
    "dr_grpo": ("token", "constant", True),  # Liu et al. 2025: no length in the denominator
    "gspo": ("sequence", "sampled", False),  # Zheng et al. 2025: one ratio a completion, its tokens' geometric mean
    "cispo": ("token", "sampled", False),  # MiniMax-M1 2025: the clipped ratio is a weight, no token loses its gradient
}


def per_sample(values: torch.Tensor, samples: torch.Tensor, reduce: str) -> torch.Tensor:
    """Sum or mean of (S,) values over each completion, given back to each of its tokens: (S,)."""
    count = int(samples.max()) + 1 if len(samples) else 0
    pooled = values.new_zeros(count).index_add(0, samples, values)  # (completions,)
    if reduce == "mean":
        pooled = pooled / torch.bincount(samples, minlength=count)
    return pooled[samples]  # (S,)


def importance_weights(
    trainer_logprobs: torch.Tensor,  # (S,) before this rollout's first update
    sampler_logprobs: torch.Tensor,  # (S,)
    how: str = "tis",
    low: float = 0.5,
    high: float = 2.0,
) -> torch.Tensor:
    """(S,) corrections for sampling with one program and training another, when the ratio is against the trainer's own.

    "tis" caps π_trainer/π_sampler at `high` (truncated importance sampling, Yao et al. 2025); "icepop" sets weights outside
    [low, high] to zero instead (Ling Team 2025). A log-prob that the engine could not give (−inf, NaN) has weight 0.
    """
    weights = (trainer_logprobs - sampler_logprobs).exp()  # (S,)
    weights = torch.where(torch.isfinite(weights), weights, 0.0)  # (S,)
    if how == "icepop":
        return weights * ((weights >= low) & (weights <= high))  # (S,)
    return weights.clamp(max=high)  # (S,)


def policy_loss(
    logprobs: torch.Tensor,  # (S,) now
    old_logprobs: torch.Tensor,  # (S,) the ratio's denominator: the sampler's, or the trainer's before the first update
    advantages: torch.Tensor,  # (S,)
    samples: torch.Tensor,  # (S,) completion of each token
    denominator: float,  # from loss_denominator, of the whole step
    *,
    loss: str = "dapo",
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
    weights: torch.Tensor | None = None,  # (S,) from importance_weights
    reference_logprobs: torch.Tensor | None = None,  # (S,) of the frozen base
    kl_coef: float = 0.0,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Clipped policy-gradient loss: this row's sum over tokens, divided by the step's denominator; and sums of its stats.

    `dual_clip` c > 1 bounds the loss of a negative advantage at c·|A| (Ye et al. 2020). `kl_coef` adds k3(π ‖ base)
    (Schulman 2020). Stats are sums or maxima, so that micro-batches and ranks can be added up.
    """
    level, _, symmetric = LOSSES[loss]
    low, high = 1 - clip_low, 1 + (clip_low if symmetric else clip_high)
    # Where the engine had no finite number (vLLM gives NaN at p ≈ 1, TRL issue 6166) the token counts as on policy.
    old_logprobs = torch.where(torch.isfinite(old_logprobs), old_logprobs, logprobs.detach())  # (S,)
    log_ratio = logprobs - old_logprobs  # (S,)
    if level == "sequence":
        log_ratio = per_sample(log_ratio, samples, "mean")  # (S,)
    ratio = log_ratio.exp()  # (S,)
    if loss == "cispo":
        losses = -ratio.clamp(low, high).detach() * advantages * logprobs  # (S,)
    else:
        losses = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)  # (S,)
    if dual_clip is not None:
        losses = torch.where(advantages < 0, losses.clamp(max=-dual_clip * advantages), losses)  # (S,)
    if weights is not None:
        losses = losses * weights  # (S,)
    if kl_coef:
        drift = reference_logprobs - logprobs  # (S,)
        losses = losses + kl_coef * (drift.exp() - 1 - drift)  # (S,)
    with torch.no_grad():
        stats = {
            "tokens": torch.tensor(float(len(logprobs))),
            "clip_low": ((ratio < low) & (advantages < 0)).sum(),
            "clip_high": ((ratio > high) & (advantages > 0)).sum(),
            "ratio_max": ratio.max(),
            "reference_kl": (drift.exp() - 1 - drift).sum() if kl_coef else torch.tensor(0.0),
        }
    return losses.sum() / denominator, stats


def loss_denominator(loss: str, trained: int, sampled: int, num_samples: int, completion_tokens: int) -> float:
    """What every row's sum is divided by, the same on all ranks: tokens that are `trained`, tokens of all that was `sampled` and
    not masked (a group without spread has a loss of zero, which counts), or Dr. GRPO's constant N · longest."""
    counts = {"trained": trained, "sampled": sampled, "constant": num_samples * completion_tokens}
    return float(max(1, counts[LOSSES[loss][1]]))


@dataclass
class Minibatch:
    """What one optimizer step trains on: this rank's micro-batches, and what all ranks divide their sums by."""

    batches: list[Batch]
    denominator: float
    num_segments: int  # of all ranks


def make_minibatches(
    rollouts: Rollouts,
    advantages: torch.Tensor,  # (groups, G)
    masked: list[bool],  # N
    *,
    number: int,
    loss: str,
    num_samples: int,  # P · G: what a step trains on, however many --refill has asked for
    max_tokens: int,
    sample_a_row: bool,
    keep_all: bool,
    completion_tokens: int,
    device: torch.device,
) -> list[Minibatch]:
    """The step's samples in `number` parts, each as this rank's micro-batches; every rank gets equally many."""
    masked = [m or replaced for m, replaced in zip(masked, rollouts.replaced)]
    segments = make_segments(rollouts.samples, advantages, 0 if sample_a_row else max_tokens, masked, keep_all)
    # Counted over all ranks: one denominator, however rows are spread over ranks.
    trained = sum(segment.num_trained for segment in segments)
    sampled = sum(len(s.completion_ids) for s, m in zip(rollouts.samples, masked) if not m)
    denominator = loss_denominator(loss, trained, sampled, num_samples, completion_tokens) / number
    parts = [segments[part::number] for part in range(number)]
    rows = [make_batches(part, dist.get_rank(), dist.get_world_size(), max_tokens, sample_a_row) for part in parts]
    return [Minibatch([b.to(device) for b in batches], denominator, len(part)) for batches, part in zip(rows, parts)]


@torch.no_grad()
def annotate(
    policy: nn.Module, batches: list[Batch], temperature: float, old_logprobs: str, correction: str, reference: bool
) -> None:
    """Extra forwards that some settings need (else none), before the first update: the trainer's own log-probs as the ratio's
    denominator with importance weights against the sampler's, and those of the base, which is the policy with its adapter
    switched off. Collective: every rank must call with equally many batches.
    """
    for batch in batches:
        if old_logprobs == "trainer":
            own, _ = token_logprobs(policy, batch, temperature)  # (S,)
            batch.corrections = importance_weights(own, batch.sampler_logprobs, correction)  # (S,)
            batch.old_logprobs = own
        if reference:
            with adapter_off(policy):
                batch.reference_logprobs, _ = token_logprobs(policy, batch, temperature)  # (S,)


# ---------------------------------------------------------------------------------------------------------------------
# The step


def learning_rate(peak: float, step: int, steps: int, warmup: int, schedule: str) -> float:
    """Linear warm-up over `warmup` steps, then constant, or a half cosine to a tenth of the peak."""
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule == "constant":
        return peak
    return peak * (0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> float:
    """The same rate for all layers; returns it, for the log."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    return lr


def build_optimizer(policy: nn.Module, lr: float) -> torch.optim.Optimizer:
    """AdamW over the adapter, a group a layer: what DTensor works out for a list of tensors takes time by the square of its
    length (5 s before the first step with 420 of them), and layers that are alike share it."""
    groups: dict[str, list[nn.Parameter]] = {}
    for name, parameter in policy.named_parameters():
        if parameter.requires_grad:
            groups.setdefault(next(filter(str.isdigit, name.split(".")), ""), []).append(parameter)
    groups_of_layers = [{"params": parameters} for parameters in groups.values()]
    return torch.optim.AdamW(groups_of_layers, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)


def optimizer_step(optimizer: torch.optim.Optimizer, loss: torch.Tensor, num_segments: int, max_norm: float) -> float:
    """Clip gradients to `max_norm`, step, clear them; returns the norm before. Collective: every rank must call.

    No step, and so no movement by momentum either, when nothing was trained (`num_segments` of all ranks is 0) or when a
    gradient, or on any rank the `loss`, is NaN or infinite: the norm returned then is no finite number.
    """
    layers = [[p for p in group["params"] if p.grad is not None] for group in optimizer.param_groups]
    norms = [model_nvfp4.whole(nn.utils.get_total_norm([p.grad for p in layer])) for layer in layers if layer]
    total = torch.stack(norms).norm() if norms else torch.zeros(())  # ()
    for layer in layers:
        nn.utils.clip_grads_with_norm_(layer, max_norm, total)
    norm = total.item()
    dist.all_reduce(loss)  # () NaN and infinity survive a sum
    if not math.isfinite(loss.item()):
        norm = math.nan
    if num_segments and math.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad()
    return norm


# ---------------------------------------------------------------------------------------------------------------------
# Trust: are trainer and engine the same policy?


def kind_of(name: str) -> str:
    """The kind of module that an adapter tensor belongs to: its name, with "experts." before it for a routed expert's, which
    the engine applies in another place than a layer of the same name."""
    module = name.split(".")
    return "experts." * ("experts" in module) + module[-3]


def parity_probe(
    engine: Any, policy: nn.Module, adapter: dict[str, torch.Tensor], prompts: list[list[int]], *,
    push: Callable, max_tokens: int, max_gap: float,
) -> dict[str, tuple[float, float]]:  # fmt: skip
    """Per kind of adapted module: mean |Δlogp| between engine and trainer with that kind's adapter made large at random,
    and what the trainer thinks of the same samples without it. {kind: (with, without)}. Collective.

    An adapter that is loaded and ignored, put into the wrong slot or scaled twice is the commonest silent fault of such
    programs (TRL 5312, unsloth-zoo 942 and 1250, vLLM 41754): then the engine's samples fit the trainer's base as well as
    its adapted policy. `push(tensors)` hands an adapter to the engine. Raises UserError naming the kind.
    """
    generator, device, results = torch.Generator().manual_seed(0), next(policy.parameters()).device, {}
    for kind in sorted({kind_of(name) for name in adapter}):
        hit = [name for name in adapter if kind_of(name) == kind and "lora_B" in name]
        noise = {name: torch.randn(adapter[name].shape, generator=generator) for name in hit}
        for size in (0.1, 0.4, 1.6):  # larger until it shows: how much a module matters differs from model to model
            perturbed = {name: size * noise[name] if name in noise else t for name, t in adapter.items()}
            with awake(engine):
                push(perturbed)
                seeds = list(range(len(prompts)))
                samples = generate(engine, prompts, seeds, max_tokens=max_tokens, temperature=1.0, use_adapter=True)
            segments = [Segment(s.prompt_ids, [(s.completion_ids, s.logprobs, 1.0)]) for s in samples]
            batch, gaps = pack(segments, policy.sample_a_row).to(device), []
            for tensors in (perturbed, adapter):
                load_lora_state_dict(policy, tensors)
                with torch.no_grad():
                    logprobs, _ = token_logprobs(policy, batch, 1.0)  # (S,)
                gaps.append(gap_stats(logprobs, batch.sampler_logprobs)["gap"].item() / len(logprobs))
            policy.reshard()  # FSDP keeps the root's weights until a backward, and the engine is about to wake
            shared = torch.tensor(gaps)  # (2,)
            dist.all_reduce(shared, op=dist.ReduceOp.MAX)  # a rounding must not send the ranks different ways
            results[kind] = used, without = shared.tolist()
            if used > max_gap or without > 3 * used:
                break
        if used > max_gap or without <= 3 * used:
            raise UserError(
                f"parity probe: with a large adapter on {kind} alone, engine and trainer differ by {used:.3f} nats per token, and "
                f"by {without:.3f} without it (healthy: below {max_gap}, and several times more). The engine ignores, misplaces "
                f"or rescales the adapter of {kind}; leave it out of --lora-targets (experts: --lora-experts) or use another vLLM."
            )
    return results


def check_step(m: dict[str, Any], max_gap: float, bad_steps: int, samples_path: Path) -> None:
    """The gate of each step: trainer and engine are one policy, gradients are finite. Raises UserError when not."""
    if m["unknown"] > 0.01:
        raise UserError(
            f"step {m['step']}: the engine gave no finite log-prob for {m['unknown']:.0%} of the tokens, so trainer and engine "
            f"cannot be compared. Try another attention backend or dtype in --engine-args."
        )
    if m["gap"] > max_gap:
        raise UserError(
            f"step {m['step']}: trainer and engine differ by {m['gap']:.3f} nats per token (--max-logprob-gap {max_gap}); about "
            f".01 is healthy. Does the engine ignore the adapter, quantise activations (W4A4), or sample at another temperature?"
        )
    if bad_steps == 3:
        raise UserError(
            f"three steps in a row had no finite gradient (norm {m['grad_norm']}) and were skipped; their samples are the last "
            f"lines of {samples_path}. Try a lower --lr or --max-grad-norm."
        )


# ---------------------------------------------------------------------------------------------------------------------
# Flags


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="GRPO with LoRA on a frozen NVFP4 checkpoint. Run under torchrun, one rank per GPU (or on a CPU).",
        formatter_class=lambda prog: argparse.ArgumentDefaultsHelpFormatter(prog, max_help_position=32, width=110),
    )
    # fmt: off
    add = parser.add_argument_group("model").add_argument
    add("--model", required=True, help="folder of an NVFP4 checkpoint; `python quantize.py SRC DST` makes one")
    add("--lora-rank", type=int, default=16, help="more learns more per step, costs memory and adapter traffic")
    add("--lora-alpha", type=int, default=32, help="the adapter counts alpha / rank; scale it with the rank")
    add("--lora-targets", default="all-linear", help="comma-separated module names, or all-linear (without routed experts)")
    add("--lora-experts", action="store_true",
        help="an adapter on every routed expert too: learns more, but is E times as large in memory, checkpoint and each push")

    add = parser.add_argument_group("problems").add_argument
    add("--dataset", default="arithmetic", help="arithmetic (made here), a JSONL file, or a Hub name")
    add("--prompt-key", default="problem", help="field of a row with the question")
    add("--answer-key", default="answer", help="field of a row with the reference answer")
    add("--tokens-key", help="field of a row with its own limit below --completion-tokens: no long tails for easy problems")
    add("--prompt-template", default=problems.TEMPLATE,
        help="the user message; {problem} is replaced")
    add("--heldout", type=int, default=64, help="problems kept from training for evaluation; 0 for none")
    add("--heldout-samples", type=int, default=8, help="samples per held-out problem; more is surer and slower")
    add("--eval-every", type=int, default=0, help="steps between evaluations; 0 for before and after only")
    add("--eval-benchmark", help="judge by this instead of held-out problems: aime2024, …, or a JSONL file")
    add("--data-dir", help="folder with NAME.jsonl of the benchmarks, instead of the Hub")
    add("--eval-tokens", type=int, help="longest completion when judged; default as in training")
    add("--eval-temperature", type=float, help="0.6 is usual for AIME; default as in training")
    add("--eval-top-p", type=float, default=1.0, help="0.95 is usual for AIME")

    add = parser.add_argument_group("rollouts").add_argument
    add("--prompts", type=int, default=16, help="prompts a step, over all ranks; more is steadier and slower")
    add("--group-size", type=int, default=8, help="samples per prompt; more gives hard problems a chance")
    add("--completion-tokens", type=int, default=40, help="longest completion; longer ones are cut (see --truncated)")
    add("--temperature", type=float, default=1.0, help="of sampling and of training; below 1 explores less")
    add("--tp", type=int, default=1, help="consecutive ranks that share one engine; for models too big for one GPU")
    add("--sleep", choices=["level1", "kv", "off"], default="level1",
        help="what the engine hands over while training: weights and KV cache, the KV cache, nothing (GPU only)")
    add("--gpu-memory-utilization", type=float, default=0.85, help="share of a GPU that vLLM may use while awake")
    add("--engine-args", type=json.loads, default={},
        help="JSON of any arguments of vllm.LLM, such as drafts or backends; they win over ours, unchecked")
    add("--engine-w4a4", action="store_true",
        help="a W4A4 checkpoint rounds activations too (Blackwell): faster, far from the trainer; wants --old-logprobs trainer")
    add("--replay-experts", action="store_true",
        help="train with the experts that the engine's routers chose; samples grow by layers x experts a token")
    add("--stop", nargs="+", help="strings that end a completion; costs detokenizing on the way")
    add("--chat-template-kwargs", type=json.loads, default={},
        help="JSON for the chat template, such as '{\"enable_thinking\": false}'; thinking asks for more --completion-tokens")

    add = parser.add_argument_group("algorithm").add_argument
    add("--refill", type=int, default=0,
        help="DAPO's dynamic sampling: rounds of rollouts that may replace groups without spread; a fuller, slower step")
    add("--loss", choices=list(LOSSES), default="dapo", help="see LOSSES and policy_loss")
    add("--advantage-scale", choices=["std", "none", "loo"], default="std", help="see group_advantages")
    add("--clip-low", type=float, default=0.2, help="how far a ratio may fall before its gradient stops")
    add("--clip-high", type=float, default=0.28, help="how far it may rise; wider keeps entropy up (DAPO)")
    add("--dual-clip", type=float, help="bound on the loss of bad samples, such as 3 (off)")
    add("--truncated", choices=["score", "zero", "mask"], default="score",
        help="what a cut completion earns; score: its answer, if it came to one (held-out: counted as wrong)")
    add("--overlong-buffer", type=int, default=0, help="DAPO: penalise the last tokens before the limit (off)")
    add("--format-bonus", type=float, default=0.0, help="added for any readable box; invites boxing guesses")
    add("--reward",
        help="path.py:function(completion, reference) -> float instead of reward.py, also on held-out problems")
    add("--kl-coef", type=float, default=0.0, help="pull towards the base; costs one more forward")
    add("--old-logprobs", choices=["sampler", "trainer"], default="sampler",
        help="the ratio's denominator; trainer costs a forward, for several --minibatches or an engine far off")
    add("--correction", choices=["tis", "icepop"], default="tis", help="with trainer: cap at 2, or drop outside .5 to 2")
    add("--no-probe", action="store_true", help="skip the start-up check that the engine uses the adapter")
    add("--max-logprob-gap", type=float, default=0.1, help="stop when trainer and engine differ by more (mean nats per token)")

    add = parser.add_argument_group("optimisation").add_argument
    add("--steps", type=int, default=24, help="optimizer steps, one per rollout")
    add("--lr", type=float, default=5e-4, help="of AdamW after warm-up; LoRA wants about ten times a full model's")
    add("--warmup", type=int, default=0, help="steps of linear warm-up")
    add("--schedule", choices=["constant", "cosine"], default="constant", help="cosine falls to a tenth")
    add("--minibatches", type=int, default=1, help="optimizer steps per rollout; more reuses samples longer")
    add("--average", type=int, default=1,
        help="judge and keep a mean of the adapters, the newest counting 1/N: steadier, behind by N steps; 1: the last alone")
    add("--max-grad-norm", type=float, default=1.0, help="gradients above are scaled down to it")
    add("--max-tokens", type=int, default=8192, help="tokens of a micro-batch at most; reduce it when memory runs out")
    add("--activation-checkpointing", action="store_true", help="recompute each layer in backward: less memory, a third slower")

    add = parser.add_argument_group("run").add_argument
    add("--run-name", help="folder under --runs-dir; default from dataset and seed")
    add("--runs-dir", default="runs", help="where run folders go")
    add("--seed", type=int, default=0, help="of problems, sampling and adapter; same seed, same run")
    add("--resume", default="auto", help="auto (go on if the run exists), never, or a checkpoint folder")
    add("--save-every", type=int, default=1, help="steps between checkpoints; what a crash can cost")
    add("--keep", type=int, default=0, help="older checkpoints to keep beside the latest")
    add("--print-every", type=int, default=5, help="steps between printed completions")
    add("--timeout", type=float, default=30, help="minutes until a stuck collective ends the run; a whole step may take twice that")
    add("--dry-run", action="store_true", help="check flags, model and data, print what would run, and stop")
    # fmt: on
    args = parser.parse_args(argv)
    if args.run_name is None:
        args.run_name = f"{Path(args.dataset).stem}-seed{args.seed}"
    return args


def check_flags(args: argparse.Namespace, world: int) -> None:
    """Raises UserError for values that cannot work, with the nearest ones that do."""
    least = dict.fromkeys(("prompts", "completion_tokens", "max_tokens", "steps", "lora_rank", "save_every"), 1)
    least |= dict.fromkeys(("heldout_samples", "tp", "minibatches", "average", "print_every"), 1)
    least |= dict.fromkeys(("keep", "heldout", "warmup", "kl_coef", "refill", "eval_every", "overlong_buffer"), 0)
    least |= dict.fromkeys(("seed", "lr", "clip_low", "clip_high", "format_bonus"), 0) | {"lora_alpha": 1}
    least |= {"eval_tokens": 1} if args.eval_tokens is not None else {}
    least |= {"eval_temperature": 0} if args.eval_temperature is not None else {}
    for flag, bound in least.items():
        if not bound <= getattr(args, flag) < math.inf:  # NaN neither
            raise UserError(f"--{flag.replace('_', '-')} {getattr(args, flag)} must be at least {bound}.")
    above_zero = {"max_grad_norm": math.inf, "max_logprob_gap": math.inf, "timeout": 525600}  # minutes of a year
    for flag, bound in (above_zero | {"eval_top_p": 1, "gpu_memory_utilization": 1}).items():
        if not 0 < getattr(args, flag) <= bound:
            limit = f" and at most {bound}" if bound < math.inf else ""
            raise UserError(f"--{flag.replace('_', '-')} {getattr(args, flag)} must be above 0{limit}.")
    replicas, largest = max(1, world // args.tp), max(rollout.LORA_RANKS)
    below, above = args.prompts // replicas * replicas, -(-args.prompts // replicas) * replicas
    nearest = f"{below} or {above}" if below else f"{above}"
    # fmt: off
    for wrong, sentence in [
        (args.group_size < 2, f"--group-size {args.group_size}: GRPO compares the samples of a group; use 2 or more (8 is usual)."),
        (not 0 < args.temperature < math.inf,
         f"--temperature {args.temperature}: all samples of a group would be equal; use a value above 0, such as 1."),
        (args.dual_clip is not None and not args.dual_clip > 1,
         f"--dual-clip {args.dual_clip} must be above 1, such as 3: it bounds what a ratio of more than that adds to the loss."),
        (not isinstance(args.engine_args, dict) or not isinstance(args.chat_template_kwargs, dict),
         "--engine-args and --chat-template-kwargs want a JSON object, such as '{\"enable_thinking\": false}'."),
        (args.stop and not all(args.stop), "--stop has an empty string, which would end each completion at once."),
        (args.lora_rank > largest, f"--lora-rank {args.lora_rank} is above the largest that vLLM serves, {largest}."),
        (args.lora_experts and not has_experts(args.model),
         f"--lora-experts: {args.model} has no routed experts in NVFP4; leave the flag out."),
        (args.replay_experts and not has_experts(args.model),
         f"--replay-experts: {args.model} has no routed experts in NVFP4; leave the flag out."),
        (args.replay_experts and args.tp > 1,  # vLLM 0.32 hands the choices to the first rank of an engine alone
         f"--replay-experts goes with --tp 1 only, not {args.tp}: vLLM tells the choices of experts to one rank of an engine."),
        (args.lora_experts and "lora_target_modules" in str(args.engine_args),
         "--lora-experts: lora_target_modules in --engine-args leaves the experts out of the engine; add --engine-args '{}'."),
        (args.lora_experts and args.lora_rank % 8,  # grouped_mm wants rows of 16 bytes
         f"--lora-experts wants a --lora-rank that 8 divides, such as {-(-args.lora_rank // 8) * 8}; not {args.lora_rank}."),
        (world % args.tp, f"--tp {args.tp} does not divide the {world} ranks; use a divisor of {world}."),
        (args.engine_w4a4 and args.old_logprobs != "trainer",
         "--engine-w4a4 samples from a rounder model than the one trained; add --old-logprobs trainer (importance weights "
         "bridge the two) and raise --max-logprob-gap to about 0.4."),
        (args.prompts % replicas,
         f"--prompts {args.prompts} does not divide over {replicas} engines; the nearest that do: {nearest}."),
    ]:
        if wrong:
            raise UserError(sentence)
    # fmt: on


# ---------------------------------------------------------------------------------------------------------------------
# The run


@dataclass
class Run:
    """What a step needs: made once, in `build`; `adapter` and `average` change with each step."""

    settings: argparse.Namespace
    task: Task
    own_reward: Callable[[str, str], float] | None
    folder: run_folder.RunFolder
    engine: Any  # vllm.LLM
    policy: Policy
    optimizer: torch.optim.Optimizer
    adapter: dict[str, torch.Tensor]  # what rolls out
    average: dict[str, torch.Tensor]  # what is judged and kept, see `averaged`
    bar: tqdm | None = None


def check(
    args: argparse.Namespace, world: int
) -> tuple[run_folder.RunFolder, Task, Callable[[str, str], float] | None]:
    """Everything a user can get wrong, before anything heavy is loaded: UserError, or (run folder, task, own reward)."""
    check_flags(args, world)
    rollout.check_architecture(args.model)
    summary = check_checkpoint(args.model)
    model_nvfp4.check_lora_targets(args.model, args.lora_targets)
    if torch.cuda.is_available():
        rollout.check_sleep(args.sleep, summary["weight_bytes"], args.tp)
    folder = run_folder.RunFolder.at(*run_folder.open_run(args), args.steps)
    train, heldout = problems.read_tasks(
        args.dataset, seed=args.seed, num_heldout=args.heldout, benchmark=args.eval_benchmark, data_dir=args.data_dir,
        prompt_key=args.prompt_key, answer_key=args.answer_key, tokens_key=args.tokens_key,
    )  # fmt: skip
    problems.check_references([*train, *heldout], args.reward)
    own_reward = reward.load_own_reward(args.reward) if args.reward else None
    task = problems.make_task(
        args.model, train, heldout, template=args.prompt_template, chat_template_kwargs=args.chat_template_kwargs,
        completion_tokens=args.completion_tokens, eval_tokens=args.eval_tokens or args.completion_tokens,
    )  # fmt: skip
    least = min(task.room[p.problem] for p in train)
    if args.overlong_buffer > least:
        raise UserError(
            f"--overlong-buffer {args.overlong_buffer} is more than the {least} tokens that a completion may have."
        )
    if int(os.environ.get("RANK", 0)) == 0:
        print(
            f"{args.model} on {args.dataset}: {len(train)} training and {len(heldout)} "
            f"{args.eval_benchmark or 'held-out'} problems, context {task.context}; "
            f"{args.steps} steps of {args.prompts} × {args.group_size} samples on {world} rank{'s' * (world > 1)}; "
            f"run {folder.path}" + (f", going on after step {folder.start_step}" if folder.checkpoint else "")
        )
    return folder, task, own_reward


def join(args: argparse.Namespace, folder: run_folder.RunFolder, task: Task) -> None:
    """Ranks find each other and agree on flags, data and where to go on; rank 0 takes the run's lock. Collective."""
    ranks.join_ranks(timedelta(minutes=args.timeout))
    ranks.dump_stacks(folder.path, dist.get_rank())
    if dist.get_rank() == 0:
        folder.lock = run_folder.lock_run(folder.path, patience=10)  # until this process ends, however it ends
    view = {f"--{name}": value for name, value in vars(args).items() if name not in ("model", "dataset", "runs_dir")}
    view |= {"the step to go on from": folder.start_step, "the checksum of all problems": task.checksum()}
    start = (folder.checkpoint / "adapter_model.safetensors").read_bytes() if folder.checkpoint else b""
    ranks.check_ranks_agree(view | {"the checksum of the checkpoint": zlib.crc32(start)})


def build(args: argparse.Namespace, folder: run_folder.RunFolder, task: Task, own_reward: Callable | None) -> Run:
    """Engine, policy and optimizer, from the checkpoint to go on from if there is one. Collective."""
    rank, world = dist.get_rank(), dist.get_world_size()
    engine = rollout.build_engine(
        args.model, max_model_len=task.context, max_lora_rank=args.lora_rank,
        max_num_seqs=min(1024, args.prompts * args.group_size), seed=args.seed, tp=args.tp, sleep=args.sleep,
        gpu_memory_utilization=args.gpu_memory_utilization, w4a4=args.engine_w4a4, return_experts=args.replay_experts,
        engine_args=args.engine_args,
    )  # fmt: skip
    register_attention()
    dtype = model_nvfp4.compute_dtype()
    model = model_nvfp4.build_model(
        args.model, lora_rank=args.lora_rank, lora_alpha=args.lora_alpha, lora_targets=args.lora_targets,
        lora_experts=args.lora_experts, dtype=dtype, attn_implementation="grouped",
    )  # fmt: skip
    policy = Policy(model, args.replay_experts)
    model_nvfp4.shard(policy, dtype=dtype, activation_checkpointing=args.activation_checkpointing)
    model_nvfp4.load_weights(policy, args.model, seed=args.seed)
    policy.eval()  # no dropout: the ratio compares two forwards of the same network
    model_nvfp4.checkpoint_in_eval(policy)
    if rank == 0:
        print(f"engine: {rollout.kernels(engine)}")
        if policy.sample_a_row:
            print("layers of this model carry a state along the row: a padded row a sample, and no prompt is shared")
    optimizer = build_optimizer(policy, args.lr)
    moments: dict[str, torch.Tensor] = {}
    if folder.checkpoint:
        load_lora_state_dict(policy, load_file(folder.checkpoint / "adapter_model.safetensors"))
        moments = load_file(folder.checkpoint / "optimizer.safetensors")
        run_folder.load_optimizer_tensors(policy, optimizer, moments)
    adapter = average = lora_state_dict(policy)
    if folder.checkpoint and args.average > 1:
        # Clones: the file, which the next checkpoint replaces, would stay mapped.
        average = {name: moments.get(f"average|{name}", tensor).clone() for name, tensor in adapter.items()}
    if rank == 0:
        run_folder.open_logs(folder, vars(args), rollout.versions(), world)
    dist.barrier()
    run = Run(args, task, own_reward, folder, engine, policy, optimizer, adapter, average)
    run.bar = tqdm(total=args.steps, initial=folder.start_step, desc="GRPO", disable=rank != 0, dynamic_ncols=True)
    return run


def push(run: Run, tensors: dict[str, torch.Tensor], version: int = -1) -> None:
    """Hand an adapter to the engine; then the last checkpoint starts to be written, beside the rollouts.

    Not earlier: beside the writing, which is Python's time as well, a push takes three times as long.
    """
    config = {"r": run.settings.lora_rank, "lora_alpha": run.settings.lora_alpha}
    push_adapter(run.engine, tensors, config, version)
    run.folder.write_pending()


def probe(run: Run) -> None:
    """`parity_probe` on four training prompts, printed in a line. Collective."""
    args, task = run.settings, run.task
    prompts = [task.prompt_ids[p.problem] for p in next_problems(task.train, run.folder.start_step, 4, args.seed)]
    found = parity_probe(
        run.engine, run.policy, run.adapter, prompts, push=partial(push, run),
        max_tokens=min(16, args.completion_tokens), max_gap=args.max_logprob_gap,
    )  # fmt: skip
    worst = max(found, key=lambda kind: found[kind][0])
    apart = min(without / max(used, 1e-9) for used, without in found.values())
    if dist.get_rank() == 0:
        print(
            f"parity probe: the engine uses the adapter on {', '.join(found)}; |Δlogp| at most {found[worst][0]:.3f} ({worst}), "
            f"without the adapter at least {apart:.0f} times that"
        )


def sample_groups(run: Run, step: int, seconds: dict[str, float]) -> Rollouts:
    """Sample and score the groups of `step`: once, and up to --refill times more in place of groups without spread.

    Inside `awake`. Collective: the problems are a function of (seed, step), the same on every rank.
    """
    args, task, found, drawn = run.settings, run.task, Rollouts(), Counter()
    missing = args.prompts
    for refill in range(1 + args.refill):
        chosen = next_problems(task.train, step, missing, args.seed, refill)
        requests = number_samples(chosen, args.group_size, drawn)
        samples = generate(
            run.engine, [task.prompt_ids[p.problem] for p, _ in requests],
            [sample_seed(args.seed, step, p.id, member) for p, member in requests],
            max_tokens=[task.room[p.problem] for p, _ in requests], temperature=args.temperature, stop=args.stop,
            use_adapter=True,
        )  # fmt: skip
        with timed(seconds, "score"):
            verdicts, values = score_together(samples, [p.answer for p, _ in requests], run.own_reward)
        found.problems += chosen
        found.samples += samples
        found.verdicts += verdicts
        found.values += values
        live = has_spread(found.unshaped())  # (groups, 1)
        missing = args.prompts - int(live.sum())
        if not missing:
            break
    # With --refill such groups stay out, also where shaping gives them a spread.
    found.replaced = (~live & (args.refill > 0)).expand(-1, args.group_size).flatten().tolist()
    return found


def judge(run: Run, step: int) -> None:
    """Held-out accuracy of the policy after `step` updates; once per step, also when a run goes on. Collective."""
    args, evaluations = run.settings, run.folder.evaluations
    done = [step in [e["step"] for e in evaluations]]  # rank 0 knows
    dist.broadcast_object_list(done)
    if not run.task.heldout or done[0]:
        return
    with awake(run.engine):
        push(run, run.average, step)
        result = evaluate(
            run.engine, run.task.tokenizer, run.task.heldout, k=args.heldout_samples,
            temperature=args.temperature if args.eval_temperature is None else args.eval_temperature,
            top_p=args.eval_top_p, stop=args.stop, max_tokens=args.eval_tokens or args.completion_tokens, seed=args.seed,
            template=args.prompt_template, chat_template_kwargs=args.chat_template_kwargs, use_adapter=True,
            own_reward=run.own_reward,
        )  # fmt: skip
    if dist.get_rank() == 0:
        evaluations.append({"step": step, **result})
        run_folder.append_jsonl(run.folder.path / "evaluations.jsonl", evaluations[-1:])
        mean = f"reward {result['reward']:.3f}{error_of(result, 'reward')}, " if run.own_reward else ""
        judged_on = args.eval_benchmark or "held-out"
        run.bar.write(f"step {step:4d}  {judged_on} {mean}accuracy {result['avg']:.3f}{error_of(result, 'avg')}")


def log(run: Run, m: dict[str, Any], rollouts: Rollouts, rewards: list[float]) -> None:
    """Rank 0 appends the step to metrics.jsonl and samples.jsonl and prints its line."""
    if dist.get_rank() == 0:
        run.folder.metrics.append(m)
        run_folder.append_jsonl(run.folder.path / "metrics.jsonl", [m])
        records = run_folder.sample_records(m["step"], rollouts.problems, rollouts.samples, rollouts.verdicts, rewards)
        run_folder.append_jsonl(run.folder.path / "samples.jsonl", records)
        printed = (m["step"] - 1) % run.settings.print_every == 0
        report.report_step(run.bar, m, run.settings.steps, rollouts.samples[0] if printed else None)


def save(run: Run, step: int) -> None:
    """Gather the optimizer's moments and hand the checkpoint of `step` to the writer. Collective."""
    moments = run_folder.optimizer_tensors(run.policy, run.optimizer)
    if run.settings.average > 1:
        moments |= {f"average|{name}": tensor for name, tensor in run.average.items()}
    if dist.get_rank() == 0:
        run.folder.put_checkpoint(step, run.adapter, moments, adapter_config(run.settings), run.settings.keep)


def adapter_config(args: argparse.Namespace) -> dict[str, Any]:
    """What `save_adapter` writes beside the tensors."""
    return {"lora_rank": args.lora_rank, "lora_alpha": args.lora_alpha, "base_model": args.model}


def finish(run: Run) -> None:
    """Judge, write what is still to be written, tell the outcome, shut down. Collective."""
    judge(run, run.settings.steps)
    run.folder.finish_checkpoints()
    if dist.get_rank() == 0:
        run.bar.close()
        save_adapter(run.folder.path / "adapter", run.average, **adapter_config(run.settings))
        if run.folder.metrics:
            report.plot_run(run.folder)
        if run.task.heldout:
            print(report.outcome(run.folder.evaluations))
        print(f"adapter in {run.folder.path / 'adapter'}, curves in {run.folder.path / 'curves.png'}")
        run.folder.lock.close()
    rollout.shutdown(run.engine)


def main() -> None:
    args = parse_args()
    world = int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    # --- Check, join, build, probe -----------------------------------------------------------------------------------
    folder, task, own_reward = check(args, world)
    if args.dry_run:
        return
    join(args, folder, task)
    run = build(args, folder, task, own_reward)
    policy, optimizer, G = run.policy, run.optimizer, args.group_size
    if not args.no_probe:
        probe(run)
    start_step = folder.start_step
    if start_step == 0 or (args.eval_every and start_step % args.eval_every == 0 and start_step < args.steps):
        judge(run, start_step)  # also when a run ended between the checkpoint of a step and its evaluation
    bad_steps, saving = 0, {}

    # --- GRPO --------------------------------------------------------------------------------------------------------
    for step in range(start_step, args.steps):
        # A collective that is stuck raises after --timeout; this is for an engine that is stuck by itself.
        faulthandler.dump_traceback_later(2 * 60 * args.timeout, exit=True)
        seconds, saving = saving, {}  # the time of log and checkpoint counts with the next line of the log
        with timed(seconds, "generate"), awake(run.engine):  # vLLM owns the GPU inside this block
            with timed(seconds, "push"):
                push(run, run.adapter, step)  # the policy that we are about to improve
            rollouts = sample_groups(run, step, seconds)
        limits = [task.room[p.problem] for p in rollouts.problems for _ in range(G)]  # N, tokens
        rewards, masked = shape_rewards(
            rollouts.samples, rollouts.values, limits=limits, truncated=args.truncated,
            overlong_buffer=args.overlong_buffer, format_bonus=args.format_bonus,
        )  # fmt: skip  # N, N
        with timed(seconds, "train"):
            advantages = group_advantages(torch.tensor(rewards).view(-1, G), args.advantage_scale)  # (groups, G)
            minibatches = make_minibatches(
                rollouts, advantages, masked, number=args.minibatches, loss=args.loss, num_samples=args.prompts * G,
                max_tokens=args.max_tokens, sample_a_row=policy.sample_a_row, keep_all=args.kl_coef > 0,
                completion_tokens=args.completion_tokens, device=device,
            )  # fmt: skip  # an optimizer step each
            all_batches = [batch for minibatch in minibatches for batch in minibatch.batches]
            annotate(
                policy, all_batches, args.temperature, args.old_logprobs, args.correction, reference=args.kl_coef > 0
            )
            lr = set_learning_rate(optimizer, learning_rate(args.lr, step, args.steps, args.warmup, args.schedule))
            stats, norms = [], []
            for minibatch in minibatches:
                loss_sum = torch.zeros((), device=device)  # ()
                for batch in minibatch.batches:
                    logprobs, entropy = token_logprobs(policy, batch, args.temperature)  # (S,), (S,)
                    loss, sums = policy_loss(
                        logprobs, batch.old_logprobs, batch.advantages, batch.samples, minibatch.denominator,
                        loss=args.loss, clip_low=args.clip_low, clip_high=args.clip_high, dual_clip=args.dual_clip,
                        weights=batch.corrections, reference_logprobs=batch.reference_logprobs, kl_coef=args.kl_coef,
                    )  # fmt: skip
                    (loss * batch.weight * world).backward()  # FSDP averages over ranks; the loss wants the sum
                    sums |= gap_stats(logprobs, batch.sampler_logprobs, counted=minibatch is minibatches[0])
                    sums |= replay_stats(policy, logprobs) | {"entropy": entropy.sum(), "loss": loss.detach()}
                    stats.append({name: value * batch.weight for name, value in sums.items()})
                    loss_sum += stats[-1]["loss"]
                norms.append(optimizer_step(optimizer, loss_sum, minibatch.num_segments, args.max_grad_norm))
            run.adapter = lora_state_dict(policy)
            run.average = averaged(run.average, run.adapter, step + 1, args.average)
            m = step_metrics(step + 1, rollouts, rewards, args.prompts, reduce_stats(stats), norms)
            m |= {"lr": lr, "seconds": seconds, "adapter_crc": ranks.check_same_adapter(run.adapter, step + 1)}
        faulthandler.cancel_dump_traceback_later()
        m |= {"memory_gib": run_folder.memory_gib(), "engine": run.engine.stats}
        with timed(saving, "log"):
            log(run, m, rollouts, rewards)
        bad_steps = bad_steps + 1 if m["skipped"] else 0
        check_step(m, args.max_logprob_gap, bad_steps, folder.path / "samples.jsonl")
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            with timed(saving, "save"):
                save(run, step + 1)
        if args.eval_every and (step + 1) % args.eval_every == 0 and step + 1 < args.steps:
            judge(run, step + 1)
            report.plot_run(folder)
    finish(run)


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        code = ranks.report_failure(error)
        sys.stdout.flush()
        os._exit(code)  # not sys.exit: what NCCL and vLLM do on the way out waits for ranks that are gone
