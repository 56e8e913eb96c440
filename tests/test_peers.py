"""Public bug reports of programs like this one, and what keeps each out. `pytest tests/test_peers.py`.

A row: number, report, what went wrong, then the tests that would see it here, or the reason why it cannot happen. The last
test below checks that every test named here exists.

 1. TRL 5312: every rollout came from the base, the sync was undone by a reload. Nothing here reloads; a probe at the start and
    a gate at every step: test_the_probe_finds_an_adapter_that_the_engine_ignores, test_the_gate_names_what_to_check
 2. unsloth 8701: rollouts from the base, all losses finite. As 1, and another adapter gives other samples:
    test_the_probe_finds_an_adapter_that_the_engine_ignores
 3. unsloth-zoo 1250, vLLM 41754: an adapter loaded and ignored. The probe asks for each kind of module:
    test_the_probe_finds_an_adapter_that_the_engine_ignores, test_vllm_and_the_trainer_agree
 4. unsloth-zoo 942: gate in the slot of up; scaled again at each sync. Slices apart, and eight syncs are one:
    test_lora_on_a_cpu_is_x_a_b, test_the_probe_finds_an_adapter_that_the_engine_ignores
 5. unsloth-zoo 919, verl 7453: names of stacked projections. We send PEFT's names and stock peft and vLLM read them:
    test_architecture, test_the_adapter_works_in_plain_peft_over_the_dequantized_model, test_the_adapter_works_in_a_fresh_engine
 6. verl 7434: an adapter pushed into a sleeping engine: test_the_gpu_changes_hands_in_the_order_that_works
 7. verl 6454: the engine kept views of a reused buffer. It reads a folder; that folder is overwritten in
    test_the_probe_finds_an_adapter_that_the_engine_ignores
 8. verl 7014: generated after the adapter was unmerged. Never merged; the gate runs at every step:
    test_the_gate_names_what_to_check
 9. ms-swift 8233: after a resume the adapter counted twice: test_without_learning_the_gap_stays_flat,
    test_kill_9_at_any_instant_then_the_same_command (|Δlogp| of each step equals the undisturbed run's)
10. verl 3461, ms-swift 7017: "!!!!" after sleep level 2. No flag asks for it: test_sleep_level_2_cannot_be_asked_for
11. vLLM 57163, 28606: level 2 zeroes scales. As 10: test_the_gpu_changes_hands_in_the_order_that_works
12. vLLM 34600, slime 578, verl 6699: memory that grows. No graph outlives its micro-batch: test_no_statistic_holds_a_graph;
    cycles of sleep need a GPU and are not tested here
13. NeMo-RL 1159, TRL 4296: the first evaluation is larger than training and runs out. The engine is sized for the longest
    prompt of both, evaluation uses the same engine and limit, and it runs before the first step: test_the_users_command
14. NeMo-RL 714, 3392, 3297, slime 557: temperature on one side only, log-prob of another token:
    test_token_logprobs_is_log_softmax_with_its_gradient and, at three temperatures against the engine,
    test_the_probe_finds_an_adapter_that_the_engine_ignores
15. prime-rl 1650: the prefix cache of the old weights: test_the_gpu_changes_hands_in_the_order_that_works
16. open-instruct 1473: |Δlogp| grows at a learning rate of zero: test_without_learning_the_gap_stays_flat
17. TRL 6166, NeMo-RL: NaN, None or −inf for a log-prob. None cannot come (no server in between);
    test_a_log_prob_that_is_no_number_counts_as_on_policy, test_a_missing_log_prob_weighs_nothing
18. accelerate 3983, axolotl 2992: packed bytes under FSDP2: test_ranks_agree_with_one, test_two_ranks_have_the_gradient_of_one
19. transformers 45050: NaN weights beside rank 0. Each rank reads its own rows from disk: test_ranks_agree_with_one
20. TRL 7103, SkyRL 1297: a gather between rank-0-only work hangs. Adapter and moments are gathered before rank 0 writes:
    test_two_ranks_train_and_one_goes_on; what still hangs ends after --timeout
21. TRL 4041, ms-swift 8102: ranks with unequal or empty batches: test_every_rank_gets_equally_many_rows_within_the_budget,
    test_two_ranks_have_the_gradient_of_one, test_a_batch_in_which_all_is_masked_has_no_loss_no_gradient_and_no_step.
    The same hang from graders that disagree: each sample has one grader, test_a_reward_function_that_gives_no_number_is_named
22. TRL 6439, OpenRLHF 1219, SkyRL 1296: a mean per rank, a reward of 0.0 taken for missing, a group of one:
    test_any_split_gives_the_gradient_of_one_padded_batch, test_one_denominator_whatever_the_split,
    test_a_reward_function_that_gives_no_number_is_named, test_a_group_of_one_is_refused
23. MemGen 33, TRL 7039: end-of-sequence masked as padding; several of them. There is no padding, and the engine says what ended:
    test_pack_writes_the_prompt_once_and_trains_every_completion_token, test_the_token_that_ends_a_completion_is_trained
24. CoursIA 11304: a string prompt goes past the chat template: test_prompts_are_the_chat_template_once
25. TRL 3651, verl 7038: text encoded again, prompts cut. Only ids of the engine are trained, a long prompt is refused:
    test_pack_writes_the_prompt_once_and_trains_every_completion_token, test_bad_input_ends_in_one_sentence
26. Math-Verify 44: two boxes joined: test_extract_answer
27. Math-Verify 76, 60, 37, 47: extraction: test_extract_answer, test_equal, test_unequal
28. tinker-cookbook 335: an unreadable reference pays: test_reasons,
    test_unreadable_references_and_a_missing_reward_function_are_told_before_training
29. NeMo-RL 465: the grader hangs: test_a_proof_that_takes_for_ever_is_cut_off_in_any_thread
30. accelerate 4071, ms-swift 9935, prime-rl 1035: a resume repeats data: test_kill_9_at_any_instant_then_the_same_command,
    test_refills_are_drawn_from_seed_step_and_round_alone
31. ms-swift 7858: all ranks sample the same: test_two_ranks_train_and_one_goes_on, test_sample_seeds
32. NeMo-RL 3504, prime-rl 1520: shared disk in the sync. The adapter goes to the engine in memory: test_one_engine
33. vLLM 54974, TRT-LLM 14199: one global scale for fused layers: test_check_checkpoint_names_the_fault,
    test_unequal_global_scales_are_rewritten_where_that_is_exact
34. QeRL 14, 21: published figures without the recipe. Flags, versions and commit are in config.json: test_the_users_command
35. SkyRL 1776: KL explodes on a mixture of experts: test_vllm_and_the_trainer_agree, test_expert_lora_equals_merged_weights,
    test_routers_replay_what_they_are_told
"""

