"""The NVFP4 format, its layers, the quantizer and the errors of model_nvfp4.py.

    pytest tests/test_model_nvfp4.py

Expected values come from the worked example of the format, from compressed-tensors' own decompressor, from the slow
reference, or from mathematics.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_model_nvfp4_models import TOKENS, quantized, tiny_checkpoint

import model_nvfp4 as nvfp4
from checkpoint import read_checkpoint
from errors import UserError

# ----------------------------------------------------------------------------------------------------------------------
# The format

# One row, K = 32, as compressed-tensors 0.20.1 and ModelOpt's formula both encode it; the first block meets every tie.
A = [6, -6, 5, -5, 3.5, -3.5, 2.5, -2.5, 1.75, 1.25, 0.75, 0.25, -0.25, 0, 0.26, -1.3]  # · 2**-10
B = [2.625, -1.5, 0.75, -0.4, 0.2, -0.1, 0.05, 1.0, -2.0, 2.2, -0.3, 0.6, 0, 1.2, -1.1, 0.9]
PACKED = bytes.fromhex("F7E6E6C4240208B1" + "D7A38140" + "7E39504D")
DECODED_A = [6, -6, 4, -4, 4, -4, 2, -2, 2, 1, 1, 0, -0.0, 0, 0.5, -1.5]  # · 2**-10
DECODED_B = [2.625, -1.3125, 0.65625, -0.4375, 0.21875, -0.0, 0, 0.875]
DECODED_B += [-1.75, 2.625, -0.21875, 0.65625, 0, 1.3125, -1.3125, 0.875]


def bits(tensor):
    """Equality of bits, so that -0 differs from 0 and NaN equals itself."""
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize])


def random_packed(n, k, seed=0, lead=()):
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (*lead, n, k // 2), dtype=torch.uint8, generator=generator)
    scale = torch.randint(0, 127, (*lead, n, k // 16), dtype=torch.uint8, generator=generator)
    return packed, scale, torch.rand(lead or (1,), generator=generator) * 1e-3


def worked_example():
    row = torch.tensor([[x * 2**-10 for x in A] + B])  # (1, 32)
    decoded = torch.tensor([[x * 2**-10 for x in DECODED_A] + DECODED_B])  # (1, 32)
    return row, torch.tensor(list(PACKED), dtype=torch.uint8).view(1, 16), decoded


@pytest.mark.parametrize("decode", [nvfp4.decode_reference, nvfp4.decode_table])
def test_worked_example_decodes(decode):
    _, packed, decoded = worked_example()
    scale = torch.tensor([[0x38, 0x7E]], dtype=torch.uint8)
    out = decode(packed, scale, torch.tensor([2.0**-10]), torch.float32)
    assert torch.equal(bits(out), bits(decoded))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_table_is_the_reference_for_every_scale_and_code(dtype):
    """All 65,536 pairs of a scale byte and a code byte, NaN scales and negative ones included."""
    byte = torch.arange(256, dtype=torch.uint8)
    packed = byte.view(1, -1, 1).expand(256, 256, 8).reshape(256, -1).contiguous()  # (256, 256·8)
    scale = byte.view(-1, 1).expand(256, 256).contiguous()  # (256, 256)
    for value in (2.0**-10, 1 / 20608, 3.1e-5, 1.7):
        parts = packed, scale, torch.tensor([value])
        assert torch.equal(bits(nvfp4.decode_table(*parts, dtype)), bits(nvfp4.decode_reference(*parts, dtype)))


def test_stacked_experts_decode_with_their_own_global_scale():
    packed, scale, global_scale = random_packed(32, 64, lead=(3,))
    both = nvfp4.decode(packed, scale, global_scale), nvfp4.decode_reference(packed, scale, global_scale)
    assert torch.equal(bits(both[0]), bits(both[1]))
    for e in range(3):
        one = nvfp4.decode_reference(packed[e], scale[e], global_scale[e : e + 1])
        assert torch.equal(bits(both[0][e]), bits(one))


@pytest.mark.parametrize(("n", "k"), [(576, 576), (1536, 576), (2048, 4096)])  # SmolLM2's q and up, a slice of Llama 8B
def test_decode_is_compressed_tensors_decompressor(n, k):
    from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
    from compressed_tensors.quantization import preset_name_to_scheme

    packed, scale, global_scale = random_packed(n, k, seed=n)
    state = {
        "weight_packed": packed,
        "weight_scale": scale.view(torch.float8_e4m3fn),
        "weight_global_scale": 1 / global_scale,
    }
    theirs = NVFP4PackedCompressor.decompress(state, preset_name_to_scheme("NVFP4A16", ["Linear"]))["weight"]
    ours = nvfp4.decode(packed, scale, 1 / (1 / global_scale))
    assert theirs.dtype == torch.bfloat16
    assert torch.equal(ours, theirs), f"{(ours != theirs).float().mean():.2%} of the weights differ"


def test_scale_rounded_to_bf16_would_be_wrong():
    """Why decode multiplies in fp32: the tempting bf16 product is off for several weights in a hundred."""
    packed, scale, global_scale = random_packed(256, 256)
    right = nvfp4.decode_reference(packed, scale, global_scale)
    tempting = (scale.view(torch.float8_e4m3fn).float() * global_scale).bfloat16()  # (N, K/16)
    values = nvfp4.decode_reference(packed, torch.full_like(scale, 0x38), torch.ones(1))  # E2M1 values
    wrong = (values.unflatten(-1, (-1, 16)) * tempting.unsqueeze(-1)).flatten(-2)
    assert 0.03 < (wrong != right).float().mean() < 0.2


def test_triton_kernel_in_the_interpreter():
    """The CUDA kernel, run by Triton's interpreter, bit for bit the reference: all pairs, and a stack of experts.

    In fp32, because the interpreter truncates when it casts to bf16; that a GPU rounds shows in the compiled code.
    """
    pytest.importorskip("triton")
    script = """
