"""Day zero: tiny random checkpoints of many architectures go through quantize -> load -> forward and backward.

    pytest tests/test_model_nvfp4_models.py

The oracle is transformers itself: the NVFP4 folder is decoded tensor by tensor to a dense folder under the same names,
loaded with `from_pretrained`, and given the same adapter by stock peft. Nothing here or in model_nvfp4.py names a model
beyond its config.
"""

import argparse
import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

import model_nvfp4 as nvfp4
from adapter import load_lora_state_dict, lora_state_dict, save_adapter
from checkpoint import read_checkpoint
from policy import replay_routers
from quantize import quantize_command

# Every size is a multiple of 16; 2 layers, so that one of them can differ from the other.
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 160,
}
SIZES |= {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "norm_topk_prob": True}
MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
GROUPS = {"n_group": 1, "topk_group": 1, "n_routed_experts": 4, "num_local_experts": 4, "first_k_dense_replace": 1}
ARCHITECTURES = {
    "Llama": {},
    "Mistral": {},
    "Ministral3": {},
    "Mistral4": EXPERTS | MLA | GROUPS | {"n_shared_experts": 1, "head_dim": 32},
    "Qwen2": {},
    "Qwen3": {},
    "Qwen3Moe": EXPERTS | {"num_experts": 4},
    "Qwen2Moe": EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 32},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    # vLLM makes the router's bias for this method only, which published configs name.
    "DeepseekV3": EXPERTS | MLA | GROUPS | {"n_shared_experts": 1, "topk_method": "noaux_tc"},
    "Glm4Moe": EXPERTS | GROUPS | {"n_shared_experts": 1},
    "Gemma3": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
    "Olmo2": {},
    "Olmo3": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "Phi": {},
    "Phi3": {},
    "Qwen3Next": EXPERTS  # half linear attention; vLLM on a CPU wants its heads of 128
    | {
        "num_experts": 4,
        "shared_expert_intermediate_size": 32,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "Lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 16},
    "GptOss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}


def tiny_checkpoint(name: str, folder: Path, std: float = 0.0, **extra) -> Path:
    """A dense random checkpoint saved by transformers."""
    config_class = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    torch.manual_seed(0)
    config = config_class(**SIZES | ARCHITECTURES[name] | {"tie_word_embeddings": False} | extra)
    model = getattr(transformers, f"{name}ForCausalLM")._from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():  # larger than transformers' initial values, so that errors show
            if parameter.dim() > 1:
                parameter.normal_(std=std or parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return folder


def quantized(source: Path, target: Path, **options) -> Path:
    options = {"a16": True, "ignore": [], "recipe": "max", "dialect": "compressed-tensors", "sha256": None} | options
    quantize_command(argparse.Namespace(source=str(source), target=str(target), **options))
    return target


def dequantized(source: Path, target: Path, dtype=torch.float32) -> Path:
    """The checkpoint decoded to a dense one, every tensor under its own name."""
    target.mkdir()
    tensors = {}
    for name, weight in read_checkpoint(source).items():
        data = weight.data.read()
        if weight.format == "nvfp4":
            scale, global_scale = weight.scale.read().view(torch.uint8), torch.tensor([weight.read_global_scale()])
            data = nvfp4.decode_reference(data, scale, global_scale, dtype)
        elif weight.format == "fp8":
            data = nvfp4.decode_fp8(data.view(torch.uint8), weight.read_scale(torch.arange(weight.data.rows)), dtype)
        tensors[name] = data.to(dtype)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config.pop("quantization_config", None)
    (target / "config.json").write_text(json.dumps(config | {"dtype": str(dtype).removeprefix("torch.")}))
    return target


def trainer_and_oracle(folder: Path, work: Path, dtype=torch.float32, **options):
    """(our model, transformers' model of the decoded weights with stock peft), with the same adapter with B != 0."""
    ours = nvfp4.build_model(folder, lora_rank=8, lora_alpha=16, dtype=dtype, **options)
    nvfp4.load_weights(ours, folder)
    adapter = lora_state_dict(ours)
    generator = torch.Generator().manual_seed(1)
    adapter = {k: torch.randn(v.shape, generator=generator) * 0.05 if "lora_B" in k else v for k, v in adapter.items()}
    load_lora_state_dict(ours, adapter)
    save_adapter(work / "adapter", adapter, lora_rank=8, lora_alpha=16, base_model="base")
    dense = dequantized(folder, work / "dense", dtype)
    oracle = type(ours.get_base_model()).from_pretrained(dense, dtype=dtype)
    return ours, oracle, adapter


def loss_and_logits(model, tokens):
    logits = model(input_ids=tokens).logits.float()
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()), logits


def lora_gradients(model) -> dict[str, torch.Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def relative(a: dict, b: dict) -> float:
    """|a - b| / |b| over all tensors."""
    assert a.keys() == b.keys(), f"different names: {sorted(a.keys() ^ b.keys())[:4]}"
    difference = sum(float((a[n] - b[n]).square().sum()) for n in a) ** 0.5
    return difference / sum(float(b[n].square().sum()) for n in b) ** 0.5


TOKENS = (torch.arange(48).view(3, 16) * 7 + 3) % 157 + 2


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture(name, tmp_path):
    from peft import PeftModel

    folder = quantized(tiny_checkpoint(name, tmp_path / "source"), tmp_path / "nvfp4")
    ours, oracle, _ = trainer_and_oracle(folder, tmp_path)
    packed = [m for m in ours.modules() if isinstance(m, nvfp4.NVFP4Linear)]
    assert len(packed) >= 2 * 4, "too few linears were packed to show anything"
    oracle.config.model_type = "any"  # else peft takes gate_proj for the experts' in models that have both
    oracle = PeftModel.from_pretrained(oracle, tmp_path / "adapter", is_trainable=True)
    loss, logits = loss_and_logits(ours, TOKENS)
    loss_oracle, logits_oracle = loss_and_logits(oracle, TOKENS)
    loss.backward()
    loss_oracle.backward()
    assert (logits - logits_oracle).abs().max() < 2e-4, "logits differ from transformers over the decoded weights"
    assert relative(lora_gradients(ours), lora_gradients(oracle)) < 2e-4
    assert any("lora_A" in n and g.abs().max() > 0 for n, g in lora_gradients(ours).items())


def test_packed_experts_are_what_the_moe_models_use(tmp_path):
    folder = quantized(tiny_checkpoint("Qwen3Moe", tmp_path / "source"), tmp_path / "nvfp4")
    model = nvfp4.build_model(folder, lora_rank=8, lora_alpha=16)
    experts = model.get_base_model().model.layers[0].mlp.experts
    assert experts.gate_up_proj.dtype == torch.uint8
    assert experts.gate_up_proj.shape == (4, 64, 32), "(E, 2·I, H/2)"
    assert experts.down_proj_scale.shape == (4, 64, 2), "(E, H, I/16)"
    shutil.rmtree(folder)


MIXTURES = ["Mistral4", "Qwen3Moe", "Qwen2Moe", "Mixtral", "DeepseekV3", "Glm4Moe", "Olmoe", "GptOss"]


@pytest.mark.parametrize("name", MIXTURES)
def test_routers_replay_what_they_are_told(name, tmp_path):
    """Whatever a router looks like: the experts run are those of `choice`, its own where that is -1; the rest stays."""
    folder = quantized(tiny_checkpoint(name, tmp_path / "source"), tmp_path / "nvfp4")
    model = nvfp4.build_model(folder, lora_rank=8, lora_alpha=16, dtype=torch.float32)
    nvfp4.load_weights(model, folder)
    with torch.no_grad():
        before = model(input_ids=TOKENS).logits
    replays, asked = replay_routers(model.get_base_model()), {}
    for stacked, module in model.named_modules():
        if stacked.endswith(".experts"):
            layer = int(stacked.split(".layers.")[1].split(".")[0])
            module.register_forward_pre_hook(lambda module, args, layer=layer: asked.update({layer: args[1]}))
    with torch.no_grad():
        assert (model(input_ids=TOKENS).logits == before).all()  # nothing to replay
    own = dict(asked)  # {layer: (T, k)}
    assert replays.keys() == own.keys()
    for layer, replay in replays.items():
        replay.choice = own[layer]
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=TOKENS).logits, before, atol=1e-5, rtol=1e-5)
    draw = torch.Generator().manual_seed(1)
    for replay in replays.values():
        pairs = torch.rand(TOKENS.numel(), 4, generator=draw).argsort(1)[:, :2]  # (T, k) of 4 experts
        replay.choice = torch.where(torch.arange(TOKENS.numel())[:, None] % 3 > 0, pairs, -1)
    logits = model(input_ids=TOKENS).logits
    assert (logits - before).abs().max() > 1e-2
    for layer, replay in replays.items():
        told = replay.choice[:, 0] >= 0
        assert (asked[layer][told] == replay.choice[told]).all()
        assert (asked[layer][~told].sort().values == own[layer][~told].sort().values).all() or layer > min(replays)
        alike, known = replay.agreement.tolist()
        assert known == 2 * told.sum()
        assert 0.3 < alike / known < 0.7  # 2 of 4 by chance: 1/2
    logits.square().sum().backward()  # through the scores of experts that the router would not have chosen
    assert all(g.isfinite().all() for g in lora_gradients(model).values())


