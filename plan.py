"""Memory, wire and time of a run before anything is loaded, and whether it fits.

    python plan.py CONFIG_OR_FOLDER --gpus 32 --gpus-per-node 4 --gpu-memory 186 --host-memory 960 --tp 4 \\
        --context 16384 --assume-quant nvfp4-experts,fp8-linears
    python plan.py CONFIG_OR_FOLDER --gpus 8 --gpu-memory 80 -- --model DIR --prompts 64 …     # of a train_grpo.py command

Everything follows from config.json, so it answers for a model whose class no installed library has, and needs nothing
but Python. Read it like a calculation on paper: `weights` lists every matrix of the model with its shape, and each
quantity below is one function whose docstring is its formula. In Python: `plan(config, gpus=8, gpu_memory=80) -> dict`.

Left out: biases and other vectors (under .1 % of the parameters of every model tried); draft layers, which the trainer
never loads and the engine only on request; latencies, the tail of the longest completion and start-up, which no config
tells. A size in the config that no line here has read is printed as *not understood*.

GB are 10⁹ bytes, per rank unless it says node. Axis legend: P prompts · G samples per prompt · S shards · V vocabulary
· H hidden size · E experts · k experts per token · r LoRA rank · t tokens of a segment (a prompt and its completions).
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from errors import UserError, end_in_a_sentence, require

# ---------------------------------------------------------------------------------------------------------------------
# Assumptions: what neither the config nor the command line says. All are printed with the plan; none was measured here.

GB = 1e9
BITS = {"nvfp4": 4.5, "mxfp4": 4.25, "int4": 4.25, "fp8": 8, "int8": 8, "bf16": 16}  # per weight, with block scales


class Device(NamedTuple):
    """A class of GPU by its data sheet: GB/s and dense bf16 TFLOP/s; links per GPU and direction."""

    memory: float  # as sold
    bandwidth: float
    tflops: float
    nvlink: float  # inside a domain; PCIe where there is no NVLink
    network: float  # between domains
    host: float  # to host memory
    domain: int  # GPUs that NVLink joins


DEVICES = {
    "rtx4090": Device(24, 1008, 165, 25, 12, 25, 8),
    "a100": Device(80, 2039, 312, 300, 25, 25, 8),
    "h100": Device(80, 3350, 989, 450, 50, 50, 8),
    "h200": Device(141, 4800, 989, 450, 50, 50, 8),
    "b200": Device(180, 8000, 2250, 900, 50, 50, 8),
    "gb200": Device(186, 8000, 2500, 900, 50, 225, 72),
}
ASSUMED = {
    "share of the bf16 peak that training and prefill reach": 0.40,
    "share of the memory bandwidth that decoding and dequantization reach": 0.60,
    "share of a link's bandwidth that a collective or a copy reaches": 0.80,
    "bytes of a GPU or a node per GB it is sold with (drivers report about that many GiB)": 2**30,
    "share of the GPU's memory that can be planned with": 0.95,
    "GB per rank for CUDA context, NCCL, CUDA graphs and what an engine keeps in sleep": 4.0,
    "host memory per byte of a sleeping engine (pinned blocks are powers of two, 1 / ln 2)": 1.44,
    "GB of host memory per rank for Python, torch and vLLM": 6.0,
    "GB/s per rank of the file system with the checkpoint": 2.0,
}
MFU, HBM_SHARE, LINK_SHARE, SOLD, USABLE, RUNTIME, PINNED, PROCESS, DISK = ASSUMED.values()

LOGITS_OF_A_CHUNK = 2**25  # policy.TokenLogprobs
LONGEST_PROMPT = 1024  # tokens; with a command of train_grpo.py, where only the data know it
NOT_COUNTED = ("refill", "replay_experts")  # flags of train_grpo.py with a price that no formula below has
# What families do and no field of their configs says: MLPs without a gate, norms of q and k, four norms in a layer.
UNGATED_MLP = r"(phi|starcoder2|nemotron|arcee|apertus|gpt_neox|falcon|gpt2|opt)$"
QK_NORM = r"qwen3|qwen4|gemma[34]|olmo[23e]|flex_olmo|glm4_moe$|minimax_m2|exaone4|hunyuan|dots1|afmoe|apertus"
FOUR_NORMS = r"gemma[234]|glm4$|afmoe"
# The classes of transformers whose default is a head that is the embedding; a config that says nothing means that, or no.
TIED = (
    r"gemma|cohere|falcon|gpt2|gpt_neo$|opt$|bloom|smollm3|starcoder2|ernie4_5|lfm2|minicpm3|zamba|jetmoe|granite_swa"
)


ALIASES = {  # families name one thing differently
    "hidden_size": ("n_embd", "dim"), "num_hidden_layers": ("n_layer", "n_layers"), "num_key_value_heads": ("n_kv_heads",),
    "num_attention_heads": ("num_attention_heads_per_layer", "n_head", "n_heads"),
    "intermediate_size": ("n_inner", "hidden_dim"), "tie_word_embeddings": ("tied_embeddings",),
    "n_routed_experts": ("num_experts", "num_local_experts", "moe_num_experts"),
    "num_experts_per_tok": ("num_experts_per_token", "moe_k", "top_k_experts"),
    "n_shared_experts": ("num_shared_experts", "moe_num_shared_experts"), "moe_intermediate_size": ("expert_hidden_dim",),
    "shared_expert_intermediate_size": ("moe_shared_expert_intermediate_size",),
    "first_k_dense_replace": ("num_dense_layers", "moe_layer_start_index"), "sliding_window": ("attention_chunk_size",),
    "decoder_sparse_step": ("moe_layer_freq", "moe_layer_interval", "interleave_moe_layer_step"),
}  # fmt: skip
NO_SIZE = (  # fields that look like sizes and change no matrix
    r"_token|position_embeddings|_ids?$|chunk_size|logits_to_keep|_group|^n_group|max_length|no_rope|index_topk"
    r"|max_window_layers|sliding_window|^head_dim$|qk_head_dim|num_key_value_heads|_pattern$|layer_end|^moe$|_eps$"
)
SIZE = r"size|dim|rank|head|layer|expert|state|conv|mamba|ssm|index|nextn|mtp|block|hc_|channels|width"


class Fields:
    """A config read by attribute, None where absent. It remembers what was read, so that the rest can be reported."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values, self._read, self.remarks = values, set(), set()  # remarks: counted as what it is probably not

    def __getattr__(self, name: str) -> Any:
        names = (name, *ALIASES.get(name, ()))
        self._read.update(names)
        return next((self._values[n] for n in names if self._values.get(n) is not None), None)

    def at(self, layer: int) -> Fields:
        """The fields of one layer: its entry of the per-layer lists, and its overrides where a config has some."""
        indices, values = (
            {"mlp_only_layers", "moe_layers"},
            dict(self._values),
        )  # indices list layers, not values per layer
        for name, value in self._values.items():
            if isinstance(value, list) and len(value) == self.num_hidden_layers and name not in indices:
                values[name] = value[layer]
        view = Fields(values | (self.per_layer_config or {}).get(f"{layer:02d}", {}))
        view._read, view.remarks = self._read, self.remarks
        return view

    def not_understood(self) -> list[str]:
        """Remarks, and fields that nobody read whose name sounds like a size and whose value could be one."""
        unread = [(name, value) for name, value in self._values.items() if name not in self._read and value]
        sizes = [(n, v) for n, v in unread if re.search(SIZE, n) and not re.search(NO_SIZE, n) and v != 1]
        return sorted(self.remarks) + sorted(f"{name}={str(value)[:40]}" for name, value in sizes)


