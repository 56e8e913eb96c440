"""policy.py on its own. `pytest tests/test_policy.py`."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from test_model_nvfp4_models import ARCHITECTURES, MLA, SIZES

from attention import register_attention
from errors import UserError
from policy import Policy, TokenLogprobs, has_state, token_logprobs
from rollout import Sample
from tree import Segment, balance_padded, make_segments, pack


@pytest.fixture(scope="module", params=["llama", "sliding window", "softcap and sinks"])
def tiny_model(request):
    """A random model in fp32, and the same one with transformers' own eager attention."""
    from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig, MistralConfig

    size = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "attention_dropout": 0.0,
    }
    config = {
        "llama": lambda: LlamaConfig(**size),
        "sliding window": lambda: MistralConfig(**size, sliding_window=5),
        "softcap and sinks": lambda: GptOssConfig(**size, num_local_experts=4, num_experts_per_tok=2, sliding_window=5),
    }[request.param]()
    register_attention()
    torch.manual_seed(0)
    models = []
    for implementation in ("grouped", "eager"):
        copied = copy.deepcopy(config)  # a model keeps its implementation in its config
        models.append(AutoModelForCausalLM.from_config(copied, attn_implementation=implementation).float().eval())
    models[1].load_state_dict(models[0].state_dict())
    return models


@pytest.mark.parametrize("shared", [0, 2])  # tokens that all prompts begin with; 2 are the third prompt as a whole
def test_shared_prompts_give_the_gradients_of_separate_rows(tiny_model, shared):
    """One packed row of three groups against one forward per sample: log-probs, entropies and all gradients."""
    grouped, eager = tiny_model
    generator = torch.Generator().manual_seed(1)

    def ids(n):
        return torch.randint(0, 97, (n,), generator=generator).tolist()

    first = ids(shared)
    sizes = [(7, [4, 1, 9]), (12, [3, 6]), (2, [5])]
    groups = [(first + ids(n - shared), [ids(length) for length in lengths]) for n, lengths in sizes]
    groups[0][1][1:1] = [groups[0][1][0], groups[0][1][2][:5] + ids(3)]  # twice the same, and five tokens in common
    segments = [Segment(prompt, [(c, [0.0] * len(c), 1.0) for c in completions]) for prompt, completions in groups]
    batch = pack(segments)
    told = [(prompt, completion) for prompt, completions in groups for completion in completions]
    assert batch.input_ids.numel() == len({(*p, *c[:-1])[:n] for p, c in told for n in range(1, len(p + c))})
    assert len(batch.targets) == len({(*p, *c[:n]) for p, c in told for n in range(1, len(c) + 1)})
    weights = torch.randn(len(batch.picks), generator=generator)  # one weight a token, so that no error can cancel

    policy = Policy(SimpleNamespace(get_base_model=lambda: grouped))
    logprobs, entropy = token_logprobs(policy, batch, temperature=0.7)
    grouped.zero_grad()
    (logprobs * weights).sum().backward()

    expected, expected_entropy = [], []
    for prompt, completions in groups:
        for completion in completions:
            logits = eager(input_ids=torch.tensor([prompt + completion]), use_cache=False).logits[0].float() / 0.7
            table = F.log_softmax(logits[len(prompt) - 1 : -1], -1)  # (tokens, V)
            expected.append(table.gather(1, torch.tensor(completion)[:, None])[:, 0])
            expected_entropy.append(-(table.exp() * table).sum(-1))
    eager.zero_grad()
    (torch.cat(expected) * weights).sum().backward()

    torch.testing.assert_close(logprobs, torch.cat(expected), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, torch.cat(expected_entropy), atol=1e-5, rtol=1e-5)
    trained = dict(eager.named_parameters())
    for name, parameter in grouped.named_parameters():
        if "lm_head" in name:
            continue  # frozen by design: TokenLogprobs makes no gradient for the head
        if "sinks" in name:
            continue  # frozen too: BlockAttention makes none for them
        if "embed" in name and grouped.config.tie_word_embeddings:
            continue
        torch.testing.assert_close(parameter.grad, trained[name].grad, atol=2e-5, rtol=1e-4, msg=name)


