"""attention.py on its own. `pytest tests/test_attention.py`."""

import math
import random

import pytest
import torch
import torch.nn.functional as F

from attention import BlockAttention, grouped_attention, visits
from tree import Segment, pack


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
    monkeypatch.setattr(BlockAttention, "ROWS", rows)
    torch.manual_seed(0)
    layout, visible = tree(shared)
    shapes = [(6, 8), (2, 8), (2, value_size)]
    exact = [torch.randn(1, h, layout.shape[-1], d, dtype=torch.float64, requires_grad=True) for h, d in shapes]
    ours = [tensor.detach().float().requires_grad_() for tensor in exact]
    sinks = torch.randn(6) if with_sinks else None
    expected = attention_by_definition(*exact, visible, layout[0, 0, 1], 0.3, window, softcap, sinks)
    for other_window in (99, window):  # layers of one model differ in it, and get the same layout
        output, _ = grouped_attention(
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
    seen, query_ends, key_ends = visits(layout[0, 0])
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
