"""Faults: what dies, hangs, fills up or drifts ends the job with its cause last, and torchrun's restarts go on from there.

pytest -m slow tests/test_ranks.py

The trainer, torchrun, gloo, FSDP2 and every file are real. vLLM is not: eight engines need more memory and minutes than a test
may take, so `generate` is a stand-in that is as deterministic (a function of seed and adapter) and as collective. A `kill -9`
with the real engine is in tests/test_main_job.py.
"""

import errno
import json
import os
import re
import signal
import string
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file
from test_model_nvfp4_models import quantized, tiny_checkpoint

from errors import UserError
from ranks import check_ranks_agree, check_same_adapter, report_failure
from run_folder import lock_run, read_jsonl

PROJECT = Path(__file__).parents[1]

# Started by torchrun in place of train_grpo.py. The first argument is a JSON list of [what, phase, rank, step]: each strikes
# once, at the start of that phase, and leaves a mark so that the restarted job gets by.
SCRIPT = """
import json, os, random, signal, sys, time, zlib
sys.path.insert(0, {project!r})
import torch
import torch.distributed as dist
from adapter import lora_state_dict, save_adapter
from problems import next_problems
from ranks import die_with_launcher, report_failure
from run_folder import save_checkpoint
import rollout, run_folder, train_grpo
from contextlib import nullcontext
from types import SimpleNamespace
from pathlib import Path
from rollout import Sample

faults, marks, rank, now = json.loads(sys.argv.pop(1)), Path(__file__).parent, int(os.environ["RANK"]), dict(step=0, crc=0)

def strike(phase, at=None):
    for number, (what, where, who, step) in enumerate(faults):
        mark = marks / f"struck-{{number}}"
        if (where, who, step) != (phase, rank, at or now["step"]) or mark.exists():
            continue
        mark.write_text(str(time.time()))
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "hang":
            time.sleep(10000)
        elif what == "raise":
            raise RuntimeError("the engine broke")
        elif what == "memory":
            torch.empty(10**15)
        elif what == "disk":
            (marks / "run" / "metrics.jsonl").unlink()
            (marks / "run" / "metrics.jsonl").symlink_to("/dev/full")
        elif what == "drift":
            return True
    return False

def before(module, name, phase):
    original = getattr(module, name)
    def patched(*args, **kwargs):
        strike(phase)
        return original(*args, **kwargs)
    setattr(module, name, patched)

before(train_grpo.reward, "score", "score")
before(train_grpo, "policy_loss", "train")
before(run_folder, "append_jsonl", "log")

def counting(problems, step, *rest):
    now["step"] = step + 1
    return next_problems(problems, step, *rest)

def saving(folder, tensors, **config):
    save_adapter(folder, tensors, **config)
    if Path(folder).name == ".writing":  # a checkpoint, half written
        strike("checkpoint", at=now["saved"])

def writing(run_dir, step, *rest):  # in a thread of its own, while the next step runs
    now["saved"] = step
    save_checkpoint(run_dir, step, *rest)

def drifting(root):
    tensors = lora_state_dict(root)
    if strike("adapter"):
        next(iter(tensors.values())).view(-1)[0] += 1e-7
    return tensors

def push_adapter(engine, tensors, config, version):
    now["crc"] = zlib.crc32(torch.cat([t.flatten() for t in tensors.values()]).numpy().tobytes())

def generate(engine, prompts, seeds, *, max_tokens, **_):
    strike("generate")
    rank, world, parts = dist.get_rank(), dist.get_world_size(), [None] * dist.get_world_size()
    mine = []
    for prompt, seed, most in list(zip(prompts, seeds, max_tokens))[rank::world]:
        draw = random.Random(f"{{seed}} {{now['crc']}}")
        ids = [draw.randrange(3, 100) for _ in range(draw.randrange(1, most + 1))]
        mine.append(Sample(prompt, ids, [-4.6] * len(ids), str(ids), "stop", seed))
    dist.all_gather_object(parts, mine)
    return [parts[index % world][index // world] for index in range(len(prompts))]

train_grpo.next_problems, train_grpo.lora_state_dict = counting, drifting
run_folder.save_adapter, run_folder.save_checkpoint = saving, writing
train_grpo.generate, train_grpo.push_adapter, train_grpo.awake = generate, push_adapter, nullcontext
rollout.build_engine, rollout.kernels = lambda *_, **__: SimpleNamespace(stats={{}}), lambda _: "a stand-in"
rollout.shutdown, rollout.versions = lambda _: dist.barrier(), lambda: {{}}
die_with_launcher()
try:
    train_grpo.main()
except Exception as error:
    os._exit(report_failure(error))
os._exit(0)
"""

