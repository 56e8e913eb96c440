"""Rollouts: a vLLM engine inside each rank. Build it, hand it the GPU and the adapter, sample, shut it down.

The trainer and the evaluation use it like this (each rank of a torchrun job runs the same lines):

    engine = build_engine("models/SmolLM2-135M-Instruct-NVFP4", max_model_len=256, max_lora_rank=16)
    with awake(engine):                                          # vLLM owns the GPU inside this block
        push_adapter(engine, adapter, {"r": 16, "lora_alpha": 32}, version=3)  # replaces the one before, and is read back
        samples = generate(engine, prompts, seeds, max_tokens=40, temperature=1.0, use_adapter=True)
    shutdown(engine)

Only this file and vllm_cpu.py, which a machine without a GPU needs, know vLLM. What is left out, and why:
1. No server, no Ray, no other process: vLLM's `external_launcher` runs the engine inside the torchrun rank.
2. No merging of the adapter into 4-bit weights: it would be rounded away; vLLM applies it as LoRA.
3. No sleep level 2: it drops quantised weights and LoRA slots (vLLM issues 57163, 28606, 54235).
4. No folder between trainer and engine: the tensors go into the worker by the calls that vLLM makes after reading a file
   (private ones of the pinned version, in `put_adapter`), and their checksum is read back each time.

Axis legend: N requests (one per sample) · T tokens of a completion · K in_features · r LoRA rank.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from checkpoint import head_is_packed
from errors import UserError, read_json
from model_nvfp4 import compute_dtype, other_layers, read_config
from ranks import die_with_launcher
from tree import Sample

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read when vLLM is imported, which any library may do first
# It warns (of a triton that it will not use on a CPU) before it has looked at that.
logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())


if TYPE_CHECKING:
    from vllm import LLM


LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # the ranks vLLM has slots for (vllm.config.LoRAConfig)


# ---------------------------------------------------------------------------------------------------------------------
# Build


def build_engine(
    model_dir: str,
    *,
    max_model_len: int,
    max_lora_rank: int = 0,
    max_num_seqs: int = 256,
    seed: int = 0,
    tp: int = 1,
    sleep: str = "level1",
    gpu_memory_utilization: float = 0.5,
    w4a4: bool = False,
    return_experts: bool = False,
    engine_args: dict[str, Any] | None = None,
) -> LLM:
    """A vLLM engine inside this rank. Call after `init_process_group`; collective over the ranks of a TP group.

    `max_model_len` in tokens (prompt and completion); `max_lora_rank` 0 builds an engine without LoRA;
    `gpu_memory_utilization` is the share of the GPU that vLLM may use while awake; `w4a4` lets the engine round activations
    to 4 bits where checkpoint and GPU can (not what the trainer computes); with `return_experts`, samples carry the experts that
    the routers of a mixture chose; `engine_args` overrides any argument of `vllm.LLM`.
    Raises UserError when `tp` does not divide the world or the checkpoint does not suit.
    """
    die_with_launcher()
    on_gpu = torch.cuda.is_available()
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world % tp:
        raise UserError(f"--tp {tp} does not divide the {world} ranks; use a divisor of {world}.")
    # One process per rank: with vLLM's own engine process, `collective_rpc` could not share tensors with the trainer.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    if not on_gpu:
        import vllm_cpu

        vllm_cpu.prepare_cpu()

    from vllm import LLM
    from vllm.model_executor.models.transformers import base as through_transformers

    # A model that vLLM has no class of its own for runs as transformers' class, which vLLM rewrites in place to compile it.
    # It is the trainer's class too, and would then ask for the engine's settings wherever it is built.
    through_transformers.Base._decorate_for_torch_compile = lambda self: None

    arguments: dict[str, Any] = {
        "model": str(model_dir),
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "seed": seed,  # the same on every rank of a TP group; each request brings its own seed anyway
        "tensor_parallel_size": tp,
        "distributed_executor_backend": "external_launcher" if dist.is_initialized() else None,
        "logprobs_mode": "processed_logprobs",  # after temperature: what the trainer computes
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "generation_config": "auto",  # brings the model's own list of end-of-sequence ids
        "use_tqdm_on_load": False,
    }
    if max_lora_rank:
        slots = [rank for rank in LORA_RANKS if rank >= max_lora_rank]
        if not slots:
            raise UserError(f"--lora-rank {max_lora_rank} is above vLLM's largest LoRA slot, {LORA_RANKS[-1]}.")
        arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": slots[0]}
        # Else a model that vLLM loads with stacked experts (Qwen3.5) takes an adapter of stacked ones only, not ours by expert.
        arguments["enable_mixed_moe_lora_format"] = True
    if on_gpu:
        arguments |= {"gpu_memory_utilization": gpu_memory_utilization, "enable_sleep_mode": sleep != "off"}
        arguments["enable_return_routed_experts"] = return_experts
        if (
            not w4a4
        ):  # only Blackwell would do otherwise; there the two ways part by .24 nats a token (emulated on a CPU)
            arguments["kernel_config"] = {"linear_backend_per_quant": {"nvfp4_w4a4": "marlin"}}
    else:
        # 32 tokens a block: with the CPU default of 128, prompts of 100 tokens share no block at all (2.9 times slower).
        norms = {"rms_norm": ["cpu", "native"], "fused_add_rms_norm": ["cpu", "native"]}
        arguments |= {"block_size": 32, "enforce_eager": True, "ir_op_priority": norms}
        arguments["dtype"] = str(compute_dtype()).removeprefix("torch.")
        # A seeded request whose prompt is cut in two ends in "CPU Generator does not use offset" (gpu_model_runner.py).
        arguments["enable_chunked_prefill"] = False
        # Without that it keeps no state of a recurrent layer for a prefix.
        arguments["enable_prefix_caching"] = not other_layers(read_config(model_dir))
    # Logits in fp32, as the trainer has them; of a quantised head vLLM has none.
    overrides = {} if head_is_packed(model_dir) else {"head_dtype": "float32"}
    arguments |= engine_args or {}
    arguments["hf_overrides"] = overrides | arguments.get("hf_overrides", {})

    engine = LLM(**arguments)
    engine.sleep_mode = sleep if arguments.get("enable_sleep_mode") else "off"  # type: ignore[attr-defined]
    engine.policy_version = None  # type: ignore[attr-defined]
    engine.kv_awake = True  # type: ignore[attr-defined]
    engine.stats = {}  # type: ignore[attr-defined]  # of the last `awake` block, for the metrics
    engine.chosen = engine.collective_rpc(vllm_cpu.note_experts)[0] if return_experts and not on_gpu else None  # type: ignore[attr-defined]
    if engine.sleep_mode != "off":
        fall_asleep(engine)
    return engine


def check_architecture(model_dir: str | Path) -> None:
    """UserError when the installed transformers or vLLM has no class for the model; reads its config.json, loads nothing.

    vLLM's registry is read as text, because importing it takes seconds. A model that is not in it may still be served
    through transformers' own modules, when their attention can be replaced (`_try_resolve_transformers` in that file).
    """
    config = read_json(Path(model_dir), "config.json")
    model_type, architecture = config.get("model_type"), (config.get("architectures") or [None])[0]
    if not architecture:
        return  # no checkpoint at all, or one that model_nvfp4.check_checkpoint has more to say about
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    installed = versions()
    missing = [] if model_type in CONFIG_MAPPING_NAMES else [f"transformers {installed['transformers']}"]
    registry = Path(find_spec("vllm").submodule_search_locations[0]) / "model_executor/models/registry.py"
    if not re.search(rf'"{architecture}": *\(', registry.read_text()):  # with a string behind it: served no longer
        own = getattr(transformers, architecture, None)
        if not (own and (own.is_backend_compatible() or own._can_set_attn_implementation())):
            missing.append(f"vLLM {installed.get('vllm') or installed['vllm-cpu']}")
    if missing:
        raise UserError(
            f"{model_dir} is a {architecture}, for which {' and '.join(missing)} {'has' if len(missing) == 1 else 'have'} no "
            f"class; install versions that have one (launch.sh names them beside the recipe of such a model)."
        )


def versions() -> dict[str, str]:
    """Versions of what produced the samples, for the run's record."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for package in ("vllm", "vllm-cpu", "torch", "transformers", "peft"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def check_sleep(sleep: str, weight_bytes: int, tp: int, root: Path = Path("/")) -> None:
    """Raises UserError when this node's memory cannot hold what `sleep` moves there, or the allocator would break it.

    `weight_bytes` of the checkpoint; needs no GPU and no engine. Level 1 keeps one copy per engine in pinned memory, and
    torch rounds each pinned block up to a power of two: 1.44 times as much for sizes spread evenly (1 / ln 2).
    """
    settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if sleep != "off" and "expandable_segments:true" in settings.lower().replace(" ", ""):
        # vLLM 0.32 switches them off while it fills its pools, but not while it captures graphs (cumem.py).
        raise UserError(
            "expandable_segments:True does not go with vLLM's sleep mode (pytorch issue 147851); take it out of "
            "PYTORCH_CUDA_ALLOC_CONF, or use --sleep off."
        )
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE", 1))
    wanted, free = 1.44 * weight_bytes * local_ranks / tp / 2**30, free_host_memory(root) / 2**30
    if sleep == "level1" and wanted > free:
        raise UserError(
            f"--sleep level1 would keep {wanted:.0f} GiB of engine weights in this node's memory, which has {free:.0f} GiB free; "
            "use --sleep kv (weights stay on the GPU, only the KV cache is handed over) or a larger --tp."
        )


