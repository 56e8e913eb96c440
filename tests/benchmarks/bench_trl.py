"""The embedded job side by side with TRL's GRPOTrainer: seconds a step by phase, and reward after equal steps.

    .venv/bin/python -m venv ../trl                                                        # TRL lives here alone
    .venv/bin/python -c 'import site; print(site.getsitepackages()[0])' > ../trl/lib/python3.11/site-packages/ours.pth
    ../trl/bin/python -m pip install --no-deps trl==1.16.0                                 # its other needs are in .venv

    python=../trl/bin/python                # the python3.11 above is that of .venv; one side a process, on a quiet machine
    $python tests/benchmarks/bench_trl.py --side stock --steps 3
    for seed in 0 1 2; do
      $python tests/benchmarks/bench_trl.py --side tuned --seed $seed
      $python tests/benchmarks/bench_trl.py --side ours --seed $seed
    done
    $python tests/benchmarks/bench_trl.py --report
    $python tests/benchmarks/bench_trl.py --side replay --seed 0              # after tuned of that seed, which it reads

Each side writes one line a step into --results. Equal on all sides and asserted where it can differ: the prompts of every step
(token for token), the values of the weights (TRL gets the NVFP4 checkpoint decoded to bf16), 16 × 8 samples of at most 40
tokens at temperature 1, LoRA r 16 alpha 32 on all linear layers, AdamW 5e-4 (.9, .95), DAPO loss with clip .2/.28, one update
a rollout, gradient norm 1, this project's reward.

- stock: TRL's own defaults in everything else: micro-batches of 8, fp32 weights under bf16 autocast, gradient checkpointing,
  a forward to correct for the sampler, KV blocks of 128 tokens (vLLM's default on a CPU).
- tuned: what a user who measures would find: blocks of 32 tokens, the LM head on completion tokens alone (TRL does that only
  where Triton runs), no correction forward, no checkpointing, bf16 weights, micro-batches of 32. The two-matmul LoRA of
  `rollout.py` has no use here: TRL merges the adapter into the weights of the engine at each step.
- ours: `train_grpo.py` with the smoke recipe's flags.
- replay: our step trained from TRL's first adapter on the samples that the TRL run drew, so that no draw differs: how alike the
  adapters are after each step (cosine of how far each has moved), and what both last ones earn on 64 held-out problems × 32.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from datetime import timedelta
from pathlib import Path
from shutil import copyfile

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
CORES = os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
os.environ.setdefault("PYTHONWARNINGS", "ignore")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from problems import arithmetic_problems, encode_prompts  # noqa: E402

GROUP_SIZE, COMPLETION_TOKENS, CONTEXT = 8, 40, 192
PHASES = ("generate", "sync", "forward", "train", "score")


def write(args: argparse.Namespace, **row) -> None:
    row = {"side": args.side, "seed": args.seed, "prompts": args.prompts, "cores": CORES, **row}
    print(json.dumps(row), flush=True)
    args.results.parent.mkdir(parents=True, exist_ok=True)
    with open(args.results, "a") as file:
        file.write(json.dumps(row) + "\n")


def cpu_seconds(pid: int) -> float:
    """CPU seconds, user and system, that process `pid` has used: what a shared machine cannot inflate, on one thread."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # from field 3; user is 14, system 15
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# ---------------------------------------------------------------------------------------------------------------------
# TRL


