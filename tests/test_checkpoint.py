"""checkpoint.py on its own. `pytest tests/test_checkpoint.py`."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_model_nvfp4 import rewrite
from test_model_nvfp4_models import TOKENS, loss_and_logits, quantized, tiny_checkpoint, trainer_and_oracle

import model_nvfp4 as nvfp4
from checkpoint import check_checkpoint, read_checkpoint
from errors import UserError
from quantize import inspect


def make_mixed(folder: Path, source: Path) -> None:
    """FP8 attention in all three granularities and a dense down_proj beside NVFP4 linears."""
    tensors, dense = load_file(folder / "model.safetensors"), load_file(source / "model.safetensors")
    for layer in (0, 1):
        for proj, scale in (("q_proj", "one"), ("k_proj", "channel"), ("v_proj", "block"), ("o_proj", "one")):
            base = f"model.layers.{layer}.self_attn.{proj}"
            for suffix in ("weight_packed", "weight_scale", "weight_global_scale"):
                del tensors[f"{base}.{suffix}"]
            weight = dense[f"{base}.weight"].float()
            size = {"one": weight.abs().amax(), "channel": weight.abs().amax(1, keepdim=True)}
            size["block"] = weight.abs().amax().reshape(1, 1)  # 64 × 64 is one 128 × 128 block
            tensors[f"{base}.weight"] = (weight / size[scale] * 448).to(torch.float8_e4m3fn)
            name = "weight_scale_inv" if scale == "block" else "weight_scale"
            tensors[f"{base}.{name}"] = size[scale] / 448
            tensors[f"{base}.input_scale"] = torch.ones(())
    save_file(tensors, folder / "model.safetensors")


def test_mixed_precision_with_ignored_layers(source, tmp_path):
    folder = quantized(
        source, tmp_path / "nvfp4", ignore=["re:.*layers\\.0\\.mlp\\.down_proj", "*layers.1.mlp.up_proj"]
    )
    make_mixed(folder, source)
    summary = check_checkpoint(folder)
    assert summary["formats"] == {"nvfp4": 4, "fp8": 8, "plain": 9}
    ours, oracle, _ = trainer_and_oracle(folder, tmp_path)
    kinds = {name: type(m).__name__ for name, m in ours.named_modules() if name.endswith("base_layer")}
    assert kinds["base_model.model.model.layers.0.self_attn.q_proj.base_layer"] == "FP8Linear"
    assert kinds["base_model.model.model.layers.0.mlp.down_proj.base_layer"] == "Linear"
    assert kinds["base_model.model.model.layers.1.mlp.up_proj.base_layer"] == "Linear"
    assert kinds["base_model.model.model.layers.1.mlp.gate_proj.base_layer"] == "NVFP4Linear"
    lora = [p.dtype for name, p in ours.named_parameters() if "lora_" in name]
    assert set(lora) == {torch.float32}, "peft makes float8 LoRA beside a float8 weight; ours is stored as uint8"
    with ours.disable_adapter():
        logits = loss_and_logits(ours, TOKENS)[1]
    assert (logits - loss_and_logits(oracle, TOKENS)[1]).abs().max() < 2e-4


def test_fp8_block_scales_are_read_by_row_and_column(tmp_path):
    """200 × 160 has 2 × 2 blocks of 128: rows in any order get their own block's scales."""
    codes, scale = torch.randn(200, 160).to(torch.float8_e4m3fn), torch.rand(2, 2) + 0.5
    save_file({"a.weight": codes, "a.weight_scale_inv": scale}, tmp_path / "model.safetensors")
    weight = read_checkpoint(tmp_path)["a.weight"]
    ids = torch.tensor([0, 127, 128, 199, 63])
    ours = nvfp4.decode_fp8(codes.view(torch.uint8)[ids], weight.read_scale(ids), torch.float32)
    expect = codes.float() * scale.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :160]
    assert torch.equal(ours, expect[ids])


OLD_MODELOPT = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}


def test_old_and_new_spellings_of_the_config(source, tmp_path):
    """compressed-tensors without scale_dtype and per-group format; ModelOpt with hf_quant_config.json alone."""
    folder = quantized(source, tmp_path / "ct")
    config = json.loads((folder / "config.json").read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]
    del group["format"], group["weights"]["scale_dtype"], group["weights"]["zp_dtype"]
    (folder / "config.json").write_text(json.dumps(config))
    assert check_checkpoint(folder)["dialect"] == "compressed-tensors"

    folder = quantized(source, tmp_path / "modelopt", dialect="modelopt")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "hf_quant_config.json").write_text(json.dumps(OLD_MODELOPT))
    assert check_checkpoint(folder)["dialect"] == "modelopt"
    nvfp4.build_model(folder, lora_rank=4, lora_alpha=8)


def test_several_files_and_index(tmp_path):
    """A sharded source becomes a sharded checkpoint with its own index; a listed file that is missing is named."""
    from transformers import AutoModelForCausalLM

    dense = tiny_checkpoint("Llama", tmp_path / "one")
    AutoModelForCausalLM.from_pretrained(dense).save_pretrained(tmp_path / "many", max_shard_size="60KB")
    folder = quantized(tmp_path / "many", tmp_path / "nvfp4")
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 1
    ours, oracle, _ = trainer_and_oracle(folder, tmp_path)
    with ours.disable_adapter():
        logits = loss_and_logits(ours, TOKENS)[1]
    assert (logits - loss_and_logits(oracle, TOKENS)[1]).abs().max() < 2e-4
    missing = sorted(set(index.values()))[1]
    (folder / missing).unlink()
    with pytest.raises(UserError, match=missing):
        check_checkpoint(folder)