# ---------------------------------------------------------------------------------------------------------------------
# The model: a list of its matrices, each with its format


class Weight(NamedTuple):
    """`copies` equal matrices (out, in_) of a decoder layer (-1: outside of them); a token uses `active` of them."""

    name: str  # module path as transformers spells it, which the ignore lists of checkpoints match
    kind: str  # attention, indexer, mlp, experts, shared, router, embedding, head, vision or other
    layer: int
    out: int
    in_: int
    copies: int = 1
    active: int = 1

    @property
    def size(self) -> int:
        return self.out * self.in_ * self.copies


def attention_weights(f: Fields, layer: int) -> list[Weight]:
    """The attention matrices of a layer: gated delta-net, multi-head latent attention (with a `kv_lora_rank`) or grouped
    queries; and the indexer of DeepSeek's sparse attention. Layers that borrow another's keys have none themselves."""
    H, heads, kind = f.hidden_size, f.num_attention_heads, f.layer_types or "full_attention"

    def part(name: str, out: int, in_: int, kind: str = "attention") -> Weight:
        return Weight(f"model.layers.{layer}.{name}", kind, layer, out, in_)

    if kind == "linear_attention" and f.linear_num_value_heads:
        keys = f.linear_num_key_heads * f.linear_key_head_dim
        values = f.linear_num_value_heads * f.linear_value_head_dim
        parts = [part("linear_attn.in_proj_qkvz", 2 * keys + 2 * values, H), part("linear_attn.out_proj", H, values)]
        parts += [part("linear_attn.in_proj_ba", 2 * f.linear_num_value_heads, H)]
        return [*parts, part("linear_attn.conv1d", 2 * keys + values, f.linear_conv_kernel_dim, "other")]
    if kind not in ("full_attention", "sliding_attention", "chunked_attention", "indexed_attention"):
        f.remarks.add(f"layers of type {kind} counted as attention")
    source = f.kv_source_layers if f.kv_source_layers is not None else layer
    owns_kv = source == layer and layer < f.num_hidden_layers - (f.num_kv_shared_layers or 0)
    if f.kv_lora_rank:
        q, value = heads * (f.qk_nope_head_dim + f.qk_rope_head_dim), f.v_head_dim
        parts = [part("self_attn.q_proj", q, H)]
        if f.q_lora_rank:
            parts = [part("self_attn.q_a_proj", f.q_lora_rank, H), part("self_attn.q_b_proj", q, f.q_lora_rank)]
        if owns_kv:
            parts += [part("self_attn.kv_a_proj_with_mqa", f.kv_lora_rank + f.qk_rope_head_dim, H)]
        parts += [part("self_attn.kv_b_proj", heads * (f.qk_nope_head_dim + value), f.kv_lora_rank)]
    else:
        kv_heads, dim = f.num_key_value_heads or heads, f.head_dim or H // heads
        if kind == "full_attention":
            dim = f.global_head_dim or dim  # Gemma 4
        value = f.v_head_dim or dim
        gate = f.attn_output_gate if f.attn_output_gate is not None else f.linear_num_value_heads  # Qwen3-Next and on
        parts = [part("self_attn.q_proj", heads * dim * (2 if gate else 1), H)]
        if owns_kv:
            parts += [part("self_attn.k_proj", kv_heads * dim, H), part("self_attn.v_proj", kv_heads * value, H)]
    parts += [part("self_attn.o_proj", H, heads * value)]
    if f.index_n_heads and f.indexer_types in (None, "full"):
        parts += [part("self_attn.indexer.wq_b", f.index_n_heads * f.index_head_dim, f.q_lora_rank or H, "indexer")]
        shapes = {"wk": f.index_head_dim, "weights_proj": f.index_n_heads}
        parts += [part(f"self_attn.indexer.{name}", out, H, "indexer") for name, out in shapes.items()]
    return parts


def is_sparse(f: Fields, layer: int) -> bool:
    """Whether the MLP of a layer is a mixture of experts: by its type, by a list, or every n-th after the first."""
    if not f.n_routed_experts:
        return False
    if f.mlp_layer_types or f.moe_layers is not None:
        return f.mlp_layer_types == "sparse" or layer in (f.moe_layers or ())
    late = layer >= (f.first_k_dense_replace or 0) and layer not in (f.mlp_only_layers or ())
    return late and (layer + 1) % (f.decoder_sparse_step or 1) == 0


def mlp_weights(f: Fields, layer: int) -> list[Weight]:
    """gate, up and down of a dense layer; or the router, E experts and the shared experts of a sparse one."""
    H, dense = f.hidden_size, f.intermediate_size_mlp or f.intermediate_size or 4 * f.hidden_size
    small = f.moe_intermediate_size or f.intermediate_size or dense
    # Llama 4 has one shared expert that no field mentions.
    shared = f.shared_expert_intermediate_size or small * (f.n_shared_experts or (1 if f.intermediate_size_mlp else 0))
    first = ("up_proj",) if re.match(UNGATED_MLP, f.model_type or "") else ("gate_proj", "up_proj")

    def block(name: str, kind: str, width: int, copies: int = 1, active: int = 1) -> list[Weight]:
        path = f"model.layers.{layer}.mlp{name}"
        into = [Weight(f"{path}.{n}", kind, layer, width, H, copies, active) for n in first]
        return [*into, Weight(f"{path}.down_proj", kind, layer, H, width, copies, active)]

    if not is_sparse(f, layer):
        return block("", "mlp", dense)
    router = Weight(f"model.layers.{layer}.mlp.gate", "router", layer, f.n_routed_experts, H)
    experts = block(".experts.0", "experts", small, f.n_routed_experts, f.num_experts_per_tok)
    return [router, *experts, *(block(".shared_experts", "shared", shared) if shared else [])]


