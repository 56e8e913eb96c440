"""Samples to micro-batches: a row is a tree of tokens, in which what two samples begin with alike is there once.

    segments = make_segments(samples, advantages, max_tokens=8192)     # a prompt with its completions, at most so long
    rows = balance(segments, world, max_tokens=8192)[rank]             # this rank's rows, equally many on every rank
    batches = [pack(row) for row in rows]                              # tensors; ragged lists end here

No model is in this file: attention.py reads `Batch.layout`, policy.py turns a batch into log-probs.

Axis legend: P prompts of a step · G samples per prompt · N = P·G · R rows of T tokens · S trained tokens · U of them that
differ (in token or history).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field

import numpy as np
import torch


@dataclass
class Sample:
    """One completion with what training needs: token ids and log-probabilities come from the engine, never re-encoded."""

    prompt_ids: list[int]
    completion_ids: list[int]  # T; the end-of-sequence token is inside when the model stopped by itself
    logprobs: list[float]  # T; of the sampled tokens, in nats, at the sampling temperature
    text: str
    finish_reason: str  # "stop" or "length"
    seed: int
    experts: np.ndarray | None = None  # (prompt + T - 1, layers, k) the routers' choices, -1 where the engine says none


@dataclass
class Segment:
    """A prompt and some of its completions, which share it. All token lists are the engine's own ids."""

    prompt_ids: list[int]
    completions: list[tuple[list[int], list[float], float]] = field(default_factory=list)  # ids, log-probs, advantage
    experts: list[np.ndarray] = field(default_factory=list)  # of each completion with its prompt, if they are replayed

    @property
    def num_trained(self) -> int:
        """Tokens of all completions."""
        return sum(len(ids) for ids, _, _ in self.completions)

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


def make_batches(
    segments: list[Segment], rank: int, world: int, max_tokens: int, sample_a_row: bool = False
) -> list[Batch]:
    """This rank's micro-batches, at least one, and as many as every other rank has; on the CPU."""
    rows = (balance_padded if sample_a_row else balance)(segments, world, max_tokens)[rank]
    return [pack(row, sample_a_row) for row in rows]


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

    A prompt of tokens 1 2 with the completions 3 4 and 3 5, of which the last tokens are no input. They begin alike, so token 3
    is there once, and so is the pair (after token 2 comes 3); what differs is what comes after it.

    >>> batch = pack([Segment([1, 2], [([3, 4], [-1.0, -2.0], 0.5), ([3, 5], [-1.0, -3.0], -0.5)])])
    >>> batch.input_ids.tolist(), batch.position_ids.tolist()
    ([[1, 2, 3]], [[0, 1, 2]])
    >>> list(zip(batch.sources.tolist(), batch.targets.tolist())), batch.picks.tolist()
    ([(1, 3), (2, 4), (2, 5)], [0, 1, 0, 2])
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
