"""GRPO on a frozen NVFP4 checkpoint with LoRA: the algorithm, the loop, the run folder. Start here.

    torchrun --nproc-per-node 1 train_grpo.py --model models/SmolLM2-135M-Instruct-NVFP4 --dataset arithmetic
    bash launch.sh                                    # the same with set-up; `--recipe NAME` picks written-out flags

Every rank runs this file. It owns a vLLM engine (rollouts) and an FSDP2 shard of the same 4-bit checkpoint (training) on the
same GPU and hands the GPU's memory from one to the other each step. `main()` holds the loop; what it calls is above it.

What we left out of the papers, and why:
1. No value network and no reward model: the reward is a verdict on the answer, the baseline is the group's mean (GRPO).
2. No second forward for old log-probs: they are the sampler's own, so one clipped ratio π_trainer/π_sampler corrects both
   staleness and the difference between the two programs.
3. No reference model: the frozen base under the adapter is one, `--kl-coef` switches the adapter off to ask it.
4. No padding and nothing twice: a row is a tree of tokens, in which what samples begin with alike is computed once (`pack`).
"""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import json
import math
import os
import random
import shutil
import socket
import sys
import time
import zlib
from bisect import bisect_left
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from tqdm import tqdm

import model_nvfp4
import report
import reward as grader
import rollout
from eval_aime import (
    BENCHMARKS,
    Problem,
    check_own_reward,
    conversation,
    error_of,
    evaluate,
    load_own_reward,
    read_problems,
    sample_seed,
)
from model_nvfp4 import UserError
from rollout import Sample, awake, generate, push_adapter

# Axis legend: P prompts of a step (all ranks) · G samples per prompt · N = P·G · R rows of T tokens · S trained tokens ·
# U of them that differ (in token or history) · V vocabulary · H hidden · r LoRA rank. Sums over tokens run over completion
# tokens only, end-of-sequence included.


# ---------------------------------------------------------------------------------------------------------------------
# Problems