def trainer_and_reference(name: str, **config):
    """A random model of the class `name` in fp32 twice: with our attention, and as transformers runs it."""
    import transformers

    register_attention()
    models = []
    for implementation in ("grouped", "eager"):
        torch.manual_seed(0)
        settings = getattr(transformers, f"{name}Config")(**SIZES | config)
        model = transformers.AutoModelForCausalLM.from_config(settings, attn_implementation=implementation)
        models.append(model.float().eval())
    models[1].load_state_dict(models[0].state_dict())
    return models


def reference_logprobs(model, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """(tokens,) of the completion, by the model's own forward of this sample alone."""
    logits = model(input_ids=torch.tensor([prompt + completion]), use_cache=False).logits[0]  # (T, V)
    table = F.log_softmax(logits[len(prompt) - 1 : -1], -1)  # (tokens, V)
    return table.gather(1, torch.tensor(completion)[:, None])[:, 0]


def some_samples(*lengths: int) -> list[Sample]:
    generator = torch.Generator().manual_seed(1)
    prompt, *said = (torch.randint(2, 97, (length,), generator=generator).tolist() for length in (8, *lengths))
    return [Sample(prompt, completion, [0.0] * len(completion), "", "stop", 0) for completion in said]


@pytest.mark.parametrize("name", ["Qwen3Next", "Lfm2"])  # linear attention, short convolutions
def test_no_state_runs_from_one_sample_into_the_next(name):
    """Such models get a padded row a sample; the reference is transformers' own forward and backward of each sample alone."""
    ours, theirs = trainer_and_reference(name, **ARCHITECTURES[name])
    samples, advantages = some_samples(9, 3, 17, 8), torch.tensor([[1.0, 0.5, -1.0, -0.5]])
    policy = Policy(SimpleNamespace(get_base_model=lambda: ours))
    assert policy.sample_a_row
    (dealt,) = balance_padded(make_segments(samples, advantages, 0), 1, 50)
    batches = [pack(row, policy.sample_a_row) for row in dealt]
    assert sorted(tuple(batch.input_ids.shape) for batch in batches) == [(2, 15), (2, 24)]
    told, expected = {}, {}
    for batch in batches:
        logprobs, _ = token_logprobs(policy, batch, 1.0)  # (S,)
        (logprobs * batch.advantages).sum().backward()
        told |= {a.item(): logprobs[batch.advantages == a].detach() for a in batch.advantages.unique()}
    for sample, advantage in zip(samples, advantages[0].tolist()):
        logprobs = reference_logprobs(theirs, sample.prompt_ids, sample.completion_ids)  # (tokens,)
        (logprobs * advantage).sum().backward()
        expected[advantage] = logprobs.detach()
    torch.testing.assert_close(told, expected, atol=1e-5, rtol=1e-5)
    trained = dict(theirs.named_parameters())
    for parameter_name, parameter in ours.named_parameters():
        if not {"lm_head", "embed_tokens"} & set(parameter_name.split(".")):  # frozen by design; one in LFM2
            grad = trained[parameter_name].grad
            torch.testing.assert_close(parameter.grad, grad, atol=2e-5, rtol=1e-4, msg=parameter_name)


@pytest.mark.parametrize(
    ("name", "config", "expected"),
    [
        ("Llama", {}, (1, None)),
        ("Granite", {"logits_scaling": 8.0}, (1 / 8, None)),  # divides
        ("HyperCLOVAX", {"logits_scaling": 8.0}, (8, None)),  # multiplies
        ("MiniCPM3", MLA | {"dim_model_base": 16}, (16 / 64, None)),  # before the head, by the hidden size
        ("Cohere", {"logit_scale": 0.0625}, (0.0625, None)),
        (
            "FalconH1",
            {"mamba_d_ssm": 128, "mamba_d_head": 16, "mamba_n_heads": 8, "lm_head_multiplier": 0.3},
            (0.3, None),
        ),
        ("Gemma2", {"final_logit_softcapping": 0.5}, (1, 0.5)),
        (
            "RecurrentGemma",
            {"lru_width": 64, "block_types": ("recurrent", "attention"), "logits_soft_cap": 0.5},
            (1, 0.5),
        ),
        ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64}, (1, None)),  # calls an inner decoder
    ],
)
def test_logits_are_scaled_as_the_model_does_it(name, config, expected):
    """Whatever its config calls that. The reference is transformers' own forward of each sample."""
    ours, theirs = trainer_and_reference(name, **config)
    samples = some_samples(9, 3)
    policy = Policy(SimpleNamespace(get_base_model=lambda: ours))
    with torch.no_grad():
        for sample in samples:
            batch = pack([Segment(sample.prompt_ids, [(sample.completion_ids, sample.logprobs, 1.0)])])
            logprobs, _ = token_logprobs(policy, batch, 1.0)  # (S,)
            reference = reference_logprobs(theirs, sample.prompt_ids, sample.completion_ids)  # (S,)
            torch.testing.assert_close(logprobs, reference, atol=1e-5, rtol=1e-5)
    assert policy.scale == pytest.approx(expected)