def vision_weights(config: dict[str, Any], f: Fields) -> list[Weight]:
    """Patches, transformer blocks and projector of a vision tower: Pixtral, SigLIP or Qwen; others are guessed."""
    v = Fields(config.get("vision_config") or config.get("vision_encoder") or {})
    if not v.hidden_size:
        return []
    if not re.match(r"pixtral|siglip|qwen", v.model_type or ""):
        f.remarks.add(f"vision tower of type {v.model_type} counted as a plain one")
    H, out = (v.embed_dim, v.hidden_size) if v.embed_dim else (v.hidden_size, v.out_hidden_size)  # first: Qwen2-VL
    width, merge = v.intermediate_size or 4 * H, v.spatial_merge_size or config.get("spatial_merge_size") or 1
    gated = v.hidden_act == "silu" or v.model_type == "pixtral"
    patch = (v.in_channels or v.num_channels or 3) * (v.patch_size or 14) ** 2 * (v.temporal_patch_size or 1)
    blocks = v.depth or v.num_hidden_layers
    shapes = {"patch_embed": (H, patch), "attention": (blocks * 4 * H, H)}
    shapes["mlp"] = (blocks * (3 if gated else 2) * width, H)
    if out:  # Qwen: an MLP over merge² patches, once more for each deep-stack layer
        mergers = 1 + len(v.deepstack_visual_indexes or ())
        shapes["merger"] = (mergers * (merge**2 * H + out), merge**2 * H)
    else:
        shapes["patch_merger"] = (H, merge**2 * H if merge > 1 else 0)
        shapes |= {"projector.linear_1": (f.hidden_size, H), "projector.linear_2": (f.hidden_size, f.hidden_size)}
    return [Weight(f"model.vision_tower.{name}", "vision", -1, *shape) for name, shape in shapes.items()]


def weights(config: dict[str, Any]) -> tuple[list[Weight], Fields]:
    """Every matrix of the model, and the text model's fields with the memory of which were read."""
    text = config.get("text_config") or config
    f = Fields({**text, **(text.get("moe") or {})})
    needed = ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]
    for name in needed + ["num_experts_per_tok"] * bool(f.n_routed_experts):
        covered = isinstance(getattr(f, name), int | list)
        require(covered, f"the config has no {name}; plan.py covers transformer language models")
    H, V, extra = f.hidden_size, f.vocab_size, f.hidden_size_per_layer_input  # the last: Gemma 3n and 4
    parts = [Weight("model.embed_tokens", "embedding", -1, V, H)]
    for layer in range(f.num_hidden_layers):
        at = f.at(layer)
        parts += [*attention_weights(at, layer), *mlp_weights(at, layer)]
        parts += [Weight(f"model.layers.{layer}.norms", "other", layer, 2, H)]
        added = ("gate", "out") if extra else ()
        parts += [Weight(f"model.layers.{layer}.per_layer_{n}", "attention", layer, extra, H) for n in added]
    if extra:
        rows = (f.vocab_size_per_layer_input or V) + H
        parts += [Weight("model.embed_tokens_per_layer", "embedding", -1, rows, f.num_hidden_layers * extra)]
    tied = f.tie_word_embeddings if config.get("tie_word_embeddings") is None else config["tie_word_embeddings"]
    if not (re.search(TIED, f.model_type or "") if tied is None else tied):
        parts += [Weight("lm_head", "head", -1, V, H)]
    return [*parts, *vision_weights(config, f)], f


def assumed_rules(text: str) -> list[tuple[str, str]]:
    """The (format, what) pairs of `nvfp4-experts,fp8-linears`; the first that applies to a matrix wins."""
    rules = [tuple(rule.split("-", 1)) for rule in text.split(",") if rule]
    known = all(len(rule) == 2 and rule[0] in BITS and rule[1] in ("experts", "linears") for rule in rules)
    require(known, f"--assume-quant {text}: write FORMAT-experts or FORMAT-linears, with {', '.join(BITS)}")
    return rules


def matches(name: str, patterns: list[str]) -> bool:
    """Whether a list of targets or exceptions names a module: by `re:`, wildcard, `Linear`, name or prefix. Multi-modal
    checkpoints write the same module under a longer path, so the usual spellings are tried too."""
    spellings = [name, f"language_model.{name}", f"model.language_model.{name.removeprefix('model.')}"]

    def match(spelling: str, pattern: str) -> bool:
        if pattern.startswith("re:"):
            return bool(re.match(pattern[3:], spelling))
        return fnmatch.fnmatch(spelling, pattern) or spelling.startswith(f"{pattern}.")

    return "Linear" in patterns or any(match(spelling, pattern) for pattern in patterns for spelling in spellings)


def algorithm_format(algorithm: str) -> str:
    """The key of BITS for `W4A16_NVFP4`, `FP8_PB_WO`, `mxfp4`, …"""
    return next((name for name in ("nvfp4", "mxfp4", "fp8", "int4", "int8") if name in algorithm.lower()), "bf16")


def group_format(description: dict[str, Any]) -> str:
    """The key of BITS for compressed-tensors' description of a group's weights."""
    bits, kind = description.get("num_bits", 16), description.get("type")
    if bits == 4 and kind == "float":
        return "mxfp4" if description.get("group_size") == 32 else "nvfp4"
    return {4: "int4", 8: "fp8" if kind == "float" else "int8"}.get(bits, "bf16")


def weight_format(w: Weight, quantization: dict[str, Any], rules: list[tuple[str, str]]) -> str:
    """The format that the checkpoint's `quantization_config` gives a matrix; --assume-quant where there is none."""
    if w.kind in ("other", "router", "embedding"):
        return "bf16"
    if not quantization:
        decoder = w.kind not in ("vision", "head")
        return next((name for name, what in rules if decoder and (what == "linears" or w.kind == "experts")), "bf16")
    exceptions = ("ignore", "exclude_modules", "modules_to_not_convert")
    if any(matches(w.name, quantization.get(key) or []) for key in exceptions):
        return "bf16"
    if table := quantization.get("quantized_layers"):  # ModelOpt's MIXED_PRECISION: the table decides
        return next((algorithm_format(v["quant_algo"]) for k, v in table.items() if matches(w.name, [k])), "bf16")
    method = quantization.get("quant_method") or ""
    if method == "compressed-tensors":
        groups = quantization["config_groups"].values()
        return next((group_format(g["weights"]) for g in groups if matches(w.name, g["targets"])), "bf16")
    unpacked = method == "mxfp4" and w.kind != "experts"  # gpt-oss
    return "bf16" if unpacked else algorithm_format(quantization.get("quant_algo") or method)


