"""launch.sh: what it starts on a laptop, a GPU node, several nodes and SLURM; its recipes; and two real nodes on the loopback
address. `pytest tests/test_launch.py`; `-m "not slow"` leaves out the real nodes.

The tests of the shell run it in a folder of its own whose `.venv/bin` holds programs that write down how they were called.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import plan
import train_grpo
from errors import UserError

PROJECT = Path(__file__).parents[1]
MODEL = PROJECT / "models" / "SmolLM2-135M-Instruct-NVFP4"
LARGE_4 = PROJECT.parent / "shared" / "data" / "configs" / "mistral_large_4.json"

# Fields of the models' own config.json.
QWEN3_8B = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "hidden_size": 4096,
    "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_30B = QWEN3_8B | {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_key_value_heads": 4, "num_experts": 128,
    "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
SMOLLM2 = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 49152, "hidden_size": 576,
    "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
}  # fmt: skip
NVFP4 = {"config_groups": {"all": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float"}}}}
NVFP4 = {"quantization_config": {"quant_method": "compressed-tensors", "ignore": ["lm_head", "re:.*gate$"]} | NVFP4}
RECIPES = {"smoke": 1, "qwen3-8b": 1, "qwen3-30b-a3b": 8, "mistral-large-4": 32}  # name: ranks

RECORDER = """#!{python} -S
import json, os, sys
if sys.argv[1:2] == ["-c"]:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
with open({log!r}, "a") as log:
    print(json.dumps([os.path.basename(sys.argv[0]), sys.argv[1:], dict(os.environ)]), file=log)
