"""What the files of a checkpoint hold: names, shapes and formats, read from headers and JSON without touching a weight.

    weights = read_checkpoint("models/SmolLM2-135M-Instruct-NVFP4")     # {name: Weight}
    weights["model.layers.0.mlp.up_proj.weight"].format                 # "nvfp4", "fp8" or "plain"

The tensors decide the format; `check_checkpoint` holds the config against them. compressed-tensors stores an NVFP4 matrix as
`weight_packed`, `weight_scale` and `weight_global_scale` (the reciprocal), ModelOpt as `weight`, `weight_scale` and
`weight_scale_2`. What the numbers mean is told in model_nvfp4.py.

Left out: AWQ and SVDQuant side tensors, MXFP4 and integer formats are refused by name.
"""

from __future__ import annotations

import fnmatch
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from errors import read_json, require

BLOCK = 16
FP8_BLOCK = 128  # edge of the square blocks of block-wise FP8
# vLLM multiplies each of these groups as one matrix and keeps one of their global scales for all.
FUSED = [
    ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"), ("wq", "wk", "wv"),
    ("q_a_proj", "kv_a_proj_with_mqa"), ("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a"),
]  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# One tensor, one weight
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """A tensor in a safetensors file, known by the file's header; `row` means an index of all its axes but the last."""

    file: Path
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1]) if len(self.shape) > 1 else math.prod(self.shape)

    def read_rows(self, start: int, stop: int) -> torch.Tensor:
        """(stop - start, width). Plain reads, not a memory map: mapped pages would count as this rank's memory."""
        width = self.shape[-1] if len(self.shape) > 1 else 1
        size = width * self.dtype.itemsize
        raw = np.fromfile(self.file, np.uint8, (stop - start) * size, offset=self.offset + start * size)
        return torch.from_numpy(raw).view(self.dtype).view(stop - start, width)

    def read(self) -> torch.Tensor:
        return self.read_rows(0, self.rows).view(self.shape)

    def __str__(self) -> str:
        return f"{self.file}: tensor {self.key}"


