"""plan.py against published numbers, against models built by transformers, and against what a training step allocates.

pytest tests/test_plan.py
"""

import gc
import json
import math
import os
import random
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

from attention import visits
from plan import (
    GB,
    Run,
    UserError,
    active_parameters,
    adapted,
    adapter_parameters,
    complete,
    decoded_bytes,
    engine_weight_bytes,
    experts_read,
    flags_of_command,
    gathered_bytes,
    kv_cache_bytes,
    layer_activation_bytes,
    logits_bytes,
    micro_batches,
    phase_memory,
    plan,
    read_config,
    read_model,
    visited_keys,
    visits_bytes,
    weights,
)
from policy import TokenLogprobs
from quantize import quantize
from tree import Segment, pack

ROOT = Path(__file__).parents[1]
LARGE_4 = ROOT.parent / "shared" / "data" / "configs" / "mistral_large_4.json"
NVFP4_EXPERTS = "nvfp4-experts,fp8-linears"

# Fields of the models' own config.json.
QWEN3_8B = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "tie_word_embeddings": False,
}  # fmt: skip
QWEN25_72B = {
    "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA31_405B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 16384, "intermediate_size": 53248,
    "num_hidden_layers": 126, "num_attention_heads": 128, "num_key_value_heads": 8, "tie_word_embeddings": False,
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "tie_word_embeddings": False,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3, "moe_layer_freq": 1,
}  # fmt: skip
GPT_OSS_120B = {
    "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
    "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "num_local_experts": 128, "num_experts_per_tok": 4, "tie_word_embeddings": False, "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18, "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip
TINY = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 64,
    "intermediate_size": 192, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False,
}  # fmt: skip


def large_4():
    if not LARGE_4.is_file():
        pytest.skip(f"{LARGE_4} is not here")
    return read_config(LARGE_4)


def total(config):
    return sum(w.size for w in weights(config)[0])


# ---------------------------------------------------------------------------------------------------------------------
# Published numbers


def test_mistral_large_4_as_counted_on_the_meta_device():
    """1,051.822 B by transformers 5.24 on the meta device; parts and bytes as in the model's facts."""
    p = plan(large_4(), gpus=32, gpus_per_node=4, gpu_memory=186, tp=4, context=16384, assume_quant=NVFP4_EXPERTS)
    kinds = p["parameters_by_kind"]
    assert p["parameters"] == pytest.approx(1051.822e9, rel=1e-4)
    assert p["active_parameters"] == pytest.approx(53.1e9, rel=2e-3)
    assert p["weight_bytes"] == pytest.approx(606e9, rel=1e-3)
    assert kinds["experts"] == pytest.approx(1029.2e9, rel=1e-3)
    assert kinds["attention"] + kinds["indexer"] == pytest.approx(9.87e9, rel=5e-3)
    assert kinds["shared"] == pytest.approx(8.04e9, rel=1e-3)
    assert kinds["embedding"] + kinds["head"] == pytest.approx(2.52e9, rel=2e-3)
    assert kinds["vision"] == pytest.approx(1.70e9, rel=5e-3)
    assert p["not_understood"] == []


def test_mistral_large_4_fits_where_the_field_ran_it():
    """8 nodes of 4 GB200 with 152 GB of engine weights per rank; half the machine is refused with the reason."""
    flags = {"gpus_per_node": 4, "gpu_memory": 186, "tp": 4, "context": 16384, "assume_quant": NVFP4_EXPERTS}
    flags |= {"expert_slots": False}
    whole = plan(large_4(), gpus=32, host_memory=960, max_tokens=49152, lora_targets="attention", **flags)
    assert whole["fits"], whole["reasons"]
    assert whole["generate"]["engine weights"] == pytest.approx(152e9, rel=0.01)
    assert whole["generate"]["weight shard"] == pytest.approx(19e9, rel=0.01)
    assert whole["run"]["nodes"] == 8
    assert whole["run"]["replicas"] == 8
    half = plan(large_4(), gpus=16, **flags)
    assert not half["fits"]
    assert "KV cache" in half["reasons"][0]


