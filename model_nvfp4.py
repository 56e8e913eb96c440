"""NVFP4 checkpoints as frozen, packed, sharded base models for LoRA training, and the commands that make and show them.

    python model_nvfp4.py quantize SRC DST --a16     # SRC: a Hugging Face folder, a Hub name or a .gguf file
    python model_nvfp4.py inspect DST

The format. A weight matrix W (N, K) is cut into blocks of 16 consecutive k. Each weight is a 4-bit E2M1 code, each block
has an 8-bit E4M3 scale, each matrix one fp32 global scale, in all 4.5 bits a weight:

    W[n, k] = E2M1[code[n, k]] * E4M3[scale[n, k // 16]] * global_scale          (in fp32, then rounded once to bf16)

Two codes share a byte, the even k in the low nibble. compressed-tensors stores 1/global_scale (`weight_global_scale`,
divide), ModelOpt stores it as it is (`weight_scale_2`, multiply); everything else is the same bytes.

Training. `build_model` makes the transformers model on the meta device, swaps every module whose weight the checkpoint
packs and lets stock peft put LoRA beside it; `shard` cuts it with FSDP2; `load_weights` reads each rank's rows, and only
those, into place. The packed bytes are what is sharded, gathered and saved for backward; bf16 weights exist for one
matrix at a time, once in forward and once again in backward (a 4-bit matmul cannot run backward: blocks lie along K, and
dgrad contracts over N).

Left out, with the reason:
1. Activations stay bf16, also for W4A4 checkpoints: vLLM computes W4A16 everywhere except on Blackwell linears. Serve
   those weight-only as well (`linear_backend="marlin"`), or quantize with --a16, which every engine serves alike.
2. No merge of the adapter into the 4-bit weights: rounding eats most of what LoRA learned.
3. No calibration data: block scales come from the weights, activation scales of W4A4 are one constant.
4. AWQ and SVDQuant side tensors (`pre_quant_scale`, `svdquant_lora_*`), MXFP4 and integer formats are refused by name.

Axes: N out_features · K in_features · E experts · T tokens · r LoRA rank.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

BLOCK = 16
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])  # (16,)


class UserError(ValueError):
    """A mistake in the user's files or flags, told in one sentence that names the place and the way out."""


# ----------------------------------------------------------------------------------------------------------------------
# The format: decode and encode


def decode_reference(packed, scale, global_scale, dtype=torch.bfloat16):
    """The definition in plain torch. packed (…, N, K/2) uint8, scale (…, N, K/16) uint8 view of e4m3, global_scale fp32
    multiplier of one element or one per leading index (E,); returns (…, N, K) in `dtype`.

    The product is taken in fp32: with the scale rounded to bf16 first, one bf16 result in seven is wrong.
    """
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).long()  # (…, N, K)
    values = E2M1.to(packed.device)[codes].unflatten(-1, (-1, BLOCK))  # (…, N, K/16, 16)
    scale = scale.view(torch.float8_e4m3fn).float() * global_scale.reshape(
        -1, *[1] * (packed.dim() - 1)
    )  # (…, N, K/16)
    return (values * scale.reshape(values.shape[:-1]).unsqueeze(-1)).flatten(-2).to(dtype)  # (…, N, K)


