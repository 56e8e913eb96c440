"""vLLM on a CPU serves what `quantize` writes and agrees with the trainer: mean |Δ log-prob| over 32 prompts, on a tiny
Llama and a tiny Qwen3-MoE. The real SmolLM2 runs in tests/test_main_job.py, with its larger rounding (README).

    pytest -m slow tests/test_model_nvfp4_vllm.py

Each case runs in a process of its own (an engine cannot be rebuilt cleanly), a fork of one that has imported vLLM; through the
trainer's own functions on both sides: rollout.py builds the engine, takes the adapter folder and samples; model_nvfp4.py scores
the sampled tokens.
"""

import json
import multiprocessing
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_model_nvfp4_models import quantized, tiny_checkpoint

import model_nvfp4 as nvfp4
from adapter import load_lora_state_dict, lora_state_dict
from vllm_cpu import prepare_cpu

ROOT = Path(__file__).parents[1]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not find_spec("vllm"), reason="vLLM is not installed")]


def compare(folder: str, *adapters: str) -> dict[str, dict[str, float]]:
    """{adapter: {"base": mean |Δ| without it, "adapter": mean |Δ| with it, "effect": mean change that it makes}}, in nats.

    An adapter is a `lora_targets`; with "+experts" at its end it is on the routed experts too.
    """
    import rollout

    folder, results = Path(folder), {}
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    draw = torch.Generator().manual_seed(2)
    prompts = [torch.randint(5, vocabulary, (12,), generator=draw).tolist() for _ in range(32)]
    engine = rollout.build_engine(str(folder), max_model_len=128, max_lora_rank=8)
    for version, name in enumerate(adapters):
        targets, experts = name.removesuffix("+experts"), name.endswith("+experts")
        model = nvfp4.build_model(folder, lora_rank=8, lora_alpha=16, lora_targets=targets, lora_experts=experts)
        nvfp4.load_weights(model, folder)
        off, generator = lora_state_dict(model), torch.Generator().manual_seed(1)  # B is zero
        # B as large as some hundred steps with a learning rate of 5e-4 make it; bf16, because vLLM holds it so.
        on = {k: torch.randn(v.shape, generator=generator) * 0.02 if "lora_B" in k else v for k, v in off.items()}
        on = {k: v.bfloat16() for k, v in on.items()}
        rollout.push_adapter(engine, on, {"r": 8, "lora_alpha": 16}, version)

        def trainer_logprobs(samples, tensors, model=model):
            load_lora_state_dict(model, {k: v.float() for k, v in tensors.items()})
            logprobs = []
            for prompt, completion in [(sample.prompt_ids, sample.completion_ids) for sample in samples]:
                with torch.no_grad():
                    logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
                logprobs.append(logits.float().log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0])
            return torch.cat(logprobs)  # (tokens,)

        result = results[name] = {}
        for key, use_adapter in (("base", False), ("adapter", True)):
            samples = rollout.generate(
                engine, prompts, list(range(32)), max_tokens=16, temperature=1.0, use_adapter=use_adapter
            )
            ours = trainer_logprobs(samples, on if use_adapter else off)
            theirs = torch.tensor([logprob for sample in samples for logprob in sample.logprobs])
            result[key] = (ours - theirs).abs().mean().item()
        result["effect"] = (ours - trainer_logprobs(samples, off)).abs().mean().item()
    rollout.shutdown(engine)
    return results


TINY = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
TINY |= {"head_dim": 64, "vocab_size": 512, "num_hidden_layers": 2, "moe_intermediate_size": 128, "num_experts": 8}