"""


@pytest.fixture
def folder(tmp_path):
    """launch.sh with recording programs in place of everything it starts, as if set up on a machine without a GPU."""
    for name in ("launch.sh", "requirements.txt", "requirements-cpu.txt"):
        shutil.copy(PROJECT / name, tmp_path)
    (tmp_path / "train_grpo.py").touch()
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("python", "torchrun", "srun"):
        (programs / name).write_text(RECORDER.format(python=sys.executable, log=str(tmp_path / "log")))
        (programs / name).chmod(0o755)
    program(tmp_path, "nvidia-smi", "exit 1")
    set_up_for(tmp_path, "requirements-cpu.txt")
    smoke = tmp_path / "models" / MODEL.name
    smoke.mkdir(parents=True)
    (smoke / "config.json").write_text(json.dumps(SMOLLM2 | NVFP4))
    return tmp_path


def set_up_for(folder, requirements):
    done = subprocess.run(["cksum", requirements], cwd=folder, capture_output=True, text=True, check=True)
    (folder / ".venv" / "installed").write_text(done.stdout)


def program(folder, name, lines):
    path = folder / ".venv" / "bin" / name
    path.write_text(f"#!/usr/bin/env bash\n{lines}\n")
    path.chmod(0o755)


def launch(folder, *words, script="launch.sh", **environment):
    """(what was started, the finished process): each start is (program, words, environment)."""
    (folder / "log").unlink(missing_ok=True)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "NPROC", "NNODES", "CUDA_", "OMP_"))}
    clean |= {"PATH": f"{folder / '.venv' / 'bin'}:{os.environ['PATH']}"} | environment
    done = subprocess.run(
        ["bash", str(script), *words], cwd=folder, env=clean, capture_output=True, text=True, timeout=60
    )
    log = folder / "log"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else [], done


def refused(folder, sentence, *words, **environment):
    started, done = launch(folder, *words, **environment)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith("error: ")
    assert sentence in done.stderr
    assert not [name for name, *_ in started if name == "torchrun"]


# --- One machine -----------------------------------------------------------------------------------------------------


def test_a_laptop_starts_one_rank_after_one_check(folder):
    started, done = launch(folder, "--seed", "3", "--run-name", "a b")
    (_, check, check_env), (name, words, _) = started
    assert check[0] == "train_grpo.py"
    assert check[-1] == "--dry-run"
    assert check_env["WORLD_SIZE"] == "1"
    assert name == "torchrun"
    assert words[: words.index("train_grpo.py")] == ["--standalone", "--nproc-per-node", "1", "--max-restarts", "0"]
    assert words[words.index("train_grpo.py") :] == check[:-1]  # what was checked is what runs
    assert words[-4:] == ["--seed", "3", "--run-name", "a b"]  # the user's words come last and stay whole
    assert done.stdout.startswith("recipe smoke on 1 rank(s)")


def test_ranks_and_restarts_reach_torchrun_and_not_the_trainer(folder):
    for words, environment in ((["--max-restarts", "3"], {}), (["--max-restarts=3"], {}), ([], {"MAX_RESTARTS": "3"})):
        started, _ = launch(folder, *words, "--seed", "1", NPROC="4", **environment)
        _, words, _ = started[-1]
        start = words.index("train_grpo.py")
        assert words[:start] == ["--standalone", "--nproc-per-node", "4", "--max-restarts", "3"]
        assert "--max-restarts" not in words[start:]
    refused(folder, "--max-restarts needs a number", "--max-restarts", "many")
    refused(folder, "--max-restarts needs a number", "--max-restarts")
    refused(folder, "no recipe named huge", "--recipe", "huge")
    for name, value in (("NPROC", "all"), ("NPROC", "0"), ("NNODES", "two"), ("NODE_RANK", "first")):
        refused(folder, f"{name}={value} must be a number", **{name: value})


def test_eval_and_test_get_their_words(folder):
    started, _ = launch(folder, "eval", "--model", "M", "--k", "4", NPROC="2")
    assert started[-1][1][-5:] == ["eval_aime.py", "--model", "M", "--k", "4"]
    checked = ["eval_aime.py", "--model", "M", "--k", "4", "--dry-run"]  # alone: a mistake ends in a sentence and 2
    assert started[-2][:2] == ["python", checked]
    started, _ = launch(folder, "eval", "--compare", "A", "B")
    assert started[-1][:2] == ["python", ["eval_aime.py", "--compare", "A", "B"]]
    started, _ = launch(folder, "test", "-k", "one or two")
    program, words, _ = started[-1]
    assert (program, words[:2], words[-2:]) == ("python", ["-m", "pytest"], ["-k", "one or two"])


def gb200(folder, number):
    lines = "".join(f"echo 'GPU {i}: NVIDIA GB200 (UUID: GPU-{i})';" for i in range(number))
    program(folder, "nvidia-smi", f"if [[ $1 == -L ]]; then {lines} else echo 189471; fi")
    (folder / "torch.py").write_text("class cuda:\n    is_available = lambda: True\n")
    set_up_for(folder, "requirements.txt")


def test_a_gpu_node_starts_a_rank_on_each_visible_gpu(folder):
    gb200(folder, 4)
    started, _ = launch(folder)
    assert started[-1][1][:3] == ["--standalone", "--nproc-per-node", "4"]
    assert started[-1][2]["VLLM_LORA_DISABLE_PDL"] == "1"
    started, _ = launch(folder, CUDA_VISIBLE_DEVICES="1,3", VLLM_LORA_DISABLE_PDL="0")
    assert started[-1][1][:3] == ["--standalone", "--nproc-per-node", "2"]
    assert started[-1][2]["VLLM_LORA_DISABLE_PDL"] == "0"  # what is set already stays
    started, _ = launch(folder, "--dry-run")
    words = started[0][1]
    assert words[0] == "plan.py"  # of the GPUs that are here, not those of the recipe
    assert words[words.index("--gpu-memory") + 1] == "185"
    assert words[words.index("--gpu") + 1] == "gb200"
    assert "rtx4090" not in words


def test_a_gpu_that_pytorch_cannot_use_is_told(folder):
    """An old driver: nvidia-smi lists the GPU, the CUDA 13 build of PyTorch sees none."""
    gb200(folder, 1)
    (folder / "torch.py").write_text("class cuda:\n    is_available = lambda: False\n")
    refused(folder, "wants driver 580 or later")


def test_a_gpu_that_plan_py_does_not_know_is_planned_by_its_memory(folder):
    gb200(folder, 4)
    nvidia_smi = folder / ".venv" / "bin" / "nvidia-smi"
    nvidia_smi.write_text(nvidia_smi.read_text().replace("GB200", "GB300"))
    started, _ = launch(folder, "--dry-run")
    words = started[0][1]
    assert "--gpu" not in words
    assert words[words.index("--gpu-memory") + 1] == "185"
    started, _ = launch(folder)
    assert started[-1][2]["VLLM_LORA_DISABLE_PDL"] == "1"


def test_set_up_is_not_repeated_and_does_not_race(folder):
    """Two nodes that share a fresh folder: one installs, the other waits and finds it done."""
    (folder / ".venv" / "installed").unlink()
    program(folder, "python3", f'if [[ $1 == -c ]]; then exit; fi; echo venv >>"{folder}/installs"; sleep 0.3')
    clean = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    clean |= {"PATH": f"{folder / '.venv' / 'bin'}:{os.environ['PATH']}"}
    nodes = [
        subprocess.Popen(["bash", "launch.sh"], cwd=folder, env=clean, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    printed = [node.communicate(timeout=60)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0]
    assert sorted(text.count("set-up:") for text in printed) == [0, 1]
    assert (folder / "installs").read_text() == "venv\n"
    assert launch(folder)[1].stdout.startswith("recipe smoke")


def test_a_failed_installation_is_not_a_finished_one(folder):
    installed = folder / ".venv" / "installed"
    installed.unlink()
    program(folder, "python3", "exit 0")
    for broken in ("install torch", "install -r", "uninstall", "install --no-deps"):
        program(folder, "python", f'if [[ "$*" == *"{broken}"* ]]; then echo no wheel; exit 1; fi')
        _, done = launch(folder)
        assert done.returncode == 1, broken
        assert "the installation failed" in done.stderr
        assert "no wheel" in done.stderr
        assert not installed.exists()


def test_packages_for_a_cpu_do_not_go_over_those_for_gpus(folder):
    """torch 2.13.0+cpu satisfies torch==2.13.0: the GPU build would never come back."""
    set_up_for(folder, "requirements.txt")  # and nvidia-smi finds nothing: a login node of a cluster
    refused(folder, ".venv holds the packages of requirements.txt, this machine needs requirements-cpu.txt")
    started, done = launch(folder, "--dry-run")  # looking is allowed
    assert done.returncode == 0, done.stderr
    assert started[-1][1][0] == "train_grpo.py"


def test_memory_that_gpu_and_host_share(folder):
    gb200(folder, 1)
    program(
        folder, "nvidia-smi", "if [[ $1 == -L ]]; then echo 'GPU 0: NVIDIA GB10 (UUID: GPU-0)'; else echo '[N/A]'; fi"
    )
    started, done = launch(folder, "--dry-run")
    assert done.returncode == 0, done.stderr
    words = started[0][1]
    assert words[words.index("--gpu-memory") + 1] == words[words.index("--host-memory") + 1]


# --- Several machines ------------------------------------------------------------------------------------------------


def test_several_nodes_by_hand(folder):
    for rank in ("0", "1"):
        by_hand = {"NNODES": "2", "NODE_RANK": rank, "MASTER_ADDR": "127.0.0.2", "MASTER_PORT": "29777", "NPROC": "2"}
        started, _ = launch(folder, **by_hand)
        (_, _, check_env), (_, words, env) = started
        assert (check_env["WORLD_SIZE"], check_env["LOCAL_WORLD_SIZE"]) == ("4", "2")  # host memory is a node's
        flags = dict(zip(words[0:14:2], words[1:14:2]))
        assert flags == {
            "--nnodes": "2",
            "--rdzv-backend": "c10d",
            "--rdzv-id": "grpo",
            "--rdzv-endpoint": "127.0.0.2:29777",
            "--local-addr": "127.0.0.1",  # the address by which this machine reaches the master
            "--rdzv-conf": f"is_host={1 - int(rank)},join_timeout=600,read_timeout=600",
            "--nproc-per-node": "2",
        }
        if shutil.which("ip"):
            assert env["GLOO_SOCKET_IFNAME"] == env["NCCL_SOCKET_IFNAME"] == "lo"
    refused(folder, "needs MASTER_ADDR", NNODES="2")
    refused(folder, "from 0 to 1", NNODES="2", NODE_RANK="2", MASTER_ADDR="127.0.0.2")
    refused(folder, "no way from", NNODES="2", NODE_RANK="1", MASTER_ADDR="no-such-host.invalid")


SLURM = {"SLURM_JOB_ID": "654321", "SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_NODELIST": "n[1-3]"}
STEP = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "n[2-3]", "SLURM_LOCALID": "0"}


def test_slurm_step(folder):
    """One launch.sh on each node of the step; the first host of the step's list is the master."""
    program(folder, "scontrol", '[[ "$*" == "show hostnames n[2-3]" ]] && printf "localhost\\nn3\\n"')
    for rank in ("0", "1"):
        started, done = launch(folder, NPROC="4", **SLURM, **STEP, SLURM_NODEID=rank)
        assert done.returncode == 0, done.stderr
        name, words, _ = started[-1]
        assert name == "torchrun"
        assert words[words.index("--nnodes") + 1] == "2"
        assert words[words.index("--rdzv-id") + 1] == "654321"
        assert words[words.index("--rdzv-endpoint") + 1] == "localhost:24321"
        assert words[words.index("--rdzv-conf") + 1].startswith(f"is_host={1 - int(rank)},")
        assert words[words.index("--nproc-per-node") + 1] == "4"
    several = SLURM | STEP | {"SLURM_NODEID": "0", "SLURM_LOCALID": "1"}
    refused(folder, "--ntasks-per-node 1", **several)
    started, _ = launch(folder, **{**SLURM, **STEP, "SLURM_STEP_NUM_NODES": "1"}, SLURM_NODEID="0")
    assert started[-1][1][0] == "--standalone"