def flag(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Run:
    """The flags, of the command line and of `plan`. None is filled in by `complete`."""

    gpus: int = flag(MISSING, "GPUs of all nodes; one rank each")
    gpu_memory: float = flag(MISSING, "GB of one GPU, as it is sold: 24, 80, 141, 186")
    gpu: str | None = flag(None, f"class of GPU, for the times: {', '.join(DEVICES)}; default: nearest in memory")
    gpus_per_node: int | None = flag(None, "default: all up to 8")
    host_memory: float | None = flag(None, "GB of one node; unchecked by default")
    tp: int = flag(1, "GPUs of one engine: more leave room for the KV cache, but fewer engines run")
    shard_size: int | None = flag(None, "ranks that share one copy of the trainer's weights; default: all")
    gpu_memory_utilization: float | None = flag(None, "share of a GPU for vLLM; default: what the trainer leaves")
    sleep: str = flag("level1", "level1: engine weights to host memory in training; kv: they stay; off: the cache too")
    context: int = flag(4096, "longest prompt and completion together, in tokens")
    prompts: int = flag(16, "per step")
    group_size: int = flag(8, "samples per prompt")
    prompt_tokens: int = flag(256, "mean length of a prompt")
    completion_tokens: int | None = flag(None, "mean length of a completion; default: half of what --context leaves")
    max_tokens: int = flag(16384, "of a micro-batch on one rank: more need more memory and fewer gathers")
    lora_rank: int = flag(16, "rank of the adapter")
    lora_targets: str = flag("all-linear", "all-linear, attention, or names such as q_proj,o_proj")
    lora_experts: bool = flag(False, "an adapter on every routed expert too")
    expert_slots: bool = flag(True, "vLLM keeps room for an adapter on all experts (not with its lora_target_modules)")
    average: int = flag(1, "above 1 a mean of the adapters is kept as well")
    minibatches: int = flag(1, "optimizer steps per rollout, each with micro-batches of its own")
    extra_forwards: int = flag(0, "forwards beside the training one: of --kl-coef, of --old-logprobs trainer")
    activation_checkpointing: bool = flag(True, "keep one hidden state per layer and recompute the rest")
    assume_quant: str = flag("", "formats where the config names none: nvfp4-linears, or nvfp4-experts,fp8-linears")


def complete(run: Run) -> Run:
    """The run with its defaults filled in; a UserError for a value that means nothing."""
    nearest = min(DEVICES, key=lambda name: abs(DEVICES[name].memory - run.gpu_memory))
    half = max(1, (run.context - run.prompt_tokens) // 2)
    run = replace(run, gpu=run.gpu or nearest, completion_tokens=run.completion_tokens or half)
    run = replace(run, gpus_per_node=run.gpus_per_node or min(run.gpus, 8), shard_size=run.shard_size or run.gpus)
    choices = {"gpu": DEVICES, "sleep": ("level1", "kv", "off")}
    for name, value in vars(run).items():
        flag_name, known = f"--{name.replace('_', '-')}", choices.get(name, (value,))
        require(value in known, f"{flag_name} {value} is unknown; choose one of {', '.join(map(str, known))}")
        least = 0 if name == "extra_forwards" else 1e-9
        sound = type(value) not in (int, float) or least <= value < math.inf
        require(sound, f"{flag_name} must be positive and finite, not {value}")
    return run


class Model(NamedTuple):
    """The matrices with their formats and bytes, and the few other facts that the formulas need."""

    parts: list[Weight]
    formats: list[str]  # one per part
    sizes: list[float]  # bytes, one per part
    fields: Fields
    kv_bytes: int  # of one cached number

    @property
    def bytes(self) -> float:
        return sum(self.sizes)

    def bytes_of(self, chosen: Callable[[Weight], bool]) -> float:
        return sum(size for w, size in zip(self.parts, self.sizes) if chosen(w))


def read_model(config: dict[str, Any], assume_quant: str = "") -> Model:
    """The matrices of a config, with their formats."""
    parts, f = weights(config)
    quantization = config.get("quantization_config") or config.get("quantization") or {}
    formats = [weight_format(w, quantization, assumed_rules(assume_quant)) for w in parts]
    sizes = [w.size * BITS[name] / 8 for w, name in zip(parts, formats)]
    kv_bytes = 1 if quantization.get("kv_cache_scheme") or quantization.get("kv_cache_quant_algo") else 2
    return Model(parts, formats, sizes, f, kv_bytes)


def by_key(pairs: Iterable[tuple[Any, float]]) -> Counter:
    """The sum of the numbers of each key."""
    sums = Counter()
    for key, number in pairs:
        sums[key] += number
    return sums


def active_parameters(m: Model) -> int:
    """Parameters that one token meets: Σ out·in·active of the text model, embedding included."""
    return sum(w.out * w.in_ * w.active for w in m.parts if w.kind != "vision")


def multiplied_parameters(m: Model) -> int:
    """Parameters that multiply a token, 2 FLOPs each: the active ones without the table that is only looked up."""
    head = any(w.kind == "head" for w in m.parts)
    return active_parameters(m) - head * sum(w.size for w in m.parts if w.kind == "embedding")


def adapted(m: Model, run: Run) -> list[Weight]:
    """The matrices with an adapter: attention; with all-linear, MLPs and shared experts; routed experts on request. Never
    kv_b_proj (the engine decodes with it folded into q and o), the indexer (it gets no gradient) or a router."""
    if run.lora_targets in ("attention", "all-linear"):
        kinds = ("attention",) if run.lora_targets == "attention" else ("attention", "mlp", "shared")
        chosen = [w for w in m.parts if w.kind in kinds and not w.name.endswith("kv_b_proj")]
    else:
        names = run.lora_targets.split(",")
        chosen = [w for w in m.parts if w.layer >= 0 and w.kind != "experts" and w.name.rpartition(".")[2] in names]
        missing = set(names) - {w.name.rpartition(".")[2] for w in chosen}
        require(not missing, f"--lora-targets: the model has no {', '.join(sorted(missing))}")
    return chosen + ([w for w in m.parts if w.kind == "experts"] if run.lora_experts else [])


def adapter_parameters(m: Model, run: Run) -> int:
    """Σ r·(out + in)·copies over the adapted matrices; the trainer has less, as gate and up of an expert share their A."""
    return sum(run.lora_rank * (w.out + w.in_) * w.copies for w in adapted(m, run))


# ---------------------------------------------------------------------------------------------------------------------
# Memory of the engine, then of the trainer, bytes per rank


def engine_weight_bytes(m: Model, tp: int) -> float:
    """Weights of an engine on one rank: all over tp, but norms, routers, indexers and down-projections of latent attention
    whole, and k and v split at most by the number of KV heads."""
    kv_ways = min(tp, m.fields.at(0).num_key_value_heads or tp)
    whole = m.bytes_of(lambda w: w.kind in ("other", "router", "indexer") or re.search(r"\.(q|kv)_a_proj", w.name))
    keys = m.bytes_of(lambda w: re.search(r"\.[kv]_proj$", w.name))
    return whole + keys / kv_ways + (m.bytes - whole - keys) / tp


def engine_sequences(run: Run) -> int:
    """Sequences that an engine runs at once (max_num_seqs), as train_grpo.py sets it."""
    return min(1024, run.prompts * run.group_size)


def lora_slot_bytes(m: Model, run: Run) -> float:
    """Room for one adapter in bf16: 2·r·(in + out)/tp of what is adapted, and of all routed experts, adapted or not, unless
    vLLM is told its lora_target_modules. A of gate and up and B of down of an expert are whole on every rank, since they
    meet the whole hidden state (vllm/lora/layers/fused_moe.py)."""
    experts = [w for w in m.parts if w.kind == "experts"] if run.lora_experts or run.expert_slots else []
    others = sum((w.in_ + w.out) * w.copies for w in adapted(m, run) if w.kind != "experts")
    ends = [(w.out, w.in_, w.copies) if w.name.endswith("down_proj") else (w.in_, w.out, w.copies) for w in experts]
    return 2 * run.lora_rank * (sum((H + inner / run.tp) * E for H, inner, E in ends) + others / run.tp)


def engine_workspace_bytes(m: Model, run: Run) -> float:
    """The largest forward in bf16, tokens·(4·H + 2·widest/tp), and the sampler's fp32 logits twice. Tokens as vLLM sets
    max_num_batched_tokens (EngineArgs.get_batch_defaults): 16,384 from 70 GiB on, but not on an A100, else 8,192."""
    tokens = 16384 if run.gpu_memory >= 70 and run.gpu != "a100" else 8192
    widest, logits = max(w.out for w in m.parts if w.layer >= 0), engine_sequences(run) * m.fields.vocab_size
    return 2 * tokens * (4 * m.fields.hidden_size + 2 * widest / run.tp) + 8 * logits


def kv_cache_bytes(m: Model, tp: int, tokens: float) -> float:
    """Cache of one sequence on one engine rank, summed over layers.

    Latent attention: (kv_lora_rank + rope)·tokens, on every rank. Grouped queries: k and v of max(1, kv_heads/tp)
    heads, in sliding layers at most the window. Indexer: fp8 keys with an fp32 scale per 128. Linear attention: an fp32
    state of key·value per head and the inputs of the convolution, whatever the length."""
    shapes, total = {w.name: w for w in m.parts}, 0.0
    for layer in range(m.fields.num_hidden_layers):
        f, prefix = m.fields.at(layer), f"model.layers.{layer}"
        sliding = f.layer_types in ("sliding_attention", "chunked_attention") and f.sliding_window
        seen = min(tokens, f.sliding_window) if sliding else tokens
        if w := shapes.get(f"{prefix}.self_attn.kv_a_proj_with_mqa"):
            total += w.out * m.kv_bytes * seen
        if w := shapes.get(f"{prefix}.self_attn.k_proj"):
            both = w.out + shapes[f"{prefix}.self_attn.v_proj"].out
            total += both * max(1 / tp, 1 / (f.num_key_value_heads or tp)) * m.kv_bytes * seen
        if w := shapes.get(f"{prefix}.self_attn.indexer.wk"):
            total += w.out * (1 + 4 / 128) * tokens
        if w := shapes.get(f"{prefix}.linear_attn.conv1d"):
            state = f.linear_num_value_heads * f.linear_key_head_dim * f.linear_value_head_dim
            total += (4 * state + 2 * w.size) / tp
    return total


def gathered_bytes(m: Model, shards: int) -> float:
    """What FSDP holds whole: the root's own weights (embedding, head, vision tower) throughout, and the largest
    decoder layer, twice where the next one is fetched ahead from other ranks."""
    layers = by_key((w.layer, size) for w, size in zip(m.parts, m.sizes))
    return layers.pop(-1) + max(layers.values()) * (2 if shards > 1 else 1)


def decoded_bytes(m: Model) -> float:
    """The largest packed matrix of a layer in bf16, 2·out·in; of a layer's experts as many as come to half a gibibyte
    (model_nvfp4.grouped_matmul), where gate and up of an expert are one."""
    packed = [w for w, name in zip(m.parts, m.formats) if name != "bf16" and w.layer >= 0]
    keys = [(w.layer, "gate_up") if re.search(r"experts\.0\.(gate|up)_proj", w.name) else w.name for w in packed]
    whole = by_key((key, 2 * w.out * w.in_) for key, w in zip(keys, packed))
    copies = {key: w.copies for key, w in zip(keys, packed)}
    return max((one * min(copies[key], max(1, 2**29 // one)) for key, one in whole.items()), default=0)


def layer_activation_bytes(m: Model, run: Run) -> float:
    """Per token, what the widest decoder layer keeps for backward.

    In bf16: what q, k, v, gate and up give, the attention output, the activation, the input of a down with an adapter, the
    outputs of experts (the router's weights have a gradient), k put together from its two parts in latent attention, the
    output of a norm that a matrix with an adapter reads. In fp32: the input of each norm."""
    chosen, f = {w.name for w in adapted(m, run)}, m.fields
    norms = 4 if re.match(FOUR_NORMS, f.model_type or "") else 2
    layers = Counter()
    for w in (w for w in m.parts if w.kind in ("attention", "mlp", "experts", "shared")):
        kept = w.out
        if w.name.endswith("down_proj"):
            kept = w.in_ * (2 if w.name in chosen else 1) + (w.out if w.kind == "experts" else 0)
        elif w.name.endswith("o_proj"):
            kept = w.in_
        elif w.name.endswith("kv_b_proj"):
            kept += f.at(0).num_attention_heads * (f.qk_nope_head_dim + f.qk_rope_head_dim)
        elif re.search(r"_a_proj|\.[qk]_proj" if re.match(QK_NORM, f.model_type or "") else r"_a_proj", w.name):
            kept += 2 * w.out  # a norm follows: 4 bytes more
        layers[w.layer] += 2 * kept * w.active
    read = sum(any(f"layers.0.{name}" in c for c in chosen) for name in ("self_attn", "mlp"))
    return max(layers.values()) + (4 * norms + 2 * read) * f.hidden_size


def gradients_in_flight(m: Model) -> float:
    """Per token, the bf16 gradients alive in the middle of a layer's backward: of down's input and of one of its two
    factors, 4·in; of the experts' outputs and weighted outputs, 4·out; of the layer's input and output, 4·H."""
    downs = [w for w in m.parts if w.name.endswith("down_proj")]
    layers = by_key((w.layer, 4 * w.active * (w.in_ + (w.out if w.kind == "experts" else 0))) for w in downs)
    return max(layers.values(), default=0) + 4 * m.fields.hidden_size


def activation_bytes(m: Model, run: Run) -> float:
    """The peak of a micro-batch: what all layers keep (with checkpointing a bf16 input of each) and the larger of two
    moments: backward of the last norm, 26·H in fp32, and that of one layer, recomputed where it was not kept."""
    one, layers, H = layer_activation_bytes(m, run), m.fields.num_hidden_layers, m.fields.hidden_size
    kept, again = (2 * H * layers, one) if run.activation_checkpointing else (one * layers, 0)
    return run.max_tokens * (kept + max(26 * H, again + gradients_in_flight(m)))


def visited_keys(run: Run) -> float:
    """Keys of a micro-batch in attention.visits when completions differ from the start: each one's and its prompt's."""
    prompt, completions = run.prompt_tokens, run.group_size * run.completion_tokens
    return run.max_tokens * (run.group_size * prompt + completions) / (prompt + completions)


def visits_bytes(m: Model, run: Run) -> float:
    """The bf16 keys and values that flash attention keeps (attention.grouped_attention) of every layer that is not
    recomputed, the prompt's once for each completion."""
    width = sum(w.out for w in m.parts if w.layer == 0 and re.search(r"\.(k|v|kv_b)_proj$", w.name))
    return 2 * width * visited_keys(run) * (1 if run.activation_checkpointing else m.fields.num_hidden_layers)


def logits_bytes(m: Model, run: Run) -> float:
    """What policy.TokenLogprobs needs: 12 bytes per logit of a chunk (fp32, beside fp32 and probabilities of the chunk before),
    the picked hidden states and their gradient in bf16, and in bf16 a head that is stored packed."""
    H, V = m.fields.hidden_size, m.fields.vocab_size
    packed = any(w.kind == "head" and name != "bf16" for w, name in zip(m.parts, m.formats))
    chunk = min(run.max_tokens, max(16, LOGITS_OF_A_CHUNK // V))
    return 12 * chunk * V + 4 * run.max_tokens * H + (2 * V * H if packed else 0)


def phase_memory(m: Model, run: Run) -> tuple[dict[str, float], dict[str, float]]:
    """What lies on a GPU while it generates, and while it trains; the KV cache gets what everything else leaves."""
    adapter = adapter_parameters(m, run)
    both = {
        "runtime": RUNTIME * GB,
        "weight shard": m.bytes / run.shard_size,
        "adapter, fp32": 4 * adapter / run.shard_size,
        "optimizer (Adam)": 8 * adapter / run.shard_size,
    }
    engine = {"engine weights": engine_weight_bytes(m, run.tp), "engine LoRA slot": lora_slot_bytes(m, run)}
    generate = both | engine | {"engine workspace": engine_workspace_bytes(m, run)}
    train = both | {
        "gradient, fp32": 4 * adapter / run.shard_size,
        "gathered layers": gathered_bytes(m, run.shard_size),
        "decoded weight": decoded_bytes(m),
        "activations": activation_bytes(m, run),
        "keys and values": visits_bytes(m, run),
        "logits": logits_bytes(m, run),
    }
    if run.sleep != "level1":
        train |= engine
    left = budget(run) - most_taken(generate, train, run)
    if run.gpu_memory_utilization:  # vLLM fills its share with cache, whatever the trainer needs
        left = (run.gpu_memory_utilization - engine_share(generate, run)) * run.gpu_memory * SOLD
    generate["KV cache"] = max(0.0, left)
    if run.sleep == "off":
        train["KV cache"] = generate["KV cache"]
    return generate, train


def most_taken(generate: dict[str, float], train: dict[str, float], run: Run) -> float:
    """Bytes in use at once: with --sleep off nothing changes hands, so the cache must leave room for training as well."""
    return max(sum(generate.values()), sum(train.values()) if run.sleep == "off" else 0)


def engine_share(generate: dict[str, float], run: Run) -> float:
    """What vLLM calls gpu_memory_utilization: its part of the GPU, driver and graphs included."""
    its = sum(size for name, size in generate.items() if name.startswith(("runtime", "engine", "KV")))
    return its / (run.gpu_memory * SOLD)


def budget(run: Run) -> float:
    """Bytes of a GPU that can be planned with."""
    return run.gpu_memory * SOLD * USABLE


def host_memory(m: Model, run: Run) -> dict[str, float]:
    """Bytes of a node: for each rank its process, whole copies of the adapter (before and after a step, vLLM's, the mean),
    engine weights asleep at level 1 (as rollout.check_sleep counts them), and the peak of loading: a shard, the largest
    tensor and 1 GiB (what model_nvfp4.load_weights promises)."""
    ranks, adapter = min(run.gpus, run.gpus_per_node), adapter_parameters(m, run)
    engine = engine_weight_bytes(m, run.tp) + lora_slot_bytes(m, run)
    return {
        "processes": ranks * PROCESS * GB,
        "adapter: last and next in fp32, vLLM's in bf16": 10 * ranks * adapter,
        "adapter: the mean, last and next": 8 * ranks * adapter if run.average > 1 else 0.0,
        "engine weights asleep": PINNED * ranks * engine if run.sleep == "level1" else 0.0,
        "loading": ranks * (m.bytes / run.shard_size + max(m.sizes) + 2**30),
    }


def largest_micro_batch(m: Model, run: Run) -> int:
    """The largest --max-tokens, a multiple of 1024, with which training fits; 0 when none does. By bisection."""
    low, high = 0, 1024
    while low < high:
        middle = (low + high + 1) // 2
        train = phase_memory(m, replace(run, max_tokens=1024 * middle))[1]
        fits = sum(train.values()) - train.get("KV cache", 0) <= budget(run)
        low, high = (middle, high) if fits else (low, middle - 1)
    return 1024 * low


# ---------------------------------------------------------------------------------------------------------------------
# Wire and time of a step


def step_tokens(m: Model, run: Run) -> int:
    """Tokens that all ranks train on: P·(prompt + G·completion), since a group's prompt is computed once (other words that
    samples share are counted each time). Samples of a model with linear attention share nothing: P·G·(prompt + completion)."""
    alone = any(w.name.endswith("conv1d") for w in m.parts)
    return run.prompts * (run.prompt_tokens * (run.group_size if alone else 1) + run.group_size * run.completion_tokens)


def micro_batches(m: Model, run: Run) -> int:
    """Forward and backward passes of a rank in a step."""
    return run.minibatches * math.ceil(step_tokens(m, run) / (run.minibatches * run.gpus * run.max_tokens))


def wire_bytes(m: Model, run: Run) -> dict[str, float]:
    """Bytes that a rank receives. Each micro-batch gathers packed layers for forward and again for backward, the root once:
    (S − 1)/S·(2·layers + root); an extra forward gathers all once more. LoRA gradients are reduced in fp32, over the
    shards and then over their copies."""
    adapter, outside = adapter_parameters(m, run), (run.shard_size - 1) / run.shard_size
    once = outside * ((2 + run.extra_forwards) * m.bytes - m.bytes_of(lambda w: w.layer < 0))
    return {
        "weights, per micro-batch": once,
        "weights, per step": once * micro_batches(m, run),
        "LoRA gradients, per step": 4 * adapter * (outside + (2 / run.shard_size if run.gpus > run.shard_size else 0)),
        "adapter to every rank, per step": 4 * adapter * outside,
    }


def experts_read(f: Fields, tokens: float) -> float:
    """Share of a layer's experts that a batch reads when every token picks k at random: 1 − (1 − k/E)^tokens."""
    return 1 - (1 - f.num_experts_per_tok / f.n_routed_experts) ** tokens if f.n_routed_experts else 0.0


def attention_flops(m: Model, tokens: float) -> float:
    """Per token, forward: scores and values over half of `tokens`, 4·heads·dim·tokens/2 a layer."""
    return sum(2 * w.in_ * tokens for w in m.parts if w.name.endswith("self_attn.o_proj"))


def decode_seconds(m: Model, run: Run, sequences: float) -> float:
    """One token for each sequence: the slower of reading touched weights and caches, and of 2·multiplied FLOPs."""
    device = DEVICES[run.gpu]
    read = m.bytes_of(lambda w: w.kind not in ("experts", "vision", "embedding"))
    read += m.bytes_of(lambda w: w.kind == "experts") * experts_read(m.fields, sequences)
    caches = sequences * kv_cache_bytes(m, run.tp, run.prompt_tokens + run.completion_tokens / 2)
    reading = (read / run.tp + caches) / (device.bandwidth * GB * HBM_SHARE)
    return max(reading, sequences * 2 * multiplied_parameters(m) / run.tp / (device.tflops * 1e12 * MFU))


def step_seconds(m: Model, run: Run, fitting: float) -> dict[str, float]:
    """Seconds of each phase, with `fitting` sequences of mean length in the cache.

    Prefill: 2·multiplied FLOPs for each prompt token, once per group. Decode: completion·requests/concurrent steps.
    Train: each token passes·(2·multiplied + attention) FLOPs, with 2 passes (forward, and backward through frozen
    weights), one more to recompute and one for each extra forward; dequantization moves 4.56 bytes per packed weight
    and pass; gathering overlaps, so the slower counts."""
    device, adapter, multiplied = DEVICES[run.gpu], adapter_parameters(m, run), multiplied_parameters(m)
    flops, bandwidth = device.tflops * 1e12 * MFU, device.bandwidth * GB * HBM_SHARE
    host_link, domain = device.host * GB * LINK_SHARE, device.domain if device.domain > 8 else run.gpus_per_node
    link = (device.nvlink if run.shard_size <= domain else device.network) * GB * LINK_SHARE
    requests = math.ceil(run.prompts * run.group_size / max(1, run.gpus // run.tp))
    concurrent = max(1.0, min(requests, fitting, engine_sequences(run)))
    passes = 2 + run.activation_checkpointing + run.extra_forwards
    per_token = 2 * multiplied + attention_flops(m, run.prompt_tokens + run.completion_tokens)
    packed = sum(w.size for w, name in zip(m.parts, m.formats) if name != "bf16" and w.layer >= 0)
    inside = {
        "in train: matrix products": passes * per_token * step_tokens(m, run) / run.gpus / flops,
        "in train: dequantization": passes * 4.56 * packed * micro_batches(m, run) / bandwidth,
        "in train: gathering, overlapped": wire_bytes(m, run)["weights, per step"] / link,
    }
    multiplying, dequantizing, gathering = inside.values()
    phases = {
        "wake and sleep": 2 * engine_weight_bytes(m, run.tp) / host_link if run.sleep == "level1" else 0.0,
        "adapter to the engine": 2 * adapter / host_link,
        "prefill": requests / run.group_size * run.prompt_tokens * 2 * multiplied / run.tp / flops,
        "decode": run.completion_tokens * requests / concurrent * decode_seconds(m, run, concurrent),
        "train": max(multiplying + dequantizing, gathering),
    }
    loading = (m.bytes / run.shard_size + engine_weight_bytes(m, run.tp)) / (DISK * GB)
    return phases | {"step, the sum": sum(phases.values())} | inside | {"loading, once": loading}


# ---------------------------------------------------------------------------------------------------------------------
# The plan and the command


def refusals(m: Model, run: Run, generate: dict[str, float], train: dict[str, float]) -> list[str]:
    """Why the run cannot be, one sentence each with the way out; an empty list means that it fits."""
    of = {"GPUs": run.gpus, "GPUs of a node": run.gpus_per_node, "heads": m.fields.at(0).num_attention_heads}
    reasons = [f"--tp {run.tp} does not divide the {number} {what}" for what, number in of.items() if number % run.tp]
    if run.gpus % run.shard_size:
        reasons.append(f"--shard-size {run.shard_size} does not divide the {run.gpus} GPUs")
    if run.prompt_tokens + run.completion_tokens > run.context:
        mean = f"a mean prompt and completion of {run.prompt_tokens} + {run.completion_tokens} tokens"
        reasons.append(f"{mean} exceed --context {run.context}")
    one, there = kv_cache_bytes(m, run.tp, run.context), budget(run) / GB
    if generate["KV cache"] < one:
        taken = (sum(generate.values()) - generate["KV cache"]) / GB
        before = f"{taken:.1f} of {there:.1f} GB are taken before the KV cache"
        needs = f"in which one sequence of {run.context} tokens needs {one / GB:.2f}"
        way_out = "raise --tp or --gpus, or lower --context" + (", or --sleep level1" if run.sleep == "off" else "")
        reasons.append(f"generating: {before}, {needs}; {way_out}")
    taken = most_taken(generate, train, run)
    if run.gpu_memory_utilization and taken > budget(run) and generate["KV cache"] >= one:
        most = run.gpu_memory_utilization - (taken - budget(run)) / (run.gpu_memory * SOLD)
        both = f"--gpu-memory-utilization {run.gpu_memory_utilization} and the trainer's part"
        fits = f"at most {math.floor(100 * most) / 100} fits"
        reasons.append(f"generating: {both} come to {taken / GB:.1f} GB of {there:.1f}; {fits}")
    needed = (sum(train.values()) - train.get("KV cache", 0)) / GB
    if needed > there:
        largest, asleep = largest_micro_batch(m, run), "" if run.sleep == "level1" else " or --sleep level1"
        way_out = f"--max-tokens {largest} fits" if largest else f"use more GPUs{asleep}"
        reasons.append(f"training: {needed:.1f} GB are needed and {there:.1f} are there; {way_out}")
    host = sum(host_memory(m, run).values())
    if run.host_memory is not None and host > run.host_memory * SOLD:
        way_out = "; --sleep kv leaves the engine's weights on the GPU" if run.sleep == "level1" else ""
        have = f"{run.host_memory * SOLD / GB:.0f}"
        reasons.append(f"host memory: a node needs {host / GB:.0f} GB and has {have}{way_out}")
    return reasons


def plan(config: dict[str, Any], **flags: Any) -> dict[str, Any]:
    """Bytes, seconds and verdict of a run whose flags are the fields of `Run`. Pure: it reads and loads nothing."""
    run = complete(Run(**flags))
    m = read_model(config, run.assume_quant)
    generate, train = phase_memory(m, run)
    reasons = refusals(m, run, generate, train)
    fitting = generate["KV cache"] / kv_cache_bytes(m, run.tp, run.prompt_tokens + run.completion_tokens)
    return {
        "fits": not reasons, "reasons": reasons, "parameters": sum(w.size for w in m.parts),
        "active_parameters": active_parameters(m), "adapter_parameters": adapter_parameters(m, run), "weight_bytes": m.bytes,
        "parameters_by_kind": dict(by_key((w.kind, w.size) for w in m.parts)),
        "parameters_by_format": dict(by_key((name, w.size) for w, name in zip(m.parts, m.formats))),
        "run": vars(run) | {"nodes": math.ceil(run.gpus / run.gpus_per_node), "replicas": run.gpus // run.tp},
        "generate": generate, "train": train, "host_per_node": host_memory(m, run),
        "gpu_memory_utilization": round(engine_share(generate, run), 3),
        "sequences_at_context": int(generate["KV cache"] / kv_cache_bytes(m, run.tp, run.context)),
        "sequences_at_mean_length": int(fitting), "largest_max_tokens": largest_micro_batch(m, run),
        "micro_batches": micro_batches(m, run), "wire": wire_bytes(m, run), "seconds": step_seconds(m, run, fitting),
        "assumptions": ASSUMED | {f"{run.gpu}: {name}": value for name, value in DEVICES[run.gpu]._asdict().items()},
        "not_understood": m.fields.not_understood(),
    }  # fmt: skip


def read_config(path: str | Path) -> dict[str, Any]:
    """What a config.json or params.json says, or that of a folder; ModelOpt's older hf_quant_config.json is read too."""
    path = Path(path)
    if path.is_dir():
        native = not (path / "config.json").is_file() and (path / "params.json").is_file()
        path = path / ("params.json" if native else "config.json")
    require(path.is_file(), f"{path} does not exist; give a config.json or the folder that holds it")
    try:
        config = json.loads(path.read_text())
    except ValueError as error:  # no JSON, or no UTF-8
        raise UserError(f"{path} is not JSON: {error}") from error
    require(isinstance(config, dict), f"{path} holds no JSON object; is it a model's config.json?")
    older = path.with_name("hf_quant_config.json")
    if older.is_file() and not config.get("quantization_config"):
        config["quantization_config"] = json.loads(older.read_text()).get("quantization")
    return config


def flags_of_command(words: list[str]) -> tuple[dict[str, Any], list[str]]:
    """The fields of `Run` that a train_grpo.py command sets, the trainer's defaults included, and the flags not counted here.

    --completion-tokens is the longest completion there and the mean one, taken for half of it, here; the longest of training
    or evaluation sets --context."""
    from train_grpo import parse_args  # imports torch, which nothing else here needs

    args = vars(parse_args(words))
    longest, engine_args = args["completion_tokens"], set(args["engine_args"])
    known = {f.name: args[f.name] for f in fields(Run) if f.name in args} | {
        "completion_tokens": max(1, longest // 2),
        "context": LONGEST_PROMPT + max(longest, args["eval_tokens"] or 0),
        "extra_forwards": (args["kl_coef"] > 0) + (args["old_logprobs"] == "trainer"),
        "expert_slots": "lora_target_modules" not in engine_args,
    }
    not_counted = [f"--{name.replace('_', '-')}" for name in NOT_COUNTED if args[name]]
    return known, not_counted + ["--engine-args"] * bool(engine_args - {"lora_target_modules"})


def table(title: str, rows: dict[str, float], unit: float = GB) -> str:
    """The title and a line for each row that is not zero."""
    return "\n".join([title, *(f"  {name:<34}{value / unit:>12,.3f}" for name, value in rows.items() if value)])


def report(p: dict[str, Any]) -> str:
    """The plan as text."""
    run, there = p["run"], f"of {p['run']['gpu_memory'] * SOLD * USABLE / GB:.1f} usable"
    parameters, active, size = p["parameters"] / GB, p["active_parameters"] / GB, p["weight_bytes"] / GB
    sums = {phase: p[phase] | {"sum": sum(p[phase].values())} for phase in ("generate", "train", "host_per_node")}
    lines = [
        f"{parameters:,.2f} B parameters, {active:,.2f} B active, {size:,.1f} GB; LoRA {p['adapter_parameters']:,}",
        table("parameters by part, 10⁹", p["parameters_by_kind"]),
        table("parameters by format, 10⁹", p["parameters_by_format"]),
        f"{run['nodes']} nodes, {run['gpus']} ranks: {run['replicas']} engines of {run['tp']}, "
        f"weights of the trainer over {run['shard_size']}",
        table(f"generating, GB per GPU {there}", sums["generate"]),
        f"  the cache holds {p['sequences_at_context']} sequences of {run['context']} tokens, "
        f"{p['sequences_at_mean_length']} of mean length; gpu_memory_utilization {p['gpu_memory_utilization']}",
        table(f"training, GB per GPU {there}", sums["train"]),
        f"  {p['micro_batches']} micro-batches of {run['max_tokens']} tokens; {p['largest_max_tokens']} would fit",
        table("host memory, GB per node", sums["host_per_node"]),
        table("received by each rank, GB", p["wire"]),
        table("seconds", p["seconds"], 1),
        "assumed",
        *(f"  {name}: {value}" for name, value in p["assumptions"].items()),
    ]
    if p["not_understood"]:
        lines.append("NOT UNDERSTOOD, so that counts may be wrong: " + "; ".join(p["not_understood"]))
    if p.get("not_counted"):
        lines.append(f"not counted, time and memory come on top: {', '.join(p['not_counted'])}")
    return "\n".join([*lines, "fits" if p["fits"] else "does not fit, because", *(f"  {r}" for r in p["reasons"])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="config.json, or a folder with one")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    for f in fields(Run):
        kind = {"int": int, "float": float, "str": str}.get(f.type.split()[0])
        how = {"type": kind} if kind else {"action": argparse.BooleanOptionalAction}
        how |= {"required": True} if f.default is MISSING else {"default": f.default}
        parser.add_argument(f"--{f.name.replace('_', '-')}", help=f.metadata["help"], **how)
    words, not_counted = sys.argv[1:], []
    if "--" in words:
        at = words.index("--")
        known, not_counted = flags_of_command(words[at + 1 :])
        parser.set_defaults(**known)  # what stands before the -- wins
        words = words[:at]
    flags = vars(parser.parse_args(words))
    path, as_json = flags.pop("config"), flags.pop("json")
    result = plan(read_config(path), **flags) | {"not_counted": not_counted}
    print(json.dumps(result, indent=1) if as_json else report(result))


if __name__ == "__main__":
    end_in_a_sentence(main)
