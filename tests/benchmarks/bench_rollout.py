"""What the adapter and our wrapper cost in generation, and what a push costs. Prints medians and ratios of one process.

    python tests/benchmarks/bench_rollout.py [--model DIR] [--rounds 5] [--stock]

`--stock` leaves vLLM's own LoRA on CPU in place (one copy of the adapter per token), to see what it costs.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
import model_nvfp4
import rollout
from train_grpo import arithmetic_problems


def random_adapter(model_dir: str, folder: str, rank: int = 16) -> None:
    """All linear layers, of the size that a hundred steps of training make."""
    model = model_nvfp4.build_model(model_dir, lora_rank=rank, lora_alpha=2 * rank)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name.replace(".default", ""): torch.randn(p.shape, generator=generator) * (0.02 if "lora_A" in name else 0.01)
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    model_nvfp4.save_adapter(folder, tensors, lora_rank=rank, lora_alpha=2 * rank, base_model=model_dir)


def time_pushes(engine, model_dir: str, rounds: int) -> dict[str, list[float]]:
    """Seconds to hand over the adapter: through a folder in memory, through vLLM's private classes, and to read it back."""
    from safetensors.torch import load_file
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    def put(worker, tensors, helper):
        manager = worker.model_runner.lora_manager
        lora = LoRAModel.from_lora_tensors(
            1, tensors, helper, "cpu", manager.lora_config.lora_dtype, model_vocab_size=manager.vocab_size
        )
        manager._adapter_manager.remove_adapter(1)
        manager._adapter_manager.add_adapter(lora)
        manager._adapter_manager.activate_adapter(1)

    with tempfile.TemporaryDirectory(dir="/dev/shm") as source, tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        random_adapter(model_dir, source)
        tensors = load_file(f"{source}/adapter_model.safetensors")
        helper = PEFTHelper.from_local_dir(source, None)
        seconds = {
            "write the folder": [],
            "push and read back": [],
            "of that, read back": [],
            "push by private classes": [],
        }
        for _ in range(rounds + 1):
            marks = [time.perf_counter()]
            model_nvfp4.save_adapter(folder, tensors, lora_rank=16, lora_alpha=32, base_model=model_dir)
            marks.append(time.perf_counter())
            rollout.push_adapter(engine, folder, version=1)
            marks.append(time.perf_counter())
            rollout.check_adapter(engine, folder)
            marks.append(time.perf_counter())
            engine.collective_rpc(put, args=({name: t.clone() for name, t in tensors.items()}, helper))
            engine.reset_prefix_cache()
            marks.append(time.perf_counter())
            for name, before, after in zip(seconds, marks, marks[1:]):
                seconds[name].append(after - before)
        rollout.push_adapter(engine, source, version=1)
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
    ids = rollout.encode_prompts(engine.get_tokenizer(), [p.messages for p in problems])
    prompts = [prompt for prompt in ids for _ in range(8)]
    with tempfile.TemporaryDirectory() as folder:
        random_adapter(args.model, folder)
        rollout.push_adapter(engine, folder, version=1)

    pushes = time_pushes(engine, args.model, args.rounds)

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
