"""NVFP4 checkpoints as frozen, packed, sharded base models for LoRA training, and the commands that make and show them.

    python model_nvfp4.py quantize SRC DST --a16      # SRC: a Hugging Face folder, a Hub name or a .gguf file
    python model_nvfp4.py inspect DST

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

import argparse
import atexit
import fnmatch
import hashlib
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

BLOCK = 16
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])  # (16,)
FP8_BLOCK = 128  # edge of the square blocks of block-wise FP8
# vLLM multiplies each of these groups as one matrix and keeps one of their global scales for all.
FUSED = [
    ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"), ("wq", "wk", "wv"),
    ("q_a_proj", "kv_a_proj_with_mqa"), ("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a"),
]  # fmt: skip


class UserError(ValueError):
    """A mistake in the user's files or flags, told in one sentence that names the place and the way out."""


def require(sound, sentence: str) -> None:
    if not sound:
        raise UserError(sentence)


# ----------------------------------------------------------------------------------------------------------------------
# The format: decode and encode


def decode_reference(packed, scale, global_scale, dtype=torch.bfloat16):
    """The definition in plain torch. packed (…, N, K/2) uint8, scale (…, N, K/16) uint8 view of e4m3, global_scale fp32
    multiplier, one element or one per expert (E,); returns (…, N, K) in `dtype`.

    The product is taken in fp32: with the scale rounded to bf16 first, several weights in a hundred come out wrong.
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


def encode(weight, amax, recipe="max"):
    """weight (N, K), amax = largest magnitude of its fused family -> packed (N, K/2) u8, scale (N, K/16) u8, fp32 (1,).

    `max` maps the largest weight of a block to 6; `four-over-six` to 6 or 4, whichever has the smaller squared error
    (its smaller global range leaves room for the larger block scale); `mse` searches the block scale on a grid.
    """
    top = 256 if recipe == "four-over-six" else 448
    factors = {"max": [1], "four-over-six": [1, 1.5], "mse": [i / 20 for i in range(14, 31)]}[recipe]
    global_scale = (amax.float() / (6 * top)).reshape(1).clamp(min=torch.finfo(torch.float32).tiny)  # (1,)
    # Rows in pieces that stay in the cache: the search passes over them fifteen times a factor.
    pieces = [encode_rows(rows, global_scale, factors) for rows in weight.split(max(1, 2**17 // weight.shape[1]))]
    packed, scale = (torch.cat(parts) for parts in zip(*pieces))  # (N, K/2), (N, K/16)
    return packed, scale, global_scale


def encode_rows(weight, global_scale, factors):
    """(N, K) -> packed (N, K/2) u8, scale (N, K/16) u8: of the block scales 6·factor the one with the least squared error."""
    blocks = weight.float().unflatten(-1, (-1, BLOCK))  # (N, K/16, 16)
    size, least, best = blocks.abs(), None, None  # (N, K/16, 16)
    largest = size.amax(-1)  # (N, K/16)
    for factor in factors:
        scale = (largest * factor / (6 * global_scale)).clamp(max=448).to(torch.float8_e4m3fn)
        # All-zero block: any scale does, compressed-tensors writes 1/8.
        scale = torch.where(scale.float() == 0, 0.125, scale.float())  # (N, K/16)
        scaled = size / (scale * global_scale).unsqueeze(-1)  # (N, K/16, 16)
        # The grid's step is .5 to 2, 1 to 4, 2 to 6; torch rounds ties to even, and here that is the even code.
        step = 0.5 + 0.5 * (scaled >= 2) + (scaled >= 4)  # (N, K/16, 16)
        nearest = (scaled / step).round_().mul_(step).clamp_(max=6)  # (N, K/16, 16)
        error = nearest.sub_(scaled).mul_(scale.unsqueeze(-1)).square_().sum(-1)  # (N, K/16)
        if least is None:
            least, best = error, scale
        best, least = torch.where(error < least, scale, best), torch.minimum(least, error)  # (N, K/16) each
    scaled = size.div_((best * global_scale).unsqueeze(-1))  # (N, K/16, 16)
    # Round to nearest, ties to the even code: a tie goes down at .25, 1.25, 2.5 and 5, up at .75, 1.75 and 3.5.
    codes = sum((scaled > tie).byte() for tie in (0.25, 1.25, 2.5, 5.0))  # (N, K/16, 16)
    codes = codes + sum((scaled >= tie).byte() for tie in (0.75, 1.75, 3.5))  # (N, K/16, 16)
    codes = codes + (blocks.signbit().byte() << 3)  # (N, K/16, 16)
    codes = codes.flatten(-2)  # (N, K)
    return codes[:, 0::2] | (codes[:, 1::2] << 4), best.to(torch.float8_e4m3fn).view(torch.uint8)


# ----------------------------------------------------------------------------------------------------------------------
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


class RouterReplay(TorchFunctionMode):
    """Around one MoE block: what its router's top-k would choose gives way to `choice` (T, k), -1 where that is not known.

    The scores stay the router's own, so weights and gradients are those of the chosen experts. transformers writes each model's
    router anew, but each ends in one torch.topk over (T, E); the top-k over groups of experts has other shapes.
    """

    def __init__(self, num_experts: int) -> None:
        self.num_experts, self.choice, self.agreement = num_experts, None, None

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk) or self.choice is None:
            return result
        scores, own = args[0], result.indices  # (T, E), (T, k)
        if own.shape != self.choice.shape or scores.shape[-1] != self.num_experts:
            return result
        known = self.choice[:, :1] >= 0  # (T, 1)
        chosen = torch.where(known, self.choice, own)  # (T, k)
        same = (chosen[:, :, None] == own[:, None, :]).any(2) & known  # (T, k)
        self.agreement = torch.stack([same.sum(), known.sum() * own.shape[1]])  # (2,): choices alike, choices known
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))


def replay_routers(model) -> dict[int, RouterReplay]:
    """{number of the layer: its replay}: from now on each MoE block runs the experts of its `choice`, where that is set."""
    modules, replays = dict(model.named_modules()), {}
    for name in [name for name, module in modules.items() if hasattr(module, "is_transposed")]:  # stacked experts
        block, layer = modules[name.rpartition(".")[0]], int(re.search(r"\.layers\.(\d+)\.", f".{name}")[1])
        replays[layer] = RouterReplay(modules[name].num_experts)
        block.forward = partial(replayed_forward, replays[layer], block.forward)
    assert replays, f"{type(model).__name__} has no stacked experts whose choice could be replayed"
    return replays


def replayed_forward(replay: RouterReplay, forward: Callable, *args, **kwargs):
    with replay:
        return forward(*args, **kwargs)


# ----------------------------------------------------------------------------------------------------------------------
# The checkpoint: what the files hold

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


def read_json(folder: Path, name: str) -> dict:
    """The object in a JSON file of `folder`, empty if there is no such file; UserError when it holds something else."""
    file = folder / name
    try:
        content = json.loads(file.read_text()) if file.is_file() else {}
    except ValueError as error:  # no JSON, or no UTF-8
        raise UserError(f"{file} cannot be read as JSON ({error}); is the copy complete?") from error
    require(isinstance(content, dict), f"{file} holds no JSON object; is the copy complete?")
    return content


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
    command = f"python model_nvfp4.py quantize {folder} OUT --a16"
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
        sentence += f" the others; rewrite them with: python model_nvfp4.py quantize {folder} OUT"
        require(len({values[name] for name in members}) <= 1, sentence)


# ----------------------------------------------------------------------------------------------------------------------
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


# ----------------------------------------------------------------------------------------------------------------------
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


# ----------------------------------------------------------------------------------------------------------------------
# The adapter in and out


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


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor behind an FSDP shard, else the tensor itself. Collective, except for one rank: asking takes longer there
    than copying."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.full_tensor() if tensor.device_mesh.size() > 1 else tensor.to_local()


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


def save_adapter(
    folder: str | Path, tensors: dict[str, torch.Tensor], *, lora_rank: int, lora_alpha: float, base_model: str
) -> None:
    """Writes a PEFT folder that peft, transformers and `vllm serve --enable-lora` load as it is, in the dtype given."""
    from peft import LoraConfig
    from safetensors.torch import save_file

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


# ----------------------------------------------------------------------------------------------------------------------
# quantize

# 2688 / 672: where activations are 4 bit, a block scale is exact (not subnormal) for block maxima from .02 up to 672.
INPUT_GLOBAL_SCALE = 4.0


def family(weight: Weight) -> tuple:
    """Siblings that read the same input share a global scale, so that whatever vLLM fuses does."""
    return weight.name.rpartition(".")[0].rpartition(".")[0], weight.shape[-1]


def choose_weights(model, placed: dict[str, Rows], ignore: list[str]) -> set[str]:
    """Names of the weights to pack: the text decoder's linears and routed experts that are stored one by one."""
    targets = {f"{name}.weight" for name in decoder_linears(model)} | expert_parameters(model).keys()
    chosen = set()
    for target in targets & placed.keys():
        for weight in placed[target].weights if placed[target].ids is not None else ():
            if len(weight.shape) != 2 or is_ignored(weight.name.removesuffix(".weight"), ignore):
                continue
            if weight.shape[1] % BLOCK:
                print(f"{weight.name} stays dense: K = {weight.shape[1]} is no multiple of {BLOCK}", file=sys.stderr)
                continue
            chosen.add(weight.name)
    return chosen