def test_a_replayed_mixture_by_its_definition(tmp_path):
    """Qwen3-MoE: the softmax of all scores, of the told experts only, to sum one; times each expert's gated MLP."""
    folder = quantized(tiny_checkpoint("Qwen3Moe", tmp_path / "source"), tmp_path / "nvfp4")
    model, oracle, _ = trainer_and_oracle(folder, tmp_path)
    replay = replay_routers(model.get_base_model())[1]
    block, dense = model.get_base_model().model.layers[1].mlp, oracle.model.layers[1].mlp
    x = torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(2))
    replay.choice = torch.tensor([[0, 1], [3, 2], [1, 3], [0, 2], [2, 1], [3, 0]])
    expected = torch.zeros(6, 64)
    for t, chosen in enumerate(replay.choice.tolist()):
        scores = (dense.gate.weight @ x[0, t]).softmax(-1)
        for e in chosen:
            gate, up = (dense.experts.gate_up_proj[e] @ x[0, t]).chunk(2)
            y = dense.experts.down_proj[e] @ (torch.nn.functional.silu(gate) * up)
            expected[t] += scores[e] / scores[chosen].sum() * y
    torch.testing.assert_close(block(x)[0], expected, atol=1e-5, rtol=1e-4)


def test_expert_lora_equals_merged_weights(tmp_path):
    """ΔW = s·B·A with s = alpha / r: forward equals transformers with W + ΔW, and dA = s·Bᵀ·dW, dB = s·dW·Aᵀ."""
    folder = quantized(tiny_checkpoint("Qwen3Moe", tmp_path / "source"), tmp_path / "nvfp4")
    ours, oracle, adapter = trainer_and_oracle(folder, tmp_path, lora_targets="o_proj", lora_experts=True)
    name = "base_model.model.model.layers.1.mlp.experts.3.up_proj"
    assert adapter[f"{name}.lora_A.weight"].shape == (8, 64)
    assert adapter[f"{name}.lora_B.weight"].shape == (32, 8)
    scaling, merged = 16 / 8, {}
    for layer in (0, 1):
        block = oracle.model.layers[layer]
        for e in range(4):
            for proj in ("gate", "up", "down"):
                key = f"base_model.model.model.layers.{layer}.mlp.experts.{e}.{proj}_proj"
                a, b = adapter[f"{key}.lora_A.weight"], adapter[f"{key}.lora_B.weight"]
                weight = block.mlp.experts.down_proj if proj == "down" else block.mlp.experts.gate_up_proj
                rows = slice(32, 64) if proj == "up" else slice(0, 32) if proj == "gate" else slice(None)
                weight.data[e, rows] += scaling * b @ a
                merged[key] = (weight, e, rows, a, b)
        key = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        delta = scaling * adapter[f"{key}.lora_B.weight"] @ adapter[f"{key}.lora_A.weight"]
        block.self_attn.o_proj.weight.data += delta
    loss, logits = loss_and_logits(ours, TOKENS)
    loss_oracle, logits_oracle = loss_and_logits(oracle, TOKENS)
    assert (logits - logits_oracle).abs().max() < 2e-4
    loss.backward()
    loss_oracle.backward()
    gradients = lora_gradients(ours)
    for key, (weight, e, rows, a, b) in merged.items():
        stacked, _, proj = key.rpartition(".")
        stacked = f"{stacked.rpartition('.')[0]}.{'down_proj' if proj == 'down_proj' else 'gate_up_proj'}"
        d_weight = scaling * weight.grad[e, rows]
        torch.testing.assert_close(gradients[f"{stacked}_lora_B"][e, rows], d_weight @ a.T, rtol=1e-3, atol=1e-6)
        if proj == "down_proj":
            torch.testing.assert_close(gradients[f"{stacked}_lora_A"][e], b.T @ d_weight, rtol=1e-3, atol=1e-6)
