"""rollout.py without a GPU: how requests are dealt out, LoRA on a CPU against its definition, and the order of sleep calls.
The engine itself runs in tests/test_main_job.py. `pytest tests/test_rollout.py`."""

from types import SimpleNamespace

import pytest
import torch

import rollout


def test_samples_of_a_prompt_stay_on_one_replica():
    prompts = [[1, 2, 3]] * 4 + [[1]] * 4 + [[5, 6]] * 4 + [[7, 8]] * 4
    shares = rollout.assign_to_replicas(prompts, 2)
    assert sorted(index for share in shares for index in share) == list(range(16))
    assert [len(share) for share in shares] == [8, 8]
    for share in shares:
        assert len({tuple(prompts[index]) for index in share}) == 2
    assert shares[0][:4] == [0, 1, 2, 3]  # the longest prompt first


def test_fewer_prompts_than_replicas_are_dealt_out_by_sample():
    shares = rollout.assign_to_replicas([[1, 2]] * 6, 4)
    assert sorted(len(share) for share in shares) == [1, 1, 2, 2]
    assert sorted(index for share in shares for index in share) == list(range(6))


@pytest.mark.parametrize("indices", [[0, 0, 0, 0, 0], [0, -1, 0, -1, -1]])
def test_lora_on_a_cpu_is_x_a_b(indices):
    """Three slices, as in q/k/v: each has its own A and B, and a token without an adapter (−1) gets nothing."""
    pytest.importorskip("vllm")
    rollout.prepare_cpu()
    generator = torch.Generator().manual_seed(0)
    tokens, k, r, slices = len(indices), 64, 16, (64, 32, 32)

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(torch.bfloat16)

    x, y = random(tokens, k), random(tokens, sum(slices))
    a = tuple(random(1, 1, r, k) for _ in slices)
    b = tuple(random(1, 1, n, r) for n in slices)
    delta = torch.cat([x.float() @ ai[0, 0].float().T @ bi[0, 0].float().T for ai, bi in zip(a, b)], 1)  # (tokens, N)
    expected = y.float() + 0.5 * delta * (torch.tensor(indices) >= 0)[:, None]
    wrapper = SimpleNamespace(no_lora=False, token_lora_indices=torch.tensor(indices))
    rollout.JOINED_ADAPTER.clear()
    rollout.add_lora_linear(wrapper, y, x, a, b, 0.5, slices)
    # bf16: the hidden (tokens, r) and the sum are rounded, each to 2^-8 of values up to about a hundred
    torch.testing.assert_close(y.float(), expected, atol=0.6, rtol=2e-2)
    untouched = torch.tensor(indices) < 0
    assert (y[untouched].float() == expected[untouched]).all()
    before = y.clone()
    rollout.add_lora_linear(SimpleNamespace(no_lora=True), y, x, a, b, 0.5, slices)
    assert (y == before).all()


class RecordingEngine:
    """Stands for vllm.LLM where sleep mode needs CUDA: it notes what is called, in order."""

    def __init__(self, sleep_mode):
        self.calls, self.sleep_mode, self.kv_awake, self.policy_version = [], sleep_mode, False, None
        self.llm_engine = SimpleNamespace(add_lora=self.add_lora, list_loras=lambda: {1})

    def add_lora(self, request):
        assert request.load_inplace
        self.calls.append(("add_lora", request.lora_path))
        return True

    def reset_prefix_cache(self):
        self.calls.append(("reset_prefix_cache",))
        return True

    def wake_up(self, tags):
        self.calls.append(("wake_up", *tags))

    def sleep(self, level):
        self.calls.append(("sleep", level))

    def collective_rpc(self, method, args):
        self.calls.append((method, *args))


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    ("mode", "wake", "sleep"),
    [
        ("level1", [("wake_up", "weights")], [("reset_prefix_cache",), ("sleep", 1)]),
        ("kv", [], [("reset_prefix_cache",), ("discard", ("kv_cache",))]),
    ],
)
def test_the_gpu_changes_hands_in_the_order_that_works(mode, wake, sleep, fails):
    """Weights, adapter, cache reset, KV cache; back to sleep also when sampling fails (verl 7434: an adapter pushed into a
    sleeping engine is an illegal address; level 2 is never used, vLLM 57163)."""
    pytest.importorskip("vllm")
    engine = RecordingEngine(mode)
    try:
        with rollout.awake(engine):
            rollout.push_adapter(engine, "/adapter", version=3)
            rollout.wake_kv_cache(engine)
            rollout.wake_kv_cache(engine)  # awake already: nothing happens
            if fails:
                raise RuntimeError("out of memory while sampling")
    except RuntimeError:
        assert fails
    push = [("add_lora", "/adapter"), ("reset_prefix_cache",)]
    assert engine.calls == [*wake, *push, ("wake_up", "kv_cache"), *sleep]
    assert engine.policy_version == 3
    assert not engine.policy.load_inplace  # a request that carried it would reload the adapter at every scheduler step
    assert not engine.kv_awake


def test_without_sleep_mode_the_block_only_indents():
    engine = RecordingEngine("off")
    with rollout.awake(engine):
        pass
    assert engine.calls == []