def test_adapter_sizes_of_mistral_large_4():
    """Rank 16: 40.8 M on q, o and kv_a; 5.36 B on all experts."""
    m = read_model(large_4())
    run = complete(Run(gpus=1, gpu_memory=1, lora_targets="attention"))
    assert adapter_parameters(m, run) == pytest.approx(40.8e6, rel=2e-3)
    with_experts = complete(Run(gpus=1, gpu_memory=1, lora_targets="attention", lora_experts=True))
    assert adapter_parameters(m, with_experts) - adapter_parameters(m, run) == pytest.approx(5.36e9, rel=1e-3)
    named = complete(Run(gpus=1, gpu_memory=1, lora_targets="q_proj,o_proj,kv_a_proj_with_mqa"))
    assert adapted(m, named) == adapted(m, run)


def test_an_adapter_on_experts_is_counted_where_it_lies():
    """Rank 16 on the experts of Mistral Large 4: 10.7 GB in bf16, of which each rank of an engine of four has what meets the
    hidden state whole and a quarter of the rest; 64 GB in fp32 with Adam's moments over all shards; and each rank holds the
    last one and the next one in fp32 and vLLM's copy in bf16, 53.6 GB. vLLM keeps the slot also for experts without one."""
    flags = {"gpus": 32, "gpus_per_node": 4, "gpu_memory": 186, "tp": 4, "assume_quant": "nvfp4-experts,fp8-linears"}
    without, with_experts = [plan(large_4(), **flags, expert_slots=False, lora_experts=on) for on in (False, True)]
    assert plan(large_4(), **flags)["generate"]["engine LoRA slot"] == with_experts["generate"]["engine LoRA slot"]
    text = large_4().get("text_config", large_4())
    H, inner = text["hidden_size"], text["moe_intermediate_size"]
    grown = lambda phase, *rows: sum(with_experts[phase][row] - without[phase][row] for row in rows)  # noqa: E731
    assert grown("generate", "engine LoRA slot") == pytest.approx(10.7e9 * (H + inner / 4) / (H + inner), rel=0.01)
    assert grown("train", "adapter, fp32", "optimizer (Adam)") * 32 == pytest.approx(64.3e9, rel=0.01)
    assert grown("host_per_node", "adapter: last and next in fp32, vLLM's in bf16") / 4 == pytest.approx(
        53.6e9, rel=0.01
    )


@pytest.mark.parametrize(
    ("config", "parameters", "active"),
    [
        (QWEN3_8B, 8.19e9, 8.19e9),  # Qwen3 technical report
        (QWEN25_72B, 72.7e9, 72.7e9),  # Qwen2.5 technical report
        (LLAMA31_405B, 405.9e9, 405.9e9),  # Llama 3 herd: 405 B
        (DEEPSEEK_V3, 671e9, 37e9 + 0.93e9),  # DeepSeek-V3 report: 37 B active without the embedding table
        (GPT_OSS_120B, 116.83e9, 5.13e9 + 0.58e9),  # gpt-oss model card: 5.13 B active without the embedding table
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_published_parameter_counts(config, parameters, active):
    m = read_model(config)
    assert sum(w.size for w in m.parts) == pytest.approx(parameters, rel=2e-3)
    assert active_parameters(m) == pytest.approx(active, rel=0.01)


def test_published_checkpoint_size():
    """gpt-oss-120b: 60.8 GiB with MXFP4 experts and the rest in bf16 (its model card)."""
    assert read_model(GPT_OSS_120B).bytes / 2**30 == pytest.approx(60.8, rel=5e-3)


def test_published_cache_sizes():
    """Bytes per token in bf16: 70,272 for DeepSeek-V3, 327,680 for Qwen2.5-72B, 516,096 for Llama 3.1 405B
    ("Insights into DeepSeek-V3", arXiv 2505.09343, table 1)."""
    for config, per_token in ((DEEPSEEK_V3, 70272), (QWEN25_72B, 327680), (LLAMA31_405B, 516096)):
        m = read_model(config)
        assert kv_cache_bytes(m, 1, 1000) == pytest.approx(1000 * per_token)
        split = 1 if "kv_lora_rank" in config else 8  # the latent is whole on every rank; 8 KV heads split at most by 8
        assert kv_cache_bytes(m, 16, 1000) == pytest.approx(1000 * per_token / split)


LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
}  # fmt: skip


def test_cache_of_sliding_shared_and_linear_layers():
    window = TINY | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 100}
    per_token = 2 * 2 * 16 * 2  # k and v of two heads of 16, bf16
    assert kv_cache_bytes(read_model(window), 1, 1000) == per_token * (100 + 1000)
    assert kv_cache_bytes(read_model(TINY | {"num_kv_shared_layers": 1}), 1, 1000) == per_token * 1000
    packed = TINY | {"quantization_config": {"quant_method": "fp8", "kv_cache_scheme": {"num_bits": 8}}}
    assert kv_cache_bytes(read_model(packed), 1, 1000) == per_token * 1000  # two layers at one byte
    state = 4 * 4 * 16 * 16 + 2 * 4 * (2 * 32 + 64)  # fp32 state, bf16 convolution window
    assert kv_cache_bytes(read_model(window | LINEAR), 1, 1000) == per_token * 1000 + state