REWARD = """
def low_tokens(completion, reference):
    return sum(int(token) < 50 for token in completion.strip("[]").split(", ")) / 8
"""


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    work = tmp_path_factory.mktemp("tiny")
    folder = quantized(tiny_checkpoint("Llama", work / "source", vocab_size=128), work / "nvfp4")
    words = ["<pad>", "<eos>", "<unk>", *string.printable]
    characters = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    characters.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token="<pad>",
        eos_token="<eos>",
        chat_template="{% for message in messages[-1:] %}{{ message['content'] }}{% endfor %}",
    ).save_pretrained(folder)
    return folder


def torchrun(model, folder, faults=(), *, ranks, steps, restarts=0, timeout=1.0, check=True):
    """(what torchrun printed and its exit code, the run folder, seconds from the last fault to the end)."""
    folder.mkdir(exist_ok=True)
    (folder / "script.py").write_text(SCRIPT.format(project=str(PROJECT)))
    (folder / "reward.py").write_text(REWARD)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    command += ["--max-restarts", restarts, folder / "script.py", json.dumps(faults)]
    command += ["--model", model, "--reward", f"{folder / 'reward.py'}:low_tokens", "--heldout", 0, "--no-probe"]
    command += ["--prompts", 24, "--group-size", 3, "--completion-tokens", 8, "--lora-rank", 8, "--max-logprob-gap", 99]
    command += ["--average", 3]
    command += ["--max-tokens", 128, "--steps", steps, "--timeout", timeout, "--runs-dir", folder, "--run-name", "run"]
    done = subprocess.run(
        [str(word) for word in command],
        env=os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    end = time.time()
    assert not check or done.returncode == 0, done.stdout[-1000:] + done.stderr[-5000:]
    struck = [float(mark.read_text()) for mark in folder.glob("struck-*")]
    assert len(struck) == len(faults), done.stderr[-5000:]
    lock_run(folder / "run").close()  # nobody trains there any more
    return done, folder / "run", end - max(struck, default=end)


def comparable(run):
    metrics = read_jsonl(run / "metrics.jsonl")
    return [{k: v for k, v in m.items() if k not in ("seconds", "memory_gib")} for m in metrics]


@pytest.mark.slow
def test_kill_9_of_a_rank_in_each_phase_and_torchrun_goes_on_by_itself(tiny_model, tmp_path):
    kills = [["kill", "generate", 2, 1], ["kill", "score", 1, 2], ["kill", "train", 3, 3], ["kill", "checkpoint", 0, 4]]
    _, whole, _ = torchrun(tiny_model, tmp_path / "whole", ranks=4, steps=5)
    done, killed, _ = torchrun(tiny_model, tmp_path / "killed", kills, ranks=4, steps=5, restarts=4)
    assert [m["step"] for m in comparable(killed)] == [1, 2, 3, 4, 5]
    assert comparable(killed) == comparable(whole)
    assert all(m["grad_norm"] > 0 for m in comparable(whole))
    assert read_jsonl(killed / "samples.jsonl") == read_jsonl(whole / "samples.jsonl")
    ours, theirs = (load_file(run / "adapter" / "adapter_model.safetensors") for run in (killed, whole))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    starts = re.findall(r"going on after step (\d)", done.stdout)
    assert starts == ["1", "2", "3"]  # the first kill came before any checkpoint


FAULTS = {
    "a rank is killed": (["kill", "train", 1, 2], r"Signal 9 \(SIGKILL\) received", "in main"),
    "a rank hangs": (["hang", "score", 1, 2], "lost another rank, which died, hung or never came", "in strike"),
    "the engine breaks": (
        ["raise", "generate", 1, 2],
        "rank 1 on .* failed: RuntimeError: the engine broke",
        "in main",
    ),
    "out of memory": (
        ["memory", "train", 1, 2],
        "rank 1 on .* failed: RuntimeError: .*can't allocate memory",
        "strike",
    ),
    "a rank drifts": (["drift", "adapter", 1, 2], "step 2: rank 1 of 2 hold another adapter", "check_same_adapter"),
    "the disk is full": (
        ["disk", "log", 0, 2],
        "rank 0 on .* could not write .*No space left.*goes on from the last",
        "main",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_ends_all_ranks_with_its_cause_last(name, tiny_model, tmp_path):
    fault, sentence, frame = FAULTS[name]
    minutes = 0.25 if fault[0] == "hang" else 5
    done, run, seconds = torchrun(tiny_model, tmp_path, [fault], ranks=2, steps=3, timeout=minutes, check=False)
    assert done.returncode == 1  # torchrun's, whatever the rank's
    assert seconds < 40  # a quarter of a minute, the wait for the first cause, and torchrun's end on a busy machine
    *_, last, frame_of_the_report = done.stderr.strip().splitlines()
    assert set(frame_of_the_report) == {"="}
    assert re.search(sentence, last), done.stderr[-3000:]
    stacks = {rank: (run / "stacks" / f"rank-{rank}.txt").read_text() for rank in range(2)}
    dumped = [rank for rank in stacks if "File " in stacks[rank]]
    assert dumped == {"kill": [0], "disk": [1]}.get(fault[0], [0, 1])  # a dead rank and a full disk keep none
    assert any(re.search(frame, text) for text in stacks.values())


@pytest.mark.slow
def test_eight_ranks_twenty_steps_no_drift(tiny_model, tmp_path):
    _, run, _ = torchrun(tiny_model, tmp_path, ranks=8, steps=20)
    metrics = read_jsonl(run / "metrics.jsonl")
    assert [m["step"] for m in metrics] == list(range(1, 21))
    assert len({m["adapter_crc"] for m in metrics}) == 20  # the adapter moved at every step, and on all ranks alike


# --- Checks that compare ranks ---------------------------------------------------------------------------------------


def compare(rank, world, port, folder, case):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=world)
    sys.stderr = open(folder / f"{rank}", "w")  # noqa: SIM115
    clock = time.time
    try:
        if case == "clock" and rank == 2:
            time.time = lambda: clock() + 40
        if case == "adapter":
            tensor = torch.arange(12.0).view(3, 4)
            tensor[2, 3] += 1e-6 * (rank == 1)
            check_same_adapter({"b": tensor, "a": torch.ones(2), "c": torch.ones(2)}, 7)
        else:
            check_ranks_agree({"--lr": 0.1, "the step to go on from": 4 if case == "step" and rank == 1 else 5})
        print("fine", file=sys.stderr)
    except UserError as error:
        print(error, file=sys.stderr)
    sys.stderr.close()
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("same", "^fine$"),
        ("step", r"^the step to go on from: 5 on rank 0 \(.*\), but 4 on rank 1 \(.*--runs-dir where all nodes see"),
        ("clock", r"^warning: the clock of .* is (39|40) s ahead of that of .*\nfine$"),
        ("adapter", "^step 7: rank 1 of 3 hold another adapter"),
    ],
)
def test_ranks_that_differ_are_named(case, sentence, tmp_path):
    port = 29950 + os.getpid() % 40 + 10 * len(case)
    mp.start_processes(compare, (3, port, tmp_path, case), nprocs=3, start_method="fork")
    told = [(tmp_path / str(rank)).read_text().strip() for rank in range(3)]
    assert re.search(sentence, told[0]), told
    if case in ("step", "adapter"):
        assert told[1] == told[2] == told[0]  # all stop, so that none waits for another


