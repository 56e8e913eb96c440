"""One GPU, ready to run: a LoRA training step over NVFP4 weights against the same step over bf16 weights.

    python tests/benchmarks/bench_gpu_step.py --tokens 8192 --layers 8       # about a minute on one GPU
    python tests/benchmarks/bench_gpu_step.py --tokens 256 --layers 2 --small   # the same path on a CPU, to see it runs

Demands: tokens/s at least .90 of bf16 at 8k tokens, weight memory at most .30 of bf16. Not measured so far: no GPU was at
hand. A random Llama of 8 B shape (fewer layers, so it fits and loads in seconds) is quantized, both forms get the same
LoRA, and a step is forward, backward and AdamW with activation checkpointing, on one rank under FSDP2.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))
import model_nvfp4 as nvfp4
from quantize import quantize


class Policy(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        hidden = self.model.get_base_model().model(input_ids=tokens).last_hidden_state
        return hidden.float().square().mean()  # no head: it is the same bf16 matmul on both sides


def make_checkpoints(folder: Path, layers: int, small: bool) -> tuple[Path, Path]:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    if small:
        sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, num_hidden_layers=layers, vocab_size=1024, max_position_embeddings=131072)
    LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained(folder / "bf16")
    (folder / "nvfp4").mkdir()
    quantize(folder / "bf16", folder / "nvfp4", a16=True, ignore=[], recipe="max", dialect="compressed-tensors")
    return folder / "bf16", folder / "nvfp4"


def measure(folder: Path, tokens: int, steps: int = 5) -> dict:
    """{"tokens_per_second", "weight_bytes" of the decoder's linears, "peak_bytes"} of LoRA steps over one checkpoint."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    root = Policy(nvfp4.build_model(folder, lora_rank=16, lora_alpha=32))
    nvfp4.shard(root, activation_checkpointing=True)
    nvfp4.load_weights(root, folder)
    root.train()
    frozen = {n: p for n, p in root.named_parameters() if ".layers." in n and "lora_" not in n}
    weight_bytes = sum(p.numel() * p.element_size() for p in frozen.values())
    optimizer = torch.optim.AdamW([p for p in root.parameters() if p.requires_grad], lr=1e-4)
    batch = torch.randint(0, 1024, (1, tokens), device=device)
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(steps + 1):
        synchronize()
        start = time.perf_counter()
        root(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        synchronize()
        times.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    return {"tokens_per_second": tokens / min(times[1:]), "weight_bytes": weight_bytes, "peak_bytes": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    dist.init_process_group(
        "gloo" if not torch.cuda.is_available() else "nccl", store=dist.HashStore(), rank=0, world_size=1
    )
    with tempfile.TemporaryDirectory() as work:
        dense, packed = make_checkpoints(Path(work), args.layers, args.small)
        result = {"bf16": measure(dense, args.tokens), "nvfp4": measure(packed, args.tokens)}
    for key in ("tokens_per_second", "weight_bytes"):
        result[f"{key} ratio"] = round(result["nvfp4"][key] / result["bf16"][key], 3)
    print(json.dumps(result, indent=2))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
