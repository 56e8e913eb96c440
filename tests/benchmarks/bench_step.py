"""The training phase against the naive one: padded rows of 16, logits of all positions in fp32. One process, ratios.

    python tests/benchmarks/bench_step.py [--groups 8] [--rounds 3]     # random completions, which share nothing
    python tests/benchmarks/bench_step.py --run runs/NAME --step 12     # those of a step of the embedded job
    python tests/benchmarks/bench_step.py --memory ours|naive [--samples 8]   # peak of rows of 2048 tokens, one side a process;
                                     # ours in micro-batches of --max-tokens (8192), the naive side in one of all rows
    python tests/benchmarks/bench_step.py --recurrent   # a random Qwen3-Next: padded micro-batches against a forward a sample

Both sides train the same samples of the embedded task on the same NVFP4 weights and must give the same gradient.
"""

import argparse
import os
import random
import resource
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))
import model_nvfp4
import train_grpo
from adapter import load_lora_state_dict, lora_state_dict
from attention import register_attention
from policy import Policy, token_logprobs
from problems import arithmetic_problems, encode_prompts
from rollout import Sample
from run_folder import read_jsonl
from tree import balance, balance_padded, make_segments, pack


class NaivePolicy(nn.Module):
    """What a first version does: right-padded rows, one row per sample, log_softmax over (rows, T, V)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        logits = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits[:, :-1].float()
        return F.log_softmax(logits, -1).gather(2, input_ids[:, 1:, None])[..., 0]  # (rows, T-1)


def build(model_dir: str, policy_class: type, attention: str) -> nn.Module:
    model = model_nvfp4.build_model(model_dir, lora_rank=16, lora_alpha=32, attn_implementation=attention)
    policy = policy_class(model)
    model_nvfp4.shard(policy)
    model_nvfp4.load_weights(policy, model_dir, seed=0)
    generator = torch.Generator().manual_seed(0)
    tensors = lora_state_dict(policy)
    noisy = {name: t + 0.01 * torch.randn(t.shape, generator=generator) for name, t in tensors.items()}
    load_lora_state_dict(policy, noisy)
    return policy.eval()


def train_ours(policy: nn.Module, samples: list[Sample], advantages: torch.Tensor, max_tokens: int = 8192) -> None:
    deal, length = (balance_padded, 0) if policy.sample_a_row else (balance, max_tokens)
    segments = make_segments(samples, advantages, length)
    num_tokens = sum(len(s.completion_ids) for s in samples)
    for row in deal(segments, 1, max_tokens)[0]:
        batch = pack(row, policy.sample_a_row)
        logprobs, _ = token_logprobs(policy, batch, 1.0)
        train_grpo.policy_loss(logprobs, logprobs.detach(), batch.advantages, batch.samples, num_tokens)[0].backward()


def train_naive(policy: nn.Module, samples: list[Sample], advantages: torch.Tensor, rows: int = 16) -> None:
    num_tokens = sum(len(s.completion_ids) for s in samples)
    for start in range(0, len(samples), rows):
        part = samples[start : start + rows]
        longest = max(len(s.prompt_ids) + len(s.completion_ids) for s in part)
        ids = torch.zeros(len(part), longest, dtype=torch.long)  # (rows, T)
        seen, trained = torch.zeros_like(ids), torch.zeros_like(ids)  # (rows, T), (rows, T)
        for i, s in enumerate(part):
            n, m = len(s.prompt_ids), len(s.prompt_ids) + len(s.completion_ids)
            ids[i, :m] = torch.tensor(s.prompt_ids + s.completion_ids)
            seen[i, :m], trained[i, n:m] = 1, 1
        logprobs = policy(ids, seen)  # (rows, T-1)
        weight = advantages.flatten()[start : start + rows, None] * trained[:, 1:]  # (rows, T-1)
        (-(logprobs - logprobs.detach()).exp() * weight).sum().div(num_tokens).backward()


def matmul_floor(policy: nn.Module, samples: list[Sample], advantages: torch.Tensor, rounds: int) -> float:
    """Seconds for the matrix products alone that the phase cannot do without, dense bf16 weights at hand: every frozen layer
    over the packed tokens and its transpose for the backward, the head over the trained tokens and its transpose."""
    (row,) = balance(make_segments(samples, advantages, 10**6), 1, 10**6)[0]
    batch, model = pack(row), policy.model.get_base_model()
    layers = [m for m in model.modules() if isinstance(m, model_nvfp4.NVFP4Linear)]
    sizes = [(batch.input_ids.shape[1], m.out_features, m.in_features) for m in layers]
    vocabulary, hidden = model.get_output_embeddings().weight.shape
    sizes.append((len(batch.targets), vocabulary, hidden))
    operands = {
        (t, n, k): [torch.randn(*shape).bfloat16() for shape in ((t, k), (n, k), (t, n))] for t, n, k in set(sizes)
    }
    seconds = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        for x, weight, dy in map(operands.get, sizes):
            F.linear(x, weight)
            dy @ weight
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def compare_recurrent(samples: list[Sample], advantages: torch.Tensor, rounds: int) -> None:
    """A linear-attention model of 7 M parameters in fp32: the step with and without company in a micro-batch."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, Qwen3NextConfig

    config = Qwen3NextConfig(
        vocab_size=49152, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32,
        linear_value_head_dim=32, mlp_only_layers=[0, 1, 2, 3], tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="grouped").float()
    policy = Policy(get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))).eval()
    gradients, seconds = {}, {1: [], 8192: []}
    for turn in range(rounds + 1):
        for budget in seconds:
            policy.zero_grad()
            start = time.perf_counter()
            train_ours(policy, samples, advantages, max_tokens=budget)
            seconds[budget] += [time.perf_counter() - start] * bool(turn)  # the first round warms up
            gradients[budget] = torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
    for budget, values in seconds.items():
        print(f"micro-batches of at most {budget} tokens {statistics.median(values):6.2f} s")
    print(f"a sample each / ours {statistics.median(a / b for a, b in zip(*seconds.values())):.2f}")
    difference = (gradients[1] - gradients[8192]).norm() / gradients[1].norm()
    print(f"gradients differ by {difference.item():.1e} relative (fp32)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct-NVFP4")
    parser.add_argument("--groups", type=int, default=8, help="groups of 8 with spread, without --run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--run", type=Path, help="a run folder of the embedded job, whose completions to train on")
    parser.add_argument("--step", type=int, default=12, help="the step of that run")
    parser.add_argument(
        "--recurrent", action="store_true", help="a model with a state along the row, which shares nothing"
    )
    parser.add_argument("--memory", choices=["ours", "naive"])
    parser.add_argument(
        "--samples", type=int, default=8, help="rows with --memory; fewer where the naive side does not fit"
    )
    parser.add_argument("--max-tokens", type=int, default=8192, help="with --memory ours; 1000000: one micro-batch")
    args = parser.parse_args()
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, value)
    dist.init_process_group("gloo")
    register_attention()
    rng = random.Random(0)

    def words(n: int) -> list[int]:
        return [rng.randrange(100, 40000) for _ in range(n)]

    if args.memory:
        samples = [Sample(words(48), words(2000), [-9.0] * 2000, "", "stop", 0) for _ in range(args.samples)]
        for sample in samples:
            sample.prompt_ids = samples[0].prompt_ids
        advantages = torch.randn(1, args.samples)
        if args.memory == "ours":
            policy = build(args.model, Policy, "grouped")
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            train_ours(policy, samples, advantages, max_tokens=args.max_tokens)
        else:
            policy = build(args.model, NaivePolicy, "sdpa")
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            train_naive(policy, samples, advantages, rows=8)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(f"{args.memory}: peak {after / 2**20:.2f} GiB, {before / 2**20:.2f} GiB of it before the step")
        return

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    problems = arithmetic_problems(0)[0][: args.groups]
    if args.run:
        records = [r for r in read_jsonl(args.run / "samples.jsonl") if r["step"] == args.step]
        assert records, f"{args.run} has no step {args.step}"
        asked = [[*problems[0].messages[:-1], {"role": "user", "content": r["question"]}] for r in records]
        said = tokenizer([r["completion"] for r in records], add_special_tokens=False).input_ids
        said = [ids + [tokenizer.eos_token_id] * (r["finish_reason"] == "stop") for ids, r in zip(said, records)]
        advantages = train_grpo.group_advantages(torch.tensor([r["reward"] for r in records]).view(-1, 8))  # (P, G)
        live = advantages.any(1)  # (P,): the naive side leaves groups without spread out as well
        told = [(p, c) for p, c, at in zip(encode_prompts(tokenizer, asked), said, live.repeat_interleave(8)) if at]
        advantages = advantages[live]  # (groups, 8)
    else:
        prompts = encode_prompts(tokenizer, [p.messages for p in problems])
        lengths = [rng.randrange(8, 20) for _ in range(8 * args.groups)]  # 13 tokens on average, as in the job
        told = [(prompts[i // 8], words(n)) for i, n in enumerate(lengths)]
        advantages = torch.randn(args.groups, 8, generator=torch.Generator().manual_seed(1))  # (groups, 8)
    samples = [Sample(prompt, ids, [-9.0] * len(ids), "", "stop", 0) for prompt, ids in told]
    if args.recurrent:
        compare_recurrent(samples, advantages, args.rounds)
        return
    sides = {
        "ours": (build(args.model, Policy, "grouped"), train_ours),
        "naive": (build(args.model, NaivePolicy, "sdpa"), train_naive),
    }
    seconds: dict[str, list[float]] = {"ours": [], "naive": []}
    gradients = {}
    for turn in range(args.rounds + 1):
        for name, (policy, train) in sides.items():
            policy.zero_grad()
            start = time.perf_counter()
            train(policy, samples, advantages)
            if turn:  # the first round warms up
                seconds[name].append(time.perf_counter() - start)
            parts = [p.grad.full_tensor().flatten() for p in policy.parameters() if p.requires_grad]
            gradients[name] = torch.cat(parts)
    ours, naive = gradients["ours"], gradients["naive"]
    tokens = sum(len(ids) for _, ids in told)
    print(f"{os.cpu_count()} processors, {len(samples)} samples, {tokens} completion tokens, {args.rounds} rounds")
    for name, values in seconds.items():
        print(
            f"{name:6s} {statistics.median(values):6.2f} s  {tokens / statistics.median(values):6.0f} completion tokens/s"
        )
    floor = matmul_floor(sides["ours"][0], samples, advantages, args.rounds)
    print(
        f"matmuls alone {floor:.2f} s: ours spends {100 * floor / statistics.median(seconds['ours']):.0f} % of its time there"
    )
    print(f"naive / ours {statistics.median(b / a for a, b in zip(seconds['ours'], seconds['naive'])):.2f}")
    print(f"gradients differ by {((ours - naive).norm() / naive.norm()).item():.4f} relative (bf16)")


if __name__ == "__main__":
    main()
