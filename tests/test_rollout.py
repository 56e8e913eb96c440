"""rollout.py without a GPU: how requests are dealt out, LoRA on a CPU against its definition, the order of sleep calls, and
real engines of one, two and four ranks on a tiny random model (slow). `pytest tests/test_rollout.py`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

import rollout
from adapter import lora_state_dict, read_adapter, save_adapter
from errors import UserError

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct-NVFP4"


def test_samples_of_a_prompt_stay_on_one_replica():
    prompts = [[1, 2, 3]] * 4 + [[1]] * 4 + [[5, 6]] * 4 + [[7, 8]] * 4
    shares = rollout.assign_to_replicas(prompts, 2, [8] * 16)
    assert sorted(index for share in shares for index in share) == list(range(16))
    assert [len(share) for share in shares] == [8, 8]
    for share in shares:
        assert len({tuple(prompts[index]) for index in share}) == 2
    assert shares[0][:4] == [0, 1, 2, 3]  # the longest prompt first


def test_fewer_prompts_than_replicas_are_dealt_out_by_sample():
    shares = rollout.assign_to_replicas([[1, 2]] * 6, 4, [8] * 6)
    assert sorted(len(share) for share in shares) == [1, 1, 2, 2]
    assert sorted(index for share in shares for index in share) == list(range(6))


def test_the_longest_prompts_go_first_and_apart():
    """Loads by hand, 10 tokens a completion: 100+20, 60+20, 50+20, 10+20 over two replicas are 120+30 against 80+70."""
    lengths = [10, 100, 50, 60]
    prompts = [[n] * n for n in lengths for _ in range(2)]
    shares = rollout.assign_to_replicas(prompts, 2, [10] * 8)
    assert [[len(prompts[index]) for index in share] for share in shares] == [[100, 100, 10, 10], [60, 60, 50, 50]]


def test_limits_of_their_own_count_in_the_order():
    """By hand: prompts of one token with limits 5, 40, 30, 5 and two samples each are 11, 81, 61, 11 tokens of work."""
    prompts = [[n] for n in range(4) for _ in range(2)]
    shares = rollout.assign_to_replicas(prompts, 2, [n for n in (5, 40, 30, 5) for _ in range(2)])
    assert shares == [[2, 3], [4, 5, 0, 1, 6, 7]]


@pytest.mark.parametrize(
    "stored", ["lm_head.weight", "lm_head.weight_scale", "language_model.lm_head.weight_scale_inv", "lm_head.qweight"]
)
def test_a_quantised_head_is_seen_by_what_stores_it(tmp_path, stored):
    assert not rollout.head_is_packed(tmp_path)  # weights in another kind of file
    save_file({"model.norm.weight": torch.ones(2), stored: torch.ones(2)}, tmp_path / "model.safetensors")
    assert rollout.head_is_packed(tmp_path) == (stored != "lm_head.weight")


# --- Sleep: vLLM's own state machine over workers that only take notes ------------------------------------------------


def recording_engine(sleep_mode):
    """An LLM whose engine core and executor are vLLM's (they refuse calls in the wrong order, or ignore them with a
    warning), and whose workers and scheduler note what they are told, since the memory itself needs CUDA."""
    pytest.importorskip("vllm")
    from vllm import LLM
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

    calls = []

    def tell_workers(method, args=(), kwargs=None):
        if method != "synchronize_device":
            calls.append((method, *args, *(kwargs or {}).values()))

    scheduler = SimpleNamespace(pause_state=PauseState.UNPAUSED, has_requests=lambda: False)
    scheduler.finish_requests = scheduler.reset_encoder_cache = lambda *_: None
    scheduler.has_unfinished_requests = lambda: False
    scheduler.set_pause_state = lambda state: setattr(scheduler, "pause_state", state)
    scheduler.reset_prefix_cache = lambda *_: calls.append(("reset_prefix_cache",)) or True
    executor = object.__new__(type("Noted", (Executor,), dict.fromkeys(Executor.__abstractmethods__)))
    executor.sleeping_tags, executor.collective_rpc = set(), tell_workers
    executor.reset_encoder_cache = lambda: None
    core = object.__new__(EngineCore)
    core.model_executor, core.scheduler, core.batch_queue = executor, scheduler, None
    core.reset_mm_cache = lambda: None

    engine = object.__new__(LLM)
    names = ("wake_up", "release_kv_cache_memory", "reset_prefix_cache")
    engine.llm_engine = SimpleNamespace(**{n: getattr(core, n) for n in names})
    engine.llm_engine.vllm_config = SimpleNamespace(lora_config=SimpleNamespace(lora_dtype=torch.bfloat16))
    engine.collective_rpc = lambda method, args: calls.append((method.__name__, *args))
    engine.llm_engine.sleep = lambda level, mode: core.sleep(level, mode)
    engine.sleep_mode, engine.kv_awake, engine.policy_version, engine.calls = sleep_mode, True, None, calls
    engine.is_paused = core.is_scheduler_paused
    if sleep_mode != "off":
        rollout.fall_asleep(engine)
        engine.calls.clear()
    return engine


RESET, LORA = ("reset_prefix_cache",), {"r": 8, "lora_alpha": 16}
PUT = ("put_adapter", {}, LORA)
ORDER = {  # one hand-over: (waking up, going to sleep)
    "level1": ([("wake_up", ["weights"])], [RESET, ("sleep", 1)]),
    "kv": ([], [RESET, ("discard", ("kv_cache",))]),
}


@pytest.fixture
def unchecked(monkeypatch):
    """Nothing to read back from workers that only take notes."""
    monkeypatch.setattr(rollout, "check_adapter", lambda *_: None)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("mode", ORDER)
def test_the_gpu_changes_hands_in_the_order_that_works(mode):
    """Weights, adapter, cache reset, KV cache (verl 7434: an adapter pushed into a sleeping engine is an illegal address;
    level 2 is never used, vLLM 57163). Twice, since only then what the first round left behind shows."""
    engine = recording_engine(mode)
    wake, sleep = ORDER[mode]
    for version in (3, 4):
        with rollout.awake(engine):
            rollout.push_adapter(engine, {}, LORA, version=version)
            rollout.wake_kv_cache(engine)
            rollout.wake_kv_cache(engine)  # awake already: nothing happens
            assert not engine.is_paused(), "requests would wait for ever"
        assert engine.calls == [*wake, PUT, RESET, ("wake_up", ["kv_cache"]), *sleep]
        assert engine.policy_version == version
        assert (
            not engine.policy.load_inplace
        )  # a request that carried it would reload the adapter at every scheduler step
        assert not engine.kv_awake
        assert set(engine.stats["memory_gib"]) == {"before", "awake", "after"}
        engine.calls.clear()


def test_nothing_is_in_flight_when_the_engine_goes_to_sleep():
    """On a GPU vLLM schedules a step ahead: its last answer leaves a surplus step queued and finished requests unforgotten,
    with which its own `release_kv_cache_memory` refuses."""
    engine = recording_engine("kv")
    core = engine.llm_engine.release_kv_cache_memory.__self__
    engine.llm_engine.engine_core = SimpleNamespace(engine_core=core)
    rollout.wake_kv_cache(engine)
    unforgotten, core.batch_queue = ["finished"], ["surplus step"]
    core.scheduler.has_requests = lambda: bool(unforgotten)
    engine.llm_engine.step = lambda: (unforgotten or core.batch_queue).pop()
    with pytest.raises(RuntimeError, match="requires a completed pause"):
        rollout.fall_asleep(engine)
    engine.llm_engine.wake_up(tags=["kv_cache"])
    rollout.drain(engine)
    assert not unforgotten
    assert not core.batch_queue
    rollout.fall_asleep(engine)
    assert engine.calls[-1] == ("discard", ("kv_cache",))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("mode", ORDER)
def test_a_push_alone_wakes_no_cache(mode):
    engine = recording_engine(mode)
    with rollout.awake(engine):
        rollout.push_adapter(engine, {}, LORA, version=1)
    asleep = [RESET, ("sleep", 1)] if mode == "level1" else []
    assert engine.calls == [*ORDER[mode][0], PUT, RESET, *asleep]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("mode", ORDER)
def test_a_failure_while_sampling_is_not_covered_by_a_second_one(mode):
    """After an illegal access every CUDA call fails, also those of falling asleep: the first cause must come out."""
    engine = recording_engine(mode)

    def sampling_that_fails():
        with rollout.awake(engine):
            rollout.wake_kv_cache(engine)
            engine.calls.clear()
            raise RuntimeError("illegal address")

    with pytest.raises(RuntimeError, match="illegal address"):
        sampling_that_fails()
    assert engine.calls == []
    with rollout.awake(engine):  # whoever caught it can go on: nothing sleeps, nothing is woken
        pass
    assert engine.calls == ORDER[mode][1]


@pytest.mark.usefixtures("unchecked")
def test_a_failed_wake_up_or_push_goes_no_further():
    engine = recording_engine("level1")

    def out_of_memory(*_, **__):
        raise RuntimeError("out of memory")

    healthy, engine.llm_engine.wake_up = engine.llm_engine.wake_up, out_of_memory
    with pytest.raises(RuntimeError, match="out of memory"), rollout.awake(engine):
        pytest.fail("the block must not run")
    assert engine.calls == []
    engine.llm_engine.wake_up = healthy
    engine.collective_rpc = out_of_memory
    with pytest.raises(RuntimeError, match="out of memory"), rollout.awake(engine):
        rollout.push_adapter(engine, {}, LORA, version=5)
    assert engine.policy_version is None  # generate(use_adapter=True) would refuse
    assert engine.calls == [("wake_up", ["weights"])]


def test_without_sleep_mode_the_block_only_indents():
    engine = recording_engine("off")
    with rollout.awake(engine):
        pass
    assert engine.calls == []


GIB = 2**30


def host(root, available, groups=()):
    """A /proc and /sys with `available` GiB free and nested control groups of (limit, used, of that reclaimable) GiB."""
    folder = root / "sys/fs/cgroup"
    for name in ("proc/self", "sys/fs/cgroup"):
        (root / name).mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 999 kB\nMemAvailable:   {available * GIB // 1024} kB\n")
    path = "/".join(f"g{i}" for i in range(len(groups)))
    (root / "proc/self/cgroup").write_text(f"12:cpu:/x\n0::/{path}\n")
    for i, (limit, used, reclaimable) in enumerate(groups):
        folder = folder / f"g{i}"
        folder.mkdir()
        (folder / "memory.max").write_text("max\n" if limit is None else f"{limit * GIB}\n")
        (folder / "memory.current").write_text(f"{used * GIB}\n")
        (folder / "memory.stat").write_text(f"anon 1\ninactive_file {reclaimable * GIB}\n")
    return root


@pytest.mark.parametrize(
    ("available", "groups", "free"),
    [
        (500, (), 500),
        (500, ((None, 3, 0),), 500),
        (500, ((100, 60, 20), (None, 5, 0)), 60),  # the outer group is the tighter one
        (30, ((100, 60, 20),), 30),
        (500, ((10, 12, 1),), 0),
    ],
)
def test_free_host_memory(tmp_path, available, groups, free):
    assert rollout.free_host_memory(host(tmp_path, available, groups)) == free * GIB


def test_level_1_is_refused_where_the_node_cannot_hold_it(tmp_path, monkeypatch):
    """Eight ranks of 20 GiB: 160 GiB of weights (peers.md), 231 with pinned blocks rounded up to powers of two."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    root = host(tmp_path, 200)
    with pytest.raises(UserError, match=r"keep 230 GiB .* 200 GiB free; use --sleep kv") as error:
        rollout.check_sleep("level1", 20 * GIB, tp=1, root=root)
    assert "\n" not in str(error.value)
    rollout.check_sleep("level1", 20 * GIB, tp=2, root=root)  # two ranks share one copy
    rollout.check_sleep("kv", 20 * GIB, tp=1, root=root)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64, expandable_segments:True")
    with pytest.raises(UserError, match="take it out of PYTORCH_CUDA_ALLOC_CONF"):
        rollout.check_sleep("kv", 20 * GIB, tp=1, root=root)
    rollout.check_sleep("off", 20 * GIB, tp=1, root=root)