import torch, model_nvfp4 as m
byte = torch.arange(256, dtype=torch.uint8)
packed = byte.view(1, -1, 1).expand(256, 256, 8).reshape(256, -1).contiguous()
scale = byte.view(-1, 1).expand(256, 256).contiguous()
g = torch.Generator().manual_seed(0)
cases = [(packed, scale, torch.tensor([3.1e-5])),
         (torch.randint(0, 256, (3, 48, 40), dtype=torch.uint8, generator=g),
          torch.randint(0, 127, (3, 48, 5), dtype=torch.uint8, generator=g), torch.tensor([1e-3, 2e-4, 7.7]))]
for parts in cases:
    ours, right = m.decode_triton(*parts, torch.float32), m.decode_reference(*parts, torch.float32)
    same = (ours.view(torch.int32) == right.view(torch.int32)) | (ours.isnan() & right.isnan())
    assert same.all(), f"{(~same).sum()} of {same.numel()} differ"
print("equal")
"""
    root = Path(__file__).parents[1]
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(root)}
    run = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, cwd=root)
    assert run.stdout.endswith("equal\n"), run.stderr[-2000:]


@pytest.mark.parametrize("capability", [90, 100])
def test_triton_kernel_compiles_without_spills(capability, tmp_path):
    """Ahead of time, without a GPU: no stack, hence no spills, and bf16 is rounded to nearest as torch rounds."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    pointers = {"packed_ptr": "*u8", "scale_ptr": "*u8", "global_ptr": "*fp32", "out_ptr": "*bf16"}
    signature = pointers | {"num_bytes": "i32", "expert_bytes": "i32", "TILE": "constexpr"}
    source = triton.compiler.ASTSource(nvfp4.decode_kernel, signature=signature, constexprs={"TILE": 1024})
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert "cvt.rn.bf16" in compiled.asm["ptx"]
    file = tmp_path / "decode.cubin"
    file.write_bytes(compiled.asm["cubin"])
    tool = next(Path(triton.__file__).parent.rglob("cuobjdump"), None)
    if tool is None:
        pytest.skip("cuobjdump did not come with Triton")
    usage = subprocess.run([tool, "--dump-resource-usage", file], capture_output=True, text=True).stdout
    print(usage)
    assert "STACK:0" in usage, f"the kernel spills: {usage}"