# ---------------------------------------------------------------------------------------------------------------------
# transformers

ARCHITECTURES = [
    "llama", "mistral", "ministral3", "mistral4", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
    "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4",
    "glm4_moe", "glm_moe_dsa", "gemma2", "gemma3_text", "gemma4_text", "olmo2", "olmo3", "olmoe", "phi", "phi3",
    "phimoe", "gpt_oss", "granite", "granitemoe", "smollm3", "seed_oss", "ernie4_5_moe", "minimax_m2",
    "llama4_text", "cohere2", "mistral3", "gemma3", "qwen3_vl", "qwen3_vl_moe", "qwen3_5_moe",
]  # fmt: skip
ODD = [
    "lfm2", "bamba", "minimax", "kimi_linear", "afmoe", "glm4v", "deepseek_v4", "jetmoe", "zamba2", "falcon_h1",
    "qwen2_vl",
]  # fmt: skip
MISSING_DEFAULTS = {"deepseek_v2": {"num_experts_per_tok": 6}}


def on_meta(model_type):
    """Config as JSON, and the parameters of the model that transformers builds from it."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(model_type, **MISSING_DEFAULTS.get(model_type, {}))
    with torch.device("meta"):
        if model_type == "mistral4":  # not in the table of the auto class
            model = transformers.Mistral4ForCausalLM(config)
        elif hasattr(config, "vision_config"):
            model = transformers.AutoModelForImageTextToText.from_config(config)
        else:
            model = transformers.AutoModelForCausalLM.from_config(config)
    return json.loads(json.dumps(config.to_dict(), default=str)), sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_counts_agree_with_transformers(model_type):
    config, parameters = on_meta(model_type)
    parts, fields = weights(config)
    assert sum(w.size for w in parts) == pytest.approx(parameters, rel=0.01)
    assert fields.not_understood() == []


def test_mistral_small_4():
    """118.97 B: the class's defaults are the published model's."""
    config, parameters = on_meta("mistral4")
    assert parameters == pytest.approx(118.97e9, rel=1e-4)
    assert total(config) == pytest.approx(118.97e9, rel=1e-3)


@pytest.mark.parametrize("model_type", ODD)
def test_what_is_counted_wrong_is_said(model_type):
    """Architectures that plan.py does not know: the count is right, or the plan says what it did not understand."""
    config, parameters = on_meta(model_type)
    parts, fields = weights(config)
    assert fields.not_understood() or sum(w.size for w in parts) == pytest.approx(parameters, rel=0.01)


# ---------------------------------------------------------------------------------------------------------------------
# Formats

ATTENTION, MLP, EMBEDDING, NORMS = 2 * (2 * 64 * 64 + 2 * 32 * 64), 2 * 3 * 64 * 192, 512 * 64, 2 * 2 * 64
NVFP4 = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "group_size": 16}}
FP8 = {"targets": ["re:.*self_attn.*"], "weights": {"num_bits": 8, "type": "float"}}
COMPRESSED = {"quant_method": "compressed-tensors", "config_groups": {"all": NVFP4}, "ignore": ["lm_head"]}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "ignore": ["lm_head", "model.layers.*.self_attn*"]}
LAYERS = {
    f"model.layers.{n}.{part}": {"quant_algo": algorithm}
    for n in (0, 1)
    for part, algorithm in (("mlp.*", "NVFP4"), ("self_attn", "FP8"))
}
MIXED = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": LAYERS}


@pytest.mark.parametrize(
    ("quantization", "attention_bits", "mlp_bits", "head_bits"),
    [
        (COMPRESSED, 4.5, 4.5, 16),
        (COMPRESSED | {"ignore": []}, 4.5, 4.5, 4.5),
        (COMPRESSED | {"config_groups": {"attention": FP8, "rest": NVFP4}}, 8, 4.5, 16),
        (MODELOPT, 16, 4.5, 16),
        (MIXED, 8, 4.5, 16),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}, 8, 8, 16),
        ({}, 16, 16, 16),
    ],
    ids=["compressed", "head-too", "fp8-attention", "modelopt", "mixed", "fp8", "none"],
)
def test_formats_of_checkpoints(quantization, attention_bits, mlp_bits, head_bits):
    expected = (ATTENTION * attention_bits + MLP * mlp_bits + EMBEDDING * (16 + head_bits) + NORMS * 16) / 8
    assert read_model(TINY | {"quantization_config": quantization}).bytes == expected


def test_older_modelopt_file_is_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    description = {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"], "kv_cache_quant_algo": "FP8"}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": description}))
    m = read_model(read_config(tmp_path))
    assert m.bytes == ((ATTENTION + MLP) * 4.5 + EMBEDDING * 32 + NORMS * 16) / 8
    assert m.kv_bytes == 1


def test_mistral_native_config_counts_the_same():
    native = {
        "dim": 64, "n_layers": 2, "hidden_dim": 192, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "vocab_size": 512,
        "tied_embeddings": False,
    }  # fmt: skip
    assert total(native) == total(TINY)


# ---------------------------------------------------------------------------------------------------------------------
# What a training step really allocates


def live_bytes(torch):
    """A dispatch mode that knows the bytes of all live CPU storages it has seen, now and at the peak."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_iter

    class Live(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.storages, self.peak = {}, 0

        def add(self, tensor):
            if isinstance(tensor, torch.Tensor):
                storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
                if storage.device.type == "cpu":
                    self.storages.setdefault(storage._cdata, weakref.ref(storage))

        def now(self):
            self.storages = {key: ref for key, ref in self.storages.items() if ref() is not None}
            return sum(ref().nbytes() for ref in self.storages.values())

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for tensor in tree_iter((out, args, kwargs)):
                self.add(tensor)
            self.peak = max(self.peak, self.now())
            return out

    return Live()


def measure(folder, tokens, rank, checkpointing):
    """Bytes of a training step over the checkpoint in `folder`: FSDP on one rank, LoRA, AdamW, as train_grpo does."""
    import torch
    import torch.distributed as dist

    import model_nvfp4

    class Trunk(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model_nvfp4.build_model(folder, lora_rank=rank, lora_alpha=rank, attn_implementation="sdpa")

        def forward(self, ids):
            return self.model.get_base_model().base_model(input_ids=ids, use_cache=False).last_hidden_state  # (1, T, H)

    def size(tensors):
        return sum(getattr(t, "_local_tensor", t).nbytes for t in tensors)

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    root = Trunk()
    model_nvfp4.shard(root, activation_checkpointing=checkpointing)
    model_nvfp4.load_weights(root, folder)
    root.train()
    trainable = [p for p in root.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable)
    ids = torch.randint(0, root.model.config.vocab_size, (1, tokens))  # (1, T)
    upstream = torch.randn(1, tokens, root.model.config.hidden_size).bfloat16()  # (1, T, H)
    live = live_bytes(torch)
    gc.collect()
    with live:
        for tensor in [*root.parameters(), *root.buffers(), ids, upstream]:
            live.add(tensor)
        start = live.now()
        root(ids).backward(upstream)
    gradients = size(p.grad for p in trainable)
    optimizer.step()
    adam = size(v for state in optimizer.state.values() for v in state.values() if v.numel() > 1)
    result = {
        "weight shard": size(p for p in root.parameters() if not p.requires_grad),
        "adapter, fp32": size(trainable),
        "gradient, fp32": gradients,
        "optimizer (Adam)": adam,
        "peak": live.peak - start,
    }
    dist.destroy_process_group()
    return result


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True], ids=["keep", "recompute"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_memory_of_a_real_step(tmp_path, model_type, checkpointing):
    """Each figure of the training phase within 10 % of what one CPU rank allocates."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    if (model_type, checkpointing) != ("qwen3", False) and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this CPU emulates bf16, two minutes a case: one of four is measured")
    shape = TINY | {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 12, "num_attention_heads": 8}
    shape |= {"model_type": model_type, "num_key_value_heads": 4, "head_dim": 32}
    config = transformers.AutoConfig.for_model(**shape)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "dense")
    (tmp_path / "packed").mkdir()
    quantize(
        tmp_path / "dense",
        tmp_path / "packed",
        a16=True,
        ignore=["lm_head"],
        recipe="max",
        dialect="compressed-tensors",
    )
    tokens, rank = 2048, 8
    measured = measure(tmp_path / "packed", tokens, rank, checkpointing)
    m = read_model(read_config(tmp_path / "packed"))
    flags = {"max_tokens": tokens, "lora_rank": rank, "activation_checkpointing": checkpointing}
    train = phase_memory(m, complete(Run(gpus=1, gpu_memory=24, **flags)))[1]
    for name in ("weight shard", "adapter, fp32", "gradient, fp32", "optimizer (Adam)"):
        assert train[name] == pytest.approx(measured[name], rel=0.1), name
    # The CPU decodes through an int32 index, 4 bytes a weight instead of 2; gradients are alive at the peak.
    peak = train["activations"] + train["gathered layers"] + 2 * train["decoded weight"] + train["gradient, fp32"]
    assert peak == pytest.approx(measured["peak"], rel=0.06)  # tight enough to see a checkpoint of half the size


@pytest.mark.slow
def test_memory_of_the_trainers_logits(monkeypatch):
    """Forty-seven chunks of a head with 32,000 words, forward and backward."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(sys.modules["plan"], "LOGITS_OF_A_CHUNK", 2**21)  # what a CPU takes
    tokens, H, V = 3000, 64, 32000
    hidden = torch.randn(tokens, H).bfloat16().requires_grad_()  # (S, H)
    weight, targets = torch.randn(V, H).bfloat16(), torch.randint(0, V, (tokens,))  # (V, H), (S,)
    with live_bytes(torch) as live:
        for tensor in (hidden, weight, targets):
            live.add(tensor)
        start = live.now()
        logprobs, _ = TokenLogprobs.apply(hidden, weight, None, targets, 1.0, 1.0, None)
        logprobs.sum().backward()
    m, wide = read_model(TINY | {"vocab_size": V}), 4 * V * H  # a CPU makes an fp32 copy of the head, a GPU does not
    assert logits_bytes(m, complete(Run(gpus=1, gpu_memory=1, max_tokens=tokens))) == pytest.approx(
        live.peak - start - wide, rel=0.1
    )


def test_keys_that_attention_visits():
    """A full row of two groups of four, 5 + 4 · 3 tokens each: every completion takes its prompt's keys along."""
    groups = [[([member, 0, 0, 0], [0.0] * 4, 1.0) for member in range(4)] for _ in range(2)]  # the fourth is no input
    row = pack([Segment([number] * 5, group) for number, group in enumerate(groups)])
    seen, _, _ = visits(row.layout[0, 0])
    run = complete(
        Run(
            gpus=1,
            gpu_memory=1,
            max_tokens=34,
            prompt_tokens=5,
            group_size=4,
            completion_tokens=3,
            activation_checkpointing=False,
        )
    )
    assert row.input_ids.numel() == 34
    assert visited_keys(run) == len(seen) == 2 * 4 * (5 + 3)
    heads, size = TINY["num_key_value_heads"], TINY["head_dim"]
    kept = 2 * 2 * heads * size * len(seen) * TINY["num_hidden_layers"]  # keys and values, bf16
    assert visits_bytes(read_model(TINY), run) == kept


# ---------------------------------------------------------------------------------------------------------------------
# Properties


def test_experts_read_is_what_random_routing_reads():
    _, fields = weights(DEEPSEEK_V3)
    generator = random.Random(0)
    for tokens in (1, 10, 100):
        draws = [len({e for _ in range(tokens) for e in generator.sample(range(256), 8)}) / 256 for _ in range(200)]
        assert experts_read(fields, tokens) == pytest.approx(sum(draws) / 200, rel=0.03)


def test_wire_of_one_micro_batch_by_hand():
    """Four shards of a bf16 model: every rank receives three quarters of the layers twice and of the root once."""
    p = plan(TINY, gpus=8, gpu_memory=24, shard_size=4, prompts=2, max_tokens=10**6)
    layers, root = 2 * (ATTENTION + MLP + NORMS), 2 * 2 * EMBEDDING
    assert p["micro_batches"] == 1
    assert p["wire"]["weights, per micro-batch"] == pytest.approx(0.75 * (2 * layers + root))
    adapter = 16 * 2 * ((64 + 64) * 2 + (64 + 32) * 2 + (64 + 192) * 3)
    assert p["adapter_parameters"] == adapter
    # Reduce-scatter over 4 shards, then all-reduce of a quarter over 2 copies.
    assert p["wire"]["LoRA gradients, per step"] == pytest.approx(4 * adapter * (0.75 + 2 / 4))


def test_largest_micro_batch_is_the_largest():
    flags = {"gpus": 1, "gpu_memory": 24, "assume_quant": "nvfp4-linears", "context": 4096}
    largest = plan(QWEN3_8B, **flags)["largest_max_tokens"]
    assert plan(QWEN3_8B, max_tokens=largest, **flags)["fits"]
    refused = plan(QWEN3_8B, max_tokens=largest + 1024, **flags)
    assert not refused["fits"]
    assert f"--max-tokens {largest} fits" in refused["reasons"][0]


def test_sleep_moves_memory_where_it_says():
    flags = {"gpus": 1, "gpu_memory": 80, "assume_quant": "nvfp4-linears", "context": 4096}
    level1, kv, off = (plan(QWEN3_8B, sleep=s, **flags) for s in ("level1", "kv", "off"))
    engine = kv["train"]["engine weights"]
    assert "engine weights" not in level1["train"]
    assert level1["host_per_node"]["engine weights asleep"] > engine
    assert kv["host_per_node"]["engine weights asleep"] == off["host_per_node"]["engine weights asleep"] == 0
    assert off["train"]["KV cache"] == off["generate"]["KV cache"] < kv["generate"]["KV cache"]
    for p in (level1, kv, off):
        for phase in ("generate", "train"):
            assert sum(p[phase].values()) <= 80 * 2**30 * 0.95 + 1


def test_more_shards_and_wider_engines_need_less_per_rank():
    m = read_model(DEEPSEEK_V3, "nvfp4-linears")
    assert engine_weight_bytes(m, 1) == pytest.approx(m.bytes)
    assert engine_weight_bytes(m, 8) < engine_weight_bytes(m, 4) < m.bytes / 3
    assert engine_weight_bytes(m, 8) > m.bytes / 8
    assert gathered_bytes(m, 1) < gathered_bytes(m, 8)  # the next layer is fetched ahead
    one = 2 * 2 * 2048 * 7168  # gate and up of an expert in bf16; nine of the 256 come to half a gibibyte
    assert 9 * one < 2**29 < 10 * one
    assert decoded_bytes(m) == 9 * one
    keep = complete(Run(gpus=1, gpu_memory=80, lora_targets="attention"))
    assert layer_activation_bytes(m, keep) < layer_activation_bytes(m, complete(Run(gpus=1, gpu_memory=80)))


def test_tokens_of_a_step_are_shared_out():
    run = complete(Run(gpus=4, gpu_memory=80, prompts=16, group_size=8, prompt_tokens=100, completion_tokens=1000))
    assert micro_batches(read_model(TINY), run) == -(-16 * (100 + 8 * 1000) // (4 * 16384))
    assert micro_batches(read_model(TINY | LINEAR), run) == -(-16 * 8 * (100 + 1000) // (4 * 16384))  # nothing shared


def test_each_optimizer_step_has_micro_batches_of_its_own_and_extra_forwards_cost():
    flags = {"gpus": 1, "gpu_memory": 80, "prompt_tokens": 100, "completion_tokens": 1000, "max_tokens": 65536}
    one, many, asked = (
        plan(QWEN3_8B, assume_quant="nvfp4-linears", **flags, **more)
        for more in ({}, {"minibatches": 8}, {"extra_forwards": 1})
    )
    assert (one["micro_batches"], many["micro_batches"]) == (2, 8)  # 16 · (100 + 8 · 1000) tokens
    # Forward, backward through frozen weights and recomputation are three passes; a fourth makes it a third more.
    assert asked["seconds"]["in train: matrix products"] == pytest.approx(
        4 / 3 * one["seconds"]["in train: matrix products"]
    )


def test_the_engine_takes_the_share_that_it_is_given():
    flags = {"gpus": 1, "gpu_memory": 80, "assume_quant": "nvfp4-linears", "context": 4096}
    free = plan(QWEN3_8B, **flags)
    half = plan(QWEN3_8B, gpu_memory_utilization=0.5, **flags)
    trainer = {"weight shard", "adapter, fp32", "optimizer (Adam)"}  # all else is in vLLM's own count
    assert sum(size for name, size in half["generate"].items() if name not in trainer) == pytest.approx(40 * 2**30)
    assert free["fits"]
    assert half["fits"]
    refused = plan(QWEN3_8B, gpu_memory_utilization=0.95, **flags)
    most = math.floor(100 * free["gpu_memory_utilization"]) / 100
    assert not refused["fits"]
    assert refused["reasons"][0].endswith(f"at most {most} fits")
    assert plan(QWEN3_8B, gpu_memory_utilization=most, **flags)["fits"]


def test_sleeping_weights_are_pinned_in_powers_of_two():
    """rollout.check_sleep refuses a node with less than 1.44 times the weights of its engines."""
    p = plan(QWEN3_8B, gpus=2, gpu_memory=80, assume_quant="nvfp4-linears")
    engines = 2 * (p["generate"]["engine weights"] + p["generate"]["engine LoRA slot"])
    assert p["host_per_node"]["engine weights asleep"] == pytest.approx(engines / math.log(2), rel=0.01)


def test_a_head_that_the_config_does_not_name_is_as_the_class_has_it():
    """LlamaConfig's tie_word_embeddings is False, GemmaConfig's True (transformers 5.19)."""
    unsaid = TINY | {"tie_word_embeddings": None}
    for config, head in ((unsaid, True), (unsaid | {"model_type": "gemma"}, False)):
        assert ("head" in plan(config, gpus=1, gpu_memory=80)["parameters_by_kind"]) == head


def test_a_command_of_the_trainer_says_what_it_can():
    words = [
        "--model",
        "any",
        "--completion-tokens",
        "40",
        "--eval-tokens",
        "2000",
        "--kl-coef",
        "0.1",
        "--refill",
        "2",
    ]
    known, not_counted = flags_of_command([*words, "--old-logprobs", "trainer", "--gpu-memory-utilization", "0.6"])
    assert (known["completion_tokens"], known["context"]) == (20, 1024 + 2000)
    assert (known["extra_forwards"], known["gpu_memory_utilization"]) == (2, 0.6)
    assert known["expert_slots"]
    assert not_counted == ["--refill"]
    targets = '{"lora_target_modules": ["q_proj"]}'
    known, not_counted = flags_of_command(["--model", "any", "--engine-args", targets])
    assert (known["expert_slots"], not_counted) == (False, [])
    assert flags_of_command(["--model", "any", "--engine-args", '{"block_size": 64}'])[1] == ["--engine-args"]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"gpus": 8, "tp": 3}, "--tp 3 does not divide the 8 GPUs"),
        ({"gpus": 6, "gpus_per_node": 6, "tp": 3}, "--tp 3 does not divide the 32 heads"),
        ({"gpus": 8, "shard_size": 3}, "--shard-size 3 does not divide the 8 GPUs"),
        ({"gpus": 1, "context": 100, "prompt_tokens": 80, "completion_tokens": 50}, "exceed --context 100"),
        ({"gpus": 8, "host_memory": 50}, "--sleep kv leaves the engine's weights on the GPU"),
        ({"gpus": 1, "context": 10**6}, "one sequence of 1000000 tokens needs"),
    ],
)
def test_refusals_say_why(flags, sentence):
    p = plan(QWEN3_8B, gpu_memory=80, assume_quant="nvfp4-linears", **flags)
    assert not p["fits"]
    assert any(sentence in reason for reason in p["reasons"]), p["reasons"]