@pytest.mark.parametrize(
    "change", [lambda logits: logits**2, lambda logits: logits.clamp(-30, 30), lambda logits: logits + 1]
)
def test_logits_made_in_another_way_are_refused(monkeypatch, change):
    ours, _ = trainer_and_reference("Llama")
    forward = type(ours).forward

    def changed(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        output.logits = change(output.logits)
        return output

    monkeypatch.setattr(type(ours), "forward", changed)
    policy = Policy(SimpleNamespace(get_base_model=lambda: ours))
    with pytest.raises(UserError, match="LlamaForCausalLM makes its logits in a way of its own"):
        token_logprobs(policy, pack([Segment([5, 6], [([7, 1], [-5.0, -5.0], 1.0)])]), 1.0)


def test_models_of_attention_alone_share_rows(tiny_model):
    assert not has_state(tiny_model[0])


@pytest.mark.parametrize(
    ("temperature", "multiplier", "softcap"), [(1.0, 1.0, None), (0.6, 0.25, None), (1.3, 2.0, 5.0)]
)
def test_token_logprobs_is_log_softmax_with_its_gradient(temperature, multiplier, softcap):
    torch.manual_seed(0)
    hidden = torch.randn(50, 16, dtype=torch.float64, requires_grad=True)
    weight, bias = torch.randn(301, 16, dtype=torch.float64), torch.randn(301, dtype=torch.float64)
    targets, weights = torch.randint(0, 301, (50,)), torch.randn(50)
    logprobs, _ = TokenLogprobs.apply(hidden, weight, bias, targets, temperature, multiplier, softcap)
    (gradient,) = torch.autograd.grad((logprobs * weights).sum(), hidden)

    logits = F.linear(hidden, weight, bias) * multiplier
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    expected = F.log_softmax(logits / temperature, -1).gather(1, targets[:, None])[:, 0]
    (expected_gradient,) = torch.autograd.grad((expected * weights).sum(), hidden)
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_are_not_rounded_to_16_bits(dtype):
    """Log-probs of logits up to 60 against exact ones; logits in bf16 would be off by up to an eighth."""
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 64, generator=draw, dtype=torch.float64).to(dtype) for n in (50, 301))
    weight, bias = 2 * weight, torch.randn(301, generator=draw, dtype=torch.float64).to(dtype)
    targets, before = torch.randint(0, 301, (50,), generator=draw), torch.backends.mkldnn.matmul.fp32_precision
    logprobs, _ = TokenLogprobs.apply(hidden, weight, bias, targets, 1.0, 1.0, None)
    logits = F.linear(hidden.double(), weight.double(), bias.double())
    assert logits.max() > 40
    expected = F.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-4, rtol=0)
    assert torch.backends.mkldnn.matmul.fp32_precision == before  # other matmuls of fp32 stay what they are


def test_empty_row_has_weight_zero_and_a_graph(tiny_model):
    batch = pack([])
    assert batch.weight == 0
    assert len(batch.targets) == 1
    policy = Policy(SimpleNamespace(get_base_model=lambda: tiny_model[0]))
    assert token_logprobs(policy, batch, 1.0)[0].requires_grad


def test_what_attention_notes_goes_with_the_graph(tiny_model):
    """Masks of all rows of a step together could be larger than the weights."""
    batch = pack([Segment([5, 6], [([7, 8, 9], [0.0] * 3, 1.0)])])
    policy = Policy(SimpleNamespace(get_base_model=lambda: tiny_model[0]))
    token_logprobs(policy, batch, 1.0)[0].sum().backward()
    assert not vars(batch.layout)