import re
from pathlib import Path

import pytest
import torch

import train_grpo
from metrics import gap_stats
from policy import TokenLogprobs
from problems import encode_prompts
from rollout import Sample
from tree import make_segments, pack

MODEL = Path(__file__).parents[1] / "models" / "SmolLM2-135M-Instruct-NVFP4"


def test_sleep_level_2_cannot_be_asked_for(capsys):
    for words in ("--sleep level2", "--sleep 2"):
        with pytest.raises(SystemExit):
            train_grpo.parse_args(["--model", "m", *words.split()])
        assert "invalid choice" in capsys.readouterr().err


def test_no_statistic_holds_a_graph():
    """verl 6699: what is kept of each micro-batch kept its whole graph, 24.8 GiB became 64."""
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True) * 1.0
    old, which = torch.tensor([-1.1, -1.9]), torch.tensor([0, 0])
    settings = {"reference_logprobs": old, "kl_coef": 0.1, "dual_clip": 3.0}
    for loss in train_grpo.LOSSES:
        _, stats = train_grpo.policy_loss(logprobs, old, torch.ones(2), which, 2, loss=loss, **settings)
        stats |= gap_stats(logprobs, old)
        assert not any(value.requires_grad for value in stats.values())
    hidden = torch.randn(2, 4, requires_grad=True)
    _, entropy = TokenLogprobs.apply(hidden, torch.randn(9, 4), None, which, 1.0, 1.0, None)
    assert not entropy.requires_grad


@pytest.mark.skipif(not MODEL.is_dir(), reason=f"{MODEL} is missing; `bash launch.sh test` makes it")
def test_prompts_are_the_chat_template_once():
    """The embedded model's format written out by hand; its <|im_start|> is the beginning-of-sequence token too, so a second
    one in front would be that of an encoder that adds it again."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    (ids,) = encode_prompts(tokenizer, [[{"role": "user", "content": "What is 1 + 1?"}]])
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is 1 + 1?<|im_end|>\n<|im_start|>assistant\n"
    )
    # Tokens that text of other encodings would give are not looked up again: what the engine sampled is what is trained.
    odd = [ids[-1], 7, 7]
    batch = pack(make_segments([Sample(ids, odd, [0.0] * 3, "", "stop", 0)] * 2, torch.eye(1, 2), 999))
    assert batch.targets[batch.picks].tolist() == odd * 2


def test_every_row_names_tests_that_exist():
    rows = re.findall(r"^ ?(\d+)\. (.*(?:\n    .*)*)", __doc__, re.M)
    assert [int(number) for number, _ in rows] == list(range(1, 36))
    text = "\n".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    exist = set(re.findall(r"^def (test_\w+)\(", text, re.M))
    for number, row in rows:
        named = set(re.findall(r"\btest_\w+", row))
        assert named <= exist, f"row {number} names {sorted(named - exist)}"
    assert not [number for number, row in rows if "test_" not in row]