def arithmetic_problems(seed: int, num_train: int = 4096, num_heldout: int = 64) -> tuple[list[Problem], list[Problem]]:
    """The embedded task: sums and differences up to 20, products of 2 to 9, two worked examples in the prompt.

    Returns (train, held-out), drawn from `seed`, with no problem in both and neither of the examples in any. The three
    operations are equally frequent; training problems repeat, since there are fewer than 500 of them.
    """
    examples = []
    for asked, said in [("What is 3 + 5?", r"3 + 5 = \boxed{8}"), ("What is 7 * 4?", r"7 * 4 = \boxed{28}")]:
        examples += [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
    pools = {
        "+": [(a, b, a + b) for a in range(1, 20) for b in range(1, 20) if a + b <= 20 and (a, b) != (3, 5)],
        "-": [(a, b, a - b) for a in range(1, 21) for b in range(1, a + 1)],
        "*": [(a, b, a * b) for a in range(2, 10) for b in range(2, 10) if (a, b) != (7, 4)],
    }
    most = 3 * min(map(len, pools.values())) - 1
    if num_heldout > most:
        raise UserError(f"--heldout {num_heldout}: arithmetic has too few products for more than {most}.")
    rng = random.Random(f"arithmetic {seed}")

    def problem(name: str, operation: str, a: int, b: int, answer: int) -> Problem:
        question = f"What is {a} {operation} {b}?"
        return Problem(name, question, str(answer), messages=[*examples, {"role": "user", "content": question}])

    for pool in pools.values():
        rng.shuffle(pool)
    operations = [(index, "+-*"[index % 3]) for index in range(num_heldout)]
    heldout = [problem(f"heldout-{index}", operation, *pools[operation].pop()) for index, operation in operations]
    draws = ((index, rng.choice("+-*")) for index in range(num_train))
    train = [problem(f"train-{index}", operation, *rng.choice(pools[operation])) for index, operation in draws]
    return train, heldout


def next_problems(problems: list[Problem], step: int, num_prompts: int, seed: int, refill: int = 0) -> list[Problem]:
    """The P problems of `step`: a new shuffle each epoch, a function of (seed, step) alone, the same on every rank.

    Round `refill` ≥ 1 of dynamic sampling draws from all problems instead: how many a step needs depends on the answers, and
    an order that moved on with them could not be found again by a resumed run.
    """
    if refill:
        order = np.random.default_rng([seed, step, refill]).permutation(len(problems))  # (problems,)
        return [problems[order[position % len(problems)]] for position in range(num_prompts)]
    chosen = []
    for position in range(step * num_prompts, (step + 1) * num_prompts):
        epoch, offset = divmod(position, len(problems))
        order = np.random.default_rng([seed, epoch]).permutation(len(problems))  # (problems,)
        chosen.append(problems[order[offset]])
    return chosen


def number_samples(problems: list[Problem], group_size: int, drawn: Counter[str]) -> list[tuple[Problem, int]]:
    """(problem, which of its samples in this step) for each sample to draw; `drawn` counts them by problem over the step.

    The number goes into the seed: a problem that comes twice in a step, from a small dataset or by refill, is sampled anew.
    """
    draws = []
    for problem in problems:
        draws += [(problem, drawn[problem.id] + member) for member in range(group_size)]
        drawn[problem.id] += group_size
    return draws


# ---------------------------------------------------------------------------------------------------------------------
# Advantages


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
    `overlong_buffer` tokens before the sample's limit (N `limits`); `format_bonus` is paid for a readable box, right or wrong.
    """
    assert len(values) == len(samples), f"{len(values)} rewards for {len(samples)} samples"
    rewards, masks = [], []
    for sample, value, limit in zip(samples, values, limits, strict=True):
        value, trained = grader.truncated_reward(value, sample.finish_reason == "length", truncated)
        if overlong_buffer:
            value += grader.overlong_penalty(len(sample.completion_ids), limit, overlong_buffer)
        if format_bonus:
            value += format_bonus * grader.format_reward(sample.text)
        rewards.append(float(value))
        masks.append(not trained)
    return rewards, masks


def score_together(
    samples: list[Sample], references: list[str], own_reward: Any = None
) -> tuple[list[grader.Verdict], list[float]]:
    """(N verdicts, N values) of N samples; a value is the verdict's unless `own_reward(completion, reference)` is given.

    Each rank grades every world-th sample and all ranks get all. Collective. Were each to grade everything, a proof that one
    rank's clock cut off (or a reward that draws) would have them drop different groups and wait for each other for ever.
    Raises UserError where the user's function gave no finite number: it would make every advantage of its group NaN.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = list(zip(samples, references))[rank::world]
    verdicts = grader.score([sample.text for sample, _ in mine], [reference for _, reference in mine])
    values = [verdict.reward for verdict in verdicts]
    if own_reward:
        values = [own_reward(sample.text, reference) for sample, reference in mine]
    parts: list[Any] = [None] * world
    dist.all_gather_object(parts, list(zip(verdicts, values)))
    judged = [parts[index % world][index // world] for index in range(len(samples))]
    for sample, reference, (_, value) in zip(samples, references, judged):
        check_own_reward(value, repr(sample.text[-60:]), reference)
    return [verdict for verdict, _ in judged], [float(value) for _, value in judged]


# ---------------------------------------------------------------------------------------------------------------------
# Micro-batches: samples as a tree of tokens, in which what two of them begin with is there once


@dataclass
class Segment:
    """A prompt and some of its completions, which share it. All token lists are the engine's own ids."""

    prompt_ids: list[int]
    completions: list[tuple[list[int], list[float], float]] = field(default_factory=list)  # ids, log-probs, advantage
    experts: list[np.ndarray] = field(default_factory=list)  # of each completion with its prompt, if they are replayed

    @property
    def num_tokens(self) -> int:
        """Tokens of input at most: a completion's last token predicts nothing that is trained, so it is no input."""
        return len(self.prompt_ids) + sum(len(ids) - 1 for ids, _, _ in self.completions)


@dataclass
class Batch:
    """A micro-batch: one row of packed segments, R = 1, or R samples in a row each, of which the shorter are padded.

    `layout` tells attention who may see whom, in all rows one after another; see `grouped_attention`.
    """

    input_ids: torch.Tensor  # (R, T)
    position_ids: torch.Tensor  # (R, T), going back at each branch
    layout: torch.Tensor  # (1, 1, 2, R·T) int32: where the token's branches end, its position
    sources: torch.Tensor  # (U,) where in R·T the hidden state lies that predicts a token; pairs that differ
    targets: torch.Tensor  # (U,) the token
    picks: torch.Tensor  # (S,) of the sampled tokens: which pair it is
    sampler_logprobs: torch.Tensor  # (S,) from the engine
    old_logprobs: torch.Tensor  # (S,) the ratio's denominator: the sampler's, unless --old-logprobs trainer
    advantages: torch.Tensor  # (S,)
    samples: torch.Tensor  # (S,) number of the completion within the micro-batch
    weight: float  # 1, or 0 for the stand-in of a rank that has nothing to do
    corrections: torch.Tensor | None = None  # (S,) importance weights, with --old-logprobs trainer
    reference_logprobs: torch.Tensor | None = None  # (S,) of the frozen base, with --kl-coef
    experts: torch.Tensor | None = None  # (layers, R·T, k) that the engine chose, with --replay-experts

    def to(self, device: torch.device) -> Batch:
        moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in vars(self).items()}
        return Batch(**moved)


def make_segments(
    samples: list[Sample],
    advantages: torch.Tensor,
    max_tokens: int,
    masked: list[bool] | None = None,
    keep_all: bool = False,
) -> list[Segment]:
    """Samples (N, group-contiguous) and advantages (P, G) to segments of at most `max_tokens`.

    A group without spread (all advantages zero) is left out, since it has no gradient (with a KL term it has one: `keep_all`),
    and so is each completion with `masked` true. The prompt is computed once for its completions; a group too long for one
    segment is cut into several that repeat the prompt. A single completion may exceed `max_tokens`: it gets a segment of its
    own; so does each with `max_tokens` 0.
    """
    num_prompts, group_size = advantages.shape
    assert len(samples) == num_prompts * group_size, f"{len(samples)} samples for {num_prompts} groups of {group_size}"
    segments: list[Segment] = []
    for group in range(num_prompts):
        if not keep_all and not advantages[group].any():
            continue
        members = range(group * group_size, (group + 1) * group_size)
        segment: Segment | None = None
        for index in members:
            sample = samples[index]
            assert sample.prompt_ids == samples[members[0]].prompt_ids, f"sample {index} has another prompt"
            if masked is not None and masked[index]:
                continue
            if segment is None or segment.num_tokens + len(sample.completion_ids) - 1 > max_tokens:
                segment = Segment(sample.prompt_ids)
                segments.append(segment)
            advantage = advantages[group, index - members[0]].item()
            segment.completions.append((sample.completion_ids, sample.logprobs, advantage))
            segment.experts += [] if sample.experts is None else [sample.experts]
    return segments


def balance(segments: list[Segment], world: int, max_tokens: int) -> list[list[list[Segment]]]:
    """Segments to `world` lists of micro-batches: the same number on every rank, about the same tokens in each, counted before
    `pack` finds what they share.

    Longest first into the emptiest row (LPT), with the smallest number of rows in which none exceeds `max_tokens` (or holds
    more than one segment; with 0 none does). Deterministic, so every rank computes the whole assignment without a collective.
    """
    ordered = sorted(segments, key=lambda segment: -segment.num_tokens)
    total = sum(segment.num_tokens for segment in ordered)
    per_rank = max(1, min(math.ceil(total / (world * max(max_tokens, 1))), math.ceil(len(ordered) / world)))
    while True:
        rows: list[list[Segment]] = [[] for _ in range(world * per_rank)]
        sizes = [0] * len(rows)
        for segment in ordered:
            emptiest = sizes.index(min(sizes))
            rows[emptiest].append(segment)
            sizes[emptiest] += segment.num_tokens
        if all(size <= max_tokens or len(row) == 1 for size, row in zip(sizes, rows)):
            return [rows[rank::world] for rank in range(world)]
        per_rank += 1


def balance_padded(segments: list[Segment], world: int, max_tokens: int) -> list[list[list[Segment]]]:
    """As `balance`, for segments of one completion that get a row each: padding counts, so those of like length go together.

    Longest first, as many in a micro-batch as have at most `max_tokens` with their padding (or one); then the smallest such
    limit that needs no more micro-batches, of which every rank gets the same number.
    """
    ordered = sorted(segments, key=lambda segment: -segment.num_tokens)

    def cut(limit: int) -> list[list[Segment]]:
        batches: list[list[Segment]] = []
        for segment in ordered:
            if not batches or (len(batches[-1]) + 1) * batches[-1][0].num_tokens > limit:
                batches.append([])
            batches[-1].append(segment)
        return batches

    number = world * max(1, math.ceil(len(cut(max_tokens)) / world))
    batches = cut(bisect_left(range(max_tokens), -number, key=lambda limit: -len(cut(limit))))
    batches += [[]] * (number - len(batches))
    return [batches[rank::world] for rank in range(world)]


def common(first: list[int], second: list[int]) -> int:
    """The number of tokens that both begin with."""
    return next((i for i, (a, b) in enumerate(zip(first, second)) if a != b), min(len(first), len(second)))


def pack(row: list[Segment], sample_a_row: bool = False) -> Batch:
    """Segments to a micro-batch of tensors: the only place where ragged lists become tensors. Without any it gets weight 0.

    The row is the tree of all samples, depth first: instructions that all prompts share, a prompt, what its completions begin
    with alike, and so on are computed once; the gradient is that of separate rows. Samples in lexical order are in tree order,
    and each adds what it does not share with the one before. A token that several chose at the same place is one pair.
    Where experts are replayed, what two samples share ends where the engine sent them through different ones.
    With `sample_a_row` nothing is shared: each sample is a row, padded at its end, where nothing that counts can see it.
    """
    segments = row or [Segment([0], [([0], [0.0], 0.0)])]
    completions = [completion for segment in segments for completion in segment.completions]
    inputs = [segment.prompt_ids + ids[:-1] for segment in segments for ids, _, _ in segment.completions]
    prompt_lengths = [len(segment.prompt_ids) for segment in segments for _ in segment.completions]
    if sample_a_row:
        longest = max(map(len, inputs))
        inputs = [ids + [0] * (longest - len(ids)) for ids in inputs]
    chosen, most = [choice for segment in row for choice in segment.experts], sum(map(len, inputs))
    experts = np.full((most, *chosen[0].shape[1:]), -1, chosen[0].dtype) if chosen else None  # (≥ R·T, layers, k)
    ids, positions, ends = [], [], []  # T each
    before, path, paths = [], [], [[]] * len(inputs)  # a path: where in the row the tokens of a sample are
    for sample in sorted(range(len(inputs)), key=inputs.__getitem__):
        shared = 0 if sample_a_row else common(before, inputs[sample])
        if experts is not None:
            theirs, own = experts[path[:shared]], chosen[sample]  # (shared, layers, k), (tokens, layers, k)
            apart = ((theirs != own[:shared]) & (theirs >= 0) & (own[:shared] >= 0)).any((1, 2))  # (shared,)
            shared = int(apart.argmax()) if apart.any() else shared
            experts[path[:shared]] = np.maximum(theirs[:shared], own[:shared])  # -1 where a prefix cache knew it
            experts[len(ids) : len(ids) + len(own) - shared] = own[shared:]
        for place in path[shared:]:  # nothing more comes below these
            ends[place] = len(ids)
        path = paths[sample] = path[:shared] + list(range(len(ids), len(ids) + len(inputs[sample]) - shared))
        ids += inputs[sample][shared:]
        positions += range(shared, len(inputs[sample]))
        ends += [0] * (len(ids) - len(ends))
        before = inputs[sample]
    for place in path:
        ends[place] = len(ids)
    pairs: dict[tuple[int, int], int] = {}
    picks, logprobs, advantages, sample_of = [], [], [], []  # S each
    for sample, (completion, its_logprobs, advantage) in enumerate(completions):
        assert len(its_logprobs) == len(completion), f"{len(its_logprobs)} log-probs of {len(completion)} tokens"
        sources = paths[sample][prompt_lengths[sample] - 1 :]
        picks += [pairs.setdefault(pair, len(pairs)) for pair in zip(sources, completion)]
        logprobs += its_logprobs
        advantages += [advantage] * len(completion)
        sample_of += [sample] * len(completion)
    sampler_logprobs = torch.tensor(logprobs, dtype=torch.float32)  # (S,)
    rows = len(inputs) if sample_a_row else 1
    return Batch(
        input_ids=torch.tensor(ids).view(rows, -1),  # (R, T)
        position_ids=torch.tensor(positions).view(rows, -1),  # (R, T)
        layout=torch.tensor([[[ends, positions]]], dtype=torch.int32),  # (1, 1, 2, R·T)
        sources=torch.tensor([source for source, _ in pairs]),  # (U,)
        targets=torch.tensor([target for _, target in pairs]),  # (U,)
        picks=torch.tensor(picks),  # (S,)
        sampler_logprobs=sampler_logprobs,
        old_logprobs=sampler_logprobs,
        advantages=torch.tensor(advantages, dtype=torch.float32),  # (S,)
        samples=torch.tensor(sample_of),  # (S,)
        weight=1.0 if row else 0.0,
        experts=None if experts is None else torch.from_numpy(experts[: len(ids)]).transpose(0, 1),  # (layers, R·T, k)
    )


# ---------------------------------------------------------------------------------------------------------------------
# The policy: attention over the tree, log-probs without (T, V)


def grouped_attention(
    module: nn.Module,
    query: torch.Tensor,  # (R, heads, T, D)
    key: torch.Tensor,  # (R, kv_heads, T, D)
    value: torch.Tensor,  # (R, kv_heads, T, D of the values)
    attention_mask: torch.Tensor,  # (1, 1, 2, R·T): `Batch.layout`
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of a micro-batch: a token sees those before it whose branches have not ended, which are its own sample's.

    The layout travels where a 4-D attention mask would: transformers hands such a tensor through to the attention function
    untouched, so no model needs a line of code for this. On a GPU flash attention over (queries, visible keys) pairs; else,
    and for soft caps and sinks, which flash attention has not, `BlockAttention`.
    """
    layout, rows = attention_mask[0, 0], query.shape[::2]  # (2, R·T), (R, T)
    # All rows as one: (heads, R·T, D), (kv_heads, R·T, D) twice.
    query, key, value = (x.transpose(0, 1).flatten(1, 2) for x in (query, key, value))
    scaling = scaling or query.shape[-1] ** -0.5
    plain = softcap is None and s_aux is None and query.shape[-1] == value.shape[-1] <= 256
    if query.is_cuda and plain and query.dtype != torch.float32:
        from torch.nn.attention.varlen import varlen_attn

        if not hasattr(attention_mask, "visits"):  # every layer gets the same tensor: once a row is enough
            seen, *ends = visits(layout)  # (K,), (visits + 1,) ×2
            attention_mask.visits = seen, *ends, *(int(end.diff().max()) for end in ends)  # type: ignore[attr-defined]
        seen, query_ends, key_ends, longest_query, longest_keys = attention_mask.visits
        output = varlen_attn(
            query.transpose(0, 1),  # (R·T, heads, D)
            key.transpose(0, 1)[seen],  # (K, kv_heads, D)
            value.transpose(0, 1)[seen],  # (K, kv_heads, D)
            query_ends, key_ends, longest_query, longest_keys,
            scale=scaling, window_size=(sliding_window - 1 if sliding_window else -1, 0), enable_gqa=True,
        )  # fmt: skip  # (R·T, heads, D)
        return output.unflatten(0, rows), None  # (R, T, heads, D)
    if not hasattr(attention_mask, "blocks"):
        attention_mask.blocks = {}  # type: ignore[attr-defined]
    if sliding_window not in attention_mask.blocks:
        attention_mask.blocks[sliding_window] = BlockAttention.blocks(layout, sliding_window)
    blocks = attention_mask.blocks[sliding_window]
    output = BlockAttention.apply(query, key, value, blocks, scaling, softcap, s_aux)
    return output.transpose(0, 1).unflatten(0, rows), None  # (R, T, heads, D)


def visits(layout: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A layout (2, T) as causal (queries, keys) pairs, what variable-length flash attention takes: one for each branch,
    whose tokens see what leads to them, aligned at their last tokens. Returns which token each key is (K,) and where each
    visit's queries and keys end, (visits + 1,) int32 each, with a zero in front.
    """
    ends, order = layout[0].cpu(), torch.arange(layout.shape[1])  # (T,), (T,)
    starts = F.pad(1 + (ends[:-1] == order[1:]).nonzero()[:, 0], (1, 0))  # (visits,): after a token with nothing below
    query_ends = F.pad(starts, (0, 1), value=len(ends)).int()  # (visits + 1,)
    above = [order[:start][ends[:start] > start] for start in starts]
    seen = [torch.cat([a, order[start:stop]]) for a, start, stop in zip(above, query_ends, query_ends[1:])]
    key_ends = F.pad(torch.tensor([len(keys) for keys in seen]).cumsum(0), (1, 0)).int()  # (visits + 1,)
    return torch.cat(seen).to(layout.device), query_ends.to(layout.device), key_ends.to(layout.device)


class BlockAttention(torch.autograd.Function):
    """Attention by its definition, a block of queries at a time; probabilities are made again in backward.

    On a CPU a third less time than torch's own, whose backward takes six times its forward; and exact for soft caps (Gemma 2)
    and sinks (gpt-oss: a learned score per head that takes probability and gives nothing).
    """

    ROWS = 512

    @staticmethod
    def blocks(layout: torch.Tensor, window: int | None) -> list[tuple[torch.Tensor, slice, torch.Tensor]]:
        """Keys (which tokens of the row), a slice of queries, and (queries, keys) true where a query must not see the key."""
        (ends, positions), order = layout, torch.arange(layout.shape[1], device=layout.device)  # (T,) each
        branches = 1 + (ends[:-1] == order[1:]).nonzero()[:, 0]  # (visits − 1,)
        first, found = 0, []
        while first < len(ends):
            # Ends where a branch does, since each query meets all keys that any may see; but a short block is slow as well.
            long_enough, most = first + max(1, BlockAttention.ROWS // 8), min(first + BlockAttention.ROWS, len(ends))
            fit = branches[(branches >= long_enough) & (branches <= most)]
            last = int(fit[0]) if len(fit) else most
            keys, rows = order[:last][ends[:last] > first], order[first:last, None]  # (keys,), (rows, 1)
            hidden = (keys > rows) | (ends[keys] <= rows)  # (rows, keys)
            if window is not None:
                hidden |= positions[keys] <= positions[first:last, None] - window
            found.append((keys, slice(first, last), hidden))
            first = last
        return found

    @staticmethod
    def probabilities(
        query: torch.Tensor,  # (kv_heads, group · rows, D)
        key: torch.Tensor,  # (kv_heads, keys, D)
        hidden: torch.Tensor,  # (rows, keys)
        scaling: float,
        softcap: float | None,
        sinks: torch.Tensor | None,  # (heads,)
    ) -> tuple[torch.Tensor, Any]:
        """(kv_heads, group · rows, keys) in fp32, and ∂score/∂(q·k), a number unless there is a soft cap."""
        scores = (query.float() @ key.float().transpose(1, 2)).mul_(scaling)  # (kv_heads, group · rows, keys)
        slope: Any = scaling
        if softcap is not None:
            scores = torch.tanh(scores / softcap)  # (kv_heads, group · rows, keys)
            slope = scaling * (1 - scores**2)  # (kv_heads, group · rows, keys)
            scores = scores * softcap  # (kv_heads, group · rows, keys)
        mask = torch.zeros_like(hidden, dtype=torch.float32).masked_fill_(hidden, -math.inf)  # (rows, keys)
        scores = scores.view(len(key), -1, *mask.shape).add_(
            mask
        )  # (kv_heads, group, rows, keys); faster than to fill it
        if sinks is not None:
            sink = sinks.float().view(len(key), -1, 1, 1).expand(*scores.shape[:3], 1)  # (kv_heads, group, rows, 1)
            scores = torch.cat([scores, sink], -1)  # (kv_heads, group, rows, keys + 1)
        return scores.softmax(-1)[..., : hidden.shape[1]].flatten(1, 2), slope  # (kv_heads, group · rows, keys)

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx,
        query,  # (heads, T, D)
        key,  # (kv_heads, T, D)
        value,  # (kv_heads, T, D of the values)
        blocks,
        scaling,
        softcap,
        sinks,
    ):
        ctx.save_for_backward(query, key, value, sinks)
        ctx.settings = blocks, scaling, softcap
        output = query.new_empty(*query.shape[:2], value.shape[-1])  # (heads, T, D)
        for keys, rows, hidden in blocks:
            q = query[:, rows].reshape(len(key), -1, query.shape[-1])  # (kv_heads, group · rows, D)
            p, _ = BlockAttention.probabilities(q, key[:, keys], hidden, scaling, softcap, sinks)
            output[:, rows] = (p.to(value.dtype) @ value[:, keys]).view(len(query), -1, value.shape[-1])
        return output  # (heads, T, D)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        query, key, value, sinks = ctx.saved_tensors
        blocks, scaling, softcap = ctx.settings
        grad_query = torch.empty_like(query)  # (heads, T, D)
        grad_key, grad_value = torch.zeros_like(key), torch.zeros_like(value)  # (kv_heads, T, D) ×2
        for keys, rows, hidden in blocks:
            q = query[:, rows].reshape(len(key), -1, query.shape[-1])  # (kv_heads, group · rows, D)
            g = grad[:, rows].reshape(len(key), -1, value.shape[-1])  # (kv_heads, group · rows, D)
            p, slope = BlockAttention.probabilities(q, key[:, keys], hidden, scaling, softcap, sinks)
            grad_value.index_add_(1, keys, p.to(g.dtype).transpose(1, 2) @ g)
            grad_p = (g @ value[:, keys].transpose(1, 2)).float()  # (kv_heads, group · rows, keys)
            grad_p -= torch.linalg.vecdot(p, grad_p)[..., None]  # (kv_heads, group · rows, 1)
            inner = grad_p.mul_(p).mul_(slope).to(q.dtype)  # (kv_heads, group · rows, keys)
            grad_query[:, rows] = (inner @ key[:, keys]).view(len(query), -1, query.shape[-1])
            grad_key.index_add_(1, keys, inner.transpose(1, 2) @ q)
        return grad_query, grad_key, grad_value, None, None, None, None


class TokenLogprobs(torch.autograd.Function):
    """log p(target) and entropy of U tokens from hidden states, a chunk of tokens at a time: (U, V) never exists.

    The head is frozen, so all that backward needs is ∂logp/∂hidden, a (U, H) tensor that forward can make while it has the
    chunk's probabilities in hand: (onehot − p) W. Nothing is recomputed and memory does not grow with V·U.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,  # (U, H)
        weight: torch.Tensor,  # (V, H)
        bias: torch.Tensor | None,  # (V,)
        targets: torch.Tensor,  # (U,)
        temperature: float,
        multiplier: float,
        softcap: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # fp32 logits of a chunk: 128 MB on a GPU, to keep its matmul busy; 8 MB on a CPU, to stay in the cache.
        chunk = max(16, (2**25 if hidden.is_cuda else 2**21) // weight.shape[0])
        head = model_nvfp4.fp32_linear(weight, bias)
        logprobs = hidden.new_empty(len(targets), dtype=torch.float32)  # (U,)
        entropy = hidden.new_empty(len(targets), dtype=torch.float32)  # (U,)
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None  # (U, H)
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            logits = head(hidden[part])  # (chunk, V)
            slope: Any = multiplier / temperature
            if softcap is None:
                if slope != 1:  # each pass over (chunk, V) counts
                    logits *= slope
            else:
                logits = torch.tanh(logits * (multiplier / softcap))  # (chunk, V)
                slope = slope * (1 - logits**2)  # (chunk, V)
                logits *= softcap / temperature
            target = targets[part, None]  # (chunk, 1)
            probabilities = logits.softmax(-1)  # (chunk, V)
            logz = logits.amax(-1) - probabilities.amax(-1).log()  # (chunk,); on a CPU far cheaper than V exponentials
            logprobs[part] = logits.gather(1, target)[:, 0] - logz
            entropy[part] = logz - torch.linalg.vecdot(probabilities, logits)
            if gradient is not None:
                probabilities.scatter_add_(1, target, -torch.ones_like(logz)[:, None])  # (chunk, V)
                if softcap is not None:
                    probabilities, slope = probabilities * slope, 1  # (chunk, V)
                gradient[part] = (probabilities.to(weight.dtype) @ weight) * -slope  # (chunk, H)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return (grad_logprobs[:, None] * gradient.float()).to(gradient.dtype), None, None, None, None, None, None


def has_state(model: nn.Module) -> bool:
    """Does a layer carry something along the row besides attention: Mamba, linear attention, a short convolution?

    Such a layer is told nothing by `Batch.layout` (transformers drops any 4-D mask for it, `create_recurrent_attention_mask`)
    and would carry one sample into the next, so each sample gets a row of its own, padded. Told by what transformers says of the
    class, by what its file calls, or by the kinds of layer in its config (`other_layers`).
    """
    classes = {type(module) for module in model.modules()}
    calls = any(hasattr(sys.modules[c.__module__], "create_recurrent_attention_mask") for c in classes)
    stateful = any(getattr(c, "_is_stateful", False) for c in classes)
    return calls or stateful or bool(model_nvfp4.other_layers(model.config))


@torch.no_grad()
def head_scale(base: nn.Module, output: Any, **inputs: Any) -> tuple[float, float | None]:
    """(multiplier, soft cap) between the head's product with the hidden states and the logits, by the model's own `forward`.

    Configs have many names for them, and what divides in one class multiplies in the next. So the class is asked: its decoder
    returns hidden states that we know (in `output`, what it has just said), its head known numbers from 2⁻¹⁰ to 2²⁰, and its
    `forward` does to `inputs` what it does. Powers of two, because no cast to another type rounds them.
    Raises UserError when the logits are not cap · tanh(multiplier · product / cap).
    """
    head, device = base.get_output_embeddings(), output.last_hidden_state.device
    width = output.last_hidden_state.shape[-1]
    hidden = 2.0 ** (torch.arange(width, device=device) % 5).double()  # (H,)
    hidden = torch.stack([hidden, 4 * hidden])[None]  # (1, 2, H): a norm would make them alike
    product = 2.0 ** torch.arange(-10, 21, device=device).double()  # (31,)
    known, entered = dataclasses.replace(output, last_hidden_state=hidden), []

    def known_product(x: torch.Tensor) -> torch.Tensor:
        entered.append(x.double() / hidden if x.shape == hidden.shape else math.nan * hidden)  # (1, 2, H)
        return product.expand(*hidden.shape[:2], -1)  # (1, 2, 31)

    with ExitStack() as patched:
        for decoder in (base.base_model, base.get_decoder()):  # one in most classes; OPT calls the inner one
            patched.enter_context(patch.object(decoder, "forward", lambda *_, **__: known))
        patched.enter_context(patch.object(head, "forward", known_product))
        logits = base(**inputs).logits[0, 0].double()  # (31,)
    before, first, last = entered[0][0, 0, 0].item(), logits[0].item(), logits[-1].item()
    softcap = None if math.isclose(last, first * 2**30, rel_tol=1e-6) else last
    multiplier = 2**10 * (first if softcap is None else softcap * math.atanh(first / softcap))
    expected = multiplier * product  # (31,)
    if softcap is not None:
        expected = softcap * torch.tanh(expected / softcap)  # (31,)
    alike = (entered[0] / before - 1).abs().max() < 1e-6 and (logits / expected - 1).abs().max() < 1e-6
    if not alike or len(entered) > 1 or (before != 1 and head.bias is not None):
        raise UserError(
            f"{type(base).__name__} makes its logits in a way of its own, not cap · tanh(multiplier · product / cap), which is all "
            f"that TokenLogprobs in train_grpo.py does (products of 1 and 1024 with the head gave {logits[10]:g}, {logits[20]:g})."
        )
    return before * multiplier, softcap


class Policy(nn.Module):
    """The FSDP root: what gets called is the root, so that gathers and gradient reductions really happen."""

    def __init__(self, model: nn.Module, replay_experts: bool = False) -> None:
        super().__init__()
        self.model = model
        self.replays = model_nvfp4.replay_routers(model.get_base_model()) if replay_experts else {}
        self.sample_a_row = has_state(model.get_base_model())
        self.scale: tuple[float, float | None] | None = None  # of the logits, known after the first forward

    def forward(
        self,
        input_ids: torch.Tensor,  # (R, T)
        position_ids: torch.Tensor,  # (R, T)
        layout: torch.Tensor,  # (1, 1, 2, R·T)
        sources: torch.Tensor,  # (U,)
        targets: torch.Tensor,  # (U,)
        temperature: float,
        experts: torch.Tensor | None,  # (layers, R·T, k)
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs of the targets at `temperature`, and the entropy of the distributions they came from; both (U,)."""
        for layer, replay in self.replays.items():  # stays for the backward too, which may compute the block again
            replay.choice = None if experts is None else experts[layer].long()  # (R·T, k)
        base = self.model.get_base_model()
        mask = layout.view_as(layout)  # its own tensor: what attention notes on it goes with this forward's graph
        inputs = {"input_ids": input_ids, "position_ids": position_ids, "use_cache": False}
        output = base.base_model(attention_mask=mask, **inputs)
        if self.scale is None:
            self.scale = head_scale(base, output, **inputs)
        head = base.get_output_embeddings()
        weight = model_nvfp4.dense_weight(head, output.last_hidden_state.dtype)  # (V, H)
        picked = output.last_hidden_state.flatten(0, 1)[sources]  # (U, H)
        return TokenLogprobs.apply(picked, weight, head.bias, targets, temperature, *self.scale)


def token_logprobs(policy: nn.Module, batch: Batch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(S,) log-probs by the trainer and (S,) entropies. Collective: every rank must call it equally often."""
    inputs = batch.input_ids, batch.position_ids, batch.layout, batch.sources, batch.targets
    logprobs, entropy = policy(*inputs, temperature, batch.experts)  # (U,), (U,)
    return logprobs[batch.picks], entropy[batch.picks]


def replay_stats(policy: nn.Module, logprobs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of the last forward, over all routers: choices in which the trainer's agrees with the engine's, choices replayed."""
    counts = [replay.agreement for replay in policy.replays.values() if replay.choice is not None]
    alike, known = torch.stack(counts).sum(0) if counts else logprobs.new_zeros(2)  # (), ()
    return {"experts_alike": alike, "experts_known": known}


@contextmanager
def adapter_off(policy: nn.Module) -> Any:
    """Inside, the adapter counts zero times and the policy is the frozen base.

    Not peft's `disable_adapter`: it switches requires_grad off meanwhile, and FSDP, should its first forward fall into that,
    takes the adapter for frozen ever after and fails in backward.
    """
    layers = [module for module in policy.modules() if hasattr(module, "lora_A")]  # peft's: a scaling for each adapter
    experts = [module for module in policy.modules() if hasattr(module, "lora_scaling")]
    scalings, expert_scalings = [layer.scaling for layer in layers], [module.lora_scaling for module in experts]
    for layer in layers:
        layer.scaling = dict.fromkeys(layer.scaling, 0.0)
    for module in experts:
        module.lora_scaling = 0.0
    yield
    for layer, scaling in zip(layers, scalings):
        layer.scaling = scaling
    for module, scaling in zip(experts, expert_scalings):
        module.lora_scaling = scaling


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
# Trust: are trainer and engine the same policy?


def kind_of(name: str) -> str:
    """The kind of module that an adapter tensor belongs to: its name, with "experts." before it for a routed expert's, which
    the engine applies in another place than a layer of the same name."""
    module = name.split(".")
    return "experts." * ("experts" in module) + module[-3]


def parity_probe(
    engine: Any, policy: nn.Module, adapter: dict[str, torch.Tensor], prompts: list[list[int]], *,
    push: Any, max_tokens: int, max_gap: float,
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
                model_nvfp4.load_lora_state_dict(policy, tensors)
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
GAP_BINS = torch.logspace(-6, 2, 161)  # twenty to a decade: a percentile is right to 6 %


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


def gap_stats(trainer_logprobs: torch.Tensor, sampler_logprobs: torch.Tensor) -> dict[str, torch.Tensor]:
    """How far trainer and engine are apart on (S,) sampled tokens: sums of |Δlogp| and of k3 = KL(sampler ‖ trainer).

    A token that one of them has no finite number for is no gap; those of the sampler are counted, for `check_step`.
    """
    difference = (trainer_logprobs.detach() - sampler_logprobs).nan_to_num(0.0, 0.0, 0.0)  # (S,)
    gap = difference.abs()  # (S,)
    bins = torch.bucketize(gap.float().cpu(), GAP_BINS)  # (S,)
    return {
        "gap": gap.sum(),
        "gap_tokens": gap.new_tensor(len(gap)),
        "unknown": (~torch.isfinite(sampler_logprobs)).sum(),
        "gap_max": gap.max(),
        "kl": (difference.exp() - 1 - difference).sum(),
        "gap_histogram": torch.bincount(bins, minlength=len(GAP_BINS) + 1),  # (bins,): a percentile without a gather
    }


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


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints; the rest of the run folder is in report.py


def save_checkpoint(
    run_dir: Path, step: int, adapter: dict[str, torch.Tensor], optimizer_state: dict[str, torch.Tensor],
    adapter_config: dict[str, Any], keep: int,
) -> None:  # fmt: skip
    """Rank 0 writes `checkpoint/step-NNNNNN`: a PEFT folder plus optimizer state, complete or not there at all.

    Everything is written under a temporary name, flushed to disk, then renamed; older ones beyond `keep` go last. All
    tensors are full (not sharded), so any number of ranks can go on from it. Raises UserError when the disk is full.
    """
    folder = run_dir / "checkpoint"
    temporary, final = folder / ".writing", folder / f"step-{step:06d}"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        model_nvfp4.save_adapter(temporary, adapter, **adapter_config)
        save_file(optimizer_state, temporary / "optimizer.safetensors")
        (temporary / "state.json").write_text(json.dumps({"step": step}))
        for path in [*temporary.iterdir(), temporary]:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        last = report.latest_checkpoint(run_dir)
        raise UserError(
            f"could not write the checkpoint of step {step} to {folder} ({error}); free some space and start the same command "
            f"again: it goes on from {last.name if last else 'the beginning'}."
        ) from error
    shutil.rmtree(final, ignore_errors=True)
    os.rename(temporary, final)
    for old in sorted(folder.glob("step-*"))[: -(keep + 1)]:
        shutil.rmtree(old, ignore_errors=True)


def optimizer_tensors(policy: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """AdamW's moments by parameter name, full CPU tensors of their own memory. Collective: every rank must call."""
    tensors = {}
    for name, parameter in policy.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}|{key}"] = model_nvfp4.whole(value).detach().to("cpu", copy=True).contiguous()
    return tensors


def load_optimizer_tensors(policy: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Any]) -> None:
    """The inverse: each rank keeps its shard of the full tensors."""
    for name, parameter in policy.named_parameters():
        for key in [k for k in ("step", "exp_avg", "exp_avg_sq") if f"{name}|{k}" in tensors]:
            # A copy: the file stays mapped as long as one of its tensors lives, and NFS cannot delete a mapped file.
            full = tensors[f"{name}|{key}"].to(parameter.device, copy=True)
            if key != "step" and isinstance(parameter, DTensor):
                full = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
            optimizer.state[parameter][key] = full


# ---------------------------------------------------------------------------------------------------------------------
# Faults: a rank that dies, hangs or drifts away ends the job, and what happened first is what one reads last


def join_ranks(timeout: timedelta) -> None:
    """`init_process_group`, also after a restart; plain `python train_grpo.py` is a job of one rank. Collective.

    torch 2.13's agent keeps one store for all restarts, and in it the addresses of processes that are dead ("Connection
    refused"), so each attempt gets a name space of its own. Nodes count restarts apart: with several of them, start torchrun
    under TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, which makes a new store each time.
    """
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ |= alone | dict(os.environ)
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    store, rank, world = next(dist.rendezvous("env://", timeout=timeout))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = dist.PrefixStore(f"attempt-{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)


def check_ranks_agree(view: dict[str, Any]) -> None:
    """Raises UserError when ranks hold different views of the job: a folder or a file that is not the same on all nodes
    would end in a hang or, worse, in a policy trained on two things. Warns of clocks that differ. Collective.
    """
    dist.barrier()
    views: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(views, view | {"host": socket.gethostname(), "clock": time.time()})
    first = views[0]
    for rank, other in enumerate(views):
        for name in [name for name in view if other[name] != first[name]]:
            raise UserError(
                f"{name}: {first[name]} on rank 0 ({first['host']}), but {other[name]} on rank {rank} ({other['host']}); start all "
                f"nodes with the same flags, and keep model, data and --runs-dir where all nodes see the same files."
            )
    ahead, behind = max(views, key=lambda v: v["clock"]), min(views, key=lambda v: v["clock"])
    apart = ahead["clock"] - behind["clock"]
    if apart > 5 and dist.get_rank() == 0:  # torchrun's rendezvous drops a node whose heartbeat seems 15 s old
        warning = f"the clock of {ahead['host']} is {apart:.0f} s ahead of that of {behind['host']}; torchrun may take"
        print(f"warning: {warning} a node for dead, so synchronise them (chrony, ntpd).", file=sys.stderr)


def check_same_adapter(adapter: dict[str, torch.Tensor], step: int) -> int:
    """The CRC-32 of the adapter after `step` updates, the same on every rank or UserError. Collective."""
    checksum = 0
    for name in sorted(adapter):
        checksum = zlib.crc32(adapter[name].contiguous().numpy(), checksum)
    gathered = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, torch.tensor([checksum]))
    checksums = [part.item() for part in gathered]
    usual = Counter(checksums).most_common(1)[0][0]
    different = [rank for rank, other in enumerate(checksums) if other != usual]
    if different:
        raise UserError(
            f"step {step}: rank{'s' * (len(different) > 1)} {', '.join(map(str, different))} of {len(checksums)} hold another "
            f"adapter than the rest, so a device or a link computes wrongly; replace that node and start the same command again: "
            f"it goes on from the last checkpoint."
        )
    return checksum


# ---------------------------------------------------------------------------------------------------------------------
# Flags and checks


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="GRPO with LoRA on a frozen NVFP4 checkpoint. Run under torchrun, one rank per GPU (or on a CPU).",
        formatter_class=lambda prog: argparse.ArgumentDefaultsHelpFormatter(prog, max_help_position=32, width=110),
    )
    # fmt: off
    add = parser.add_argument_group("model").add_argument
    add("--model", required=True, help="folder of an NVFP4 checkpoint; `python model_nvfp4.py quantize` makes one")
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
    add("--prompt-template", default="{problem}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}.",
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
    add("--format-bonus", type=float, default=0.0, help="paid for any readable box; invites boxing guesses")
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
        (args.lora_experts and not model_nvfp4.has_experts(args.model),
         f"--lora-experts: {args.model} has no routed experts in NVFP4; leave the flag out."),
        (args.replay_experts and not model_nvfp4.has_experts(args.model),
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


def check_references(problems: list[Problem], reward: str | None) -> None:
    """An answer that the checker cannot read could never be earned: a mistake in the data, told before training."""
    # One's own reward function reads its references itself.
    rows = [] if reward else grader.unreadable_references([problem.answer for problem in problems])
    if rows:
        first = problems[rows[0]]
        raise UserError(
            f"{len(rows)} reference answers cannot be read, the first of problem {first.id}: {first.answer[:60]!r}; drop these "
            f"rows, or grade them yourself with --reward path.py:function."
        )


def longest_context(model_dir: str, prompt_ids: dict[str, list[int]], room: dict[str, int]) -> int:
    """Tokens of the longest prompt with the `room` for its completion, both by problem text; UserError if the model has fewer."""
    from transformers import AutoConfig

    longest = max(room, key=lambda text: len(prompt_ids[text]) + room[text])
    context = len(prompt_ids[longest]) + room[longest]
    model_context = AutoConfig.from_pretrained(model_dir).get_text_config().max_position_embeddings
    if context > model_context:
        raise UserError(
            f"the longest prompt has {len(prompt_ids[longest])} tokens ({longest[:60]!r}…) and its completion may have "
            f"{room[longest]} (--completion-tokens, --eval-tokens), together above the model's context of {model_context}; "
            f"drop that problem or ask for less."
        )
    return context


def read_data(args: argparse.Namespace) -> tuple[list[Problem], list[Problem]]:
    """(training, held-out) problems, disjoint. Raises UserError naming file, line or key."""
    keys = {"prompt_key": args.prompt_key, "answer_key": args.answer_key}
    num_heldout = 0 if args.eval_benchmark else args.heldout
    if args.dataset == "arithmetic":
        problems, heldout = arithmetic_problems(args.seed, num_heldout=num_heldout)
    else:
        problems = read_problems(args.dataset, **keys, tokens_key=args.tokens_key)
        random.Random(f"split {args.seed}").shuffle(problems)
        heldout = problems[:num_heldout]
    if args.eval_benchmark:
        keys = {} if args.eval_benchmark in BENCHMARKS else keys  # a file of the user's is written as the others
        heldout = read_problems(args.eval_benchmark, **keys, data_dir=args.data_dir)
    texts = {"".join(problem.problem.split()) for problem in heldout}  # copies differ in their spaces
    train = [problem for problem in problems if "".join(problem.problem.split()) not in texts]
    if not train:
        judge = f"--eval-benchmark {args.eval_benchmark}" if args.eval_benchmark else f"--heldout {args.heldout}"
        raise UserError(f"--dataset {args.dataset} has {len(problems)} problems and {judge} leaves none to train on.")
    return train, heldout


def register_attention() -> None:
    """Make `grouped_attention` an attention implementation of transformers, for every model that uses its interface."""
    from transformers import AttentionInterface

    AttentionInterface.register("grouped", grouped_attention)


def learning_rate(peak: float, step: int, steps: int, warmup: int, schedule: str) -> float:
    """Linear warm-up over `warmup` steps, then constant, or a half cosine to a tenth of the peak."""
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule == "constant":
        return peak
    return peak * (0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def averaged(
    average: dict[str, torch.Tensor], adapter: dict[str, torch.Tensor], updates: int, window: int
) -> dict[str, torch.Tensor]:
    """The mean of the adapters of all `updates` up to `window`; from then on the newest counts 1/window and older ones fade.

    What single steps on a few noisy groups do to the policy cancels, while all of them have learned the same (averaging of
    iterates, Polyak and Juditsky 1992). The rollouts are always the last adapter's.
    """
    if window == 1:
        return adapter
    return {name: average[name].lerp(tensor, 1 / min(updates, window)) for name, tensor in adapter.items()}


def loss_denominator(loss: str, trained: int, sampled: int, num_samples: int, completion_tokens: int) -> float:
    """What every row's sum is divided by, the same on all ranks: tokens that are `trained`, tokens of all that was `sampled` and
    not masked (a group without spread has a loss of zero, which counts), or Dr. GRPO's constant N · longest."""
    counts = {"trained": trained, "sampled": sampled, "constant": num_samples * completion_tokens}
    return float(max(1, counts[LOSSES[loss][1]]))


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


def step_metrics(
    step: int,
    samples: list[Sample],
    rewards: torch.Tensor,  # (groups, G), with all rounds of dynamic sampling
    values: torch.Tensor,  # (groups, G), before shaping
    num_prompts: int,  # P
    totals: dict[str, torch.Tensor],
    norms: list[float],
) -> dict[str, Any]:
    """Most of a line of metrics.jsonl. Means over tokens are over the trained tokens of all ranks; log-probs are in nats.

    Rewards and shares of groups are of the first P groups: those asked because others had no spread are no fair sample.
    """
    asked, (rewards, values) = len(rewards), (rewards[:num_prompts], values[:num_prompts])  # (P, G), (P, G)
    mixed, best = has_spread(values)[:, 0], values.amax(1)  # (P,), (P,)
    lengths = [len(s.completion_ids) for s in samples]
    t = {name: total.item() for name, total in totals.items() if name != "gap_histogram"}
    means, gaps = ("reference_kl", "entropy", "clip_low", "clip_high"), ("gap", "unknown", "kl")
    # fmt: off
    return {
        "step": step, "reward": rewards.mean().item(), "reward_std": rewards.std().item(),
        "groups_mixed": mixed.float().mean().item(),
        "groups_all_right": (~mixed & (best > 0)).float().mean().item(),
        "groups_all_wrong": (~mixed & (best <= 0)).float().mean().item(),
        "groups_asked": asked,
        "completion_tokens": float(np.mean(lengths)), "completion_tokens_max": max(lengths),
        "truncated": float(np.mean([s.finish_reason == "length" for s in samples])),
        "sampled_tokens": sum(lengths), "trained_tokens": int(t["tokens"]), "loss": t["loss"] / len(norms),
        **{name: t[name] / max(t["gap_tokens"], 1) for name in gaps},
        **{name: t[name] / max(t["tokens"], 1) for name in means},
        "gap_p99": percentile(totals["gap_histogram"], 0.99), "gap_max": t["gap_max"], "ratio_max": t["ratio_max"],
        **({"experts_alike": t["experts_alike"] / t["experts_known"]} if t["experts_known"] else {}),
        "grad_norm": float(np.mean(norms)), "skipped": sum(not math.isfinite(norm) for norm in norms),
    }
    # fmt: on


# ---------------------------------------------------------------------------------------------------------------------
# The run


def main() -> None:
    args = parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    say = print if rank == 0 else lambda *_, **__: None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    # --- Checks: everything a user can get wrong, before anything heavy is loaded ------------------------------------
    check_flags(args, world)
    rollout.check_architecture(args.model)
    summary = model_nvfp4.check_checkpoint(args.model)
    model_nvfp4.check_lora_targets(args.model, args.lora_targets)
    if device.type == "cuda":
        rollout.check_sleep(args.sleep, summary["weight_bytes"], args.tp)
    run_dir, checkpoint = report.open_run(args)
    start_step = json.loads((checkpoint / "state.json").read_text())["step"] if checkpoint else 0
    if start_step > args.steps:
        raise UserError(
            f"{checkpoint} is after step {start_step}, more than --steps {args.steps}; --steps counts from the start."
        )
    train, heldout = read_data(args)
    check_references([*train, *heldout], args.reward)
    own_reward = load_own_reward(args.reward) if args.reward else None
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    conversations = {p.problem: conversation(p, args.prompt_template) for p in [*train, *heldout]}
    ids = rollout.encode_prompts(tokenizer, list(conversations.values()), args.chat_template_kwargs)
    prompt_ids = dict(zip(conversations, ids))  # by the problem's text
    eval_tokens, judged_on = args.eval_tokens or args.completion_tokens, args.eval_benchmark or "held-out"
    room = {p.problem: min(p.max_tokens or math.inf, args.completion_tokens) for p in train}  # for a completion
    room |= {p.problem: eval_tokens for p in heldout}
    context = longest_context(args.model, prompt_ids, room)
    least = min(room[p.problem] for p in train)
    if args.overlong_buffer > least:
        raise UserError(
            f"--overlong-buffer {args.overlong_buffer} is more than the {least} tokens that a completion may have."
        )
    say(
        f"{args.model} on {args.dataset}: {len(train)} training and {len(heldout)} {judged_on} problems, context {context}; "
        f"{args.steps} steps of {args.prompts} × {args.group_size} samples on {world} rank{'s' * (world > 1)}; "
        f"run {run_dir}" + (f", going on after step {start_step}" if checkpoint else "")
    )
    if args.dry_run:
        return

    # --- Ranks and run folder ----------------------------------------------------------------------------------------
    join_ranks(timedelta(minutes=args.timeout))
    report.dump_stacks(run_dir, rank)
    lock = report.lock_run(run_dir, patience=10) if rank == 0 else None  # until this process ends, however it ends
    view = {f"--{name}": value for name, value in vars(args).items() if name not in ("model", "dataset", "runs_dir")}
    contents = json.dumps([(p.problem, p.answer, prompt_ids[p.problem], room[p.problem]) for p in [*train, *heldout]])
    view |= {"the step to go on from": start_step, "the checksum of all problems": zlib.crc32(contents.encode())}
    start = (checkpoint / "adapter_model.safetensors").read_bytes() if checkpoint else b""
    check_ranks_agree(view | {"the checksum of the checkpoint": zlib.crc32(start)})

    # --- Engine, policy, optimizer -----------------------------------------------------------------------------------
    engine = rollout.build_engine(
        args.model, max_model_len=context, max_lora_rank=args.lora_rank, max_num_seqs=min(1024, args.prompts * args.group_size),
        seed=args.seed, tp=args.tp, sleep=args.sleep, gpu_memory_utilization=args.gpu_memory_utilization,
        w4a4=args.engine_w4a4, return_experts=args.replay_experts, engine_args=args.engine_args,
    )  # fmt: skip
    say(f"engine: {rollout.kernels(engine)}")
    register_attention()
    lora = {"lora_rank": args.lora_rank, "lora_alpha": args.lora_alpha}
    targets = {"lora_targets": args.lora_targets, "lora_experts": args.lora_experts}
    dtype = model_nvfp4.compute_dtype()
    model = model_nvfp4.build_model(args.model, **lora, **targets, dtype=dtype, attn_implementation="grouped")
    policy = Policy(model, args.replay_experts)
    deal, segment_tokens = balance, args.max_tokens
    if policy.sample_a_row:
        deal, segment_tokens = balance_padded, 0
        say("layers of this model carry a state along the row: each sample gets a padded row, and no prompt is shared")
    model_nvfp4.shard(policy, dtype=dtype, activation_checkpointing=args.activation_checkpointing)
    model_nvfp4.load_weights(policy, args.model, seed=args.seed)
    policy.eval()  # no dropout: the ratio compares two forwards of the same network
    model_nvfp4.checkpoint_in_eval(policy)
    optimizer = build_optimizer(policy, args.lr)
    if checkpoint:
        model_nvfp4.load_lora_state_dict(policy, load_file(checkpoint / "adapter_model.safetensors"))
        moments = load_file(checkpoint / "optimizer.safetensors")
        load_optimizer_tensors(policy, optimizer, moments)
    adapter = average = model_nvfp4.lora_state_dict(policy)  # what rolls out; what is judged and kept
    if checkpoint:
        if args.average > 1:
            average = {name: moments.get(f"average|{name}", tensor).clone() for name, tensor in adapter.items()}
        del moments  # or its file, which the next checkpoint replaces, would stay mapped
    adapter_config = lora | {"base_model": args.model}
    metrics, evaluations = [], []  # of rank 0, which writes
    if rank == 0:
        metrics, evaluations = report.open_logs(run_dir, start_step, vars(args), rollout.versions(), world)
    dist.barrier()

    # --- What the loop calls with settings of its own ----------------------------------------------------------------
    writer, written, unwritten = ThreadPoolExecutor(1), Future(), []
    written.set_result(None)
    flags, P, G = vars(args), args.prompts, args.group_size
    loss_settings = {name: flags[name] for name in ("loss", "clip_low", "clip_high", "dual_clip", "kl_coef")}
    shaping = {name: flags[name] for name in ("truncated", "overlong_buffer", "format_bonus")}
    extra_forwards = {name: flags[name] for name in ("old_logprobs", "correction")} | {"reference": args.kl_coef > 0}
    sampling = {"temperature": args.temperature, "stop": args.stop, "use_adapter": True}
    temperature = args.temperature if args.eval_temperature is None else args.eval_temperature
    judging = {"k": args.heldout_samples, "temperature": temperature, "top_p": args.eval_top_p, "stop": args.stop}
    judging |= {"max_tokens": eval_tokens, "seed": args.seed, "template": args.prompt_template}
    judging |= {"chat_template_kwargs": args.chat_template_kwargs, "use_adapter": True, "own_reward": own_reward}

    def push(tensors: dict[str, torch.Tensor], version: int = -1) -> None:
        nonlocal written
        push_adapter(engine, tensors, {"r": args.lora_rank, "lora_alpha": args.lora_alpha}, version)
        # Only now: beside the writing of a checkpoint, which is Python's time as well, a push takes three times as long.
        while unwritten:
            written = writer.submit(save_checkpoint, *unwritten.pop())

    def judge(step: int) -> None:
        """Held-out accuracy of the policy after `step` updates; once per step, also when a run goes on."""
        done = [step in [e["step"] for e in evaluations]]  # rank 0 knows
        dist.broadcast_object_list(done)
        if not heldout or done[0]:
            return
        with awake(engine):
            push(average, step)
            result = evaluate(engine, tokenizer, heldout, **judging)
        if rank == 0:
            evaluations.append({"step": step, **result})
            report.append_jsonl(run_dir / "evaluations.jsonl", evaluations[-1:])
            paid = f"reward {result['reward']:.3f}{error_of(result, 'reward')}, " if own_reward else ""
            bar.write(f"step {step:4d}  {judged_on} {paid}accuracy {result['avg']:.3f}{error_of(result, 'avg')}")

    bar = tqdm(total=args.steps, initial=start_step, desc="GRPO", disable=rank != 0, dynamic_ncols=True)
    if not args.no_probe:
        probes = [prompt_ids[p.problem] for p in next_problems(train, start_step, 4, args.seed)]
        limits = {"max_tokens": min(16, args.completion_tokens), "max_gap": args.max_logprob_gap}
        probe = parity_probe(engine, policy, adapter, probes, push=push, **limits)
        worst = max(probe, key=lambda kind: probe[kind][0])
        apart = min(without / max(used, 1e-9) for used, without in probe.values())
        say(
            f"parity probe: the engine uses the adapter on {', '.join(probe)}; |Δlogp| at most {probe[worst][0]:.3f} ({worst}), "
            f"without the adapter at least {apart:.0f} times that"
        )
    if start_step == 0 or (args.eval_every and start_step % args.eval_every == 0 and start_step < args.steps):
        judge(start_step)  # also when a run ended between the checkpoint of a step and its evaluation
    bad_steps, saving = 0, {}

    # --- GRPO --------------------------------------------------------------------------------------------------------
    for step in range(start_step, args.steps):
        # A collective that is stuck raises after --timeout; this is for an engine that is stuck by itself.
        faulthandler.dump_traceback_later(2 * 60 * args.timeout, exit=True)
        seconds, saving = saving, {}  # the time of log and checkpoint counts with the next line of the log
        problems, samples, verdicts, values, missing, drawn = [], [], [], [], P, Counter()
        with report.timed(seconds, "generate"), awake(engine):  # vLLM owns the GPU inside this block
            with report.timed(seconds, "push"):
                push(adapter, step)  # the policy that we are about to improve
            for refill in range(1 + args.refill):  # once; --refill asks again in place of groups without spread
                asked = next_problems(train, step, missing, args.seed, refill)  # the same on every rank
                draws = number_samples(asked, G, drawn)
                seeds = [sample_seed(args.seed, step, p.id, member) for p, member in draws]
                most = [room[p.problem] for p, _ in draws]  # tokens of each completion
                said = generate(engine, [prompt_ids[p.problem] for p, _ in draws], seeds, max_tokens=most, **sampling)
                with report.timed(seconds, "score"):
                    judged, paid = score_together(said, [p.answer for p, _ in draws], own_reward)
                problems, samples = problems + asked, samples + said  # P groups, and those that --refill asks for
                verdicts, values = verdicts + judged, values + paid
                unshaped = torch.tensor(values).view(-1, G)  # (groups, G)
                missing = P - int(has_spread(unshaped).sum())
                if not missing:
                    break
        limits = [room[p.problem] for p in problems for _ in range(G)]  # N, tokens
        shaped, masked = shape_rewards(samples, values, limits=limits, **shaping)  # N, N
        rewards = torch.tensor(shaped).view(-1, G)  # (groups, G)
        with report.timed(seconds, "train"):
            advantages = group_advantages(rewards, args.advantage_scale)  # (groups, G)
            if args.refill:  # replaced groups stay out, also where the shaping has given them a spread
                masked = [m or not live for m, live in zip(masked, has_spread(unshaped).expand(-1, G).flatten())]
            segments = make_segments(samples, advantages, segment_tokens, masked, keep_all=args.kl_coef > 0)
            # Counted over all ranks: one denominator, however rows are dealt out.
            trained = sum(len(ids) for s in segments for ids, _, _ in s.completions)
            sampled = sum(len(s.completion_ids) for s, m in zip(samples, masked) if not m)
            denominator = loss_denominator(args.loss, trained, sampled, P * G, args.completion_tokens)
            denominator /= args.minibatches
            chunks = [segments[part :: args.minibatches] for part in range(args.minibatches)]
            dealt = [deal(chunk, world, args.max_tokens)[rank] for chunk in chunks]
            batches = [[pack(row, policy.sample_a_row).to(device) for row in rows] for rows in dealt]
            annotate(policy, [batch for rows in batches for batch in rows], args.temperature, **extra_forwards)
            lr = learning_rate(args.lr, step, args.steps, args.warmup, args.schedule)
            for group in optimizer.param_groups:
                group["lr"] = lr
            stats, norms = [], []
            for part, (chunk, rows) in enumerate(zip(chunks, batches)):  # an optimizer step each
                loss_sum = torch.zeros((), device=device)  # ()
                for batch in rows:
                    logprobs, entropy = token_logprobs(policy, batch, args.temperature)  # (S,), (S,)
                    loss, sums = policy_loss(
                        logprobs, batch.old_logprobs, batch.advantages, batch.samples, denominator,
                        weights=batch.corrections, reference_logprobs=batch.reference_logprobs, **loss_settings,
                    )  # fmt: skip
                    (loss * batch.weight * world).backward()  # FSDP averages over ranks; the loss wants the sum
                    gaps = gap_stats(logprobs, batch.sampler_logprobs)  # counts before the first update only
                    sums |= replay_stats(policy, logprobs) | {name: value * (part == 0) for name, value in gaps.items()}
                    sums |= {"entropy": entropy.sum(), "loss": loss.detach()}
                    stats.append({name: value * batch.weight for name, value in sums.items()})
                    loss_sum += stats[-1]["loss"]
                norms.append(optimizer_step(optimizer, loss_sum, len(chunk), args.max_grad_norm))
            adapter = model_nvfp4.lora_state_dict(policy)
            average = averaged(average, adapter, step + 1, args.average)
            checksum = check_same_adapter(adapter, step + 1)
            totals = reduce_stats(stats)
        faulthandler.cancel_dump_traceback_later()

        # --- Log, checkpoint, evaluation -----------------------------------------------------------------------------
        done = step + 1
        m = step_metrics(done, samples, rewards, unshaped, P, totals, norms)
        m |= {"lr": lr, "reasons": dict(Counter(v.reason for v in verdicts)), "seconds": seconds}
        m |= {"memory_gib": report.memory_gib(), "adapter_crc": checksum, "engine": engine.stats}
        if rank == 0:
            with report.timed(saving, "log"):
                metrics.append(m)
                report.append_jsonl(run_dir / "metrics.jsonl", [m])
                records = report.sample_records(done, problems, samples, verdicts, shaped)
                report.append_jsonl(run_dir / "samples.jsonl", records)
                report.report_step(bar, m, args.steps, samples[0] if step % args.print_every == 0 else None)
        bad_steps = bad_steps + 1 if m["skipped"] else 0
        check_step(m, args.max_logprob_gap, bad_steps, run_dir / "samples.jsonl")
        if done % args.save_every == 0 or done == args.steps:
            with report.timed(saving, "save"):
                moments = optimizer_tensors(policy, optimizer)
                moments |= {f"average|{name}": tensor for name, tensor in average.items() if args.average > 1}
                if rank == 0:
                    written.result()  # the one before, which has had a step's time; or what went wrong with it
                    unwritten.append((run_dir, done, adapter, moments, adapter_config, args.keep))  # by the next push
        if args.eval_every and done % args.eval_every == 0 and done < args.steps:
            judge(done)
            if rank == 0:
                report.plot_curves({run_dir.name: (metrics, evaluations)}, run_dir / "curves.png")

    # --- After -------------------------------------------------------------------------------------------------------
    judge(args.steps)
    written.result()
    for last in unwritten:  # nothing is judged, so no push came
        save_checkpoint(*last)
    if rank == 0:
        bar.close()
        model_nvfp4.save_adapter(run_dir / "adapter", average, **adapter_config)
        if metrics:
            report.plot_curves({run_dir.name: (metrics, evaluations)}, run_dir / "curves.png")
        if heldout:
            print(report.outcome(evaluations))
        print(f"adapter in {run_dir / 'adapter'}, curves in {run_dir / 'curves.png'}")
        lock.close()
    rollout.shutdown(engine)


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        code = report.report_failure(error)
        sys.stdout.flush()
        os._exit(code)  # not sys.exit: what NCCL and vLLM do on the way out waits for ranks that are gone