# --- Real engines on a tiny random model ------------------------------------------------------------------------------

EOS = (7, 11)  # a model with two


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A random Qwen3 of two layers whose heads and key heads divide by two, with two adapters."""
    from test_model_nvfp4_models import quantized, tiny_checkpoint
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    import model_nvfp4 as nvfp4

    work = tmp_path_factory.mktemp("tiny")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"head_dim": 64, "vocab_size": 64, "max_position_embeddings": 512}
    source = tiny_checkpoint("Qwen3", work / "source", std=0.02, **sizes)
    words = Tokenizer(WordLevel({str(i): i for i in range(64)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    tokenizer.save_pretrained(source)
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": list(EOS)}))
    folder = quantized(source, work / "nvfp4")
    model = nvfp4.build_model(folder, lora_rank=8, lora_alpha=16)
    nvfp4.load_weights(model, folder)
    for seed in (1, 2):
        generator = torch.Generator().manual_seed(seed)
        adapter = {
            k: (torch.randn(v.shape, generator=generator) * 0.05 if "lora_B" in k else v).bfloat16()
            for k, v in lora_state_dict(model).items()
        }
        save_adapter(work / f"adapter{seed}", adapter, lora_rank=8, lora_alpha=16, base_model=str(folder))
    return work


def work(folder, tp, out):
    """What every rank of a torchrun job does in the tests below; rank 0 writes down what it saw."""
    import torch.distributed as dist

    folder, tp = Path(folder), int(tp)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    settings = {"max_num_batched_tokens": 96, "block_size": 64}
    engine = rollout.build_engine(
        str(folder / "nvfp4"), max_model_len=96, max_lora_rank=8, max_num_seqs=32, tp=tp, engine_args=settings
    )
    config = engine.llm_engine.vllm_config
    seen = {"settings": [config.scheduler_config.max_num_batched_tokens, config.cache_config.block_size]}
    seen["kernels"] = rollout.kernels(engine)
    seen["head"] = str(config.model_config.head_dtype)
    draw = torch.Generator().manual_seed(2)
    prompts = [torch.randint(12, 64, (n,), generator=draw).tolist() for n in (12, 20, 9, 33) for _ in range(1)]
    prompts = [prompt for prompt in prompts for _ in range(6)]

    def sample(**options):
        options = {"max_tokens": 24, "temperature": 1.0, "use_adapter": True} | options
        samples = rollout.generate(engine, prompts, list(range(len(prompts))), **options)
        core = engine.llm_engine.engine_core.engine_core
        assert not core.scheduler.has_requests() and not core.batch_queue
        return samples

    def tokens(samples):
        return [s.completion_ids for s in samples]

    adapters = {seed: read_adapter(folder / f"adapter{seed}") for seed in (1, 2)}
    for tensors, _ in adapters.values():  # in the type that the engine holds
        tensors |= {name: tensor.to(config.model_config.dtype) for name, tensor in tensors.items()}
    mine = {name: tensor.clone() for name, tensor in adapters[1][0].items()}
    rollout.push_adapter(engine, mine, LORA, version=1)
    first = sample()
    seen["samples"] = [(s.completion_ids, s.logprobs, s.finish_reason) for s in first]
    seen["stats"] = dict(engine.stats)
    everywhere = [None] * world
    dist.all_gather_object(everywhere, (tokens(first), [s.logprobs for s in first]))
    seen["shared"] = all(part == everywhere[0] for part in everywhere)
    rollout.push_adapter(engine, mine, LORA, version=2)
    seen["pushed twice"] = tokens(sample()) == tokens(first)
    for name, tensor in mine.items():  # the caller goes on with its tensors
        tensor.copy_(adapters[2][0][name])
    seen["source overwritten"] = tokens(sample()) == tokens(first)
    seen["stale"] = refused(engine, mine)
    rollout.push_adapter(engine, mine, LORA, version=3)
    seen["other adapter"] = tokens(sample()) != tokens(first)
    seen["old one"] = refused(engine, adapters[1][0])
    names = [name for name in mine if "v_proj.lora_B" in name]
    seen["scaled twice"] = refused(engine, mine | {name: 2 * mine[name] for name in names})
    seen["a module left out"] = refused(engine, {name: t for name, t in mine.items() if name not in names})
    if rank == world - 1:  # one slice of one rank
        modules = engine.collective_rpc(lambda w: w.model_runner.lora_manager._adapter_manager.modules)[0]
        next(m for n, m in modules.items() if "qkv_proj" in n).lora_b_stacked[1][0, 0, 0, 0] += 0.5
    reports = [None] * world
    dist.all_gather_object(reports, refused(engine, mine))
    seen["damaged slice"] = reports
    seen["stop string"] = [(s.completion_ids, s.finish_reason) for s in sample(stop=["33", "44"], use_adapter=False)]
    if rank == 0:
        Path(out).write_text(json.dumps(seen))
    rollout.shutdown(engine)


def refused(engine, tensors):
    try:
        rollout.check_adapter(engine, rollout.adapter_checksum(tensors, LORA))
    except AssertionError as error:
        return "does not hold the adapter" in str(error)
    return False


def torchrun(ranks, *words):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run([*command, *map(str, words)], env=env, capture_output=True, text=True, cwd=ROOT, timeout=400)
    assert done.returncode == 0, done.stderr[-8000:]
    return done


@pytest.fixture(scope="module")
def one_rank(tiny):
    out = tiny / "one.json"
    torchrun(1, __file__, tiny, 1, out)
    return json.loads(out.read_text())


def check_engine(seen, replicas, damaged):
    assert seen["settings"] == [96, 64]  # --engine-args reach vLLM and win
    assert "DecodedNvFp4LinearKernel × 8" in seen["kernels"]  # two layers of qkv, o, gate_up, down
    assert "AttentionBackendImpl × 2" in seen["kernels"]
    facts = ("shared", "pushed twice", "source overwritten", "stale", "other adapter", "old one", "scaled twice")
    for fact in (*facts, "a module left out"):
        assert seen[fact], fact
    assert seen["damaged slice"] == damaged
    assert seen["head"] == "torch.float32"
    assert len(seen["stats"]["idle"]) == replicas
    assert min(seen["stats"]["idle"]) < 0.1  # the one that finishes last waits for nobody
    assert seen["stats"]["tokens"] == sum(len(ids) for ids, _, _ in seen["samples"])
    ends = {ids[-1] for ids, _, reason in seen["samples"] if reason == "stop"}
    assert ends == set(EOS)  # both end a completion, inside it
    for ids, logprobs, reason in seen["samples"]:
        assert not set(ids[:-1]) & set(EOS)
        assert len(ids) == 24 or reason == "stop"
        assert len(logprobs) == len(ids)
    stopped = [ids for ids, reason in seen["stop string"] if reason == "stop" and ids[-1] not in EOS]
    assert {ids[-1] for ids in stopped} == {33, 44}
    assert not any(set(ids[:-1]) & {33, 44} for ids, _ in seen["stop string"])


@pytest.mark.slow
def test_one_engine(one_rank):
    check_engine(one_rank, replicas=1, damaged=[True])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_tensor_parallel(tiny, one_rank, ranks):
    """TP 2, alone and as two replicas: the samples of one rank, up to the rounding of sums over halves."""
    out = tiny / f"{ranks}.json"
    torchrun(ranks, __file__, tiny, 2, out)
    seen = json.loads(out.read_text())
    check_engine(seen, replicas=ranks // 2, damaged=[False] * (ranks - 2) + [True, True])
    # Same seeds, same policy: a sample parts from its twin only where rounding moves a step of the distribution function past
    # its number (64 nearly equal tokens have many such steps); up to there the log-probs are the same.
    pairs, gaps = list(zip(seen["samples"], one_rank["samples"])), []
    for (ids, logprobs, _), (twin_ids, twin_logprobs, _) in pairs:
        alike = next((i for i, (p, q) in enumerate(zip(ids, twin_ids)) if p != q), min(len(ids), len(twin_ids)))
        gaps += [abs(p - q) for p, q in zip(logprobs[:alike], twin_logprobs[:alike])]
    assert sum(a[0] == b[0] for a, b in pairs) >= 12  # of 24; other seeds would make none
    assert len(gaps) > 12 * 24 / 2
    assert sum(gaps) / len(gaps) < 0.01


@pytest.mark.slow
def test_four_ranks_train_on_what_two_engines_sampled(tiny, tmp_path):
    """train_grpo.py --tp 2 on four ranks: the probe passes, engine and trainer agree after each update."""
    (tmp_path / "reward.py").write_text("def odd(completion, reference):\n    return float(len(completion) % 2)\n")
    (tmp_path / "data.jsonl").write_text(
        "".join(
            json.dumps({"problem": f"{20 + i} {30 + i} {40 + i}", "answer": "1", "most": 5 if i < 4 else None}) + "\n"
            for i in range(8)
        )
    )
    words = ["--model", tiny / "nvfp4", "--dataset", tmp_path / "data.jsonl", "--prompt-template", "{problem}"]
    words += [
        "--reward",
        f"{tmp_path / 'reward.py'}:odd",
        "--heldout",
        0,
        "--steps",
        3,
        "--prompts",
        4,
        "--group-size",
        4,
    ]
    words += ["--completion-tokens", 24, "--tokens-key", "most"]
    words += ["--lora-rank", 8, "--tp", 2, "--lr", "1e-2", "--runs-dir", tmp_path]
    done = torchrun(4, ROOT / "train_grpo.py", *words, "--run-name", "tp")
    assert "parity probe: the engine uses the adapter" in done.stdout
    metrics = [json.loads(line) for line in (tmp_path / "tp" / "metrics.jsonl").read_text().splitlines()]
    assert len(metrics) == 3
    for m in metrics:
        assert m["trained_tokens"] > 0
        assert m["gap"] < 0.02
        assert len(m["engine"]["idle"]) == 2
        assert m["engine"]["tokens_per_second"] > 0
    longest = {True: 0, False: 0}  # token budgets: four problems have one of their own
    for sample in map(json.loads, (tmp_path / "tp" / "samples.jsonl").read_text().splitlines()):
        own = int(sample["question"].split()[0]) < 24
        longest[own] = max(longest[own], sample["tokens"])
    assert longest == {True: 5, False: 24}


# --- With a GPU ------------------------------------------------------------------------------------------------------

FIFTY_CYCLES = """
import sys, torch
sys.path.insert(0, {project!r})
from adapter import read_adapter
import rollout
engine = rollout.build_engine(sys.argv[1], max_model_len=160, max_lora_rank=16, sleep=sys.argv[3], gpu_memory_utilization=0.3)
prompts, seeds, used, outputs = [list(range(100, 140))] * 8, list(range(8)), [], []
for cycle in range(50):
    with rollout.awake(engine):
        rollout.push_adapter(engine, *read_adapter(sys.argv[2]), version=cycle)
        samples = rollout.generate(engine, prompts, seeds, max_tokens=32, temperature=0.0, use_adapter=True)
    outputs.append([s.completion_ids for s in samples])
    used.append(engine.stats["memory_gib"]["after"])
assert all(output == outputs[0] for output in outputs), "greedy output changed after waking up"
assert engine.stats["memory_gib"]["awake"] - used[-1] > 1, "sleep gave nothing back"
assert max(used[5:]) - used[4] < 0.0625, f"GiB in use asleep: {{used}}"
print("FIFTY", used[4], used[-1])
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="sleep mode needs a CUDA device")
@pytest.mark.parametrize("sleep", ["level1", "kv"])
def test_fifty_hand_overs_leak_nothing_and_change_nothing(sleep, tmp_path):
    sys.path.insert(0, str(ROOT / "tests" / "benchmarks"))
    from bench_rollout import random_adapter

    settings = {"lora_rank": 16, "lora_alpha": 32, "base_model": str(MODEL)}
    save_adapter(tmp_path / "adapter", random_adapter(str(MODEL)), **settings)
    (tmp_path / "cycles.py").write_text(FIFTY_CYCLES.format(project=str(ROOT)))
    command = [sys.executable, tmp_path / "cycles.py", MODEL, tmp_path / "adapter", sleep]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=600, check=False)
    assert "FIFTY" in done.stdout, done.stderr[-3000:]


if __name__ == "__main__":
    work(*sys.argv[1:])