def free_host_memory(root: Path = Path("/")) -> int:
    """Bytes that this process may still take: the kernel's estimate, or what the tightest control group above it leaves.

    Version 2 groups; a group's inactive file pages count as free, since the kernel drops them first. (A container's own
    group appears as the root of /sys/fs/cgroup.)
    """
    meminfo = dict(line.split(":") for line in (root / "proc/meminfo").read_text().splitlines())
    free = [int(meminfo["MemAvailable"].split()[0]) * 1024]
    top = root / "sys/fs/cgroup"
    groups = (root / "proc/self/cgroup").read_text().splitlines()
    own = next((line[3:].strip("/") for line in groups if line.startswith("0::")), "")
    for group in (top / own, *(top / own).parents):
        if group.is_relative_to(top) and (group / "memory.max").exists():
            limit = (group / "memory.max").read_text().strip()
            if limit != "max":
                stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                used = int((group / "memory.current").read_text()) - int(stat["inactive_file"])
                free.append(int(limit) - used)
    return max(0, min(free))


def kernels(engine: LLM) -> str:
    """What runs the linear and attention layers, such as "MarlinNvFp4LinearKernel × 112, FlashAttentionImpl × 28"."""

    def count(model: torch.nn.Module) -> Counter[str]:
        chosen = {}  # by id: a layer and the LoRA around it show the same one
        for module in model.modules():
            method, impl = getattr(module, "quant_method", None), getattr(module, "impl", None)
            holders = [x for x in (getattr(module, "scheme", None), method) if x is not None]
            kernels = [v for x in holders for v in vars(x).values() if type(v).__name__.endswith("Kernel")]
            for used in (*(kernels[:1] or [method]), impl):
                if type(used).__name__.endswith(("Kernel", "LinearMethod", "MoEMethod", "Impl")):
                    chosen[id(used)] = type(used).__name__
        return Counter(chosen.values())

    return ", ".join(f"{name} × {number}" for name, number in sorted(engine.apply_model(count)[0].items()))


