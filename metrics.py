"""The numbers of a step: sums over micro-batches and ranks, and the means that metrics.jsonl states.

sums = gap_stats(logprobs, batch.sampler_logprobs)     # of one micro-batch; sums and maxima, so that they can be added up
totals = reduce_stats([sums, …])                       # over micro-batches and ranks; collective
line = step_metrics(step, rollouts, rewards, num_prompts, totals, norms)
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

GAP_BINS = torch.logspace(-6, 2, 161)  # twenty to a decade: a percentile is right to 6 %


def gap_stats(
    trainer_logprobs: torch.Tensor, sampler_logprobs: torch.Tensor, counted: bool = True
) -> dict[str, torch.Tensor]:
    """How far trainer and engine are apart on (S,) sampled tokens: sums of |Δlogp| and of k3 = KL(sampler ‖ trainer).

    A token that one of them has no finite number for is no gap; those of the sampler are counted, for `check_step`. Not
    `counted`, all is zero: after an optimizer step the two are not the same policy any more.
    """
    difference = (trainer_logprobs.detach() - sampler_logprobs).nan_to_num(0.0, 0.0, 0.0)  # (S,)
    gap = difference.abs()  # (S,)
    bins = torch.bucketize(gap.float().cpu(), GAP_BINS)  # (S,)
    stats = {
        "gap": gap.sum(),
        "gap_tokens": gap.new_tensor(len(gap)),
        "unknown": (~torch.isfinite(sampler_logprobs)).sum(),
        "gap_max": gap.max(),
        "kl": (difference.exp() - 1 - difference).sum(),
        "gap_histogram": torch.bincount(bins, minlength=len(GAP_BINS) + 1),  # (bins,): a percentile without a gather
    }
    return {name: value * counted for name, value in stats.items()}


def reduce_stats(stats: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Sums over micro-batches and ranks, maxima for names in …_max. Collective: every rank must call, with the same keys."""
    reduced = {}
    for op, pool in ((dist.ReduceOp.SUM, torch.sum), (dist.ReduceOp.MAX, torch.amax)):
        names = [name for name in stats[0] if name.endswith("_max") == (op == dist.ReduceOp.MAX)]
        pooled = [pool(torch.stack([s[name].double() for s in stats]), 0).cpu() for name in names]
        flat = torch.cat([total.flatten() for total in pooled])  # (values,): one collective for all of them
        dist.all_reduce(flat, op=op)
        parts = flat.split([total.numel() for total in pooled])
        reduced |= {name: part.view(total.shape) for name, part, total in zip(names, parts, pooled)}
    return reduced


def percentile(histogram: torch.Tensor, share: float) -> float:
    """Upper edge of the bin of GAP_BINS in which `share` of the tokens lie at or below."""
    if not histogram.sum():
        return 0.0
    index = int(torch.searchsorted(histogram.cumsum(0), share * histogram.sum()))
    return GAP_BINS[min(index, len(GAP_BINS) - 1)].item()


def step_metrics(
    step: int,
    rollouts: Any,  # train_grpo.Rollouts
    rewards: list[float],  # N, shaped
    num_prompts: int,  # P
    totals: dict[str, torch.Tensor],
    norms: list[float],
) -> dict[str, Any]:
    """Most of a line of metrics.jsonl. Means over tokens are over the trained tokens of all ranks; log-probs are in nats.

    Rewards and shares of groups are of the first P groups: those asked because others had no spread are no fair sample.
    """
    values = rollouts.unshaped()[:num_prompts]  # (P, G)
    shaped = torch.tensor(rewards).view(-1, values.shape[1])[:num_prompts]  # (P, G)
    best, mixed = values.amax(1), values.amax(1) > values.amin(1)  # (P,), (P,)
    lengths = [len(s.completion_ids) for s in rollouts.samples]
    t = {name: total.item() for name, total in totals.items() if name != "gap_histogram"}
    means, gaps = ("reference_kl", "entropy", "clip_low", "clip_high"), ("gap", "unknown", "kl")
    # fmt: off
    return {
        "step": step, "reward": shaped.mean().item(), "reward_std": shaped.std().item(),
        "groups_mixed": mixed.float().mean().item(),
        "groups_all_right": (~mixed & (best > 0)).float().mean().item(),
        "groups_all_wrong": (~mixed & (best <= 0)).float().mean().item(),
        "groups_asked": len(rollouts.problems), "reasons": dict(Counter(v.reason for v in rollouts.verdicts)),
        "completion_tokens": float(np.mean(lengths)), "completion_tokens_max": max(lengths),
        "truncated": float(np.mean([s.finish_reason == "length" for s in rollouts.samples])),
        "sampled_tokens": sum(lengths), "trained_tokens": int(t["tokens"]), "loss": t["loss"] / len(norms),
        **{name: t[name] / max(t["gap_tokens"], 1) for name in gaps},
        **{name: t[name] / max(t["tokens"], 1) for name in means},
        "gap_p99": percentile(totals["gap_histogram"], 0.99), "gap_max": t["gap_max"], "ratio_max": t["ratio_max"],
        **({"experts_alike": t["experts_alike"] / t["experts_known"]} if t["experts_known"] else {}),
        "grad_norm": float(np.mean(norms)), "skipped": sum(not math.isfinite(norm) for norm in norms),
    }
    # fmt: on
