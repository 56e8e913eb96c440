"""vLLM on a machine without a GPU: what it lacks there. Nothing on a GPU imports this file.

    prepare_cpu()          # before the engine is built, once or many times; `rollout.build_engine` calls it

vLLM's CPU build has no NVFP4 kernel, its LoRA is five times too slow and its sampler takes a third of the time. Here are a
weight-only NVFP4 kernel (decoded once, by the trainer's own decode, so that both sides hold the same numbers), the same for
experts, LoRA as two matmuls, and a sampler that draws one number a request. All by vLLM's hooks or by replacing one function.

Axis legend: N requests · V vocabulary · K in_features · E experts · r LoRA rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from model_nvfp4 import decode, fp32_linear


def prepare_cpu() -> None:
    """Environment and kernels for a machine without a GPU; before the engine is built, once or many times."""
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # bound threads would also bind the trainer
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
    from vllm import ir
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearKernel
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.platforms import PlatformEnum
    from vllm.v1.sample import sampler
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    if linear.MarlinNvFp4LinearKernel.__name__ == "DecodedNvFp4LinearKernel":
        return  # already done in this process

    class DecodedNvFp4LinearKernel(NvFp4LinearKernel):
        """W4A16: decode once after loading, with the trainer's own decode, so both sides hold the same numbers."""

        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            return True, None

        @classmethod
        def can_implement(cls, config: Any) -> tuple[bool, str | None]:
            return True, None

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            scale = layer.weight_scale.data.view(torch.uint8)  # (N, K/16)
            dtype = torch.get_default_dtype()  # the model's, while vLLM loads it
            weight = decode(layer.weight.data, scale, layer.weight_global_scale.data, dtype)  # (N, K)
            layer.weight = torch.nn.Parameter(weight, requires_grad=False)
            del layer.weight_scale
            dispatch_cpu_unquantized_gemm(layer, remove_weight=True)  # vLLM's own packed layout for bf16 on this CPU

        def apply_weights(
            self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
        ) -> torch.Tensor:
            return layer.cpu_linear(x, layer.weight, bias)

    def plain(x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
        return variance_size is None and weight is not None and weight.dtype == x.dtype and x.is_contiguous()

    # vLLM has RMS norms in C++ for CPUs but calls its eager ones, eight times slower at these sizes.
    @ir.ops.rms_norm.register_impl("cpu", supports_args=plain)
    def rms_norm(
        x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.ops._C.rms_norm(out, x, weight, epsilon)
        return out

    @ir.ops.fused_add_rms_norm.register_impl(
        "cpu",
        supports_args=lambda x, x_residual, weight, epsilon, variance_size=None: plain(
            x, weight, epsilon, variance_size
        ),
        inplace=True,
    )
    def fused_add_rms_norm(
        x: torch.Tensor,
        x_residual: torch.Tensor,
        weight: torch.Tensor | None,
        epsilon: float,
        variance_size: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
        return x, x_residual

    # Ranks of a TP group meet in shared memory whose name is the same in every job, also in one that was killed.
    job = "".join(os.environ.get(name, "") for name in ("MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"))
    make_group_name = _CPUSHMDistributed.make_group_name
    _CPUSHMDistributed.make_group_name = staticmethod(lambda group: f"/{job}{make_group_name(group).lstrip('/')}")
    linear.register_linear_kernel(DecodedNvFp4LinearKernel, PlatformEnum.CPU, "nvfp4")  # W4A4 checkpoints
    linear.MarlinNvFp4LinearKernel = DecodedNvFp4LinearKernel  # W4A16 checkpoints: vLLM forces Marlin by name
    PunicaWrapperCPU.update_metadata = update_metadata
    PunicaWrapperCPU.add_lora_linear = add_lora_linear
    PunicaWrapperCPU.add_lora_logits = add_lora_logits
    TopKTopPSampler.forward_cpu = sample_tokens
    LogitsProcessor._apply_head = apply_head
    # Else the head of a ModelOpt checkpoint is packed and its weight, which `apply_head` wants, thrown away.
    ParallelLMHead._cpu_skip_gemm_dispatch = True
    # The rank of each sampled token, in two passes over (N, V); nobody reads it.
    sampler.batched_count_greater_than = lambda x, values: torch.zeros(len(x), dtype=torch.int64)  # (N,)
    serve_experts()
    torch._dynamo.config.disable = True  # vLLM compiles one tiny sampler function; that needs a C++ compiler and 30 s


def serve_experts() -> None:
    """NVFP4 experts (one stack of matrices per layer), for which vLLM has no CPU backend at all; part of `prepare_cpu`."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.experts import nvfp4_emulation_moe as emulation
    from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend
    from vllm.model_executor.layers.quantization import modelopt
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w4a4_nvfp4 as compressed_tensors,
    )

    class DecodedExperts(emulation.Nvfp4QuantizationEmulationTritonExperts):
        """W4A16: decode once after loading, then one expert after the other over the rows that chose it."""

        @staticmethod
        def supports_lora() -> bool:
            return True

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            for name in ("w13_weight", "w2_weight"):
                codes, scale = getattr(layer, name).data, getattr(layer, f"{name}_scale").data.view(torch.uint8)
                dtype = torch.get_default_dtype()
                weight = decode(codes, scale, getattr(layer, f"{name}_scale_2").data, dtype)  # (E, N, K)
                setattr(layer, name, torch.nn.Parameter(weight, requires_grad=False))

        def apply(  # the names are those of vLLM's call
            self,
            output: torch.Tensor,  # (tokens, K)
            hidden_states: torch.Tensor,  # (tokens, K)
            w1: torch.Tensor,  # (E, 2·N, K): gate, then up
            w2: torch.Tensor,  # (E, K, N)
            topk_weights: torch.Tensor,  # (tokens, experts of a token)
            topk_ids: torch.Tensor,  # (tokens, experts of a token)
            activation: MoEActivation,
            apply_router_weight_on_input: bool,
            **_: Any,
        ) -> None:
            assert activation == MoEActivation.SILU and not apply_router_weight_on_input, "experts of another kind"
            lora = self._lora_context  # None without LoRA; one adapter for all requests or none, as `generate` has it
            use_adapter = lora is not None and not lora.punica_wrapper.no_lora
            total = torch.zeros(output.shape)  # (tokens, K) fp32
            for e in topk_ids.unique().tolist():
                token, place = torch.where(topk_ids == e)  # (rows,), (rows,)
                x = hidden_states[token]  # (rows, K)
                gate_up = x @ w1[e].T  # (rows, 2·N)
                if use_adapter:  # vLLM has multiplied B by alpha / r
                    pairs = zip(lora.w13_lora_a_stacked, lora.w13_lora_b_stacked)
                    gate_up += torch.cat([x @ a[0, e].T @ b[0, e].T for a, b in pairs], -1)  # (rows, 2·N)
                gate, up = gate_up.chunk(2, -1)  # (rows, N) each
                h = torch.nn.functional.silu(gate) * up  # (rows, N)
                y = h @ w2[e].T  # (rows, K)
                if use_adapter:
                    y += h @ lora.w2_lora_a_stacked[0][0, e].T @ lora.w2_lora_b_stacked[0][0, e].T
                total.index_add_(0, token, y.float() * topk_weights[token, place, None].float())
            output.copy_(total)

    # Its list has no fp32, which a CPU without units for bf16 computes in.
    modelopt.ModelOptNvFp4Config.get_supported_act_dtypes = lambda self: [torch.bfloat16, torch.float16, torch.float32]
    for module in (modelopt, compressed_tensors):
        module.select_nvfp4_moe_backend = lambda *args, **kwargs: (NvFp4MoeBackend.EMULATION, DecodedExperts)


def note_experts(worker: Any) -> dict[str, list[tuple[int, np.ndarray]]]:
    """What `enable_return_routed_experts` does in the runner for GPUs: in the worker, note each router's choices by request.

    {request: [(position of its first token, (tokens, layers, k)), …]}, filled as the engine runs. A prompt that comes out of the
    prefix cache is not computed again, so nothing is noted for it.
    """
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    runner, chosen = worker.model_runner, {}
    layers = runner.model_config.get_total_num_hidden_layers()

    def note(layer: int, topk_ids: torch.Tensor) -> None:
        batch = runner.input_batch
        bounds = runner.query_start_loc.np[: len(batch.req_ids) + 1].tolist()
        for row, (request, start, end) in enumerate(zip(batch.req_ids, bounds, bounds[1:])):
            position = int(batch.num_computed_tokens_cpu[row])
            parts = chosen.setdefault(request.rpartition("-")[0], [])  # vLLM appends "-" and a random word
            if not parts or parts[-1][0] != position:
                parts.append((position, np.full((end - start, layers, topk_ids.shape[1]), -1, np.int16)))
            parts[-1][1][:, layer] = topk_ids[start:end].numpy()

    for module in runner.model.modules():
        if isinstance(module, MoERunner):
            module.router.set_capture_fn(partial(note, module.layer_id))
    return chosen


# (A of all slices, B of all slices on a diagonal) by fused layer, for the adapter that was pushed last.
JOINED_ADAPTER: dict[int, tuple[Callable, Callable]] = {}


def packed_linear(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """x -> x Wᵀ with the fastest kernel that vLLM has for this (N, K) on this CPU."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(weight.contiguous(), requires_grad=False)
    dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    return lambda x: layer.cpu_linear(x, layer.weight, None)


def update_metadata(self: Any, *args: Any, **kwargs: Any) -> None:
    """`PunicaWrapperCPU.update_metadata`, and once a batch what add_lora_linear would ask in each of its layers."""
    super(type(self), self).update_metadata(*args, **kwargs)
    self.some_without_adapter = bool((self.token_lora_indices < 0).any())


def add_lora_linear(
    self: Any,
    y: torch.Tensor,  # (tokens, sum of output_slices)
    x: torch.Tensor,  # (tokens, K)
    lora_a_stacked: tuple[torch.Tensor, ...],  # per slice (1 slot, 1, r, K)
    lora_b_stacked: tuple[torch.Tensor, ...],  # per slice (1 slot, 1, N, r)
    scale: float,
    output_slices: tuple[int, ...],
    **_: Any,
) -> None:
    """`PunicaWrapperCPU.add_lora_linear` for one adapter: y += x Aᵀ Bᵀ · scale by slice, in place, as two matmuls.

    vLLM's own version copies the adapter's weights once per token, because every token could have another adapter; we
    only ever have one, in slot 0. A fused layer (q/k/v, gate/up) has one A and B per slice: they are joined once per
    adapter, since below a hundred tokens the price of a small matmul is the call. Requests without an adapter get nothing.
    """
    if self.no_lora:
        return
    key = lora_a_stacked[0].data_ptr()
    if key not in JOINED_ADAPTER:
        a = torch.cat([part[0, 0] for part in lora_a_stacked])  # (slices·r, K)
        b = torch.block_diag(*[part[0, 0] for part in lora_b_stacked]) * scale  # (N, slices·r)
        pad = -a.shape[0] % 32  # the small-matmul kernel wants multiples of 32
        a, b = torch.nn.functional.pad(a, (0, 0, 0, pad)), torch.nn.functional.pad(b, (0, pad))
        JOINED_ADAPTER[key] = packed_linear(a), packed_linear(b)
    a, b = JOINED_ADAPTER[key]
    x = x.view(-1, x.shape[-1])  # (tokens, K)
    hidden = a(x)  # (tokens, slices·r)
    if self.some_without_adapter:
        hidden *= (self.token_lora_indices[: x.shape[0]] >= 0).unsqueeze(1)  # (tokens, 1)
    y.view(-1, y.shape[-1]).add_(b(hidden))


def add_lora_logits(
    self: Any,
    y: torch.Tensor,  # (requests, V)
    x: torch.Tensor,  # (requests, K)
    lora_a_stacked: torch.Tensor,  # (1 slot, 1, r, K)
    lora_b_stacked: torch.Tensor,  # (1 slot, 1, V, r)
    scale: float,
    **_: Any,
) -> None:
    """`PunicaWrapperCPU.add_lora_logits` for one adapter: the head's share, which is nothing unless the adapter has one."""
    a, b = lora_a_stacked[0, 0], lora_b_stacked[0, 0]  # (r, K), (V, r)
    if not a.any():
        return
    wants_adapter = (self.sampler_indices[: x.shape[0]] >= 0).to(x.dtype).unsqueeze(1) * scale  # (requests, 1)
    y.addmm_((torch.nn.functional.linear(x, a) * wants_adapter).to(y.dtype), b.t().to(y.dtype))


def apply_head(
    self: Any,
    lm_head: Any,
    hidden_states: torch.Tensor,  # (requests, K)
    embedding_bias: torch.Tensor | None,  # (V,)
) -> torch.Tensor:
    """`LogitsProcessor._apply_head`: (requests, V) logits. For fp32 ones vLLM makes a wide copy of the head at each call."""
    if self.head_dtype != torch.float32 or hidden_states.dtype == torch.float32:
        return lm_head.quant_method.apply(lm_head, hidden_states, bias=embedding_bias)
    if not hasattr(lm_head, "fp32_linear"):
        lm_head.fp32_linear = fp32_linear(lm_head.weight, embedding_bias)
    return lm_head.fp32_linear(hidden_states)


def sample_tokens(
    self: Any,
    logits: torch.Tensor,  # (N, V) fp32
    generators: dict[int, torch.Generator],  # by row
    k: torch.Tensor | None,  # (N,)
    p: torch.Tensor | None,  # (N,)
) -> tuple[torch.Tensor, torch.Tensor]:
    """`TopKTopPSampler.forward_cpu`: (N,) tokens and (N, V) processed log-probs, from one uniform number a request.

    vLLM draws Gumbel noise for each token of the vocabulary, which takes five times as long as this: the first token at which
    the distribution function exceeds the number, looked for among sums of 256 tokens and then inside one of them.
    """
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    logits = apply_top_k_top_p(logits, k, p)  # (N, V)
    rows, vocabulary = logits.shape
    peak = logits.amax(-1, keepdim=True)  # (N, 1)
    weights = (logits - peak).exp_()  # (N, V)
    if vocabulary % 256:
        weights = torch.nn.functional.pad(weights, (0, -vocabulary % 256))  # (N, V to the next 256)
    blocks = weights.view(rows, -1, 256)  # (N, V/256, 256)
    sums = blocks.sum(-1).double()  # (N, V/256)
    ends = sums.cumsum(-1)  # (N, V/256)
    draws = torch.rand(rows, 1, dtype=torch.float64)  # (N, 1)
    for row, generator in generators.items():
        draws[row] = torch.rand(1, generator=generator, dtype=torch.float64)  # (1,)
    target = draws * ends[:, -1:]  # (N, 1)
    # NaN logits end up past the last block; their log-probs then stop the run in a sentence (`check_step`).
    block = torch.searchsorted(ends, target, right=True).clamp(max=ends.shape[1] - 1)  # (N, 1)
    inside = blocks[torch.arange(rows), block[:, 0]].double().cumsum(-1)  # (N, 256)
    rest = target - ends.gather(1, block) + sums.gather(1, block)  # (N, 1)
    # The two sums of a block differ by their rounding; a token of probability zero must not come out.
    rest = torch.minimum(rest, inside[:, -1:] * (1 - 1e-12))  # (N, 1)
    tokens = (256 * block + torch.searchsorted(inside, rest, right=True)).clamp(max=vocabulary - 1)  # (N, 1)
    return tokens[:, 0], logits.sub_(peak + ends[:, -1:].log().float())  # (N,), (N, V)