def quantize(source: Path, target: Path, *, a16: bool, ignore: list[str], recipe: str, dialect: str) -> None:
    """Fills the folder `target` with the NVFP4 form of the dense checkpoint `source`, file by file."""
    from safetensors.torch import save_file
    from tqdm import tqdm

    weights = read_checkpoint(source)
    sound = all(w.format == "plain" for w in weights.values())
    require(sound, f"{source} holds FP8 weights; give a dense checkpoint")
    model = empty_model(read_config(source))
    placed, unused = place_weights(model, weights)
    account(model, placed, unused, source)
    chosen = choose_weights(model, placed, ignore)
    amax: dict[tuple, torch.Tensor] = {}
    for name in tqdm(sorted(chosen), desc="global scales", unit="tensor", mininterval=1):
        largest = weights[name].data.read().abs().amax()
        require(largest.isfinite(), f"{weights[name].data} holds NaN or infinity")
        amax[family(weights[name])] = torch.maximum(amax.get(family(weights[name]), largest), largest)
    ct, weight_map = dialect == "compressed-tensors", {}
    with tqdm(total=len(weights), desc="quantize", unit="tensor", mininterval=1) as progress:
        for file in sorted({w.data.file for w in weights.values()}):
            out = {}
            for name, weight in weights.items():
                if weight.data.file != file:
                    continue
                progress.update()
                base, data = name.removesuffix(".weight"), weight.data.read()
                if name not in chosen:
                    out[name] = data
                    continue
                packed, scale, factor = encode(data, amax[family(weight)], recipe)
                out[f"{base}.weight_packed" if ct else name] = packed
                out[f"{base}.weight_scale"] = scale.view(torch.float8_e4m3fn)
                out[f"{base}.weight_{'global_scale' if ct else 'scale_2'}"] = 1 / factor if ct else factor[0]
                if not a16:
                    value = INPUT_GLOBAL_SCALE if ct else 1 / INPUT_GLOBAL_SCALE
                    out[f"{base}.input_{'global_scale' if ct else 'scale'}"] = torch.full((1,) if ct else (), value)
            save_file({k: v.contiguous() for k, v in out.items()}, target / file.name, {"format": "pt"})
            (target / file.name).chmod(0o644)
            weight_map |= dict.fromkeys(out, file.name)
    if len(set(weight_map.values())) > 1:
        index = {"metadata": {}, "weight_map": dict(sorted(weight_map.items()))}
        (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    dense = sorted(n.removesuffix(".weight") for n, w in weights.items() if n not in chosen and len(w.shape) == 2)
    write_configs(source, target, ignore=[n for n in dense if "embed" not in n], a16=a16, dialect=dialect)


def share_global_scales(source: Path, target: Path) -> None:
    """Copies an NVFP4 checkpoint with one global scale for each family that vLLM fuses: the largest, the difference moved
    into the block scales. Only where that is exact (ratios that are powers of two, mostly), else UserError."""
    from safetensors.torch import save_file

    packed = [w for w in read_checkpoint(source).values() if w.format == "nvfp4"]
    by_module = {w.name.removesuffix(".weight"): w for w in packed}
    changed = {}
    for members in fused_families(by_module):
        values = {name: by_module[name].read_global_scale() for name in members}
        for name in members:
            weight, common = by_module[name], max(values.values())
            wanted = weight.scale.read().float() * (values[name] / common)  # (N, K/16)
            scale = wanted.to(torch.float8_e4m3fn)
            sentence = f"{source}: {', '.join(members)} have global scales that cannot be made equal without loss"
            require(torch.equal(scale.float(), wanted), f"{sentence}; quantize the dense model instead")
            top = next(by_module[m].global_scale for m in members if values[m] == common)
            changed |= {weight.scale.key: scale, weight.global_scale.key: top.read()}
    stored = read_headers(source)
    for file in sorted({tensor.file for tensor in stored.values()}):
        out = {key: changed.get(key, t.read()) for key, t in stored.items() if t.file == file}
        save_file(out, target / file.name, {"format": "pt"})
    for name in ("config.json", "hf_quant_config.json", "model.safetensors.index.json"):
        if (source / name).is_file():
            shutil.copy(source / name, target)


def write_configs(source: Path, target: Path, *, ignore: list[str], a16: bool, dialect: str) -> None:
    ignore = sorted({"lm_head", *ignore})
    weights = {"num_bits": 4, "type": "float", "group_size": BLOCK, "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None if a16 else weights}
    quant = {"quant_method": dialect, "config_groups": {"group_0": group}, "ignore": ignore}
    if dialect == "modelopt":
        quant["quant_algo"] = "W4A16_NVFP4" if a16 else "NVFP4"
        old = {"quant_algo": quant["quant_algo"], "kv_cache_quant_algo": None, "group_size": BLOCK}
        old = {"producer": {"name": "modelopt"}, "quantization": old | {"exclude_modules": ignore}}
        (target / "hf_quant_config.json").write_text(json.dumps(old, indent=2) + "\n")
    else:
        weights |= {"strategy": "tensor_group", "symmetric": True}
        weights |= {"scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"}
        group["format"] = quant["format"] = "nvfp4-pack-quantized"
        quant["quantization_status"] = "compressed"
        if not a16:
            group["input_activations"] = weights | {"dynamic": "local"}
    config = read_json(source, "config.json") | {"quantization_config": quant}
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def gguf_to_folder(gguf: Path, folder: Path) -> None:
    """A dense Hugging Face folder from a GGUF file, all of it in memory at once (transformers has no other way)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    require(find_spec("gguf"), f"{gguf} needs the package gguf to be read: pip install gguf")
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    quant = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16, quantization_config=quant)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def quantize_command(args) -> None:
    source, target = Path(args.source), Path(args.target)
    if target.exists():
        check_checkpoint(target)
        print(f"{target} is complete already")
        return
    if args.sha256:
        digest = hashlib.sha256(source.read_bytes()).hexdigest() if source.is_file() else "no file"
        sentence = f"{source} has sha256 {digest}, not {args.sha256}: damaged, or not the file you mean"
        require(digest == args.sha256, sentence)
    if not source.exists():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

        try:
            source = Path(snapshot_download(args.source, ignore_patterns=["*.bin", "*.pth", "original/*"]))
        except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
            raise UserError(f"{args.source} is neither a path here nor a model the Hub gives: {error}") from error
    unfinished = target.with_name(f"{target.name}.{os.getpid()}.tmp")  # renamed at the end: complete or absent
    unfinished.mkdir(parents=True)
    atexit.register(shutil.rmtree, unfinished, ignore_errors=True)  # after a failure; else it has its name by then
    dense = source
    if source.suffix == ".gguf":
        dense = unfinished / "dense"
        gguf_to_folder(source, dense)
    if any(weight.format == "nvfp4" for weight in read_checkpoint(dense).values()):
        share_global_scales(dense, unfinished)
    else:
        quantize(dense, unfinished, a16=args.a16, ignore=args.ignore, recipe=args.recipe, dialect=args.dialect)
    for file in dense.iterdir():
        written = file.name in ("config.json", "hf_quant_config.json") or file.name.endswith(".index.json")
        if file.is_file() and not written and file.suffix not in (".safetensors", ".bin", ".pth", ".gguf"):
            shutil.copy(file, unfinished)
    if dense != source:
        shutil.rmtree(dense)
    unfinished.rename(target)
    print(f"{target}: {sum(f.stat().st_size for f in target.iterdir()) / 1e6:.0f} MB")


# ----------------------------------------------------------------------------------------------------------------------
# inspect


def inspect(folder: Path) -> dict:
    """What the checkpoint holds, per kind of module (layer and expert numbers as *), and what LoRA would train."""
    report = check_checkpoint(folder)
    weights = read_checkpoint(folder)
    model = empty_model(read_config(folder))
    placed, unused = place_weights(model, weights)
    account(model, placed, unused, folder)
    linears = {f"{name}.weight" for name in decoder_linears(model) if not name.endswith("kv_b_proj")}
    experts = expert_parameters(model)
    trains = {w.name: "yes" for t, rows in placed.items() if t in linears for w in rows.weights}
    trains |= {w.name: "--lora-experts" for t, rows in placed.items() if t in experts for w in rows.weights}
    kinds: dict[tuple, list[Weight]] = {}
    for weight in weights.values():
        kind = re.sub(r"\.\d+(?=\.|$)", ".*", weight.name), weight.format, weight.shape
        kinds.setdefault(kind, []).append(weight)
    report["modules"] = []
    for (name, form, shape), members in kinds.items():
        size, count = sum(w.bytes for w in members), len(members) * math.prod(shape)
        row = {"name": name, "count": len(members), "format": form, "shape": list(shape), "bytes": size}
        row |= {"bits": 8 * size / max(count, 1), "lora": trains.get(members[0].name, ""), "scales": ""}
        if form == "nvfp4":
            for weight in members:
                weight.read_scale(torch.arange(weight.data.rows))  # raises on NaN
            values = [weight.read_global_scale() for weight in members]
            row["scales"] = f"ok, global {min(values):.2g} to {max(values):.2g}"
        report["modules"].append(row)
    report["bits_per_weight"] = 8 * report["weight_bytes"] / report["parameters"]
    return report


def print_report(report: dict) -> None:
    rows = [["module", "count", "format", "shape", "bits", "MB", "LoRA", "block scales"]]
    for m in report["modules"]:
        shape = " × ".join(map(str, m["shape"]))
        rows.append([m["name"], str(m["count"]), m["format"], shape, f"{m['bits']:.2f}", f"{m['bytes'] / 1e6:.2f}",
                     m["lora"], m["scales"]])  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    print(
        f"\n{report['architecture']}, {report['dialect']}, activations {report['activations']}: "
        f"{report['parameters'] / 1e6:,.1f} M parameters in {report['weight_bytes'] / 1e6:,.1f} MB, "
        f"{report['bits_per_weight']:.2f} bits a weight"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    quant = commands.add_parser("quantize", help="make an NVFP4 checkpoint from a dense one")
    quant.add_argument("source", help="Hugging Face folder, Hub name or .gguf file")
    quant.add_argument("target", help="folder to write; left alone when it is complete already")
    quant.add_argument("--a16", action="store_true", help="weight-only: activations stay bf16 in every engine")
    quant.add_argument(
        "--ignore", action="append", default=[], help="module to leave dense: name, wildcard or re:…; repeatable"
    )
    quant.add_argument(
        "--recipe",
        choices=["max", "mse", "four-over-six"],
        default="mse",
        help="block scales: mse searches the best (slow), max and four-over-six are quicker and train worse",
    )
    quant.add_argument("--dialect", choices=["compressed-tensors", "modelopt"], default="compressed-tensors")
    quant.add_argument("--sha256", help="checksum that the source file must have")
    show = commands.add_parser("inspect", help="show layers, formats, sizes, scale checks and what LoRA would train")
    show.add_argument("folder")
    show.add_argument("--json", action="store_true", help="for programs")
    args = parser.parse_args()
    if args.command == "quantize":
        quantize_command(args)
    elif args.json:
        print(json.dumps(inspect(Path(args.folder)), indent=2))
    else:
        print_report(inspect(Path(args.folder)))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