def tiny_folder(architecture: str, work: Path, dialect: str, a16: bool, **extra) -> Path:
    """A random checkpoint of sizes that vLLM's CPU attention knows, with a tokenizer, quantized."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    source = tiny_checkpoint(architecture, work / "source", **TINY | extra)
    words = Tokenizer(WordLevel({str(i): i for i in range(TINY["vocab_size"])}, unk_token="0"))
    words.pre_tokenizer = Whitespace()
    template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    PreTrainedTokenizerFast(tokenizer_object=words, chat_template=template).save_pretrained(source)
    return quantized(source, work / f"{dialect}-{'a16' if a16 else 'a4'}", dialect=dialect, a16=a16)


ATTENTION, MLP = "q_proj,k_proj,v_proj,o_proj", "gate_proj,up_proj,down_proj"
FOLDERS = [(dialect, a16) for dialect in ("compressed-tensors", "modelopt") for a16 in (True, False)]
# For experts small weights: with weights of unit gain, rounding to bf16 alone flips the router and moves log-probs by .02.
# Their adapter is on attention, and on the experts too (vLLM refuses one on experts alone).
ADAPTERS = {"Llama": (0.0, [ATTENTION, MLP]), "Qwen3Moe": (0.02, [ATTENTION, "o_proj+experts"])}
CASES = [(architecture, *folder) for architecture in ADAPTERS for folder in FOLDERS]
# vLLM has no class of its own for it and takes transformers', the trainer's: neither may spoil it for the other.
ADAPTERS["Olmo2"] = (0.0, ["all-linear"])
CASES.append(("Olmo2", "compressed-tensors", True))


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """({(architecture, dialect, a16): what `compare` found}, what was said on stderr)."""
    work, cases, keys = tmp_path_factory.mktemp("vllm"), [], {}
    for architecture, dialect, a16 in CASES:
        std, adapters = ADAPTERS[architecture]
        folder = str(tiny_folder(architecture, work / architecture, dialect, a16, std=std))
        keys[folder] = architecture, dialect, a16
        cases.append([folder, *adapters])
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    command = [sys.executable, __file__, json.dumps(cases)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=ROOT)
    results = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    return {keys[folder]: found for folder, found in results}, done.stderr


@pytest.mark.parametrize(("architecture", "dialect", "a16"), CASES)
def test_vllm_and_the_trainer_agree(compared, architecture, dialect, a16):
    results, errors = compared
    case = architecture, dialect, a16
    assert case in results, errors[-5000:]
    assert list(results[case]) == ADAPTERS[architecture][1]
    for adapter, result in results[case].items():
        print(case, adapter, result)
        assert result["base"] <= 0.012
        assert result["adapter"] <= 0.02
        assert result["effect"] >= 3 * result["adapter"], "the adapter is too small to show that vLLM applies it"


def test_experts_are_trained_probed_saved_and_resumed(tmp_path):
    """train_grpo.py as a user runs it, one step and, in a new process, one more."""
    folder = tiny_folder("Qwen3Moe", tmp_path, "compressed-tensors", True, std=0.02)
    rows = [json.dumps({"problem": f"{i} {i + 7} {3 * i}", "answer": "2"}) for i in range(10, 18)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    reward = "def even(completion, reference):\n    return sum(int(word) % 2 == 0 for word in completion.split())\n"
    (tmp_path / "reward.py").write_text(reward)
    words = ["--model", folder, "--dataset", tmp_path / "rows.jsonl", "--prompt-template", "{problem}", "--heldout", 2]
    words += ["--reward", f"{tmp_path}/reward.py:even", "--lora-experts", "--lora-targets", "o_proj", "--lora-rank", 8]
    words += ["--replay-experts", "--heldout-samples", 2]
    words += ["--prompts", 2, "--group-size", 4, "--completion-tokens", 12, "--runs-dir", tmp_path, "--run-name", "run"]
    printed = []
    for steps in (1, 2):
        command = [sys.executable, "train_grpo.py", *map(str, words), "--keep", "1", "--steps", str(steps)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr[-3000:]
        printed.append(done.stdout)
    for text in printed:
        assert "uses the adapter on experts.down_proj, experts.gate_proj, experts.up_proj, o_proj;" in text
    assert "going on after step 1" in printed[1]
    judged = [json.loads(line) for line in (tmp_path / "run" / "evaluations.jsonl").read_text().splitlines()]
    assert [e["step"] for e in judged] == [0, 1, 2]
    # Even numbers among at most 12 tokens; and nothing boxed.
    assert all(0 < e["reward"] <= 12 and e["avg"] == 0 for e in judged)
    assert f"before {judged[0]['reward']:.2f} → after {judged[2]['reward']:.2f} (mean reward, " in printed[1]
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in metrics] == [1, 2]
    assert all(m["grad_norm"] > 0 and m["gap"] < 0.012 for m in metrics), metrics

    # A router flips where two scores are closer than bf16 rounds; tokens mixed up would agree by chance, in 2 of 8.
    assert all(0.95 < m["experts_alike"] <= 1 for m in metrics), metrics

    first, second = [load_file(folder / "adapter_model.safetensors") for folder in checkpoints(tmp_path / "run")]
    b = [name for name in second if ".experts." in name and name.endswith(".lora_B.weight")]
    assert len(b) == 2 * 8 * 3, "layers × experts × matrices"
    for tensors in (first, second):
        assert sum(tensors[name].any().item() for name in b) > len(b) / 2, "most experts get tokens, and so a gradient"
    assert any(not torch.equal(first[name], second[name]) for name in b)
    moments = load_file(checkpoints(tmp_path / "run")[1] / "optimizer.safetensors")
    assert any(".experts.gate_up_proj_lora_B|exp_avg" in name and moment.any() for name, moment in moments.items())


def checkpoints(run: Path) -> list[Path]:
    return sorted((run / "checkpoint").glob("step-*"))


def tell(folder: str, *adapters: str) -> None:
    print("FOUND", json.dumps([folder, compare(folder, *adapters)]), flush=True)


if __name__ == "__main__":
    prepare_cpu()
    from vllm import LLM  # noqa: F401  the import that all forks share

    for case in json.loads(sys.argv[1]):
        process = multiprocessing.get_context("fork").Process(target=tell, args=case)
        process.start()
        process.join()