# ---------------------------------------------------------------------------------------------------------------------
# Awake


@contextmanager
def awake(engine: LLM) -> Iterator[LLM]:
    """vLLM owns the GPU inside this block.

    Order (each step has a bug report behind it): weights first, so that an adapter has somewhere to go; the adapter and the
    reset of the prefix cache (`push_adapter`); the KV cache last, just before the first request (`generate`), so that the
    adapter's copy and the full cache never stand side by side; sleep and hand the memory back on the way out.
    Without sleep mode (CPU, or `--sleep off`) there is nothing to hand over and the block is only an indentation.
    After an exception the engine stays awake: the process is about to end, and a sleep that fails in its turn (every CUDA
    call does, after the first illegal access) would hide the first cause. `engine.stats["memory_gib"]` has the memory in use
    on this rank's GPU (without one: of this process) asleep, awake, and asleep again.
    """
    engine.stats = {"memory_gib": {"before": used_memory()}}
    if engine.sleep_mode == "level1":
        engine.wake_up(tags=["weights"])
    yield engine
    engine.stats["memory_gib"]["awake"] = used_memory()
    if engine.sleep_mode != "off":
        fall_asleep(engine)
    engine.stats["memory_gib"]["after"] = used_memory()


def fall_asleep(engine: LLM) -> None:
    """Give the GPU back: `level1` moves the weights to host memory and drops the KV cache, `kv` drops the KV cache only.

    Both forget cached prefixes. The calls are LLM's own: a `discard` sent to the workers past the executor leaves it
    convinced that nothing sleeps, and the next `wake_up` does nothing but warn.
    """
    if engine.sleep_mode == "level1":
        engine.sleep(level=1)
    elif engine.kv_awake:
        engine.sleep(level=0)  # only pauses the scheduler, which the next line asks for
        engine.release_kv_cache_memory()
    engine.kv_awake = False
    gc.collect()
    torch.cuda.empty_cache()