def test_sbatch_runs_a_copy_of_the_script_on_the_first_node(folder):
    """It goes back to the folder it was submitted from and starts itself once on every node."""
    spool = folder / "spool"
    spool.mkdir()
    shutil.copy(folder / "launch.sh", spool / "slurm_script")
    batch = SLURM | {"SLURM_NODEID": "0", "SLURM_LOCALID": "0", "SLURM_SUBMIT_DIR": str(folder)}
    started, done = launch(folder, "--recipe", "smoke", "--run-name", "a b", script=spool / "slurm_script", **batch)
    assert done.returncode == 0, done.stderr
    ((name, words, _),) = started
    assert name == "srun"
    assert words[:6] == ["--nodes", "3", "--ntasks", "3", "--ntasks-per-node", "1"]
    assert words[6:8] == ["--cpu-bind", "none"]  # or a step of one task has one core
    assert words[8:] == ["bash", str(folder / "launch.sh"), "--recipe", "smoke", "--run-name", "a b"]
    started, _ = launch(folder, script=spool / "slurm_script", **batch | {"SLURM_JOB_NUM_NODES": "1"})
    assert started[-1][1][0] == "--standalone"


# --- Recipes ---------------------------------------------------------------------------------------------------------


def config_of(name):
    if name == "mistral-large-4":
        if not LARGE_4.is_file():
            pytest.skip(f"{LARGE_4} is not here")
        return json.loads(LARGE_4.read_text())
    return {"smoke": SMOLLM2, "qwen3-8b": QWEN3_8B, "qwen3-30b-a3b": QWEN3_30B}[name] | NVFP4


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_prints_its_command_parses_and_fits(name, folder, monkeypatch, capsys):
    """The dry run as a user sees it: command, plan, checks. A much smaller GPU is refused with a reason."""
    started, done = launch(folder, "--recipe", name, "--dry-run")
    if name != "smoke":
        assert (done.returncode, started) == (2, [])
        assert "config.json is not here" in done.stderr
        assert done.stderr.count("\n") == 1
        model = (
            folder / "models" / {"qwen3-8b": "Qwen3-8B", "qwen3-30b-a3b": "Qwen3-30B-A3B"}.get(name, "Mistral-Large-4")
        )
        model = model.with_name(f"{model.name}-NVFP4")
        model.mkdir()
        (model / "config.json").write_text(json.dumps(config_of(name)))
        started, done = launch(folder, "--recipe", name, "--dry-run")
    assert done.returncode == 0, done.stderr
    (_, planned, _), (_, checked, env) = started
    assert env["WORLD_SIZE"] == str(RECIPES[name])
    (command,) = [line for line in done.stdout.splitlines() if "torchrun" in line]
    words = [word for word in checked if word != "--dry-run"]
    assert shlex.split(command)[-len(words) :] == words  # what is printed can be pasted, and starts
    assert ("--nnodes 8" in command) == (name == "mistral-large-4")

    args = train_grpo.parse_args(checked[1:])
    train_grpo.check_flags(args, RECIPES[name])
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", planned)
    plan.main()
    printed = capsys.readouterr().out
    assert "NOT UNDERSTOOD" not in printed
    assert printed.endswith("\nfits\n"), printed[-1000:]
    assert f"{RECIPES[name]} ranks: {RECIPES[name] // args.tp} engines of {args.tp}" in printed
    assert f"micro-batches of {args.max_tokens} tokens" in printed

    start, memory = planned.index("--"), {"smoke": 1, "qwen3-8b": 16, "qwen3-30b-a3b": 24, "mistral-large-4": 96}[name]
    monkeypatch.setattr(sys, "argv", [*planned[:start], "--gpu-memory", str(memory), *planned[start:]])
    plan.main()
    refusal = capsys.readouterr().out.rpartition("does not fit, because")[2]
    assert "generating:" in refusal or "training:" in refusal