def patch_vllm(tuned: bool) -> None:
    """What TRL 1.16.0 with vLLM 0.32.0 needs to run on a CPU at all; with `tuned` the block size too."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = (
        "0"  # TRL writes weights into the engine, so it must be in its process
    )
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # bound threads would also bind the trainer in the same process
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "2"  # GiB, as ours; TRL's share of 0.3 would be taken of the host's memory
    from trl.generation import vllm_generation
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    engine_class = vllm_generation.LLM

    def engine(**arguments):
        # The compiled graph would hold the packed weights of the base for good: TRL replaces weights at each step.
        arguments |= {"enforce_eager": True, "disable_log_stats": True, "use_tqdm_on_load": False}
        del arguments["enable_sleep_mode"]  # there is none on a CPU
        return engine_class(**arguments | ({"block_size": 32} if tuned else {}))

    def pack(self, layer) -> None:
        dispatch_cpu_unquantized_gemm(layer, remove_weight=False)

    sync_weights = vllm_generation.VLLMGeneration.sync_weights

    def sync_and_pack(self) -> None:
        sync_weights(self)
        model = self.llm.llm_engine.model_executor.driver_worker.model_runner.model
        for module in model.modules():
            if isinstance(module, LinearBase):
                pack(None, module)

    vllm_generation.LLM = engine
    # vLLM packs weights for its CPU kernels and drops the originals; TRL's `load_weights` needs those, and a fresh packing.
    UnquantizedLinearMethod.process_weights_after_loading = pack
    vllm_generation.VLLMGeneration.sync_weights = sync_and_pack


def record_profile(seconds: dict[str, float]) -> None:
    """TRL measures its phases but hands the figures to wandb, mlflow or trackio only; add them up in `seconds` instead."""
    from trl.extras.profiling import ProfilingContext

    names = {"vLLM.generate": "generate", "sync_weights": "sync", "_calculate_rewards": "score"}
    pending = []  # seconds of forwards: of the correction inside `_prepare_inputs`, of training inside `compute_loss`

    def log_metrics(self, duration: float) -> None:
        name = self.name.removeprefix("GRPOTrainer.")
        if name in names:
            seconds[names[name]] += duration
        elif name == "_get_per_token_logps_and_entropies":
            pending.append(duration)
        elif name == "_prepare_inputs":
            seconds["forward"] += sum(pending)
        if name in ("_prepare_inputs", "compute_loss"):
            pending.clear()

    ProfilingContext._log_metrics = log_metrics


def record_folder(args: argparse.Namespace) -> Path:
    """Where the tuned side leaves its samples and adapters for the replay."""
    return args.results.parent / f"bench_trl-{args.side.replace('replay', 'tuned')}-{args.seed}"


def run_trl(args: argparse.Namespace, folder: Path, work: Path) -> None:
    tuned = args.side == "tuned"
    patch_vllm(tuned)
    seconds: dict[str, float] = defaultdict(float)
    record_profile(seconds)
    import trl.trainer.utils
    from datasets import Dataset
    from peft import LoraConfig
    from safetensors.torch import save_file
    from transformers import AutoTokenizer, TrainerCallback

    import reward as grader
    from problems import arithmetic_problems, encode_prompts, next_problems

    if tuned:
        # TRL's test for "score completion tokens only" asks for Triton, but the head it then calls runs anywhere.
        trl.trainer.utils._use_triton = lambda device: True
    problems = [
        problem
        for step in range(args.steps)
        for problem in next_problems(arithmetic_problems(args.seed)[0], step, args.prompts, args.seed)
    ]
    rows = [{"prompt": problem.messages, "answer": problem.answer} for problem in problems]
    state = {"step": 0, "tokens": 0, "seconds": 0.0, "cpu": 0.0}
    record = record_folder(args)
    record.mkdir(parents=True, exist_ok=True)
    (record / "samples.jsonl").unlink(missing_ok=True)

    def save_policy(model) -> None:
        adapter = {name.replace(".default", ""): p.detach() for name, p in model.named_parameters() if "lora_" in name}
        save_file(adapter, record / f"step{state['step']}.safetensors")

    def boxed_answer(prompts, completions, completion_ids, answer, **_) -> list[float]:
        expected = rows[state["step"] * args.prompts : (state["step"] + 1) * args.prompts]
        assert prompts == [row["prompt"] for row in expected for _ in range(GROUP_SIZE)], "TRL trains other prompts"
        state["tokens"] = sum(map(len, completion_ids))
        rewards = [v.reward for v in grader.score([completion[0]["content"] for completion in completions], answer)]
        with open(record / "samples.jsonl", "a") as file:
            file.write(json.dumps({"ids": completion_ids, "rewards": rewards}) + "\n")
        return rewards

    class Clock(TrainerCallback):
        def on_train_begin(self, *_, model, **__):
            save_policy(model)

        def on_step_begin(self, *_, **__):
            seconds.clear()
            state["cpu"], state["seconds"] = -cpu_seconds(os.getpid()), -time.perf_counter()

        def on_step_end(self, *_, model, **__):
            state["cpu"] += cpu_seconds(os.getpid())
            state["seconds"] += time.perf_counter()
            state["step"] += 1
            save_policy(model)

        def on_log(self, _, __, ___, logs, **____):
            if "reward" in logs:
                phases = {name: seconds[name] for name in PHASES}
                phases["train"] = state["seconds"] - sum(phases.values())
                keys = {"reward": "reward", "gap": "sampling/sampling_logp_difference/mean", "grad_norm": "grad_norm"}
                figures = {name: logs.get(key) for name, key in keys.items()}
                write(args, **state, **phases, **figures)

    micro_batch = min(args.micro_batch or (32 if tuned else 8), args.prompts * GROUP_SIZE)
    settings = {"vllm_importance_sampling_correction": False, "gradient_checkpointing": False}
    settings |= {"model_init_kwargs": {"dtype": "bfloat16"}}
    config = trl.GRPOConfig(
        output_dir=str(work / "out"),
        seed=args.seed,
        max_steps=args.steps,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=args.prompts * GROUP_SIZE // micro_batch,
        num_generations=GROUP_SIZE,
        max_completion_length=COMPLETION_TOKENS,
        temperature=1.0,
        learning_rate=5e-4,
        lr_scheduler_type="constant",
        adam_beta1=0.9,
        adam_beta2=0.95,
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        shuffle_dataset=False,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=CONTEXT,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **(settings if tuned else {}),
    )
    trainer = trl.GRPOTrainer(
        model=str(folder),
        args=config,
        reward_funcs=boxed_answer,
        train_dataset=Dataset.from_list(rows),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
        callbacks=[Clock()],
    )
    conversations = [row["prompt"] for row in rows]
    ours = encode_prompts(AutoTokenizer.from_pretrained(args.model), conversations)
    assert ours == trainer._tokenize_prompts(conversations)[0], "TRL's prompts have other tokens than ours"
    trainer.train()


# ---------------------------------------------------------------------------------------------------------------------
# Ours


def run_ours(args: argparse.Namespace, work: Path) -> None:
    """`train_grpo.py` as a user starts it; a step's seconds are from line to line of its log, checkpoints included."""
    flags = {"model": args.model, "dataset": "arithmetic", "heldout": 64, "heldout-samples": 1, "steps": args.steps}
    flags |= {"prompts": args.prompts, "group-size": GROUP_SIZE, "completion-tokens": COMPLETION_TOKENS}
    flags |= {"temperature": 1.0, "lora-rank": 16, "lora-alpha": 32, "lr": 5e-4, "max-tokens": 8192}
    flags |= {"seed": args.seed, "runs-dir": work, "run-name": "ours"}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    process = subprocess.Popen([sys.executable, str(ROOT / "train_grpo.py"), *words], cwd=ROOT, stdout=sys.stderr)
    log, seen = work / "ours" / "metrics.jsonl", 0
    then = cpu_then = None
    while process.poll() is None:
        time.sleep(0.05)
        now, cpu = time.perf_counter(), cpu_seconds(process.pid)
        for line in log.read_text().splitlines(keepends=True)[seen:] if log.exists() else []:
            if not line.endswith("\n"):
                break
            m = json.loads(line)
            s = m["seconds"]
            phases = {name: s[name] for name in ("train", "score")} | {"sync": s["push"], "forward": 0.0}
            phases["generate"] = s["generate"] - s["push"]
            wall = sum(phases.values()) if then is None else now - then
            used = None if then is None else cpu - cpu_then
            figures = {"step": m["step"], "seconds": wall, "cpu": used, "tokens": m["sampled_tokens"]}
            write(args, **figures, **phases, **{name: m[name] for name in ("reward", "gap", "grad_norm")})
            then, cpu_then, seen = now, cpu, seen + 1
    assert process.returncode == 0, f"train_grpo.py ended with {process.returncode}"


