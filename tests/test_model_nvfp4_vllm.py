"""vLLM on a CPU serves what `quantize` writes and agrees with the trainer: mean |Δ log-prob| over 32 prompts, on a tiny
Qwen3-MoE. The real SmolLM2 runs in tests/test_main_job.py, with its larger rounding at temperature 1 (README).

    pytest -m slow tests/test_model_nvfp4_vllm.py

Each case runs in a process of its own (an engine cannot be rebuilt cleanly), through the trainer's own functions on both
sides: rollout.py builds the engine, takes the adapter folder and samples; model_nvfp4.py scores the sampled tokens.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from test_model_nvfp4_models import quantized, tiny_checkpoint

import model_nvfp4 as nvfp4

ROOT = Path(__file__).parents[1]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not find_spec("vllm"), reason="vLLM is not installed")]


def compare(folder: str, lora_targets: str, lora_experts: str) -> dict:
    """{"base": mean |Δ|, "adapter": mean |Δ|, "effect": mean change of log-prob that the adapter makes in the trainer}."""
    import rollout

    folder, lora_experts = Path(folder), lora_experts == "experts"
    model = nvfp4.build_model(folder, lora_rank=8, lora_alpha=16, lora_targets=lora_targets, lora_experts=lora_experts)
    nvfp4.load_weights(model, folder)
    # A realistic adapter: as large as some hundred steps make it (B of the size of A divided by ten).
    adapter, generator = nvfp4.lora_state_dict(model), torch.Generator().manual_seed(1)
    adapter = {
        k: (torch.randn(v.shape, generator=generator) * 0.005 if "lora_B" in k else v).bfloat16()
        for k, v in adapter.items()
    }
    nvfp4.save_adapter(folder / "adapter", adapter, lora_rank=8, lora_alpha=16, base_model=str(folder))
    if (
        folder / "chat_template.jinja"
    ).exists():  # real text: on random tokens a real model amplifies rounding five times
        from transformers import AutoTokenizer

        questions = [f"What is {a} + {b}?" for a in range(11, 19) for b in (7, 25, 48, 96)]
        conversations = [[{"role": "user", "content": question}] for question in questions]
        prompts = rollout.encode_prompts(AutoTokenizer.from_pretrained(folder), conversations)
    else:
        vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
        draw = torch.Generator().manual_seed(2)
        prompts = [torch.randint(5, vocabulary, (12,), generator=draw).tolist() for _ in range(32)]
    rollout.prepare_cpu()
    serve_packed_experts_on_cpu()
    engine = rollout.build_engine(str(folder), max_model_len=128, max_lora_rank=8)
    rollout.push_adapter(engine, folder / "adapter", version=0)

    def trainer_logprobs(prompt, completion):
        tokens = torch.tensor([prompt + completion])
        with torch.no_grad():
            logits = model(input_ids=tokens).logits.float()[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]

    result = {}
    for name, use_adapter in (("base", False), ("adapter", True)):
        samples = rollout.generate(
            engine, prompts, list(range(32)), max_tokens=16, temperature=1.0, use_adapter=use_adapter
        )
        nvfp4.load_lora_state_dict(model, {k: v.float() * (use_adapter or "lora_A" in k) for k, v in adapter.items()})
        ours = [trainer_logprobs(s.prompt_ids, s.completion_ids) for s in samples]
        gaps = torch.cat([(o - torch.tensor(s.logprobs)).abs() for o, s in zip(ours, samples)])
        result[name] = gaps.mean().item()
    nvfp4.load_lora_state_dict(model, {k: v.float() * ("lora_A" in k) for k, v in adapter.items()})
    base = [trainer_logprobs(s.prompt_ids, s.completion_ids) for s in samples]
    result["effect"] = torch.cat([(o - b).abs() for o, b in zip(ours, base)]).mean().item()
    rollout.shutdown(engine)
    return result


def serve_packed_experts_on_cpu() -> None:
    """vLLM has no NVFP4 experts for CPUs: decode one expert at a time, with its LoRA. rollout.py covers linears only."""
    from vllm.model_executor.layers.fused_moe.experts import nvfp4_emulation_moe as emulation
    from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend
    from vllm.model_executor.layers.quantization import modelopt
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w4a4_nvfp4 as compressed,
    )

    class DecodedExperts(emulation.Nvfp4QuantizationEmulationTritonExperts):
        supports_lora = staticmethod(lambda: True)

        def process_weights_after_loading(self, layer):
            scales = (
                (layer.w13_weight_scale, layer.w13_weight_scale_2),
                (layer.w2_weight_scale, layer.w2_weight_scale_2),
            )
            self.scales = [(s.data.view(torch.uint8), g.data.float()) for s, g in scales]

        def apply(self, output, hidden_states, w1, w2, topk_weights, topk_ids, *args, **kwargs):
            (s1, g1), (s2, g2) = self.scales
            lora, total = self._lora_context, torch.zeros(hidden_states.shape, dtype=torch.float32)
            on = lora is not None and not lora.punica_wrapper.no_lora
            for e in topk_ids.unique().tolist():
                token, slot = torch.where(topk_ids == e)
                x = hidden_states[token]
                gate_up = x @ nvfp4.decode(w1[e], s1[e], g1[e : e + 1]).T
                if on:
                    pairs = zip(lora.w13_lora_a_stacked, lora.w13_lora_b_stacked)
                    gate_up += torch.cat([x @ a[0, e].T @ b[0, e].T for a, b in pairs], -1)
                gate, up = gate_up.chunk(2, -1)
                h = torch.nn.functional.silu(gate) * up
                y = h @ nvfp4.decode(w2[e], s2[e], g2[e : e + 1]).T
                if on:
                    y += h @ lora.w2_lora_a_stacked[0][0, e].T @ lora.w2_lora_b_stacked[0][0, e].T
                total.index_add_(0, token, y.float() * topk_weights[token, slot, None].float())
            output.copy_(total)

    for module in (modelopt, compressed):
        module.select_nvfp4_moe_backend = lambda *args, **kwargs: (NvFp4MoeBackend.EMULATION, DecodedExperts)


def run(folder: Path, lora_targets: str, experts: str = "") -> dict:
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    command = [sys.executable, __file__, str(folder), lora_targets, experts]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.strip().splitlines()[-1])
    print(folder.name, lora_targets, experts, result)
    return result


def check(result: dict) -> None:
    assert result["base"] <= 0.012
    assert result["adapter"] <= 0.02
    assert result["effect"] > 2 * result["adapter"], "the adapter is too small to show that vLLM applies it"


TINY = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
TINY |= {"vocab_size": 512, "num_hidden_layers": 2, "moe_intermediate_size": 128, "num_experts": 8}


@pytest.mark.parametrize(
    ("dialect", "a16", "targets", "experts"),
    [
        ("compressed-tensors", True, "q_proj,k_proj,v_proj,o_proj", ""),
        ("compressed-tensors", False, "o_proj", "experts"),
        ("modelopt", True, "o_proj", "experts"),
        ("modelopt", False, "q_proj,k_proj,v_proj,o_proj", ""),
    ],
)
def test_qwen3_moe(tmp_path, dialect, a16, targets, experts):
    """A tiny random Qwen3-MoE; the adapter on attention, or on the experts too (vLLM refuses one on experts alone)."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    # Small weights: with weights of unit gain, rounding to bf16 alone flips the router and moves log-probs by .02.
    source = tiny_checkpoint("Qwen3Moe", tmp_path / "source", std=0.02, **TINY)
    words = Tokenizer(WordLevel({str(i): i for i in range(TINY["vocab_size"])}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(source)  # vLLM wants one to decode with
    folder = quantized(source, tmp_path / f"{dialect}-{'a16' if a16 else 'a4'}", dialect=dialect, a16=a16)
    check(run(folder, targets, experts))


if __name__ == "__main__":
    print(json.dumps(compare(*sys.argv[1:])))