def test_the_plan_takes_the_trainers_flags_and_what_stands_before_them_wins(tmp_path, monkeypatch, capsys):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B | NVFP4))
    command = ["--model", "M", "--completion-tokens", "3072", "--prompts", "12", "--lora-rank", "64"]
    monkeypatch.setattr(
        sys, "argv", ["plan.py", str(tmp_path), "--gpus", "1", "--gpu-memory", "80", "--json", "--", *command]
    )
    plan.main()
    run = json.loads(capsys.readouterr().out)["run"]
    defaults = train_grpo.parse_args(["--model", "M"])
    assert (run["context"], run["prompts"], run["lora_rank"]) == (3072 + 1024, 12, 64)
    assert (run["max_tokens"], run["activation_checkpointing"]) == (
        defaults.max_tokens,
        False,
    )  # the trainer's, not ours
    assert run["completion_tokens"] == 3072 // 2  # half of the longest
    monkeypatch.setattr(sys, "argv", [*sys.argv[:6], "--context", "9000", *sys.argv[6:]])
    plan.main()
    assert json.loads(capsys.readouterr().out)["run"]["context"] == 9000


def test_a_model_that_no_installed_library_has_is_refused_before_anything_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train_grpo.py", "--model", str(tmp_path)])
    (tmp_path / "config.json").write_text(json.dumps(config_of("mistral-large-4")))
    with pytest.raises(UserError) as error:
        train_grpo.main()
    assert "is a MistralLarge4ForConditionalGeneration, for which transformers 5." in str(error.value)
    assert " and vLLM 0." in str(error.value)
    assert "have no class" in str(error.value)
    for config in (SMOLLM2, QWEN3_8B, QWEN3_30B):
        (tmp_path / "config.json").write_text(json.dumps(config))
        train_grpo.rollout.check_architecture(tmp_path)
    # transformers has it and vLLM does not list it, but can serve it through transformers' modules
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "mistral4", "architectures": ["Mistral4ForCausalLM"]})
    )
    train_grpo.rollout.check_architecture(tmp_path)
    # served once and no longer: in vLLM's registry, but with the last version that had it
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["MotifForCausalLM"]}))
    with pytest.raises(UserError, match=r"for which vLLM [\d.]+ has no class"):
        train_grpo.rollout.check_architecture(tmp_path)