# ----------------------------------------------------------------------------------------------------------------------
# The layers


def nvfp4_linear(n, k, bias=False):
    with torch.device("meta"):
        layer = nvfp4.NVFP4Linear(torch.nn.Linear(k, n, bias=bias), None)
    layer.to_empty(device="cpu")
    packed, scale, global_scale = random_packed(n, k)
    layer.weight.data.copy_(packed)
    layer.weight_scale.data.copy_(scale)
    layer.weight_global.copy_(global_scale)
    return layer


def test_linear_equals_the_dense_layer_forward_and_backward():
    layer = nvfp4_linear(48, 64, bias=True)
    with torch.no_grad():
        layer.bias.copy_(torch.randn(48))
    weight = nvfp4.dense_weight(layer, torch.float32)
    x = torch.randn(3, 5, 64, requires_grad=True)
    dense_x = x.detach().clone().requires_grad_()
    y, dense_y = layer(x).mul_(2), torch.nn.functional.linear(dense_x, weight, layer.bias) * 2  # in place, as models do
    torch.testing.assert_close(y, dense_y, rtol=0, atol=0)
    y.square().sum().backward()
    dense_y.square().sum().backward()
    torch.testing.assert_close(x.grad, dense_x.grad, rtol=0, atol=0)


@pytest.mark.parametrize("needs_input_grad", [True, False])
def test_lora_in_one_function_is_pefts_lora(needs_input_grad):
    """Output and every gradient against the forward that peft has for the same layer, bias and scaling included."""
    from peft import LoraConfig
    from peft.tuners.lora import Linear as LoraLinear

    torch.manual_seed(0)
    base = nvfp4_linear(48, 64, bias=True)
    with torch.no_grad():
        base.bias.copy_(torch.randn(48))
    config = LoraConfig(r=4, lora_alpha=6)
    layer = LoraLinear(base, "default", config, r=4, lora_alpha=6).float()
    torch.nn.init.normal_(layer.lora_B["default"].weight)
    x, grad = torch.randn(3, 5, 64, requires_grad=needs_input_grad), torch.randn(3, 5, 48)
    leaves = [layer.lora_A["default"].weight, layer.lora_B["default"].weight, *([x] if needs_input_grad else [])]
    theirs = layer(x)
    wanted = torch.autograd.grad(theirs, leaves, grad)
    ours = nvfp4.lora_forward(layer, x)
    torch.testing.assert_close(ours, theirs)
    for got, want in zip(torch.autograd.grad(ours, leaves, grad), wanted):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)
    nvfp4.lora_forward(layer, x).mul_(2).sum().backward()  # models scale what a layer gives in place
    layer.enable_adapters(False)
    torch.testing.assert_close(nvfp4.lora_forward(layer, x), base(x), rtol=0, atol=0)


def test_saved_for_backward_is_at_most_32_percent_of_dense():
    def saved_bytes(run):
        sizes = {}
        pack = lambda t: sizes.__setitem__(t.data_ptr(), t.numel() * t.element_size()) or t  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            run()
        return sum(sizes.values())

    layer = nvfp4_linear(512, 512)
    x = torch.randn(1, 512, dtype=torch.bfloat16, requires_grad=True)
    dense = torch.randn(512, 512, dtype=torch.bfloat16)
    ours, theirs = saved_bytes(lambda: layer(x)), saved_bytes(lambda: torch.nn.functional.linear(x, dense))
    assert theirs >= dense.numel() * 2
    assert ours <= 0.32 * theirs, f"{ours} bytes against {theirs}"


def test_global_scale_is_no_parameter_and_no_saved_buffer():
    """A parameter would be rounded to bf16 by FSDP (0.0012345678 to 0.0012359619), a saved buffer would be exported."""
    layer = nvfp4_linear(16, 32)
    assert {name: p.dtype for name, p in layer.named_parameters()} == {
        "weight": torch.uint8,
        "weight_scale": torch.uint8,
    }
    assert "weight_global" not in layer.state_dict()
    assert not any(p.requires_grad for p in layer.parameters())


