"""What the adapter and our wrapper cost in generation, and what a push costs. Prints medians and ratios of one process.

    python tests/benchmarks/bench_rollout.py [--model DIR] [--rounds 5] [--stock]

`--stock` leaves vLLM's own LoRA on CPU in place (one copy of the adapter per token), to see what it costs.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
import model_nvfp4
import rollout
from problems import arithmetic_problems, encode_prompts


def random_adapter(model_dir: str, rank: int = 16) -> dict[str, torch.Tensor]:
    """All linear layers, of the size that a hundred steps of training make."""
    model = model_nvfp4.build_model(model_dir, lora_rank=rank, lora_alpha=2 * rank)
    generator = torch.Generator().manual_seed(0)
    return {
        name.replace(".default", ""): torch.randn(p.shape, generator=generator) * (0.02 if "lora_A" in name else 0.01)
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def time_pushes(engine, tensors: dict, config: dict, rounds: int) -> dict[str, list[float]]:
    """Seconds to hand over the adapter, and how much of it is its checksum, before and after."""
    lora_dtype = engine.llm_engine.vllm_config.lora_config.lora_dtype
    copies = {name: tensor.to(lora_dtype) for name, tensor in tensors.items()}
    seconds: dict[str, list[float]] = {"push and read back": [], "of that, checksums": []}
    for version in range(rounds + 1):
        marks = [time.perf_counter()]
        rollout.push_adapter(engine, tensors, config, version=version)
        marks.append(time.perf_counter())
        rollout.check_adapter(engine, rollout.adapter_checksum(copies, config))
        marks.append(time.perf_counter())
        for name, before, after in zip(seconds, marks, marks[1:]):
            seconds[name].append(after - before)
    return {name: values[1:] for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct-NVFP4")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stock", action="store_true", help="vLLM's own LoRA on CPU")
    args = parser.parse_args()

    if args.stock:
        from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

        own = PunicaWrapperCPU.add_lora_linear, PunicaWrapperCPU.add_lora_logits
    engine = rollout.build_engine(args.model, max_model_len=160, max_lora_rank=16, max_num_seqs=128)
    if args.stock:
        PunicaWrapperCPU.add_lora_linear, PunicaWrapperCPU.add_lora_logits = own
    problems = arithmetic_problems(0)[0][:16]
    ids = encode_prompts(engine.get_tokenizer(), [p.messages for p in problems])
    prompts = [prompt for prompt in ids for _ in range(8)]
    pushes = time_pushes(engine, random_adapter(args.model), {"r": 16, "lora_alpha": 32}, args.rounds)

    def ours(use_adapter: bool, seed: int) -> float:
        engine.reset_prefix_cache()
        seeds = [1000 * seed + i for i in range(len(prompts))]
        start = time.perf_counter()
        samples = rollout.generate(engine, prompts, seeds, max_tokens=40, temperature=1.0, use_adapter=use_adapter)
        return sum(len(s.completion_ids) for s in samples) / (time.perf_counter() - start)

    def bare(seed: int) -> float:
        from vllm import SamplingParams

        engine.reset_prefix_cache()
        params = [
            SamplingParams(max_tokens=40, temperature=1.0, seed=1000 * seed + i, logprobs=0, detokenize=True)
            for i in range(len(prompts))
        ]
        start = time.perf_counter()
        outputs = engine.generate(
            [{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False, lora_request=engine.policy
        )
        return sum(len(o.outputs[0].token_ids) for o in outputs) / (time.perf_counter() - start)

    rates = {"without adapter": [], "with adapter": [], "bare LLM.generate, with adapter": []}
    for seed in range(args.rounds + 1):
        row = ours(False, seed), ours(True, seed), bare(seed)
        if seed:  # the first round warms up
            for name, rate in zip(rates, row):
                rates[name].append(rate)
    print(
        f"{os.cpu_count()} processors, {torch.get_num_threads()} threads, {args.rounds} rounds of {len(prompts)} samples"
    )
    for name, values in rates.items():
        print(f"{name:34s} {statistics.median(values):6.0f} tokens/s  ({min(values):.0f} to {max(values):.0f})")
    pairs = list(zip(*rates.values()))
    print(f"with / without adapter             {statistics.median(b / a for a, b, _ in pairs):.3f}")
    print(f"ours / bare LLM.generate           {statistics.median(b / c for _, b, c in pairs):.3f}")
    for name, values in pushes.items():
        print(f"{name:34s} {statistics.median(values):6.3f} s  ({min(values):.3f} to {max(values):.3f})")
    rollout.shutdown(engine)


if __name__ == "__main__":
    main()