def decode(packed, scale, global_scale, dtype=torch.bfloat16):
    """The fast decode for the tensor's device, bit-equal to `decode_reference` (same arguments)."""
    if packed.dim() == 3:
        return torch.stack([decode(*parts, dtype=dtype) for parts in zip(packed, scale, global_scale)])  # (E, N, K)
    # Every (scale byte, code byte) pair stands for two weights: decode all 65,536 pairs once (.07 ms), then fetch two
    # weights with one gather of one integer. 3 times the naive speed on two cores, and exact by construction.
    byte = torch.arange(256, dtype=torch.uint8, device=packed.device)  # (256,)
    values = E2M1.to(packed.device)[torch.stack((byte & 15, byte >> 4), dim=-1).long()]  # (256, 2)
    scales = byte.view(torch.float8_e4m3fn).float() * global_scale  # (256,)
    table = (
        (values * scales[:, None, None]).to(dtype).view({2: torch.int32, 4: torch.int64}[dtype.itemsize])
    )  # (256, 256, 1)
    index = (scale.int() << 8).unsqueeze(-1) | packed.unflatten(-1, (-1, BLOCK // 2))  # (N, K/16, 8)
    return table.flatten().index_select(0, index.flatten()).view(dtype).view(packed.shape[0], -1)  # (N, K)


def quantize_tensor(weight, amax, recipe="max"):
    """weight (N, K), amax = largest magnitude of its fused family -> packed (N, K/2) u8, scale (N, K/16) u8, fp32 (1,).

    `max` maps each block's largest weight to 6; `four-over-six` to 6 or 4, whichever has the smaller squared error (and
    leaves head-room in the global scale for the larger block scale); `mse` searches the scale on a grid.
    """
    top = 256 if recipe == "four-over-six" else 448
    factors = {"max": [1.0], "four-over-six": [1.0, 1.5], "mse": [f / 20 for f in range(16, 25)]}[recipe]
    global_scale = (amax.float() / (6 * top)).reshape(1).clamp(min=torch.finfo(torch.float32).tiny)  # (1,)
    blocks = weight.float().unflatten(-1, (-1, BLOCK))  # (N, K/16, 16)
    best_error, best_scale, best_codes = None, None, None
    for factor in factors:
        scale = (
            (blocks.abs().amax(-1) * factor / (6 * global_scale)).clamp(max=448).to(torch.float8_e4m3fn)
        )  # (N, K/16)
        scale = torch.where(
            scale.float() == 0, torch.tensor(0.125), scale.float()
        )  # an all-zero block, as compressed-tensors
        scaled = blocks / (scale * global_scale).unsqueeze(-1)  # (N, K/16, 16)
        magnitude = scaled.abs()
        # Round to nearest, ties to the even code: a tie goes up at .75, 1.75 and 3.5, down at the others.
        codes = sum((magnitude > b).byte() for b in (0.25, 1.25, 2.5, 5.0))
        codes = codes + sum((magnitude >= b).byte() for b in (0.75, 1.75, 3.5)) + (scaled.signbit().byte() << 3)
        error = (E2M1[codes.long()] - scaled).mul(scale.unsqueeze(-1)).square().sum(-1)  # (N, K/16)
        if best_error is None:
            best_error, best_scale, best_codes = error, scale, codes
        better = error < best_error
        best_error, best_scale = torch.where(better, error, best_error), torch.where(better, scale, best_scale)
        best_codes = torch.where(better.unsqueeze(-1), codes, best_codes)
    codes = best_codes.flatten(-2)  # (N, K)
    packed = codes[:, 0::2] | (codes[:, 1::2] << 4)  # (N, K/2)
    return packed, best_scale.to(torch.float8_e4m3fn).view(torch.uint8), global_scale


# ----------------------------------------------------------------------------------------------------------------------
# The frozen layers


class FrozenMatmul(torch.autograd.Function):
    """y = x @ W.T + bias for a frozen W that is decoded here and, instead of being saved, once more in backward."""

    @staticmethod
    def forward(ctx, x, bias, decoder, *packed):
        ctx.decoder = decoder
        ctx.save_for_backward(*packed)
        return F.linear(x, decoder(*packed, dtype=x.dtype), bias)  # (…, K) @ (K, N) -> (…, N)

    @staticmethod
    def backward(ctx, grad):
        packed = ctx.saved_tensors  # once: activation checkpointing refuses a second look
        weight = ctx.decoder(*packed, dtype=grad.dtype)  # (N, K)
        return grad @ weight, *[None] * (2 + len(packed))  # (…, N) @ (N, K) -> (…, K)


def frozen(*shape, dtype=torch.uint8):
    """A parameter that only bytes are stored in. uint8, because FSDP's mixed precision casts every float parameter."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device="meta"), requires_grad=False)


class NVFP4Linear(nn.Linear):
    """A linear layer over packed weights. A subclass of nn.Linear, so that peft's own dispatcher accepts it."""

    def __init__(self, linear: nn.Linear):
        nn.Module.__init__(self)  # not nn.Linear's: that allocates the dense weight
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.weight = frozen(self.out_features, self.in_features // 2)  # (N, K/2)
        self.weight_scale = frozen(self.out_features, self.in_features // BLOCK)  # (N, K/16)
        # A buffer, because FSDP would round an fp32 parameter to bf16 (.1 % off, silently), and not persistent, because
        # get_model_state_dict(ignore_frozen_params=True) would still return it.
        self.register_buffer("global_scale", torch.empty(1, device="meta"), persistent=False)

    def forward(self, x):
        return FrozenMatmul.apply(x, self.bias, decode, self.weight, self.weight_scale, self.global_scale)


def dense_weight(linear: nn.Module, dtype: torch.dtype) -> torch.Tensor:
    """(N, K) of any linear layer in `dtype`, for a caller that multiplies by itself (a chunked lm_head)."""
    if isinstance(linear, NVFP4Linear):
        return decode(linear.weight, linear.weight_scale, linear.global_scale, dtype)
    return linear.weight.to(dtype)


# ----------------------------------------------------------------------------------------------------------------------
# The checkpoint: what is in the files


@dataclass(frozen=True)
class Stored:
    """One tensor in a safetensors file, known by its header alone."""

    file: Path
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    def read(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows start:stop (all leading axes flattened to rows) as (rows, width) or, without a range, the whole tensor."""
        width = self.shape[-1] if self.shape else 1
        rows = math.prod(self.shape) // max(width, 1) if len(self.shape) > 1 else math.prod(self.shape)
        width = width if len(self.shape) > 1 else 1
        whole, stop = stop is None, rows if stop is None else stop
        item = self.dtype.itemsize
        raw = np.fromfile(self.file, np.uint8, (stop - start) * width * item, offset=self.offset + start * width * item)
        data = torch.from_numpy(raw).view(self.dtype)
        return data.view(self.shape) if whole else data.view(stop - start, width)


@dataclass(frozen=True)
class Weight:
    """A weight as the model knows it (`name` ends in .weight or .bias …) and the tensors that store it."""

    name: str
    format: str  # "nvfp4" or "plain"
    data: Stored
    scale: Stored | None = None
    global_scale: Stored | None = None
    divide: bool = False  # compressed-tensors stores the reciprocal

    @property
    def shape(self):
        return (*self.data.shape[:-1], self.data.shape[-1] * 2) if self.format == "nvfp4" else self.data.shape

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1]) if len(self.shape) > 1 else math.prod(self.shape)

    def read_global_scale(self) -> float:
        value = self.global_scale.read().double().reshape(())
        return float((1 / value if self.divide else value).float())


DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


def read_headers(folder: Path) -> dict[str, Stored]:
    """Every tensor of the folder's safetensors files, by name; no weight byte is read."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give a checkpoint folder with config.json and *.safetensors")
    stored = {}
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        with open(file, "rb") as f:
            length = int.from_bytes(f.read(8), "little")
            header = json.loads(f.read(length)) if 8 + length <= size else {}
        header.pop("__metadata__", None)
        if not header or 8 + length + max(t["data_offsets"][1] for t in header.values()) != size:
            raise UserError(f"{file} is truncated: its header promises more bytes than the file has; copy it again")
        for key, t in header.items():
            if t["dtype"] not in DTYPES:
                raise UserError(f"{file}: tensor {key} has the data type {t['dtype']}, which this loader does not know")
            stored[key] = Stored(file, key, DTYPES[t["dtype"]], tuple(t["shape"]), 8 + length + t["data_offsets"][0])
    if not stored:
        raise UserError(f"{folder} holds no *.safetensors weights")
    return stored


def read_checkpoint(folder: str | Path) -> dict[str, Weight]:
    """Weights by their name in the checkpoint; the tensors decide the format, not the config."""
    stored = read_headers(Path(folder))
    weights = {}
    for key, data in stored.items():
        base = key.rpartition(".")[0]
        get = lambda suffix, base=base: stored.get(f"{base}.{suffix}")  # noqa: E731
        if key.endswith(".weight_packed") or (key.endswith(".weight") and get("weight_scale_2")):
            ct = key.endswith("_packed")
            global_scale = get("weight_global_scale" if ct else "weight_scale_2")
            weights[f"{base}.weight"] = Weight(f"{base}.weight", "nvfp4", data, get("weight_scale"), global_scale, ct)
        elif not key.endswith(
            (".weight_scale", ".weight_global_scale", ".weight_scale_2", "input_scale", "input_global_scale")
        ):
            weights[key] = Weight(key, "plain", data)
    return weights


def check_checkpoint(model_dir: str | Path) -> dict:
    """Raises UserError unless the folder holds a sound NVFP4 checkpoint; reads headers, JSON and scalars only."""
    weights = read_checkpoint(model_dir)
    if not (Path(model_dir) / "config.json").is_file():
        raise UserError(f"{model_dir} has no config.json")
    config = json.loads((Path(model_dir) / "config.json").read_text())
    packed = [w for w in weights.values() if w.format == "nvfp4"]
    if not packed:
        raise UserError(
            f"{model_dir} holds no NVFP4 weights; make some with: python model_nvfp4.py quantize {model_dir} OUT --a16"
        )
    return {"model_type": config.get("model_type"), "nvfp4_tensors": len(packed), "tensors": len(weights)}


# ----------------------------------------------------------------------------------------------------------------------
# From the checkpoint's tensors to the model's parameters


@dataclass
class Rows:
    """Where the rows of one model parameter come from: row ids[i] of all `weights` laid end to end."""

    weights: list[Weight]
    ids: torch.Tensor  # (rows,) int64


def empty_model(config, attn_implementation=None, dtype=torch.bfloat16):
    """The transformers model with its parameters on meta and its computed buffers (rotary frequencies) in place."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with init_empty_weights(include_buffers=False), no_init_weights():
        kwargs = {"attn_implementation": attn_implementation} if attn_implementation else {}
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, **kwargs)
    model.tie_weights()
    return model


def read_config(folder):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # transformers would build its own quantized layers
    return config


def place_weights(model, weights: dict[str, Weight]) -> tuple[dict[str, Rows], list[str]]:
    """Maps model parameter names to checkpoint rows with transformers' own conversion tables.

    The tables fuse, split and permute weights (per-expert matrices to one (E, N, K) tensor, say). Instead of weights we
    send row numbers through them, so the answer says which row of which file each row of each parameter is: packed
    bytes, scales and plain weights can then be read alike, a slice at a time.
    """
    from copy import deepcopy

    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    table = get_model_conversion_mapping(model)
    renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in table if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    state, prefix = model.state_dict(), model.base_model_prefix
    pending, unused = {}, []
    for key in sorted(weights, key=dot_natural_key):
        target, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if target not in state and key in state:
            target, pattern = rename_source_key(key, [], [], prefix, state)
        if target not in state:
            unused.append(key)
            continue
        new = deepcopy(by_pattern[pattern]) if pattern else WeightRenaming(key, target)
        converter, sources = pending.setdefault(target, (new, []))
        start = sum(weight.rows for weight in sources)
        shape = weights[key].shape
        ids = torch.arange(start, start + weights[key].rows)  # (rows,)
        converter.add_tensor(
            target, key, pattern or key, ids.view(*shape[:-1], 1) if len(shape) > 1 else ids.view(shape)
        )
        sources.append(weights[key])
    placed = {}
    for first_target, (converter, sources) in pending.items():
        for target, ids in converter.convert(first_target, model=model, config=model.config).items():
            placed[target] = Rows(sources, (ids[0] if isinstance(ids, list) else ids).flatten())
    return placed, unused


def swap_packed_modules(model, placed: dict[str, Rows]) -> None:
    """Replaces every nn.Linear whose weight is packed in the checkpoint."""
    for target, rows in placed.items():
        if rows.weights[0].format == "nvfp4":
            path = target.rpartition(".")[0]
            model.set_submodule(path, NVFP4Linear(model.get_submodule(path)))


def lora_linears(model) -> list[str]:
    """The linears of the decoder layers that get LoRA: all but routers and kv_b_proj.

    A router is frozen because a small change sends tokens to other experts. kv_b_proj is, because vLLM's MLA decode uses
    it absorbed into other products and would apply its LoRA to the prompt only.
    """
    decoder = {id(module) for module in model.get_decoder().modules()}
    parents = dict(model.named_modules())
    names = []
    for name, module in parents.items():
        parent = parents[name.rpartition(".")[0]] if name else None
        router = hasattr(parent, "experts") and "gate" in name.rpartition(".")[2]
        if isinstance(module, nn.Linear) and id(module) in decoder and not router and not name.endswith("kv_b_proj"):
            names.append(name)
    return names


def build_model(
    model_dir,
    *,
    lora_rank: int,
    lora_alpha: float,
    lora_targets: str = "all-linear",
    lora_experts: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    attn_implementation: str | None = None,
):
    """The peft model of the checkpoint, parameters on meta. lora_targets: all-linear, or module names split by commas."""
    from peft import LoraConfig, get_peft_model

    weights = read_checkpoint(model_dir)
    model = empty_model(read_config(model_dir), attn_implementation, dtype)
    model.config.use_cache = False
    placed, _ = place_weights(model, weights)
    swap_packed_modules(model, placed)
    wanted = None if lora_targets == "all-linear" else set(lora_targets.split(","))
    names = [n for n in lora_linears(model) if wanted is None or n.rpartition(".")[2] in wanted]
    if not names or (wanted and wanted - {n.rpartition(".")[2] for n in names}):
        raise UserError(
            f"--lora-targets {lora_targets}: the model's linears are "
            f"{', '.join(sorted({n.rpartition('.')[2] for n in lora_linears(model)}))}"
        )
    suffixes = sorted({n.rpartition(".")[2] for n in names})
    others = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n not in set(names)]
    config = LoraConfig(
        r=lora_rank,
        lora_alpha=lora_alpha,
        target_modules=suffixes,
        exclude_modules=others or None,
        task_type="CAUSAL_LM",
    )
    peft_model = get_peft_model(model, config, low_cpu_mem_usage=True)
    return peft_model


# ----------------------------------------------------------------------------------------------------------------------
# Sharding and loading


def shard(
    root: nn.Module,
    *,
    mesh=None,
    dtype: torch.dtype = torch.bfloat16,
    reshard_after_forward: bool | int = True,
    activation_checkpointing: bool = False,
) -> None:
    """FSDP2 around every decoder layer and `root`, which holds the peft model at any depth. mesh: 1-D, or 2-D for HSDP.

    The process group must exist. Trainable parameters stay fp32 and are cast to `dtype` when gathered.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers.modeling_layers import GradientCheckpointingLayer

    assert dist.is_initialized(), "shard() needs torch.distributed.init_process_group() first, also on one rank"
    if activation_checkpointing:
        base_model(root).gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    # Inputs are not cast: the batch of the root carries fp32 log-probs and advantages that must stay so.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in [m for m in root.modules() if isinstance(m, GradientCheckpointingLayer)]:
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    fully_shard(root, mesh=mesh, mp_policy=policy)


def peft_model(root: nn.Module):
    from peft import PeftModel

    return next(module for module in root.modules() if isinstance(module, PeftModel))


def base_model(root: nn.Module):
    return peft_model(root).get_base_model()


def local_part(tensor: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """This rank's part of a parameter and the range of the leading axis that it holds."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(tensor, DTensor):
        return tensor, 0, tensor.shape[0] if tensor.dim() else 1
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), offset[0], offset[0] + shape[0]


def read_rows(parts: list[Stored], ids: torch.Tensor) -> torch.Tensor:
    """Rows `ids` of the tensors `parts` laid end to end, (len(ids), width); only the range that is needed is read."""
    out, start = None, 0
    for part in parts:
        rows = math.prod(part.shape[:-1]) if len(part.shape) > 1 else math.prod(part.shape)
        here = (ids >= start) & (ids < start + rows)
        if here.any():
            local = ids[here] - start
            low, high = int(local.min()), int(local.max()) + 1
            data = part.read(low, high)  # (high - low, width)
            data = data if len(local) == high - low and bool((local.diff() == 1).all()) else data[local - low]
            out = data.new_empty(len(ids), data.shape[1]) if out is None else out
            out[here] = data
        start += rows
    return out


@torch.no_grad()
def load_weights(root: nn.Module, model_dir, *, seed: int = 0) -> None:
    """Materialises every parameter of `root` and fills this rank's shards from the files. No collective.

    LoRA B is zero and A comes from (seed, name), so that it does not depend on the number of ranks.
    """
    model = base_model(root)
    tied = [[n for n, q in model.named_parameters(remove_duplicate=False) if q is p] for p in model.parameters()]
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    root._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))
    for first, *others in [names for names in tied if len(names) > 1]:  # _apply gives each name a tensor of its own
        for name in others:
            path, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(path), leaf, model.get_parameter(first))
    weights = read_checkpoint(model_dir)
    clean = {name.replace(".base_layer.", "."): t for name, t in [*model.named_parameters(), *model.named_buffers()]}
    placed, _ = place_weights(empty_model(read_config(model_dir)), weights)
    filled = set()
    for name, tensor in clean.items():
        if "lora_" in name:
            init_lora(tensor, name, seed)
            continue
        path, _, leaf = name.rpartition(".")
        target = f"{path}.weight" if leaf in ("weight_scale", "global_scale") else name
        if target not in placed:
            continue
        rows = placed[target]
        if leaf == "global_scale":
            tensor.fill_(rows.weights[0].read_global_scale())
            continue
        parts = [w.scale if leaf == "weight_scale" else w.data for w in rows.weights]
        local, start, stop = local_part(tensor)
        per = len(rows.ids) // tensor.shape[0]  # rows of the file per index of the leading axis
        data = read_rows(parts, rows.ids[start * per : stop * per]) if stop > start else local
        data = data.view(torch.uint8) if tensor.dtype == torch.uint8 else data
        local.copy_(data.view(local.shape))
        filled.add(name)


def init_lora(tensor: torch.Tensor, name: str, seed: int) -> None:
    local, start, stop = local_part(tensor)
    if "lora_B" in name:
        local.zero_()
        return
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    bound = 1 / math.sqrt(tensor.shape[-1])  # peft's own: kaiming_uniform with a = sqrt(5)
    full = torch.empty(tensor.shape).uniform_(-bound, bound, generator=generator)  # (r, K)
    local.copy_(full[start:stop])


# ----------------------------------------------------------------------------------------------------------------------
# The adapter in and out


def lora_parameters(root: nn.Module) -> dict[str, torch.Tensor]:
    named = peft_model(root).named_parameters()
    return {name.replace(".default", ""): p for name, p in named if "lora_" in name}


def lora_state_dict(root: nn.Module) -> dict[str, torch.Tensor]:
    """Full fp32 CPU tensors under PEFT's saved names, the same on every rank. Collective: every rank must call."""
    tensors = {name: p.detach() for name, p in lora_parameters(root).items()}
    return {k: (t.full_tensor() if isinstance(t, DTensor) else t).to("cpu", copy=True) for k, t in tensors.items()}


@torch.no_grad()
def load_lora_state_dict(root: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """The inverse of `lora_state_dict`, from full tensors that every rank holds. No collective."""
    parameters = lora_parameters(root)
    if parameters.keys() != tensors.keys():
        raise UserError(
            f"the adapter does not fit the model: {sorted(parameters.keys() ^ tensors.keys())[:4]} do not match"
        )
    for name, parameter in parameters.items():
        if parameter.shape != tensors[name].shape:
            raise UserError(
                f"adapter tensor {name} has shape {tuple(tensors[name].shape)}, not {tuple(parameter.shape)}"
            )
        local, start, stop = local_part(parameter)
        local.copy_(tensors[name][start:stop])


def save_adapter(
    folder, tensors: dict[str, torch.Tensor], *, lora_rank: int, lora_alpha: float, base_model: str
) -> None:
    """Writes a PEFT folder that peft, transformers and `vllm serve --enable-lora` load as it is, in the dtype given."""
    from peft import LoraConfig
    from safetensors.torch import save_file

    Path(folder).mkdir(parents=True, exist_ok=True)
    save_file(
        {k: v.contiguous() for k, v in tensors.items()}, Path(folder) / "adapter_model.safetensors", {"format": "pt"}
    )
    LoraConfig(
        r=lora_rank,
        lora_alpha=lora_alpha,
        target_modules=sorted({name.split(".")[-3] for name in tensors}),
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(base_model),
        inference_mode=True,
    ).save_pretrained(folder)


# ----------------------------------------------------------------------------------------------------------------------
# Commands


def fused_family(name: str, shape) -> tuple:
    """Siblings that read the same input share a global scale: vLLM fuses q/k/v, gate/up … and keeps one scale."""
    return name.rpartition(".")[0].rpartition(".")[0], shape[-1]


def gguf_to_folder(gguf: Path, folder: Path) -> None:
    """A dense Hugging Face folder from a GGUF file (in memory at once: GGUF files are small models here)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def quantize(source: Path, target: Path, *, a16: bool, ignore: list[str], recipe: str, dialect: str) -> None:
    """Writes `target`, a folder that vLLM serves as it is, one safetensors file at a time."""
    from safetensors.torch import save_file
    from tqdm import tqdm

    weights = read_checkpoint(source)
    model = empty_model(read_config(source))
    placed, _ = place_weights(model, weights)
    chosen, output = set(), model.get_output_embeddings()
    for name, rows in placed.items():
        module = model.get_submodule(name.rpartition(".")[0])
        if isinstance(module, nn.Linear) and module is not output and name.endswith(".weight"):
            chosen |= {w.name for w in rows.weights}
    amax: dict[tuple, torch.Tensor] = {}
    for name in tqdm(sorted(chosen), desc="global scales", unit="tensor"):
        family = fused_family(name, weights[name].shape)
        largest = weights[name].data.read().float().abs().amax()
        amax[family] = torch.maximum(amax.get(family, largest), largest)
    progress = tqdm(total=len(weights), desc="quantize", unit="tensor")
    for file in sorted({w.data.file for w in weights.values()}):
        out = {}
        for name, weight in weights.items():
            if weight.data.file != file:
                continue
            data, base = weight.data.read(), name.rpartition(".")[0]
            if name in chosen:
                packed, scale, global_scale = quantize_tensor(data, amax[fused_family(name, weight.shape)], recipe)
                scale = scale.view(torch.float8_e4m3fn)
                out |= {f"{base}.weight_packed": packed, f"{base}.weight_scale": scale}
                out[f"{base}.weight_global_scale"] = 1 / global_scale
            else:
                out[name] = data
            progress.update()
        save_file({k: v.contiguous() for k, v in out.items()}, target / file.name, {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    scheme = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": BLOCK, "symmetric": True}
    group = {
        "targets": ["Linear"],
        "format": "nvfp4-pack-quantized",
        "weights": {
            **scheme,
            "dynamic": False,
            "scale_dtype": "torch.float8_e4m3fn",
            "zp_dtype": "torch.float8_e4m3fn",
        },
        "input_activations": None if a16 else {**scheme, "dynamic": "local"},
    }
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": sorted(
            {"lm_head"}
            | {
                n.rpartition(".")[0]
                for n, w in weights.items()
                if n not in chosen and len(w.shape) == 2 and n.endswith(".weight")
            }
        ),
    }
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def quantize_command(args) -> None:
    source, target = Path(args.source), Path(args.target)
    if (target / "config.json").is_file():
        check_checkpoint(target)
        print(f"{target} is already complete")
        return
    if not source.exists():
        raise UserError(f"{source} does not exist")
    if args.sha256:
        digest = hashlib.sha256(source.read_bytes()).hexdigest()
        if digest != args.sha256:
            raise UserError(
                f"{source} has sha256 {digest}, not {args.sha256}: the file is damaged or not the one expected"
            )
    partial = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    partial.mkdir(parents=True)
    if source.suffix == ".gguf":
        dense = partial / "dense"
        gguf_to_folder(source, dense)
    else:
        dense = source
    quantize(dense, partial, a16=args.a16, ignore=args.ignore, recipe=args.recipe, dialect=args.dialect)
    for file in dense.iterdir():
        if file.is_file() and not file.name.startswith(("model", "pytorch_model", "config.json")):
            shutil.copy(file, partial)
    shutil.rmtree(partial / "dense", ignore_errors=True)
    partial.rename(target)
    print(f"{target}: {sum(f.stat().st_size for f in target.iterdir()) / 1e6:.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    quant = commands.add_parser("quantize", help="make an NVFP4 checkpoint from a dense one")
    quant.add_argument("source", help="Hugging Face folder, Hub name or .gguf file")
    quant.add_argument("target", help="folder to write")
    quant.add_argument("--a16", action="store_true", help="weight-only: activations stay bf16 in every engine")
    quant.add_argument(
        "--ignore", action="append", default=[], help="module name or re:pattern to leave dense; repeatable"
    )
    quant.add_argument("--recipe", choices=["max", "mse", "four-over-six"], default="max")
    quant.add_argument("--dialect", choices=["compressed-tensors", "modelopt"], default="compressed-tensors")
    quant.add_argument("--sha256", help="checksum the source file must have")
    args = parser.parse_args()
    quantize_command(args)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