K_PROJ = "model.layers.0.self_attn.k_proj"


def reconfigure(**values):
    def apply(folder):
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] |= values
        (folder / "config.json").write_text(json.dumps(config))

    return apply


def truncate(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-100])


def set_tensor(name, value):
    return rewrite(lambda tensors: tensors.__setitem__(f"{K_PROJ}.{name}", value))


GROUP = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}, "input_activations": None}}
FAULTS = {
    "truncated": (truncate, "model.safetensors is truncated"),
    "no header": (
        lambda f: (f / "model.safetensors").write_bytes(b"\x00" * 64),
        "model.safetensors is truncated or no",
    ),
    "wrong dtype": (
        set_tensor("weight_packed", torch.zeros(32, 32, dtype=torch.int8)),
        "k_proj.weight_packed must be uint8",
    ),
    "wrong shape": (
        set_tensor("weight_packed", torch.zeros(16, 32, dtype=torch.uint8)),
        "k_proj.weight_scale has shape",
    ),
    "missing scale": (rewrite(lambda t: t.pop(f"{K_PROJ}.weight_scale")), "k_proj.weight_packed has no"),
    "missing global": (
        rewrite(lambda t: t.pop(f"{K_PROJ}.weight_global_scale")),
        "has no .*k_proj.weight_global_scale",
    ),
    "missing packed": (rewrite(lambda t: t.pop(f"{K_PROJ}.weight_packed")), "k_proj.weight_.*scale scales no weight"),
    "NaN global": (
        set_tensor("weight_global_scale", torch.tensor([float("nan")])),
        "k_proj.weight_global_scale is no pos",
    ),
    "block 32": (set_tensor("weight_scale", torch.ones(32, 2).to(torch.float8_e4m3fn)), "blocks of 32: NVFP4 has 16"),
    "K": (set_tensor("weight_packed", torch.zeros(32, 36, dtype=torch.uint8)), "k_proj.weight_packed has K = 72"),
    "mxfp4": (set_tensor("weight_scale", torch.ones(32, 2, dtype=torch.uint8)), "packed with torch.uint8 scales"),
    "AWQ": (set_tensor("pre_quant_scale", torch.ones(64)), "pre_quant_scale.*not NVFP4"),
    "method": (reconfigure(quant_method="gptq"), "config.json has quant_method gptq"),
    "group size": (reconfigure(config_groups=GROUP), "config.json has group_size 32"),
    "ignored": (reconfigure(ignore=["re:.*k_proj"]), "k_proj.weight_packed is packed, but .*ignore"),
    "family": (
        set_tensor("weight_global_scale", torch.tensor([7.0])),
        "q_proj, .*k_proj, .*v_proj have different global",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), "has no config.json"),
    "half a config": (lambda f: (f / "config.json").write_text('{"model_type": "ll'), "cannot be read as JSON"),
    "a list for a config": (lambda f: (f / "config.json").write_text("[]"), "holds no JSON object"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "holds no .*safetensors"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_check_checkpoint_names_the_fault(checkpoint, fault):
    damage, sentence = FAULTS[fault]
    damage(checkpoint)
    with pytest.raises(UserError, match=sentence) as error:
        check_checkpoint(checkpoint)
    assert "\n" not in str(error.value)
    assert str(checkpoint) in str(error.value), "the message names the file"


@pytest.mark.parametrize("byte", [0x7F, 0xFF])  # both signs of e4m3's NaN
def test_nan_block_scale_is_found_when_it_is_read(checkpoint, byte):
    rewrite(lambda t: t[f"{K_PROJ}.weight_scale"].view(torch.uint8)[3].fill_(byte))(checkpoint)
    with pytest.raises(UserError, match=r"k_proj\.weight_scale holds NaN"):
        nvfp4.load_weights(nvfp4.build_model(checkpoint, lora_rank=4, lora_alpha=8), checkpoint)
    with pytest.raises(UserError, match=r"k_proj\.weight_scale holds NaN"):
        inspect(checkpoint)


def test_missing_and_unknown_tensors_are_listed(checkpoint):
    rewrite(lambda t: t.pop("model.norm.weight"))(checkpoint)
    with pytest.raises(UserError, match=r"lacks 1 tensors of a LlamaForCausalLM: model\.norm"):
        nvfp4.build_model(checkpoint, lora_rank=4, lora_alpha=8)
    rewrite(lambda t: t.update({"model.norm.weight": torch.ones(64), "model.other": torch.ones(1)}))(checkpoint)
    with pytest.raises(UserError, match=r"has unknown 1 tensors of a LlamaForCausalLM: model\.other"):
        nvfp4.build_model(checkpoint, lora_rank=4, lora_alpha=8)


def test_a_dense_folder_says_how_to_quantize(source, tmp_path):
    with pytest.raises(UserError, match=f"quantize.py {source} OUT"):
        check_checkpoint(source)
    with pytest.raises(UserError, match="is not a folder"):
        check_checkpoint(tmp_path / "nothing")