# --- Before anything starts, and after it ended ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (UserError("--lr must be positive."), 2, "^error: --lr must be positive.$"),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            2,
            r"^error: rank 0 on \S+ could not write \(.*No space left",
        ),
        (
            torch.OutOfMemoryError("CUDA out of memory.\nTried"),
            1,
            "failed: OutOfMemoryError: CUDA out of memory. Tried",
        ),
        (
            dist.DistStoreError("1/2 clients joined."),
            1,
            "lost another rank, which died, hung or never came .1/2 clients",
        ),
    ],
)
def test_one_sentence_and_an_exit_code(error, code, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert report_failure(error, seconds_for_the_first=0) == code
    told = capsys.readouterr().err
    assert re.search(sentence, told)
    assert told.count("\n") == 1 or "OutOfMemory" in told  # a fault of ours comes with its stack, before the sentence
    assert json.loads((tmp_path / "error.json").read_text())["message"] in told  # what torchrun's report will end with


def test_a_rank_told_to_stop_while_it_fails_still_tells_where(tmp_path):
    """torchrun sees the first dead rank within milliseconds of the others, so its SIGTERM may come at any instruction."""
    script = f"""
import os, signal, sys, traceback
from pathlib import Path
sys.path.insert(0, {str(PROJECT)!r})
from ranks import dump_stacks, report_failure
import report
dump_stacks(Path({str(tmp_path)!r}), 0)
format_exception = traceback.format_exception

def interrupted(error):
    os.kill(os.getpid(), signal.SIGTERM)
    return format_exception(error)

def where_it_broke():
    raise RuntimeError("broken")

traceback.format_exception = interrupted
try:
    where_it_broke()
except RuntimeError as error:
    report_failure(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert "in where_it_broke" in (tmp_path / "stacks" / "rank-0.txt").read_text()