def wake_kv_cache(engine: LLM) -> None:
    """Map the KV cache if it is not there yet; the last step of waking up."""
    if not engine.kv_awake:
        fully_awake = engine.wake_up(tags=["kv_cache"])
        assert fully_awake, "the KV cache is back but the engine still sleeps: generate outside `with awake(engine)`?"
        engine.kv_awake = True


def used_memory() -> float:
    """GiB in use now: on this rank's GPU by everybody (vLLM's pools are not torch's), without a GPU by this process."""
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return (total - free) / 2**30
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**30


# ---------------------------------------------------------------------------------------------------------------------
# Push


def push_adapter(engine: LLM, tensors: dict[str, torch.Tensor], config: dict[str, Any], version: int) -> None:
    """Replace the engine's adapter by `tensors` (names and shapes of a PEFT file, whole), in memory.

    `config` is PEFT's adapter_config.json, or of it `r` and `lora_alpha`. The same id every time, so the engine never holds
    two. The prefix cache is keyed by name and path, hence the reset: without it, keys and values of the previous policy are
    served silently. The caller may change `tensors` afterwards. Collective over a TP group, each rank with the same content;
    fails when what the group then holds is not it.
    """
    from vllm.lora.request import LoRARequest

    # Copies: vLLM keeps them, and scales B in place.
    dtype = engine.llm_engine.vllm_config.lora_config.lora_dtype
    copies = {name: tensor.to(dtype, copy=True) for name, tensor in tensors.items()}
    expected = adapter_checksum(copies, config)
    engine.collective_rpc(put_adapter, args=(copies, config))
    if not torch.cuda.is_available():
        from vllm_cpu import JOINED_ADAPTER

        JOINED_ADAPTER.clear()  # made of the adapter before
    engine.policy = LoRARequest("policy", 1, "handed over in memory")  # never read: the id is there already
    assert engine.reset_prefix_cache(), "the prefix cache could not be reset: requests of another policy still run"
    engine.policy_version = version
    check_adapter(engine, expected)


def peft_helper(config: dict[str, Any]) -> Any:
    """vLLM's reading of an adapter_config.json, from which it takes the rank and alpha / r of each module."""
    from vllm.lora.peft_helper import PEFTHelper

    return PEFTHelper.from_dict({"target_modules": []} | config)