def test_fp8_decode_per_tensor_per_channel_and_per_block():
    weight = torch.randn(200, 160)  # not a multiple of the 128 block, on purpose
    codes = weight.to(torch.float8_e4m3fn)
    blocks = torch.rand(2, 2) + 0.5
    expect = codes.float() * blocks.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :160]
    rows = blocks[torch.arange(200) // 128].contiguous()
    assert torch.equal(nvfp4.decode_fp8(codes.view(torch.uint8), rows.view(torch.uint8), torch.float32), expect)
    channel = torch.rand(200, 1)
    ours = nvfp4.decode_fp8(codes.view(torch.uint8), channel.view(torch.uint8), torch.float32)
    assert torch.equal(ours, codes.float() * channel)


# ----------------------------------------------------------------------------------------------------------------------
# quantize, load, inspect


# ----------------------------------------------------------------------------------------------------------------------
# Mistakes: one sentence, naming file and tensor

K_PROJ = "model.layers.0.self_attn.k_proj"


def rewrite(change):
    def apply(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return apply


def test_unknown_lora_target_lists_the_modules(checkpoint):
    with pytest.raises(UserError, match=r"w_q: this model has .*q_proj"):
        nvfp4.build_model(checkpoint, lora_rank=4, lora_alpha=8, lora_targets="w_q")


# ----------------------------------------------------------------------------------------------------------------------
# Traps of others that this file exists to avoid


def test_transformers_scales_fused_experts_wrongly(tmp_path):
    """transformers drops weight_global_scale of merged experts: they come out 1/global_scale too large. Ours do not."""
    from transformers import AutoModelForCausalLM

    source = tiny_checkpoint("Qwen3Moe", tmp_path / "source")
    folder = quantized(source, tmp_path / "nvfp4")
    right = AutoModelForCausalLM.from_pretrained(source).model.layers[0].mlp.experts.down_proj.float()
    model = nvfp4.build_model(folder, lora_rank=4, lora_alpha=8)
    nvfp4.load_weights(model, folder)
    experts = model.get_base_model().model.layers[0].mlp.experts
    decoder, packed = nvfp4.packed_parts(experts, "down_proj")
    ours = decoder(*packed, dtype=torch.float32)
    assert (ours - right).norm() / right.norm() < 0.12
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    theirs(input_ids=TOKENS)  # decompresses on the first forward
    theirs = theirs.model.layers[0].mlp.experts.down_proj.float()
    ratio = theirs.norm() / right.norm()
    if ratio < 2:
        pytest.skip("this transformers has the fault mended")
    assert ratio > 100, "the known fault of the transformers loader has changed; read facts again"


def test_kv_b_proj_and_routers_are_never_trained(tmp_path):
    folder = quantized(tiny_checkpoint("DeepseekV3", tmp_path / "source"), tmp_path / "nvfp4")
    model = nvfp4.build_model(folder, lora_rank=4, lora_alpha=8)
    trained = {name.split(".lora_A")[0] for name, _ in model.named_parameters() if "lora_A" in name}
    leaves = {name.rpartition(".")[2] for name in trained}
    assert "kv_b_proj" not in leaves
    assert leaves == {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert "base_model.model.model.layers.1.mlp.shared_experts.gate_proj" in trained
    bias = model.get_base_model().model.layers[1].mlp.gate.e_score_correction_bias
    assert bias.dtype == torch.float32, "transformers keeps it in fp32"


def test_the_gate_of_a_shared_expert_stays_dense_and_frozen(tmp_path):
    """It is an nn.Linear, unlike the routers of most models, and vLLM builds it dense whatever the config says."""
    folder = quantized(tiny_checkpoint("Qwen2Moe", tmp_path / "source"), tmp_path / "nvfp4")
    gate = "model.layers.0.mlp.shared_expert_gate"
    assert read_checkpoint(folder)[f"{gate}.weight"].format == "plain"
    assert gate in json.loads((folder / "config.json").read_text())["quantization_config"]["ignore"]
    model = nvfp4.build_model(folder, lora_rank=4, lora_alpha=8)
    assert not [name for name, _ in model.named_parameters() if "shared_expert_gate" in name and "lora_" in name]
