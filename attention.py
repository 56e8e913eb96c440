"""Attention of a micro-batch whose rows are trees of tokens (tree.py): a token sees what lies on its own branch.

    register_attention()                                                # once, before the model is built
    model = build_model(folder, …, attn_implementation="grouped")       # any model of transformers' attention interface

`BlockAttention` is the definition, block by block; on a GPU flash attention takes over where it can (`grouped_attention`).
A row of separate prompts, of samples that share one, and of a single sample are all the same case.

Axis legend: R rows of T tokens · D width of a head · K visible keys.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def register_attention() -> None:
    """Make `grouped_attention` an attention implementation of transformers, for every model that uses its interface."""
    from transformers import AttentionInterface

    AttentionInterface.register("grouped", grouped_attention)


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

    A prompt of one token (0) with two branches of two (1 2 and 3 4): the first visit is 0 1 2, the second 3 4, which sees 0 too.

    >>> seen, query_ends, key_ends = visits(torch.tensor([[5, 3, 3, 5, 5], [0, 1, 2, 1, 2]]))
    >>> seen.tolist(), query_ends.tolist(), key_ends.tolist()
    ([0, 1, 2, 0, 3, 4], [0, 3, 5], [0, 3, 6])
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
