"""NVFP4 checkpoints as frozen, packed, sharded base models for LoRA training.

    model = build_model(folder, lora_rank=16, lora_alpha=32)      # transformers + peft, parameters on the meta device
    shard(model)                                                  # FSDP2: packed bytes are what is cut
    load_weights(model, folder)                                   # each rank reads its rows, and only those

The format. A weight matrix W (N, K) is cut into blocks of 16 consecutive k. Each weight is a 4-bit E2M1 code, each
block has an 8-bit E4M3 scale and each matrix one fp32 global scale, together 4.5 bits a weight:

    W[n, k] = E2M1[code[n, k]] * E4M3[scale[n, k // 16]] * global_scale         (in fp32, rounded once to bf16)

Two codes share a byte, the even k in the low nibble. compressed-tensors stores 1/global_scale (`weight_global_scale`),
ModelOpt stores it as it is (`weight_scale_2`); all other bytes are the same.

Training. `build_model` makes the transformers model on the meta device, swaps every module whose weight the checkpoint
packs, and lets stock peft put LoRA beside it; `shard` cuts it with FSDP2; `load_weights` reads each rank's rows, and
only those, into place. Packed bytes are what is sharded, gathered and saved for backward. A bf16 weight exists for one
matrix at a time, in forward and again in backward: a 4-bit matmul cannot run backward, because the blocks lie along K
and dgrad contracts over N.

Left out, with the reason:
1. Activations stay bf16, also for W4A4 checkpoints and FP8 layers. vLLM computes NVFP4 as W4A16 everywhere except in
   Blackwell's linears; serve those weight-only too (`linear_backend="marlin"`) or quantize with --a16.
2. No merge of the adapter into the 4-bit weights: rounding eats most of what LoRA learned.
3. No calibration: block scales come from the weights alone, the activation scale of W4A4 is a constant.
4. Experts that a model holds transposed (gpt-oss) or that a dense checkpoint stores as one tensor stay as they are.
5. AWQ and SVDQuant side tensors, MXFP4 and integer formats are refused by name.

Axes: N out_features · K in_features · E experts · S (token, expert) pairs · r LoRA rank.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from checkpoint import BLOCK, FP8_BLOCK, Weight, read_checkpoint, read_segment
from errors import require

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])  # (16,)


# ---------------------------------------------------------------------------------------------------------------------
# The format: decode


def decode_reference(packed, scale, global_scale, dtype=torch.bfloat16):
    """The definition in plain torch. packed (…, N, K/2) uint8, scale (…, N, K/16) uint8 view of e4m3, global_scale fp32
    multiplier, one element or one per expert (E,); returns (…, N, K) in `dtype`.

    The product is taken in fp32: with the scale rounded to bf16 first, several weights in a hundred come out wrong.

    Byte 0xF2 is the codes 2 (which stands for 1) and 15 (for −6); scale byte 0x40 is 2 in E4M3; the global scale is 1/4.

    >>> packed, scale = torch.tensor([[0xF2] + [0] * 7], dtype=torch.uint8), torch.tensor([[0x40]], dtype=torch.uint8)
    >>> decode_reference(packed, scale, torch.tensor([0.25])).tolist()[0][:4]
    [0.5, -3.0, 0.0, 0.0]
    """
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).long()  # (…, N, K)
    values = E2M1.to(packed.device)[codes].unflatten(-1, (-1, BLOCK))  # (…, N, K/16, 16)
    global_scale = global_scale.reshape(-1, *[1] * (packed.dim() - 1))  # (E or 1, 1, 1)
    scale = (scale.view(torch.float8_e4m3fn).float() * global_scale).reshape(values.shape[:-1])  # (…, N, K/16)
    return (values * scale.unsqueeze(-1)).flatten(-2).to(dtype)  # (…, N, K)


def decode_table(packed, scale, global_scale, dtype=torch.bfloat16):
    """`decode_reference` for one matrix, as one gather: a (scale byte, code byte) pair stands for two weights, so all
    65,536 pairs are decoded once (.07 ms), and one integer fetched is two weights. The index is made of two codes at a time:
    torch is slow at adding something to rows as short as a block's."""
    byte = torch.arange(256, dtype=torch.uint8, device=packed.device)  # (256,)
    values = E2M1.to(packed.device)[torch.stack((byte & 15, byte >> 4), dim=-1).long()]  # (256, 2)
    scales = byte.view(torch.float8_e4m3fn).float() * global_scale  # (256,)
    table = (values * scales[:, None, None]).to(dtype)  # (256, 256, 2)
    table = table.view({2: torch.int32, 4: torch.int64}[dtype.itemsize]).flatten()  # (65536,)
    index = packed.int().view(torch.int64).view(-1, BLOCK // 4)  # (N·K/16, 4), each of two codes
    index += (scale.long() * (2**8 + 2**40)).view(-1, 1)  # (N·K/16, 4)
    return table.index_select(0, index.view(torch.int32).flatten()).view(dtype).view(packed.shape[0], -1)  # (N, K)


if find_spec("triton"):
    import triton
    import triton.language as tl

    @triton.jit
    def decode_kernel(packed_ptr, scale_ptr, global_ptr, out_ptr, num_bytes, expert_bytes, TILE: tl.constexpr):
        """One program decodes TILE code bytes into 2·TILE weights, both formats by arithmetic on bits: an instruction
        that converts fp8 exists from sm_89 on only."""
        at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
        mask = at < num_bytes
        byte = tl.load(packed_ptr + at, mask=mask, other=0).to(tl.int32)
        e4m3 = tl.load(scale_ptr + at // 8, mask=mask, other=0).to(tl.int32)
        exponent, mantissa = (e4m3 >> 3) & 15, e4m3 & 7
        normal = (((exponent + 120) << 23) | (mantissa << 20)).to(tl.float32, bitcast=True)  # 120 = 127 - 7
        scale = tl.where(exponent == 0, mantissa.to(tl.float32) * 0.001953125, normal)  # subnormal: mantissa * 2**-9
        scale = tl.where((e4m3 & 127) == 127, float("nan"), scale)
        scale = tl.where(e4m3 >= 128, -scale, scale) * tl.load(global_ptr + at // expert_bytes, mask=mask, other=0.0)
        pair = tl.join(byte & 15, byte >> 4)  # (TILE, 2), even k first
        exponent, mantissa = (pair >> 1) & 3, pair & 1
        normal = (((exponent + 126) << 23) | (mantissa << 22)).to(tl.float32, bitcast=True)  # 126 = 127 - 1
        value = tl.where(exponent == 0, mantissa.to(tl.float32) * 0.5, normal)
        value = (value.to(tl.int32, bitcast=True) | ((pair >> 3) << 31)).to(tl.float32, bitcast=True)  # keeps -0
        out = (value * tl.expand_dims(scale, 1)).to(out_ptr.dtype.element_ty)
        place = tl.expand_dims(at * 2, 1) + tl.expand_dims(tl.arange(0, 2), 0)
        tl.store(out_ptr + place, out, mask=tl.expand_dims(mask, 1))


def decode_triton(packed, scale, global_scale, dtype=torch.bfloat16):
    """`decode_reference` on a GPU; matrices and (E, N, K) stacks alike."""
    assert packed.is_contiguous() and scale.is_contiguous(), "the kernel walks both as flat bytes"
    out = torch.empty(*packed.shape[:-1], packed.shape[-1] * 2, dtype=dtype, device=packed.device)  # (…, N, K)
    expert_bytes = packed.numel() // global_scale.numel()
    grid = (triton.cdiv(packed.numel(), 1024),)
    decode_kernel[grid](packed, scale, global_scale, out, packed.numel(), expert_bytes, TILE=1024)
    return out


def decode(packed, scale, global_scale, dtype=torch.bfloat16):
    """The fast decode for the tensor's device, bit-equal to `decode_reference` (same arguments)."""
    if packed.is_cuda:
        return decode_triton(packed, scale, global_scale, dtype)
    if packed.dim() == 3:
        return torch.stack([decode_table(*parts, dtype) for parts in zip(packed, scale, global_scale)])  # (E, N, K)
    return decode_table(packed, scale, global_scale, dtype)


def decode_fp8(codes, scale, dtype=torch.bfloat16):
    """codes (…, N, K) uint8 view of e4m3, scale (…, N, 4·C) bytes of fp32 (…, N, C), C = 1 or one per 128 columns."""
    weight, scale = codes.view(torch.float8_e4m3fn).float(), scale.view(torch.float32)  # (…, N, K), (…, N, C)
    if scale.shape[-1] > 1:
        scale = scale.repeat_interleave(FP8_BLOCK, dim=-1)[..., : weight.shape[-1]]  # (…, N, K)
    return (weight * scale).to(dtype)


# ---------------------------------------------------------------------------------------------------------------------
# The frozen layers


def compute_dtype() -> torch.dtype:
    """What trainer and engine compute in on this machine: bf16, but fp32 on a CPU that has no units for bf16.

    There torch emulates bf16 in a tenth of the speed, and vLLM's norms for AVX2 cut bits off instead of rounding: engine and
    trainer then part by .1 nats a token, in fp32 by less than .0001.
    """
    units = torch.cuda.is_available() or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if units else torch.float32


def frozen(*shape, dtype=torch.uint8) -> nn.Parameter:
    """A parameter for stored bytes. uint8, because FSDP's mixed precision casts every float parameter, also float8."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device="meta"), requires_grad=False)


def pack_parameter(module: nn.Module, name: str, fp8_columns: int | None) -> None:
    """Replaces the dense parameter `name` (…, N, K) by its packed codes under the same name, and scales beside it."""
    *lead, n, k = getattr(module, name).shape
    delattr(module, name)
    if fp8_columns:
        module.register_parameter(name, frozen(*lead, n, k))
        module.register_parameter(f"{name}_scale", frozen(*lead, n, 4 * fp8_columns))
        return
    module.register_parameter(name, frozen(*lead, n, k // 2))
    module.register_parameter(f"{name}_scale", frozen(*lead, n, k // BLOCK))
    # A buffer, because FSDP would round an fp32 parameter to bf16 (.1 % off, silently), and not persistent, because
    # get_model_state_dict(ignore_frozen_params=True) would still return it.
    module.register_buffer(f"{name}_global", torch.empty(*(lead or [1]), device="meta"), persistent=False)


def packed_parts(module: nn.Module, name: str) -> tuple[Callable, tuple[torch.Tensor, ...]]:
    """The decoder of a packed parameter and the tensors it takes."""
    codes, scale = getattr(module, name), getattr(module, f"{name}_scale")
    global_scale = getattr(module, f"{name}_global", None)
    return (decode_fp8, (codes, scale)) if global_scale is None else (decode, (codes, scale, global_scale))


def linear(x, weight, bias):
    """`F.linear` whose result is never a view: what an autograd function returns as one could not be changed in place."""
    if bias is None:
        return F.linear(x, weight)  # (…, K) @ (K, N) -> (…, N)
    y = x.new_empty(*x.shape[:-1], len(weight))  # (…, N)
    torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight.T, out=y.view(-1, len(weight)))
    return y


def fp32_linear(weight, bias=None):
    """x -> x @ W.T + bias, (tokens, K) to (tokens, N) in fp32: for a head, since bf16 rounds logits of 20 to eighths.

    bf16 operands are multiplied by the units for bf16, which sum in fp32, and the sums are kept. On a CPU trainer and engine
    share this function, on a GPU vLLM calls torch as it is called here (`LogitsProcessor._apply_head`, version 0.32).
    """
    if weight.dtype not in (torch.bfloat16, torch.float16):
        return lambda x: F.linear(x, weight, bias)  # (tokens, N)
    shift = None if bias is None else bias.float()  # (N,)
    if weight.is_cuda:
        product = partial(torch.mm, mat2=weight.T, out_dtype=torch.float32)
        return product if bias is None else lambda x: product(x).add_(shift)  # (tokens, N)
    wide, units = weight.float(), torch.backends.mkldnn.matmul  # (N, K)
    inside = "bf16" if weight.dtype == torch.bfloat16 else "ieee"  # exact: the numbers are bf16, only their type is not

    def linear(x):
        before, units.fp32_precision = units.fp32_precision, inside
        y = F.linear(x.float(), wide, shift)  # (tokens, N)
        units.fp32_precision = before
        return y

    return linear


class FrozenMatmul(torch.autograd.Function):
    """y = x @ W.T + bias for a frozen W that is decoded here and, instead of being saved, once more in backward."""

    @staticmethod
    def forward(ctx, x, bias, decoder, *packed):
        ctx.decoder = decoder
        ctx.save_for_backward(*packed)
        return linear(x, decoder(*packed, dtype=x.dtype), bias)  # (…, N)

    @staticmethod
    def backward(ctx, grad):
        packed = ctx.saved_tensors  # once: activation checkpointing refuses a second look
        return grad @ ctx.decoder(*packed, dtype=grad.dtype), *[None] * (2 + len(packed))  # (…, N) @ (N, K) -> (…, K)


class FrozenLoRAMatmul(torch.autograd.Function):
    """y = x @ W.T + bias + x @ A.T @ B.T · scaling over the same frozen W. As peft writes it (a product, its scaling, a sum,
    and the same backwards) the adapter's passes over (tokens, N) take as long as W itself; here they go into the matmuls."""

    @staticmethod
    def forward(ctx, x, bias, a, b, scaling, decoder, *packed):
        ctx.scaling, ctx.decoder, ctx.leaves = scaling, decoder, (a.dtype, b.dtype)
        a, b = a.to(x.dtype), b.to(x.dtype)  # (r, K), (N, r)
        rows = x.flatten(0, -2)  # (tokens, K)
        hidden = rows @ a.T  # (tokens, r)
        y = linear(x, decoder(*packed, dtype=x.dtype), bias)  # (…, N)
        y.flatten(0, -2).addmm_(hidden, b.T, alpha=scaling)
        ctx.save_for_backward(x, hidden, a, b, *packed)
        return y

    @staticmethod
    def backward(ctx, grad):
        x, hidden, a, b, *packed = ctx.saved_tensors
        grad, rows = grad.flatten(0, -2), x.flatten(0, -2)  # (tokens, N), (tokens, K)
        grad_hidden = (grad @ b) * ctx.scaling  # (tokens, r)
        grad_b = (grad.T @ hidden) * ctx.scaling  # (N, r)
        grad_a = grad_hidden.T @ rows  # (r, K)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ ctx.decoder(*packed, dtype=grad.dtype)  # (tokens, K)
            grad_x = grad_x.addmm_(grad_hidden, a).view_as(x)  # (…, K)
        return grad_x, None, grad_a.to(ctx.leaves[0]), grad_b.to(ctx.leaves[1]), *[None] * (2 + len(packed))


def lora_forward(layer, x):
    """`forward` of peft's LoRA layer over an NVFP4Linear, in one autograd function; what that has not, peft does itself."""
    name, base = layer.active_adapters[0], layer.base_layer
    plain = isinstance(layer.lora_dropout[name], nn.Identity) and not layer.lora_variant
    if layer.disable_adapters or layer.merged or not plain:
        return type(layer).forward(layer, x)
    decoder, packed = packed_parts(base, "weight")
    a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
    return FrozenLoRAMatmul.apply(x, base.bias, a, b, layer.scaling[name], decoder, *packed)


class NVFP4Linear(nn.Linear):
    """A linear layer over packed weights. A subclass of nn.Linear, so that peft's own dispatcher accepts it."""

    def __init__(self, linear: nn.Linear, fp8_columns: int | None = None):
        nn.Module.__init__(self)  # not nn.Linear's, which allocates the dense weight
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.weight = linear.weight
        pack_parameter(self, "weight", fp8_columns)

    def forward(self, x):
        decoder, packed = packed_parts(self, "weight")
        return FrozenMatmul.apply(x, self.bias, decoder, *packed)


class FP8Linear(NVFP4Linear):
    """The same over FP8 codes, a name of its own for those who print the model."""


def dense_weight(linear: nn.Module, dtype: torch.dtype) -> torch.Tensor:
    """(N, K) of any linear layer in `dtype`, for a caller that multiplies by itself (a chunked lm_head)."""
    if isinstance(linear, NVFP4Linear):
        decoder, packed = packed_parts(linear, "weight")
        return decoder(*packed, dtype=dtype)
    return linear.weight.to(dtype)


class FrozenGroupedMatmul(torch.autograd.Function):
    """y[s] = W[expert of s] @ x[s] for rows sorted by expert; experts are decoded a few at a time, and again in backward."""

    @staticmethod
    def forward(ctx, x, ends, decoder, *packed):
        ctx.ends, ctx.decoder, ctx.width = ends, decoder, x.shape[1]
        ctx.save_for_backward(*packed)
        return grouped_matmul(x, ends, decoder, packed, packed[0].shape[1], transpose=True)  # (S, K) -> (S, N)

    @staticmethod
    def backward(ctx, grad):
        packed = ctx.saved_tensors
        grad = grouped_matmul(grad, ctx.ends, ctx.decoder, packed, ctx.width, transpose=False)  # (S, N) -> (S, K)
        return grad, *[None] * (2 + len(packed))


def grouped_matmul(x, ends: list[int], decoder, packed, width: int, transpose: bool):
    """(S, width); ends[e] is the end of expert e's rows in x. On a CPU one expert at a time, experts without rows skipped;
    on a GPU as many as decode into half a gigabyte, with one grouped matmul."""
    experts, out = packed[0].shape[0], x.new_empty(len(x), width)  # (S, width)
    step = max(1, 2**29 // (4 * packed[0][0].numel())) if x.is_cuda else 1
    for first in range(0, experts, step):
        last = min(first + step, experts)
        start, stop = ends[first - 1] if first else 0, ends[last - 1]
        if start == stop:
            continue
        weight = decoder(*[part[first:last] for part in packed], dtype=x.dtype)  # (step, N, K)
        weight = weight.transpose(1, 2) if transpose else weight
        if step == 1:
            torch.mm(x[start:stop], weight[0], out=out[start:stop])
        else:
            offsets = torch.tensor(ends[first:last], dtype=torch.int32, device=x.device) - start  # (step,)
            out[start:stop] = F.grouped_mm(x[start:stop], weight, offs=offsets)
    return out


def experts_forward(self, hidden_states, top_k_index, top_k_weights):
    """transformers' experts interface (grouped_mm_experts_forward) over packed weights, with LoRA where the module has
    it. hidden_states (T, H), top_k_index and top_k_weights (T, k)."""
    tokens, k = top_k_index.shape
    expert_of, order = torch.sort(top_k_index.flatten())  # (S,), (S,)
    counts = torch.bincount(expert_of, minlength=self.num_experts)  # (E,)
    offsets = counts.cumsum(0).to(torch.int32)  # (E,)
    ends = offsets.tolist()

    def matmul(x, name):
        if hasattr(self, f"{name}_scale"):
            decoder, packed = packed_parts(self, name)
            y = FrozenGroupedMatmul.apply(x, ends, decoder, *packed)  # (S, N)
        else:
            y = F.grouped_mm(x, getattr(self, name).transpose(1, 2), offs=offsets)  # (S, N)
        if self.has_bias:
            y = y + getattr(self, f"{name}_bias")[expert_of]
        if hasattr(self, f"{name}_lora_A"):
            a, b = getattr(self, f"{name}_lora_A"), getattr(self, f"{name}_lora_B")  # (E, r, K), (E, N, r)
            low = F.grouped_mm(x.to(a.dtype), a.transpose(1, 2), offs=offsets)  # (S, r)
            y = y + F.grouped_mm(low, b.transpose(1, 2), offs=offsets).to(y.dtype) * self.lora_scaling
        return y

    x = hidden_states[order // k]  # (S, H)
    x = self._apply_gate(matmul(x, "gate_up_proj")) if self.has_gate else self.act_fn(matmul(x, "up_proj"))  # (S, I)
    y = matmul(x, "down_proj") * top_k_weights.flatten()[order].unsqueeze(-1)  # (S, H)
    y = torch.zeros_like(y).index_copy(0, order, y)  # (S, H) in token order
    return y.view(tokens, k, -1).sum(dim=1).to(hidden_states.dtype)  # (T, H)


# ---------------------------------------------------------------------------------------------------------------------
# From the tensors of the checkpoint to the parameters of the model


@dataclass
class Rows:
    """Where a model parameter comes from: its row i is row ids[i] of all `weights` laid end to end. A conversion that
    does more than move rows has `convert` instead, which makes the whole tensor from plain weights."""

    weights: list[Weight]
    ids: torch.Tensor | None  # (rows,) int64
    convert: Callable[[], torch.Tensor] | None = None

    def segments(self, start: int, stop: int):
        """(first, last, weight, ids within the weight): rows first:last of start:stop come from one weight."""
        ends = torch.tensor([w.data.rows for w in self.weights]).cumsum(0)  # (weights,)
        ids = self.ids[start:stop]
        owners = torch.searchsorted(ends, ids, right=True)
        first = 0
        for owner, count in zip(*[t.tolist() for t in torch.unique_consecutive(owners, return_counts=True)]):
            here = ids[first : first + count] - (ends[owner] - self.weights[owner].data.rows)
            yield first, first + count, self.weights[owner], here
            first += count


def read_config(folder: Path):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    for part in (config, config.get_text_config()):
        if hasattr(part, "quantization_config"):
            del part.quantization_config  # transformers would build its own quantized layers
    return config


def other_layers(config) -> set[str]:
    """The kinds of layer that a transformers config names besides attention, such as "linear_attention" or "conv"."""
    return {*(getattr(config.get_text_config(), "layer_types", None) or [])} - {"full_attention", "sliding_attention"}


def empty_model(config, dtype=torch.bfloat16, attn_implementation=None):
    """The transformers model, parameters on meta, computed buffers (rotary frequencies) in place."""
    import transformers
    from accelerate import init_empty_weights
    from transformers.initialization import no_init_weights

    name = (config.architectures or [""])[0]
    known = not name or hasattr(transformers, name)
    require(known, f"transformers {transformers.__version__} has no class {name}; install a newer transformers")
    build = getattr(transformers, name)._from_config if name else transformers.AutoModelForCausalLM.from_config
    kwargs = {"attn_implementation": attn_implementation} if attn_implementation else {}
    with init_empty_weights(include_buffers=False), no_init_weights():
        model = build(config, dtype=dtype, **kwargs)
    model.tie_weights()
    return model


def place_weights(model, weights: dict[str, Weight]) -> tuple[dict[str, Rows], list[str]]:
    """({parameter name: Rows}, names of weights without a parameter), by transformers' own conversion tables.

    The tables rename, fuse, split and permute weights (per-expert matrices to one (E, N, K) tensor, say). Instead of
    the weights we send row numbers through them; what comes out says which row of which file each parameter row is,
    and packed codes, scales and plain weights can all be read by it, a slice at a time.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    table = get_model_conversion_mapping(model)
    renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in table if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    state, prefix = model.state_dict(), model.base_model_prefix
    sources: dict[str, list[tuple[Weight, str]]] = {}  # by the first parameter that a conversion makes
    unused = []
    for key in sorted(weights, key=dot_natural_key):
        target, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if target not in state and key in state:
            target, pattern = rename_source_key(key, [], [], prefix, state)
        if target in state:
            sources.setdefault(target, []).append((weights[key], pattern))
        else:
            unused.append(key)

    def convert(first: str, tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        pattern = sources[first][0][1]
        converter = deepcopy(by_pattern[pattern]) if pattern else WeightRenaming(sources[first][0][0].name, first)
        for (weight, pattern), tensor in zip(sources[first], tensors):
            converter.add_tensor(first, weight.name, pattern or weight.name, tensor)
        made = converter.convert(first, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def whole(first: str, target: str) -> torch.Tensor:
        return convert(first, [weight.data.read() for weight, _ in sources[first]])[target]

    placed = {}
    for first, pairs in sources.items():
        origin = [weight for weight, _ in pairs]
        ids = torch.arange(sum(w.data.rows for w in origin)).split([w.data.rows for w in origin])
        numbers = [i.view(*w.shape[:-1], 1) if len(w.shape) > 1 else i.view(w.shape) for i, w in zip(ids, origin)]
        for target, rows in convert(first, numbers).items():
            shape = state[target].shape
            if rows.shape == ((*shape[:-1], 1) if len(shape) > 1 else shape) and origin[0].shape[-1:] == shape[-1:]:
                placed[target] = Rows(origin, rows.flatten())
                continue
            sound = all(weight.format == "plain" for weight in origin)
            require(sound, f"{origin[0].data}: packed {list(origin[0].shape)} cannot become {target} {list(shape)}")
            placed[target] = Rows(origin, None, partial(whole, first, target))
    return placed, unused


def account(model, placed: dict[str, Rows], unused: list[str], folder) -> None:
    """Every tensor of the checkpoint is used and every parameter filled, or an error that lists what is not."""
    tied = {name for group in tied_names(model) if set(group) & placed.keys() for name in group}
    missing = [name for name in model.state_dict() if name not in placed and name not in tied]
    known = [*(model._keys_to_ignore_on_load_unexpected or []), r"rotary_emb\.inv_freq$", r"^mtp", *tied]
    stray = [name for name in unused if not any(re.search(pattern, name) for pattern in known)]
    for problem, names in (("lacks", missing), ("has unknown", stray)):
        shown = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
        require(not names, f"{folder} {problem} {len(names)} tensors of a {type(model).__name__}: {shown}")


def tied_names(model) -> list[list[str]]:
    """Groups of names that are one parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def swap_packed_modules(model, placed: dict[str, Rows]) -> None:
    """Replaces what the checkpoint packs: linears by NVFP4Linear and FP8Linear, stacked experts in place."""
    for target, rows in placed.items():
        formats, columns = {w.format for w in rows.weights}, {w.fp8_columns for w in rows.weights}
        data, sound = rows.weights[0].data, len(formats) == len(columns) == 1
        require(sound, f"{data}: {target} mixes parts in {', '.join(sorted(formats))}, which cannot be one parameter")
        if formats == {"plain"}:
            continue
        path, _, leaf = target.rpartition(".")
        module = model.get_submodule(path)
        if isinstance(module, nn.Linear):
            kind = NVFP4Linear if formats == {"nvfp4"} else FP8Linear
            model.set_submodule(path, kind(module, *columns))
        else:
            sound = getattr(module, "is_transposed", None) is False
            require(sound, f"{data} is packed, but {target} belongs to a {type(module).__name__}")
            pack_parameter(module, leaf, *columns)
            use_packed_experts(module)


def use_packed_experts(module) -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register("nvfp4", experts_forward)
    module.config = deepcopy(module.config)  # its own: experts without packed weights keep transformers' forward
    module.config._experts_implementation = "nvfp4"


def keep_fp32(model) -> None:
    """Frozen parameters that transformers keeps in fp32, and scalars, become buffers: FSDP rounds the first to bf16 and
    cannot shard the second."""
    strict = model._keep_in_fp32_modules_strict or ()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        path, _, leaf = name.rpartition(".")
        fp32 = any(part in name for part in strict) and tensor.is_floating_point()
        if fp32 or (isinstance(tensor, nn.Parameter) and tensor.dim() == 0):
            module = model.get_submodule(path)
            delattr(module, leaf)
            module.register_buffer(leaf, tensor.detach().to(torch.float32 if fp32 else tensor.dtype))


# ---------------------------------------------------------------------------------------------------------------------
# Build, shard, load


def decoder_linears(model) -> dict[str, nn.Linear]:
    """The linears of the text decoder's layers by name, without routers: what is quantized and what LoRA may train.

    A router (and the gate of a shared expert) is frozen, because a small change of it sends tokens to other experts.
    """
    decoder = {id(module) for module in model.get_decoder().modules()}
    modules = dict(model.named_modules())

    def is_router(name):
        parent, _, leaf = name.rpartition(".")
        return "gate" in leaf and hasattr(modules[parent], "experts")

    return {n: m for n, m in modules.items() if isinstance(m, nn.Linear) and id(m) in decoder and not is_router(n)}


def lora_leaves(linears: Iterable[str], lora_targets: str) -> set[str]:
    """Last names of the modules that get LoRA, of the `linears` of a model; UserError when it has none of a name."""
    known = {name.rpartition(".")[2] for name in linears} - {"kv_b_proj"}
    wanted = known if lora_targets == "all-linear" else set(lora_targets.split(","))
    unknown = sorted(wanted - known)
    require(not unknown, f"--lora-targets {', '.join(unknown)}: this model has {', '.join(sorted(known))}")
    return wanted


def check_lora_targets(model_dir: str | Path, lora_targets: str) -> None:
    """UserError, before anything is loaded, when the model has no module of such a name."""
    if lora_targets != "all-linear":
        lora_leaves(decoder_linears(empty_model(read_config(Path(model_dir)))), lora_targets)


def expert_parameters(model) -> dict[str, tuple[nn.Module, str]]:
    """{name: (module, leaf)} of the stacked expert weights (E, N, K), packed or not."""
    modules = {n: m for n, m in model.named_modules() if getattr(m, "is_transposed", None) is False}
    leaves = ("gate_up_proj", "up_proj", "down_proj")
    return {f"{n}.{leaf}": (m, leaf) for n, m in modules.items() for leaf in leaves if hasattr(m, leaf)}


def build_model(
    model_dir: str | Path,
    *,
    lora_rank: int,
    lora_alpha: float,
    lora_targets: str = "all-linear",
    lora_experts: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    attn_implementation: str | None = None,
):
    """The peft.PeftModel of a checkpoint, parameters on meta. lora_targets: all-linear, or module names with commas.

    kv_b_proj gets no LoRA: vLLM's MLA decode uses it absorbed into other products and would apply LoRA to prompts only.
    """
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import Linear as LoraLinear

    folder = Path(model_dir)
    weights = read_checkpoint(folder)
    model = empty_model(read_config(folder), dtype, attn_implementation)
    model.config.use_cache = False
    placed, unused = place_weights(model, weights)
    account(model, placed, unused, folder)
    swap_packed_modules(model, placed)
    keep_fp32(model)
    model.checkpoint_dir, model.checkpoint_rows = folder, placed  # for load_weights

    leaf = lambda name: name.rpartition(".")[2]  # noqa: E731
    linears = [name for name in decoder_linears(model) if leaf(name) != "kv_b_proj"]
    wanted = lora_leaves(linears, lora_targets)
    trained = {name for name in linears if leaf(name) in wanted}
    others = [name for name, m in model.named_modules() if isinstance(m, nn.Linear) and name not in trained]
    config = LoraConfig(
        r=lora_rank,
        lora_alpha=lora_alpha,
        target_modules=sorted(wanted),
        exclude_modules=[name for name in others if leaf(name) in wanted] or None,
        task_type="CAUSAL_LM",
    )
    # peft takes "gate_proj" in the target list of some MoE types for their experts, and leaves dense and shared MLPs
    # without LoRA; it decides by model_type, so it does not get to see it.
    model_type, model.config.model_type = model.config.model_type, "any"
    peft_model = get_peft_model(model, config, low_cpu_mem_usage=True)
    model.config.model_type = model_type
    for module in peft_model.modules():
        if isinstance(module, LoraLinear) and isinstance(module.base_layer, NVFP4Linear):
            module.forward = partial(lora_forward, module)
    for module, name in expert_parameters(model).values() if lora_experts else ():
        use_packed_experts(module)
        module.lora_scaling = lora_alpha / lora_rank
        experts, n, k = getattr(module, name).shape
        k = k * 2 if hasattr(module, f"{name}_global") else k
        for part, shape in (("A", (experts, lora_rank, k)), ("B", (experts, n, lora_rank))):
            parameter = nn.Parameter(torch.empty(shape, dtype=torch.float32, device="meta"))
            module.register_parameter(f"{name}_lora_{part}", parameter)
    return peft_model


def peft_model_of(root: nn.Module):
    from peft import PeftModel

    return next(module for module in root.modules() if isinstance(module, PeftModel))


def shard(
    root: nn.Module,
    *,
    mesh=None,
    dtype: torch.dtype = torch.bfloat16,
    reshard_after_forward: bool | int = True,
    activation_checkpointing: bool = False,
) -> None:
    """FSDP2 around every decoder layer and around `root`, which holds the peft model at any depth. mesh: 1-D, or 2-D
    (replicate, shard) for HSDP. The process group must exist. LoRA stays fp32 and is cast to `dtype` when gathered."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers.modeling_layers import GradientCheckpointingLayer

    assert dist.is_initialized(), "shard() needs torch.distributed.init_process_group() first, also on one rank"
    if activation_checkpointing:
        model = peft_model_of(root).get_base_model()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    # Inputs are not cast: a batch carries fp32 log-probs and advantages that must stay so.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in [m for m in root.modules() if isinstance(m, GradientCheckpointingLayer)]:
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    fully_shard(root, mesh=mesh, mp_policy=policy)


def checkpoint_in_eval(root: nn.Module) -> None:
    """Keep activation checkpointing on in a model in eval mode. transformers checkpoints a layer only while the layer's own
    flag says "training"; what is inside it (dropout) stays in eval mode."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    for module in root.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True


def local_part(tensor: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """This rank's part of a parameter and the range of the leading axis that it holds."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(tensor, DTensor):
        return tensor, 0, tensor.shape[0] if tensor.dim() else 1
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), offset[0], offset[0] + shape[0]


@torch.no_grad()
def load_weights(root: nn.Module, model_dir: str | Path, *, seed: int = 0) -> None:
    """Materialises every parameter of `root` and reads this rank's rows from the files, one tensor at a time. No
    collective. LoRA B is zero; A comes from (seed, name), so it does not depend on the number of ranks."""
    model = peft_model_of(root).get_base_model()
    assert model.checkpoint_dir == Path(model_dir), "load_weights must read the checkpoint that build_model was given"
    tied = tied_names(model)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    root._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))
    for first, *others in tied:  # _apply has given each name a tensor of its own
        for name in others:
            path, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(path), leaf, model.get_parameter(first))
    for target, rows in model.checkpoint_rows.items():
        path, _, leaf = target.rpartition(".")
        module = model.get_submodule(path)
        module = getattr(module, "base_layer", module)  # of peft's LoRA layer
        fill(getattr(module, leaf), rows, lambda weight, ids: read_segment(weight.data, ids))
        if hasattr(module, f"{leaf}_scale"):
            fill(getattr(module, f"{leaf}_scale"), rows, Weight.read_scale)
        if hasattr(module, f"{leaf}_global"):
            values = getattr(module, f"{leaf}_global")  # (1,) or (E,)
            per = len(rows.ids) // len(values)
            for i in range(len(values)):
                parts = {w.read_global_scale() for _, _, w, _ in rows.segments(i * per, (i + 1) * per)}
                require(len(parts) == 1, f"{rows.weights[0].data}: the parts of {target} have different global scales")
                values[i] = parts.pop()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            init_lora(parameter, name, seed)


def fill(tensor: torch.Tensor, rows: Rows, read: Callable[[Weight, torch.Tensor], torch.Tensor]) -> None:
    """Copies this rank's rows of `tensor`, as `read` gives them, into place."""
    local, start, stop = local_part(tensor)
    if rows.ids is None:
        local.copy_(rows.convert()[start:stop])
        return
    per = len(rows.ids) // (tensor.shape[0] if tensor.dim() else 1)  # rows of the files per index of the leading axis
    flat = local.view(-1, local.shape[-1]) if local.dim() > 1 else local.view(-1, 1)  # (rows, width)
    for first, last, weight, ids in rows.segments(start * per, stop * per):
        data = read(weight, ids)  # (last - first, width)
        flat[first:last].copy_(data.view(torch.uint8) if tensor.dtype == torch.uint8 else data)


def init_lora(tensor: torch.Tensor, name: str, seed: int) -> None:
    local, start, stop = local_part(tensor)
    if "lora_B" in name:
        local.zero_()
        return
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    bound = 1 / math.sqrt(tensor.shape[-1])  # as peft: kaiming_uniform with a = sqrt(5)
    full = torch.empty(tensor.shape).uniform_(-bound, bound, generator=generator)  # (r, K) or (E, r, K)
    local.copy_(full[start:stop])


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor behind an FSDP shard, else the tensor itself. Collective, except for one rank: asking takes longer there
    than copying."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.full_tensor() if tensor.device_mesh.size() > 1 else tensor.to_local()