def put_adapter(worker: Any, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    """In the engine's worker: what vLLM 0.32 does with a folder (`WorkerLoRAManager._load_adapter`), without the folder."""
    from vllm.lora.lora_model import LoRAModel, _is_remote_expert_key

    outer = worker.model_runner.lora_manager
    manager, helper = outer._adapter_manager, peft_helper(config)
    helper.validate_legal(outer.lora_config)
    mapper, experts_here = getattr(manager.model, "hf_to_vllm_mapper", None), manager.moe_ep_load_spec
    if experts_here is not None:  # expert parallelism
        tensors = {name: t for name, t in tensors.items() if not _is_remote_expert_key(name, experts_here)}
    adapter = LoRAModel.from_lora_tensors(
        1, tensors, helper, "cpu", outer.lora_config.lora_dtype, outer.vocab_size,
        mapper and mapper.get_rename_mapper(), getattr(manager.model, "lora_skip_prefixes", None),
    )  # fmt: skip
    adapter.is_3d_lora_weight = False  # experts one by one
    manager._validate_moe_lora_format(adapter)
    manager.remove_adapter(1)
    assert manager.add_adapter(adapter), "vLLM did not take the adapter"
    manager.activate_adapter(1)


def check_adapter(engine: LLM, expected: list[int]) -> None:
    """Read the adapter back from the engine's slots: the checksums of all A and of all B must be those pushed.

    Finds a push that was ignored, an older version, a module left out, a rank of the TP group with another's slice or
    with none, B scaled twice. It cannot see two modules exchanged, and skips experts; the trainer's parity probe does neither.
    """
    held, copies = engine.collective_rpc(slot_checksum)[0]
    wanted = [copies * checksum % 2**64 for checksum in expected]
    assert held == wanted, (
        f"the engine does not hold the adapter that was pushed: checksums of A and B {held}, not {wanted}"
    )


def bit_sum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of the bits of a bf16 or fp16 matrix, four numbers at a time, modulo 2⁶⁴: exact, in any order, by any slices
    of whole rows or of columns by fours. (A sum in fp64 takes ten times as long.)
    """
    if tensor.shape[-1] % 4:
        tensor = torch.nn.functional.pad(tensor, (0, -tensor.shape[-1] % 4))  # (rows, a multiple of 4)
    return tensor.contiguous().view(torch.int64).sum()  # ()


def adapter_checksum(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> list[int]:
    """[of A, of B], B multiplied with alpha / r as vLLM holds it; `tensors` in the engine's dtype."""
    helper, parts = peft_helper(config), [[torch.zeros((), dtype=torch.int64)] for _ in "AB"]
    for name, tensor in tensors.items():
        if ".experts." not in name:
            module, _, matrix = name.removeprefix("base_model.model.").rpartition(".lora_")
            scaled = tensor if matrix.startswith("A") else tensor * helper.get_rank_and_scaling(module)[1]
            parts[matrix.startswith("B")].append(bit_sum(scaled))
    return [torch.stack(sums).sum().item() % 2**64 for sums in parts]


def slot_checksum(worker: Any) -> tuple[list[int], int]:
    """([of A, of B] in the engine's slot, how often each element counts in it); the same on a whole TP group.

    A rank holds all of a tensor or a slice, and slices may be repeated (key heads on more ranks than there are): a rank's
    part is weighted such that over the group every element counts as often as there are ranks.
    """
    from vllm.distributed import get_tp_group

    manager, group = worker.model_runner.lora_manager._adapter_manager, get_tp_group()
    adapter, slot = manager.get_adapter(1), manager.lora_index_to_id.index(1)
    parts: dict[tuple[int, int], list[torch.Tensor]] = {}  # by A or B and by weight
    seen = set()
    for name, weights in adapter.loras.items():
        module = manager.modules.get(name)  # None: vLLM ignores this part of the adapter, and the checksum will say so
        if module is None or hasattr(module, "w13_lora_a_stacked"):
            continue  # experts have a layout of their own and are not read back
        a, b = weights.lora_a, weights.lora_b
        if isinstance(b, list) and len(b) != module.n_slices:
            a, b = module.expand_packed_lora(a, b)
        for kind, whole, stacked in ((0, a, module.lora_a_stacked), (1, b, module.lora_b_stacked)):
            for tensor, buffer in zip(whole if isinstance(whole, list) else [whole], stacked):
                if tensor is None or id(tensor) in seen:
                    continue  # a slice without an adapter, or one A for several slices
                seen.add(id(tensor))
                held = buffer[slot, 0, : tensor.shape[0]] if kind == 0 else buffer[slot, 0, :, : tensor.shape[1]]
                parts.setdefault((kind, tensor.numel() // held.numel()), []).append(bit_sum(held))
    result = torch.zeros(2, dtype=torch.int64)  # (A | B)
    for (kind, weight), sums in parts.items():
        result[kind] += weight * torch.stack(sums).sum().cpu()
    if group.world_size > 1:
        dist.all_reduce(result, group=group.cpu_group)
    return [checksum % 2**64 for checksum in result.tolist()], group.world_size


# ---------------------------------------------------------------------------------------------------------------------
# Generate


def assign_to_replicas(prompts: list[list[int]], replicas: int, limits: list[int]) -> list[list[int]]:
    """Which request runs on which replica: `replicas` lists of request indices, each longest expected first.

    The longest unit goes to the replica with the least work so far (Graham 1969), work in tokens to compute: the prompt once
    and each sample's limit (N `limits`). Nothing else may enter, such as lengths seen before: who computes what would then
    differ after a resume, and with the batches the rounding. Samples of one prompt are a unit (they share its keys and
    values) as long as there are prompts enough for all replicas; with fewer the samples themselves are dealt out.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, prompt in enumerate(prompts):
        groups.setdefault(tuple(prompt), []).append(index)
    units = list(groups.values()) if len(groups) >= replicas else [[index] for index in range(len(prompts))]
    work = {unit[0]: len(prompts[unit[0]]) + sum(limits[i] for i in unit) for unit in units}
    units.sort(key=lambda unit: -work[unit[0]])  # stable: equal lengths keep their order on every rank
    shares: list[list[int]] = [[] for _ in range(replicas)]
    loads = [0] * replicas
    for unit in units:
        least = loads.index(min(loads))
        shares[least].extend(unit)
        loads[least] += work[unit[0]]
    return shares


def generate(
    engine: LLM,
    prompts: list[list[int]],
    seeds: list[int],
    *,
    max_tokens: int | list[int],
    temperature: float,
    top_p: float = 1.0,
    top_k: int = 0,
    use_adapter: bool = False,
    stop: list[str] | None = None,
    on_sample: Callable[[int, Sample], None] | None = None,
    gather: bool = True,
) -> list[Sample]:
    """One sample per entry of `prompts` (N token-id lists) with its own seed and at most `max_tokens`, one number for all or
    N of them; repeat a prompt G times for a group.

    Collective: every rank calls it with the same arguments. The requests are split over the replicas; with `gather` every
    rank returns all N samples in request order, without it only its own (the rest are missing from the list).
    `on_sample(index, sample)` is called on the rank that finished a sample, as soon as it is finished.
    Log-probabilities are those of the sampled tokens after temperature, top-p and top-k. `stop` strings and every
    end-of-sequence id of the model end a completion and stay inside it.
    With `gather`, `engine.stats` gets tokens, tokens per second (of all replicas over the slowest one's time) and the share of
    that time in which each replica had nothing left to do.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    assert len(prompts) == len(seeds), f"one seed per prompt: {len(prompts)} prompts, {len(seeds)} seeds"
    limits = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens  # N
    assert len(limits) == len(prompts), f"one limit per prompt: {len(prompts)} prompts, {len(limits)} limits"
    assert not use_adapter or engine.policy_version is not None, "use_adapter before any push_adapter"
    wake_kv_cache(engine)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    tp = engine.llm_engine.vllm_config.parallel_config.tensor_parallel_size
    mine = assign_to_replicas(prompts, world // tp, limits)[rank // tp]

    start = time.perf_counter()
    for index in mine:
        params = SamplingParams(
            max_tokens=limits[index],
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seeds[index],
            logprobs=0,  # only the sampled token's
            stop=stop,
            detokenize=bool(stop),  # text is decoded once at the end; stop strings need it on the way
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )
        engine.llm_engine.add_request(
            str(index),
            {"prompt_token_ids": prompts[index]},
            params,
            lora_request=engine.policy if use_adapter else None,
        )
    tokenizer = engine.get_tokenizer()
    samples: dict[int, Sample] = {}
    while engine.llm_engine.has_unfinished_requests():
        for output in engine.llm_engine.step():
            if not output.finished:
                continue
            index, completion = int(output.request_id), output.outputs[0]
            ids = list(completion.token_ids)
            logprobs = [position[token].logprob for position, token in zip(completion.logprobs, ids)]
            samples[index] = Sample(
                prompt_ids=prompts[index],
                completion_ids=ids,
                logprobs=logprobs,
                text=tokenizer.decode(ids, skip_special_tokens=True),
                finish_reason=completion.finish_reason,
                seed=seeds[index],
                experts=chosen_experts(engine, completion.routed_experts, index, len(prompts[index]) + len(ids) - 1),
            )
            if on_sample and rank % tp == 0:
                on_sample(index, samples[index])
    drain(engine)
    assert set(samples) == set(mine), f"the engine answered {len(samples)} of {len(mine)} requests"

    if gather:
        # Ranks of a TP group computed the same; the first one's samples count, so that all train on the same numbers.
        tokens = [samples[index].completion_ids for index in sorted(samples)]
        part = time.perf_counter() - start, zlib.crc32(str(tokens).encode()), samples if rank % tp == 0 else {}
        parts = [part] * world
        if world > 1:
            dist.all_gather_object(parts, part)
        busy, digests, shares = zip(*parts)
        for first in range(0, world, tp):
            assert len(set(digests[first : first + tp])) == 1, (
                f"ranks {first} to {first + tp - 1} share an engine (--tp {tp}) and sampled different tokens"
            )
        samples = {index: sample for share in shares for index, sample in share.items()}
        assert len(samples) == len(prompts), f"{len(samples)} samples came back for {len(prompts)} requests"
        slowest, sampled = max(busy), sum(len(sample.completion_ids) for sample in samples.values())
        idle = [round(1 - seconds / slowest, 4) for seconds in busy[::tp]]
        engine.stats |= {"tokens": sampled, "tokens_per_second": sampled / slowest, "idle": idle}
    return [samples[index] for index in sorted(samples)]


def drain(engine: LLM) -> None:
    """Step until the engine itself has nothing left. On a GPU it schedules a step ahead, so that the last answer comes out
    while a surplus step is still queued: `release_kv_cache_memory` refuses then, and what the step says of its experts would
    arrive after the reset of the prefix cache, which vLLM 0.32 asserts against.
    """
    core = engine.llm_engine.engine_core.engine_core
    while core.scheduler.has_requests() or core.batch_queue:
        engine.llm_engine.step()


def chosen_experts(engine: LLM, returned: np.ndarray | None, index: int, tokens: int) -> np.ndarray | None:
    """(tokens, layers, k) int16 for one finished request: what vLLM returned, or on a CPU what `note_experts` wrote down."""
    if engine.chosen is not None:
        parts = engine.chosen.pop(str(index))
        returned = np.full((tokens, *parts[0][1].shape[1:]), -1, np.int16)  # (tokens, layers, k)
        for start, part in parts:
            returned[start : start + len(part)] = part
    if returned is None:
        return None
    assert len(returned) == tokens, f"the engine returned the experts of {len(returned)} tokens; {tokens} were computed"
    return returned.astype(np.int16)


# ---------------------------------------------------------------------------------------------------------------------
# Shutdown


def shutdown(engine: LLM) -> None:
    """Stop the engine, then the process group: the other order makes vLLM's exit handler fail on every rank.

    Collective: every rank must call, after its last collective. (vLLM 0.32 destroys the default group by itself.)
    """
    if dist.is_initialized():
        dist.barrier()
    engine.llm_engine.engine_core.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()