# ---------------------------------------------------------------------------------------------------------------------
# The command


def command(*arguments):
    """Isolated and without site-packages: it must run before anything is installed."""
    line = [sys.executable, "-E", "-s", "-S", str(ROOT / "plan.py"), *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, env={"PATH": os.environ["PATH"], "PYTHONUTF8": "1"})


def test_command_needs_only_python(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    flags = (tmp_path, "--gpus", 1, "--gpu-memory", 24, "--assume-quant", "nvfp4-linears", "--max-tokens", 8192)
    text = command(*flags)
    assert text.returncode == 0, text.stderr
    assert text.stdout.splitlines()[-1] == "fits"
    p = json.loads(command(*flags, "--json").stdout)
    assert p["fits"] is True
    assert p["parameters"] == pytest.approx(8.19e9, rel=1e-3)
    refused = command(*flags, "--sleep", "kv", "--context", 131072)
    assert refused.returncode == 0
    assert "does not fit, because" in refused.stdout


@pytest.mark.parametrize(
    ("content", "flags", "sentence"),
    [
        (None, (), "does not exist"),
        ("{", (), "is not JSON"),
        ("[]", (), "holds no JSON object"),
        ("{}", (), "has no hidden_size"),
        (json.dumps(TINY | {"num_experts": 4}), (), "has no num_experts_per_tok"),
        (json.dumps(TINY), ("--sleep", "level2"), "--sleep level2 is unknown"),
        (json.dumps(TINY), ("--gpu", "tpu"), "--gpu tpu is unknown"),
        (json.dumps(TINY), ("--assume-quant", "fp3-linears"), "--assume-quant fp3-linears"),
        (json.dumps(TINY), ("--lora-targets", "q_proj,w9"), "the model has no w9"),
        (json.dumps(TINY), ("--prompts", "-1"), "--prompts must be positive"),
    ],
)
def test_mistakes_get_one_sentence(tmp_path, content, flags, sentence):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    done = command(path, "--gpus", 1, "--gpu-memory", 24, *flags)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""


def test_unknown_model_class_is_planned_with_a_warning():
    p = plan(TINY | {"model_type": "of_tomorrow", "memory_state_size": 4096}, gpus=1, gpu_memory=24)
    assert p["not_understood"] == ["memory_state_size=4096"]
    with pytest.raises(UserError, match="--gpu-memory must be positive"):
        plan(TINY, gpus=1, gpu_memory=0)
    assert p["generate"]["runtime"] == 4 * GB
