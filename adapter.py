"""The LoRA adapter between the sharded model, the names of a PEFT file, and a folder.

    tensors = lora_state_dict(policy)                      # full fp32 CPU tensors by their PEFT names; collective
    load_lora_state_dict(policy, tensors)                  # and back into each rank's shard
    save_adapter("runs/NAME/adapter", tensors, lora_rank=16, lora_alpha=32, base_model="models/…")

Routed experts are stacked in the model, (E, r, K) and (E, N, r), and matrix by matrix in the file, which is what vLLM maps.
How LoRA comes beside a frozen layer is in model_nvfp4.py (`build_model`); how the engine takes it, in rollout.py
(`push_adapter`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from errors import UserError, read_json, require
from model_nvfp4 import empty_model, expert_parameters, local_part, peft_model_of, read_config, whole

# ---------------------------------------------------------------------------------------------------------------------
# Of the model


def lora_parameters(root: nn.Module) -> dict[str, torch.Tensor]:
    named = peft_model_of(root).named_parameters()
    return {name.replace(".default.", "."): p for name, p in named if "lora_" in name}


def expert_slices(root: nn.Module) -> dict[str, list[tuple[str, int, slice]]]:
    """For every stacked LoRA parameter, the saved per-expert names with their expert and rows of B.

    Saved names follow the checkpoint's own (…experts.3.gate_proj), which is what vLLM maps. gate and up share their A.
    """
    model, slices = peft_model_of(root).get_base_model(), {}
    for stacked, (module, leaf) in expert_parameters(model).items():
        if not hasattr(module, f"{leaf}_lora_A"):
            continue
        experts, n, _ = getattr(module, leaf).shape
        found = slices[f"base_model.model.{stacked}"] = []
        for expert in range(experts):
            for first, last, weight, _ in model.checkpoint_rows[stacked].segments(expert * n, (expert + 1) * n):
                found.append((f"base_model.model.{weight.name.removesuffix('.weight')}", expert, slice(first, last)))
    return slices


def lora_state_dict(root: nn.Module) -> dict[str, torch.Tensor]:
    """Full fp32 CPU tensors under PEFT's saved names, the same on every rank. Collective: every rank must call."""
    full = {}
    for name, parameter in lora_parameters(root).items():
        tensor = parameter.detach()
        full[name] = whole(tensor).to("cpu", copy=True)
    for stacked, experts in expert_slices(root).items():
        a, b = full.pop(f"{stacked}_lora_A"), full.pop(f"{stacked}_lora_B")  # (E, r, K), (E, N, r)
        for name, expert, rows in experts:
            full[f"{name}.lora_A.weight"], full[f"{name}.lora_B.weight"] = a[expert].clone(), b[expert, rows].clone()
    return full


