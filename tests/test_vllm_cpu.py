"""vllm_cpu.py on its own. `pytest tests/test_vllm_cpu.py`."""

import pytest
import torch

from vllm_cpu import JOINED_ADAPTER, add_lora_linear, prepare_cpu, sample_tokens


@pytest.mark.parametrize("indices", [[0, 0, 0, 0, 0], [0, -1, 0, -1, -1]])
def test_lora_on_a_cpu_is_x_a_b(indices):
    """Three slices, as in q/k/v: each has its own A and B, and a token without an adapter (−1) gets nothing."""
    pytest.importorskip("vllm")
    from vllm.lora.layers import LoRAMapping
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    prepare_cpu()
    generator = torch.Generator().manual_seed(0)
    tokens, k, r, slices = len(indices), 64, 16, (64, 32, 32)

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(torch.bfloat16)

    x, y = random(tokens, k), random(tokens, sum(slices))
    a = tuple(random(1, 1, r, k) for _ in slices)
    b = tuple(random(1, 1, n, r) for n in slices)
    delta = torch.cat([x.float() @ ai[0, 0].float().T @ bi[0, 0].float().T for ai, bi in zip(a, b)], 1)  # (tokens, N)
    expected = y.float() + 0.5 * delta * (torch.tensor(indices) >= 0)[:, None]
    wrapper = PunicaWrapperCPU(max_num_batched_tokens=tokens, max_batches=tokens, device="cpu")
    ids = tuple(index + 1 for index in indices)  # vLLM's ids of adapters: 0 is none
    wrapper.update_metadata(LoRAMapping(ids, ids), [1], 1, 100)
    JOINED_ADAPTER.clear()
    add_lora_linear(wrapper, y, x, a, b, 0.5, slices)
    # bf16: the hidden (tokens, r) and the sum are rounded, each to 2^-8 of values up to about a hundred
    torch.testing.assert_close(y.float(), expected, atol=0.6, rtol=2e-2)
    untouched = torch.tensor(indices) < 0
    assert (y[untouched].float() == expected[untouched]).all()
    before = y.clone()
    wrapper.update_metadata(LoRAMapping((0,) * tokens, (0,) * tokens), [1], 1, 100)
    add_lora_linear(wrapper, y, x, a, b, 0.5, slices)
    assert (y == before).all()


@pytest.mark.parametrize("vocabulary", [1000, 1024])
def test_tokens_come_with_their_probability(vocabulary):
    """Against the softmax: frequencies by χ², each draw by the distribution function in fp64, and nothing that top-k cut off."""
    pytest.importorskip("vllm")
    draw = torch.Generator().manual_seed(0)
    logits = (2 * torch.randn(vocabulary, generator=draw)).expand(20000, -1)  # (N, V)
    generators = {row: torch.Generator().manual_seed(row) for row in range(20000)}
    tokens, logprobs = sample_tokens(None, logits.clone(), generators, None, None)
    expected = logits[0].double().softmax(-1)  # (V,)
    torch.testing.assert_close(logprobs[7].double(), expected.log(), atol=1e-5, rtol=0)
    counts = torch.bincount(tokens, minlength=vocabulary)  # (V,)
    chi2 = ((counts - 20000 * expected) ** 2 / (20000 * expected)).sum()
    assert abs(chi2 - vocabulary) < 5 * (2 * vocabulary) ** 0.5
    drawn = [torch.rand(1, generator=torch.Generator().manual_seed(row), dtype=torch.float64) for row in range(500)]
    slow = torch.searchsorted(expected.cumsum(0), torch.cat(drawn), right=True)  # (500,)
    assert (tokens[:500] == slow).sum() >= 499  # a number within 1e-7 of a step may fall on its other side
    top = torch.full((20000,), 3)  # (N,)
    tokens, logprobs = sample_tokens(None, logits.clone(), generators, top, None)
    assert set(tokens.tolist()) == set(expected.topk(3).indices.tolist())
    assert logprobs.isfinite().sum(-1).tolist() == [3] * 20000
    broken, logprobs = sample_tokens(None, torch.full((2, vocabulary), torch.nan), {}, None, None)
    assert (broken < vocabulary).all()  # a token that exists, with a log-prob at which the trainer stops
    assert logprobs.isnan().all()