def test_dry_run_checks_and_plans_on_this_machine():
    if not MODEL.is_dir():
        pytest.skip(f"{MODEL} is missing; `bash launch.sh test` makes it")
    words = ["--recipe", "smoke", "--dry-run", "--seed", "3"]
    done = subprocess.run(
        ["bash", "launch.sh", *words], cwd=PROJECT, capture_output=True, text=True, env=os.environ | {"NPROC": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert "torchrun --standalone --nproc-per-node 1 --max-restarts 0 train_grpo.py" in done.stdout
    assert "\nfits\n" in done.stdout
    assert "24 steps of 16 × 8 samples on 1 rank" in done.stdout
    assert "arithmetic-seed3" in done.stdout


# --- Two nodes of two ranks, real ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_nodes_of_two_ranks_train_one_run(tmp_path):
    """Two launch.sh, four ranks, each with its engine and its shard: two steps, exit code 0 twice, one run folder."""
    if not MODEL.is_dir():
        pytest.skip(f"{MODEL} is missing; `bash launch.sh test` makes it")
    from test_model_nvfp4_models import quantized, tiny_checkpoint

    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    sizes |= {"num_hidden_layers": 2, "vocab_size": 49152, "max_position_embeddings": 512}
    source = tiny_checkpoint("Llama", tmp_path / "source", std=0.02, **sizes)
    for path in [*MODEL.glob("tokenizer*"), *MODEL.glob("*.jinja"), *MODEL.glob("special_tokens*")]:
        shutil.copy(path, source)
    model = quantized(source, tmp_path / "model")
    reward = tmp_path / "reward.py"  # a random model is never right; a reward with spread, so that there is a gradient
    reward.write_text("def even(completion, reference):\n    return float(len(completion) % 2)\n")
    flags = [
        "--model",
        model,
        "--prompts",
        4,
        "--group-size",
        4,
        "--completion-tokens",
        8,
        "--heldout",
        0,
        "--steps",
        2,
    ]
    flags += ["--reward", f"{reward}:even", "--no-probe", "--runs-dir", tmp_path / "runs", "--run-name", "two-nodes"]
    nodes = []
    for rank in (0, 1):
        by_hand = {"NNODES": "2", "NODE_RANK": str(rank), "NPROC": "2", "OMP_NUM_THREADS": "1"}
        by_hand |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(21000 + os.getpid() % 8000)}
        with open(tmp_path / f"node{rank}", "w") as out:
            command = ["bash", "launch.sh", *map(str, flags)]
            nodes.append(subprocess.Popen(command, cwd=PROJECT, env=os.environ | by_hand, stdout=out, stderr=out))
    codes = [node.wait(timeout=400) for node in nodes]
    printed = [(tmp_path / f"node{rank}").read_text() for rank in (0, 1)]
    assert codes == [0, 0], "\n".join(text[-3000:] for text in printed)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["two-nodes"]
    metrics = [
        json.loads(line) for line in (tmp_path / "runs" / "two-nodes" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [m["step"] for m in metrics] == [1, 2]
    assert all(m["grad_norm"] > 0 and m["gap"] < 0.05 for m in metrics)
    samples = (tmp_path / "runs" / "two-nodes" / "samples.jsonl").read_text().splitlines()
    assert len(samples) == 2 * 4 * 4