@torch.no_grad()
def load_lora_state_dict(root: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """The inverse of `lora_state_dict`, from full tensors that every rank holds. No collective."""
    parameters, tensors = lora_parameters(root), dict(tensors)
    for stacked, experts in expert_slices(root).items():
        a = torch.zeros(parameters[f"{stacked}_lora_A"].shape)  # (E, r, K)
        b = torch.zeros(parameters[f"{stacked}_lora_B"].shape)  # (E, N, r)
        for name, expert, rows in [part for part in experts if f"{part[0]}.lora_A.weight" in tensors]:
            a[expert], b[expert, rows] = tensors.pop(f"{name}.lora_A.weight"), tensors.pop(f"{name}.lora_B.weight")
        tensors |= {f"{stacked}_lora_A": a, f"{stacked}_lora_B": b}
    different = ", ".join(sorted(parameters.keys() ^ tensors.keys())[:4])
    require(not different, f"the adapter is for another model or other --lora-targets: {different} …")
    for name, parameter in parameters.items():
        sound = parameter.shape == tensors[name].shape
        require(sound, f"adapter tensor {name} is {list(tensors[name].shape)}, the model has {list(parameter.shape)}")
        local, start, stop = local_part(parameter)
        local.copy_(tensors[name][start:stop])


@contextmanager
def adapter_off(policy: nn.Module) -> Iterator[None]:
    """Inside, the adapter counts zero times and the policy is the frozen base.

    Not peft's `disable_adapter`: it switches requires_grad off meanwhile, and FSDP, should its first forward fall into that,
    takes the adapter for frozen ever after and fails in backward.
    """
    layers = [module for module in policy.modules() if hasattr(module, "lora_A")]  # peft's: a scaling for each adapter
    experts = [module for module in policy.modules() if hasattr(module, "lora_scaling")]
    scalings, expert_scalings = [layer.scaling for layer in layers], [module.lora_scaling for module in experts]
    for layer in layers:
        layer.scaling = dict.fromkeys(layer.scaling, 0.0)
    for module in experts:
        module.lora_scaling = 0.0
    yield
    for layer, scaling in zip(layers, scalings):
        layer.scaling = scaling
    for module, scaling in zip(experts, expert_scalings):
        module.lora_scaling = scaling


def averaged(
    average: dict[str, torch.Tensor], adapter: dict[str, torch.Tensor], updates: int, window: int
) -> dict[str, torch.Tensor]:
    """The mean of the adapters of all `updates` up to `window`; from then on the newest counts 1/window and older ones fade.

    What single steps on a few noisy groups do to the policy cancels, while all of them have learned the same (averaging of
    iterates, Polyak and Juditsky 1992). The rollouts are always the last adapter's.
    """
    if window == 1:
        return adapter
    return {name: average[name].lerp(tensor, 1 / min(updates, window)) for name, tensor in adapter.items()}


# ---------------------------------------------------------------------------------------------------------------------
# In a file


def save_adapter(
    folder: str | Path, tensors: dict[str, torch.Tensor], *, lora_rank: int, lora_alpha: float, base_model: str
) -> None:
    """Writes a PEFT folder that peft, transformers and `vllm serve --enable-lora` load as it is, in the dtype given."""
    from peft import LoraConfig

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "adapter_model.safetensors", {"format": "pt"})
    LoraConfig(
        r=lora_rank,
        lora_alpha=lora_alpha,
        target_modules=sorted({name.split(".")[-3] for name in tensors}),
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(base_model),
        inference_mode=True,
    ).save_pretrained(folder)


def read_adapter(folder: str | Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """A PEFT folder as `push_adapter` takes it: tensors and adapter_config.json."""
    return load_file(Path(folder) / "adapter_model.safetensors"), read_json(Path(folder), "adapter_config.json")


def check_adapter(adapter: Path, model: Path) -> int:
    """The rank of a PEFT folder that belongs on this model; UserError in one sentence when it does not.

    Shapes come from the headers of the adapter and from the model's modules on the meta device: no weights are read.
    Experts are left to vLLM, which names them one by one where transformers fuses them.
    """
    weights = adapter / "adapter_model.safetensors"
    for path in (adapter / "adapter_config.json", weights):
        if not path.is_file():
            raise UserError(f"--adapter {adapter} is no PEFT folder: it has no {path.name}.")
    config = read_json(adapter, "adapter_config.json")
    base_name, rank = config.get("base_model_name_or_path"), config.get("r")
    if not isinstance(rank, int):
        raise UserError(f"--adapter {adapter} is no LoRA: its adapter_config.json names no rank r.")
    if base_name and Path(base_name).resolve().name != model.resolve().name:  # either may be a link
        raise UserError(
            f"--adapter {adapter} was trained on {base_name}, not on {model} (if that is the same model under another "
            "name, correct base_model_name_or_path in its adapter_config.json)."
        )
    try:
        with safe_open(weights, "numpy") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise UserError(f"{weights} is not a readable safetensors file ({error}).") from error

    modules = dict(empty_model(read_config(model)).named_modules())
    for name, shape in shapes.items():
        target = name.removeprefix("base_model.model.").partition(".lora_")[0]
        if ".experts" in target:
            continue
        if getattr(getattr(modules.get(target), "weight", None), "ndim", 0) != 2:
            raise UserError(f"--adapter {adapter} targets {target}, which is no linear layer of {model}.")
        n, k = modules[target].weight.shape
        expected = (rank, k) if ".lora_A." in name else (n, rank)
        if shape != expected:
            raise UserError(
                f"--adapter {adapter} does not fit: rank {rank} on the {n} × {k} weight of {model} makes {name} "
                f"{expected[0]} × {expected[1]}, but it is {shape[0]} × {shape[1]} (another rank or another model)."
            )
    return rank
