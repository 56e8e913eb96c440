"""adapter.py on its own. `pytest tests/test_adapter.py`."""

import pytest
import torch

import model_nvfp4 as nvfp4
from adapter import averaged, load_lora_state_dict, lora_state_dict, read_adapter, save_adapter
from errors import UserError


def test_the_average_is_the_mean_then_fades():
    """Of adapters 4, 8, 6, 9 with a window of 3: means of one, two and three, then a third of the way to the fourth."""
    average, seen = {"a": torch.tensor([100.0])}, []  # what there was before any update counts nothing
    for updates, value in enumerate([4.0, 8.0, 6.0, 9.0], start=1):
        average = averaged(average, {"a": torch.tensor([value])}, updates, 3)
        seen.append(average["a"].item())
    assert seen == pytest.approx([4, 6, 6, 7])
    last = {"a": torch.tensor([9.0])}
    assert averaged(average, last, 5, 1) is last


def test_a_saved_adapter_counts_as_it_did(tmp_path):
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_{}.weight"
    tensors = {name.format("A"): torch.randn(8, 64), name.format("B"): torch.randn(32, 8)}
    save_adapter(tmp_path, tensors, lora_rank=8, lora_alpha=24, base_model="m")
    read, config = read_adapter(tmp_path)
    torch.testing.assert_close(read, tensors, atol=0, rtol=0)
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (8, 24, ["up_proj"])


def test_an_adapter_begins_from_seed_and_name():
    """Peft's start, B zero and A uniform up to 1 / √K, but the same on any number of ranks."""

    def begin(name, seed):
        tensor = torch.full((8, 64), 9.0)
        nvfp4.init_lora(tensor, name, seed)
        return tensor

    first = begin("layers.0.q_proj.lora_A", 0)
    assert torch.equal(first, begin("layers.0.q_proj.lora_A", 0))
    assert not torch.equal(first, begin("layers.0.q_proj.lora_A", 1))
    assert not torch.equal(first, begin("layers.1.q_proj.lora_A", 0))
    assert 0.12 < first.abs().max() <= 1 / 8
    assert not begin("layers.0.q_proj.lora_B", 0).any()


def test_adapter_of_another_shape_is_refused(checkpoint):
    model = nvfp4.build_model(checkpoint, lora_rank=4, lora_alpha=8)
    nvfp4.load_weights(model, checkpoint)
    tensors = lora_state_dict(model)
    name = next(iter(tensors))
    with pytest.raises(UserError, match="another model"):
        load_lora_state_dict(model, {k: v for k, v in tensors.items() if k != name})
    with pytest.raises(UserError, match=r"is \[2, 64\], the model has"):
        load_lora_state_dict(model, tensors | {name: torch.zeros(2, 64)})