def run_replay(args: argparse.Namespace) -> None:
    """Our half of a step, on TRL's samples; the ratio is 1 as in TRL without its correction, the rest is the smoke recipe's."""
    import numpy as np
    import torch
    from safetensors.torch import load_file
    from transformers import AutoTokenizer

    import model_nvfp4
    import reward as grader
    import rollout
    import train_grpo as t
    from adapter import load_lora_state_dict, lora_state_dict
    from problems import sample_seed
    from ranks import join_ranks
    from tree import balance

    join_ranks(timedelta(minutes=30))
    t.register_attention()
    flags = t.parse_args(["--model", args.model, "--dataset", "arithmetic"])
    targets = {"lora_targets": flags.lora_targets, "lora_experts": False}
    model = model_nvfp4.build_model(args.model, lora_rank=16, lora_alpha=32, **targets, attn_implementation="grouped")
    policy = t.Policy(model)
    model_nvfp4.shard(policy, activation_checkpointing=False)
    model_nvfp4.load_weights(policy, args.model, seed=0)
    policy.eval()
    optimizer, record = t.build_optimizer(policy, 5e-4), record_folder(args)
    adapters = [load_file(record / f"step{step}.safetensors") for step in range(args.steps + 1)]
    load_lora_state_dict(policy, adapters[0])
    train, heldout = arithmetic_problems(args.seed)
    encode = lambda problems: encode_prompts(tokenizer, [p.messages for p in problems])  # noqa: E731
    tokenizer, N = AutoTokenizer.from_pretrained(args.model), args.prompts * GROUP_SIZE
    clip = {"loss": "dapo", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": None, "kl_coef": 0.0}
    for step, line in enumerate((record / "samples.jsonl").read_text().splitlines()[: args.steps]):
        said = json.loads(line)
        prompts = encode(t.next_problems(train, step, args.prompts, args.seed))
        pairs = [(prompts[i // GROUP_SIZE], ids) for i, ids in enumerate(said["ids"])]
        samples = [rollout.Sample(prompt, ids, [0.0] * len(ids), "", "stop", 0) for prompt, ids in pairs]
        advantages = t.group_advantages(torch.tensor(said["rewards"]).view(-1, GROUP_SIZE))  # (P, G)
        segments = t.make_segments(samples, advantages, 8192)
        trained = sum(len(ids) for segment in segments for ids, _, _ in segment.completions)
        denominator = t.loss_denominator("dapo", trained, sum(map(len, said["ids"])), N, COMPLETION_TOKENS)
        total = torch.zeros(())  # ()
        for batch in map(t.pack, balance(segments, 1, 8192)[0]):
            logprobs, _ = t.token_logprobs(policy, batch, 1.0)  # (S,)
            loss, _ = t.policy_loss(
                logprobs, logprobs.detach(), batch.advantages, batch.samples, denominator,
                weights=None, reference_logprobs=None, **clip,
            )  # fmt: skip
            loss.backward()
            total += loss.detach()
        norm = t.optimizer_step(optimizer, total, len(segments), 1.0)
        ours, alike = lora_state_dict(policy), {}
        for kind in ("lora_A", "lora_B"):
            moved = (
                torch.cat([(adapter[name] - adapters[0][name]).flatten() for name in sorted(ours) if kind in name])
                for adapter in (ours, adapters[step + 1])
            )
            alike[kind] = torch.cosine_similarity(*moved, dim=0).item()  # of lora_A 0 after one step: neither has moved
        write(args, step=step + 1, reward=float(np.mean(said["rewards"])), grad_norm=norm, **alike)
    engine = rollout.build_engine(args.model, max_model_len=CONTEXT, max_lora_rank=16, seed=0)
    seeds = [sample_seed(args.seed, 99, p.id, member) for p in heldout for member in range(32)]
    prompts = [ids for ids in encode(heldout) for _ in range(32)]
    accuracy = []  # of TRL's last adapter and ours, (problems,) each, with the same draws
    for adapter in (adapters[args.steps], ours):
        with rollout.awake(engine):
            rollout.push_adapter(engine, adapter, {"r": 16, "lora_alpha": 32}, len(accuracy))
            limits = {"max_tokens": COMPLETION_TOKENS, "temperature": 1.0, "use_adapter": True}
            said = [sample.text for sample in rollout.generate(engine, prompts, seeds, **limits)]
        verdicts = grader.score(said, [p.answer for p in heldout for _ in range(32)])
        accuracy.append(np.array([v.reward for v in verdicts]).reshape(-1, 32).mean(1))
    gained = accuracy[1] - accuracy[0]  # (problems,)
    figures = {"trl": accuracy[0].mean(), "ours": accuracy[1].mean(), "se": gained.std(ddof=1) / len(gained) ** 0.5}
    write(args, step=args.steps, **{name: round(float(value), 4) for name, value in figures.items()})
    rollout.shutdown(engine)


# ---------------------------------------------------------------------------------------------------------------------


def report(results: Path) -> None:
    """Medians over the steps after the first of each run; the last run of a (side, seed, cores) counts.

    On a machine that others use too, compare `cpu` of one-thread runs: wall time then measures the neighbours.
    """
    runs: dict[tuple[str, int, str], list[dict]] = {}
    for row in map(json.loads, results.read_text().splitlines()):
        key = row["side"], row["seed"], row["cores"]
        runs[key] = [row] if row["step"] == 1 else [*runs[key], row]
    columns = ("seconds", "cpu", *PHASES)
    for cores in sorted({cores for _, _, cores in runs}):
        print(
            f"{cores} core(s) {'steps':>5s} " + " ".join(f"{name:>8s}" for name in columns) + "  / ours: seconds, cpu"
        )
        ours = None
        for side in ("ours", "tuned", "stock"):
            steps = [row for key, rows in runs.items() if key[::2] == (side, cores) for row in rows[1:]]
            if not steps:
                continue
            figures = {name: statistics.median(row[name] for row in steps) for name in columns}
            ours = figures if side == "ours" else ours
            ratios = [figures[name] / ours[name] for name in ("seconds", "cpu")] if ours else []
            cells = " ".join(f"{figure:8.2f}" for figure in [*figures.values(), *ratios])
            print(f"{side:9s} {len(steps):5d} {cells}")
    print("mean training reward of steps 6 to 8 (of steps 1 to 8)")
    for side in ("ours", "tuned", "stock"):
        rewards = {key: [row["reward"] for row in rows[:8]] for key, rows in sorted(runs.items()) if len(rows) >= 8}
        late = {key[1]: statistics.mean(values[5:]) for key, values in rewards.items() if key[0] == side}
        if late:
            parts = ", ".join(f"seed {seed}: {value:.3f}" for seed, value in late.items())
            everything = statistics.mean(statistics.mean(v) for key, v in rewards.items() if key[0] == side)
            print(f"{side:9s} {parts}; mean {statistics.mean(late.values()):.3f} ({everything:.3f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--side", choices=["stock", "tuned", "ours", "replay"])
    parser.add_argument("--report", action="store_true", help="print the table of what --results holds")
    parser.add_argument("--results", type=Path, default=ROOT / "runs" / "bench_trl.jsonl")
    parser.add_argument("--model", default=str(ROOT / "models" / "SmolLM2-135M-Instruct-NVFP4"))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=16, help="fewer for a trial of the script")
    parser.add_argument("--micro-batch", type=int, default=None, help="rows of TRL's micro-batches; 8 stock, 32 tuned")
    args = parser.parse_args()
    if args.report:
        report(args.results)
        return
    if not args.side:
        parser.error("--side or --report")
    if args.side == "replay":
        run_replay(args)
        return
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        if args.side == "ours":
            run_ours(args, work)
            return
        import torch
        from test_model_nvfp4_models import dequantized

        folder = dequantized(Path(args.model), work / "dense", torch.bfloat16)
        for file in Path(args.model).iterdir():
            if not (folder / file.name).exists():
                copyfile(file, folder / file.name)
        run_trl(args, folder, work)


if __name__ == "__main__":
    main()