@dataclass(frozen=True)
class Weight:
    """A weight as the model knows it, and the tensors that store it. `name` ends in .weight, .bias …"""

    name: str
    format: str  # "nvfp4", "fp8" or "plain"
    data: Stored
    scale: Stored | None = None
    global_scale: Stored | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.data.shape[:-1], self.data.shape[-1] * 2) if self.format == "nvfp4" else self.data.shape

    @property
    def stored(self) -> list[Stored]:
        return [part for part in (self.data, self.scale, self.global_scale) if part is not None]

    @property
    def bytes(self) -> int:
        return sum(math.prod(part.shape) * part.dtype.itemsize for part in self.stored)

    def read_global_scale(self) -> float:
        """The fp32 multiplier; compressed-tensors stores its reciprocal."""
        value = self.global_scale.read().reshape(1)
        return float(1 / value if self.data.key.endswith(".weight_packed") else value)

    def read_scale(self, ids: torch.Tensor) -> torch.Tensor:
        """Scale bytes of rows `ids`: (len(ids), K/16) e4m3, or for FP8 (len(ids), 4·C) of fp32."""
        if self.format == "nvfp4":
            scale = read_segment(self.scale, ids).view(torch.uint8)  # (rows, K/16)
            sound = not bool(((scale & 127) == 127).any())
            require(sound, f"{self.scale} holds NaN block scales; the checkpoint is damaged, copy or make it again")
            return scale
        scale = self.scale.read().float()
        scale = scale.reshape(scale.shape if scale.dim() == 2 else (-1, 1))  # (1, N or N/128; 1 or K/128)
        per = {1: self.data.rows, self.data.rows: 1}.get(len(scale), FP8_BLOCK)  # rows of W per row of scales
        return scale[ids // per].contiguous().view(torch.uint8)

    @property
    def fp8_columns(self) -> int | None:
        return None if self.format != "fp8" else (self.scale.shape[1] if len(self.scale.shape) == 2 else 1)


def read_segment(stored: Stored, ids: torch.Tensor) -> torch.Tensor:
    """Rows `ids` of one tensor; the range that spans them is read."""
    low, high = int(ids.min()), int(ids.max()) + 1
    data = stored.read_rows(low, high)
    return data if high - low == len(ids) and bool((ids.diff() == 1).all()) else data[ids - low]


# ---------------------------------------------------------------------------------------------------------------------
# A folder


def read_headers(folder: Path) -> dict[str, Stored]:
    """Every tensor of the folder's safetensors files by name; no weight byte is read."""
    require(folder.is_dir(), f"{folder} is not a folder; give a checkpoint folder (config.json and *.safetensors)")
    files = sorted(folder.glob("*.safetensors"))
    require(files, f"{folder} holds no *.safetensors weights")
    if index := read_json(folder, "model.safetensors.index.json"):
        wanted = sorted({folder / name for name in index["weight_map"].values()})
        missing = [file for file in wanted if file not in files]
        require(not missing, f"{(missing or ['?'])[0]} is missing though the index lists it; copy the checkpoint again")
        files = wanted
    stored = {}
    for file in files:
        size = file.stat().st_size
        with open(file, "rb") as f:
            length = int.from_bytes(f.read(8), "little")
            header = f.read(length) if 8 + length <= size else b""
        require(header.startswith(b"{"), f"{file} is truncated or no safetensors file; copy it again")
        tensors = {key: t for key, t in json.loads(header).items() if key != "__metadata__"}
        end = 8 + length + max((t["data_offsets"][1] for t in tensors.values()), default=0)
        require(end == size, f"{file} is truncated: its header promises {end} bytes, it has {size}; copy it again")
        for key, t in tensors.items():
            require(t["dtype"] in DTYPES, f"{file}: tensor {key} has data type {t['dtype']}, which is not known here")
            stored[key] = Stored(file, key, DTYPES[t["dtype"]], tuple(t["shape"]), 8 + length + t["data_offsets"][0])
    return stored


# Tensors beside a weight: its scales, what only vLLM uses (activations, KV cache), and what is not NVFP4.
SCALES = ("weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale")
ENGINE = ("input_scale", "input_global_scale", "k_scale", "v_scale", "q_scale", "activation_scale")
REFUSED = ("pre_quant_scale", "svdquant_lora_a", "svdquant_lora_b", "weight_zero_point", "weight_shape", "qzeros")


def read_checkpoint(folder: str | Path) -> dict[str, Weight]:
    """Weights by name. The tensors decide the format; `check_checkpoint` holds the config against them."""
    stored = read_headers(Path(folder))
    weights, used = {}, set()
    for key, data in stored.items():
        base, _, leaf = key.rpartition(".")
        require(leaf not in REFUSED, f"{data}: AWQ, SVDQuant and integer formats are not NVFP4; use a plain checkpoint")
        if leaf in SCALES + ENGINE:
            continue
        if leaf == "weight_packed" or (leaf == "weight" and data.dtype == torch.uint8):
            names = "weight_scale", "weight_global_scale" if leaf == "weight_packed" else "weight_scale_2"
            if f"{base}.weight_scale" in stored:
                dtype = stored[f"{base}.weight_scale"].dtype
                require(dtype == torch.float8_e4m3fn, f"{data} is packed with {dtype} scales; NVFP4 has float8_e4m3fn")
            for name in names:
                sentence = f"{data} has no {base}.{name} beside it; the checkpoint is incomplete"
                require(f"{base}.{name}" in stored, sentence)
            weight = Weight(f"{base}.weight", "nvfp4", data, *(stored[f"{base}.{name}"] for name in names))
            check_nvfp4(weight)
        elif leaf == "weight" and data.dtype == torch.float8_e4m3fn:
            scale = stored.get(f"{base}.weight_scale") or stored.get(f"{base}.weight_scale_inv")
            require(scale, f"{data} is FP8 and has no {base}.weight_scale beside it; the checkpoint is incomplete")
            weight = Weight(key, "fp8", data, scale)
            blocks = (math.ceil(data.rows / FP8_BLOCK), math.ceil(data.shape[-1] / FP8_BLOCK))
            known = scale.shape in ((), (1,), (1, 1), (data.rows,), (data.rows, 1), blocks)
            require(known, f"{scale} has shape {list(scale.shape)}; FP8 scales are one, {data.rows} or {list(blocks)}")
        else:
            weight = Weight(key, "plain", data)
        weights[weight.name] = weight
        used |= {part.key for part in weight.stored}
    stray = [str(stored[key]) for key in stored if key not in used and key.rpartition(".")[2] in SCALES]
    require(not stray, f"{''.join(stray[:1])} scales no weight ({len(stray)} such); the checkpoint is incomplete")
    return weights


def check_nvfp4(weight: Weight) -> None:
    data, scale, global_scale = weight.stored
    sound = data.dtype == torch.uint8 and len(data.shape) == 2
    require(sound, f"{data} must be uint8 of two axes, not {data.dtype} {list(data.shape)}")
    n, k = weight.shape
    require(k % BLOCK == 0, f"{data} has K = {k}, which is no multiple of {BLOCK}, the block of NVFP4")
    width = scale.shape[1] if len(scale.shape) == 2 and scale.shape[0] == n else 0
    block = f" (blocks of {k // width}: NVFP4 has {BLOCK})" if width else ""
    require(width == k // BLOCK, f"{scale} has shape {list(scale.shape)}, not {[n, k // BLOCK]}{block}")
    sound = global_scale.dtype == torch.float32 and math.prod(global_scale.shape) == 1
    require(sound, f"{global_scale} must be one float32, not {global_scale.dtype} {list(global_scale.shape)}")


def has_experts(folder: str | Path) -> bool:
    """Whether the checkpoint holds routed experts, matrix by matrix, as packed ones are; reads headers only."""
    return any(re.search(r"\.experts\.\d+\.", name) for name in read_headers(Path(folder)))


def head_is_packed(folder: str | Path) -> bool:
    """Whether the LM head is stored as more than a weight and a bias, in whatever format; reads headers of safetensors only."""
    names = read_headers(Path(folder)) if any(Path(folder).glob("*.safetensors")) else {}
    parts = (name.rpartition(".") for name in names)
    return any(module.endswith("lm_head") and leaf not in ("weight", "bias") for module, _, leaf in parts)


# ---------------------------------------------------------------------------------------------------------------------
# Is it sound?


def is_ignored(module: str, patterns: list[str]) -> bool:
    """compressed-tensors: names and `re:` expressions from the start of the name; ModelOpt: names and wildcards."""
    names = [p for p in patterns if not p.startswith("re:")]
    expressions = [p.removeprefix("re:") for p in patterns if p.startswith("re:")]
    return any(fnmatch.fnmatchcase(module, p) for p in names) or any(re.match(p, module) for p in expressions)


def check_checkpoint(model_dir: str | Path) -> dict:
    """A summary of a sound NVFP4 checkpoint, or UserError. Reads headers, JSON and one-number tensors, no weights."""
    folder = Path(model_dir)
    weights, config = read_checkpoint(folder), read_json(folder, "config.json")
    require(config, f"{folder} has no config.json; the folder must hold a Hugging Face checkpoint")
    quant = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    quant = quant or read_json(folder, "hf_quant_config.json").get("quantization") or {}
    method = quant.get("quant_method") or ("modelopt" if "quant_algo" in quant else "none")
    sound = method in ("compressed-tensors", "modelopt", "none")
    require(sound, f"{folder}/config.json has quant_method {method}; NVFP4 is compressed-tensors or modelopt")
    packed = [w for w in weights.values() if w.format == "nvfp4"]
    command = f"python quantize.py {folder} OUT --a16"
    require(packed, f"{folder} is not an NVFP4 checkpoint; make one with: {command}")
    require(method != "none", f"{folder}/config.json has no quantization_config, which vLLM needs for packed weights")
    groups = (quant.get("config_groups") or {}).values()
    groups = [group for group in groups if (group.get("weights") or {}).get("num_bits") == 4]
    for size in [group["weights"].get("group_size") for group in groups] + [quant.get("group_size")]:
        require(size in (BLOCK, None), f"{folder}/config.json has group_size {size}; NVFP4 has blocks of {BLOCK}")
    ignore = quant.get("ignore") or quant.get("exclude_modules") or []
    for weight in packed:
        sentence = f"{weight.data} is packed, but the config's ignore list names it: vLLM would read it as dense"
        require(not is_ignored(weight.name.removesuffix(".weight"), ignore), sentence)
    check_global_scales(packed)
    algorithms = [quant.get("quant_algo") or "", *(v["quant_algo"] for v in quant.get("quantized_layers", {}).values())]
    weight_only = any("A16" in name for name in algorithms)
    weight_only = weight_only or (bool(groups) and not any(group.get("input_activations") for group in groups))
    return {
        "architecture": (config.get("architectures") or ["?"])[0],
        "dialect": method,
        "activations": "bf16 (W4A16)" if weight_only else "4 bit (W4A4)",
        "parameters": sum(math.prod(w.shape) for w in weights.values()),
        "weight_bytes": sum(w.bytes for w in weights.values()),
        "formats": {f: sum(w.format == f for w in weights.values()) for f in ("nvfp4", "fp8", "plain")},
    }


def fused_families(modules) -> list[list[str]]:
    """Those of the modules (by name) that vLLM multiplies as one matrix."""
    parents = sorted({name.rpartition(".")[0] for name in modules})
    families = [[f"{parent}.{leaf}" for leaf in family] for parent in parents for family in FUSED]
    return [[name for name in family if name in modules] for family in families]


def check_global_scales(packed: list[Weight]) -> None:
    """Every global scale is a positive number, and layers that vLLM fuses have the same one."""
    values = {}
    for weight in packed:
        value = values[weight.name.removesuffix(".weight")] = weight.read_global_scale()
        require(0 < value < math.inf, f"{weight.global_scale} is no positive finite number; the checkpoint is damaged")
    folder = packed[0].data.file.parent
    for members in fused_families(values):
        sentence = (
            f"{folder}: {', '.join(members)} have different global scales, of which vLLM would keep one and damage"
        )
        sentence += f" the others; rewrite them with: python quantize.py {folder} OUT"
        require(len({values[name] for name in members}) <= 1, sentence)
