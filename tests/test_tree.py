"""tree.py on its own. `pytest tests/test_tree.py`."""

import numpy as np
import pytest
import torch

from attention import visits
from rollout import Sample
from tree import Segment, balance, balance_padded, make_segments, pack


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
    seen, query_ends, key_ends = visits(batch.layout[0, 0])
    assert (seen.tolist(), query_ends.tolist(), key_ends.tolist()) == ([*range(8)], [0, 4, 8], [0, 4, 8])
