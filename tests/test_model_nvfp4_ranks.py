"""Sharding: the same loss and gradients on 1, 2 and 4 gloo ranks, and each trap of FSDP2 with frozen bytes.

pytest tests/test_model_nvfp4_ranks.py
"""

import json
import multiprocessing
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from test_model_nvfp4_models import TOKENS, loss_and_logits, quantized, tiny_checkpoint
from torch import nn
from torch.distributed.tensor import DTensor

import model_nvfp4 as nvfp4
from adapter import load_lora_state_dict, lora_state_dict
from checkpoint import read_checkpoint

# The ranks of most tests are forks of one process that has imported this already, which is most of a rank's time. Of pytest's
# own they cannot be forks: once another test has called `backward` there, autograd refuses to work in its children.
multiprocessing.set_forkserver_preload(["torch.distributed.fsdp", "peft", "transformers", "model_nvfp4"])

ROWS = TOKENS.repeat(2, 1)[:4]  # 4 rows, so that 1, 2 and 4 ranks get equal shares


class Policy(nn.Module):
    """A root as the trainer's: the peft model is one level down."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        return loss_and_logits(self.model, tokens)[0]


def step(rank, world, folder, port, out, options):
    """One forward and backward on this rank's rows; rank 0 writes loss, gradients and what was asserted on the way."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    dtype = options.get("dtype", torch.float32)
    mesh = None
    if options.get("hsdp"):
        mesh = dist.init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("replicate", "shard"))
    model = nvfp4.build_model(
        folder, lora_rank=8, lora_alpha=16, dtype=dtype, lora_experts=options.get("experts", False)
    )
    root = Policy(model)
    nvfp4.shard(
        root,
        mesh=mesh,
        dtype=dtype,
        reshard_after_forward=options.get("reshard", True),
        activation_checkpointing=options.get("checkpointing", False),
    )
    nvfp4.load_weights(root, folder)
    root.train()
    # B away from zero, the same on every world size, through the trainer's own functions.
    adapter = lora_state_dict(root)
    generator = torch.Generator().manual_seed(1)
    adapter = {k: torch.randn(v.shape, generator=generator) * 0.05 if "lora_B" in k else v for k, v in adapter.items()}
    load_lora_state_dict(root, adapter)
    again = lora_state_dict(root)
    assert all(torch.equal(adapter[k], again[k]) for k in adapter), "the adapter does not survive its own round trip"

    shards = 2 if options.get("hsdp") else world
    for name, parameter in root.named_parameters():
        assert isinstance(parameter, DTensor), f"{name} is not sharded"
        full, local = parameter.shape[0], parameter.to_local().shape[0]
        assert local in (-(-full // shards), full // shards, 0) or full < shards, f"{name}: {local} of {full} rows"
        if parameter.dtype == torch.uint8:
            assert not parameter.requires_grad
        else:
            assert parameter.requires_grad == ("lora_" in name)
    loss = root(ROWS.chunk(world)[rank])
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    gradients = {n: p.grad.full_tensor() for n, p in root.named_parameters() if p.grad is not None}
    globals_exact = {n: b.tolist() for n, b in root.named_buffers() if n.endswith("_global")}
    if rank == 0:
        torch.save({"loss": total / world, "gradients": gradients, "adapter": adapter, "globals": globals_exact}, out)
    dist.barrier()  # without it one rank was seen to abort in destroy_process_group
    dist.destroy_process_group()


PORT = [29650 + os.getpid() % 300]


def run(world, folder, tmp_path, **options):
    PORT[0] += 1
    out = tmp_path / f"result_{PORT[0]}.pt"
    mp.start_processes(step, (world, folder, PORT[0], out, options), nprocs=world, start_method="forkserver")
    return torch.load(out)


def assert_same(a, b, tolerance=1e-5):
    assert abs(a["loss"] - b["loss"]) <= tolerance * abs(b["loss"])
    assert a["gradients"].keys() == b["gradients"].keys()
    for name, gradient in b["gradients"].items():
        scale = max(gradient.norm().item(), 1e-8)
        assert (a["gradients"][name] - gradient).norm() <= tolerance * scale, name


@pytest.fixture(scope="module")
def dense_folder(tmp_path_factory):
    work = tmp_path_factory.mktemp("llama")
    # 3 KV heads of 16: 48 rows of k_proj divide by 2 and 4; tied embeddings are the case of the demo model.
    return quantized(tiny_checkpoint("Llama", work / "source", tie_word_embeddings=True), work / "nvfp4")


@pytest.fixture(scope="module")
def moe_folder(tmp_path_factory):
    work = tmp_path_factory.mktemp("moe")
    return quantized(tiny_checkpoint("Qwen3Moe", work / "source", num_experts=3), work / "nvfp4")


@pytest.fixture(scope="module")
def single(dense_folder, tmp_path_factory):
    return run(1, dense_folder, tmp_path_factory.mktemp("one"))


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (2, {}),
        (2, {"checkpointing": True}),
        (2, {"reshard": False}),
        pytest.param(4, {}, marks=pytest.mark.slow),
        pytest.param(4, {"hsdp": True, "checkpointing": True}, marks=pytest.mark.slow),
    ],
)
def test_ranks_agree_with_one(single, dense_folder, tmp_path, world, options):
    """Loss and gradients to 1e-5 in fp32, and A the same on every world size."""
    result = run(world, dense_folder, tmp_path, **options)
    assert_same(result, single)
    assert all(torch.equal(result["adapter"][k], single["adapter"][k]) for k in single["adapter"])


def test_experts_shard_unevenly(moe_folder, tmp_path):
    """3 experts over 2 ranks, LoRA on them, activation checkpointing."""
    one = run(1, moe_folder, tmp_path, experts=True)
    two = run(2, moe_folder, tmp_path, experts=True, checkpointing=True)
    assert any("gate_up_proj_lora_A" in name for name in one["gradients"])
    assert_same(two, one)


def test_single_rank_equals_no_sharding(single, dense_folder):
    model = nvfp4.build_model(dense_folder, lora_rank=8, lora_alpha=16, dtype=torch.float32)
    nvfp4.load_weights(model, dense_folder)
    load_lora_state_dict(model, single["adapter"])
    loss, _ = loss_and_logits(model, ROWS)
    loss.backward()
    plain = {f"model.{n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert_same({"loss": loss.detach(), "gradients": plain}, single)


def test_bf16_compute_keeps_global_scales_exact_and_lora_fp32(dense_folder, single, tmp_path):
    """FSDP's mixed precision would round an fp32 parameter; the buffers hold the file's own numbers."""
    result = run(2, dense_folder, tmp_path, dtype=torch.bfloat16)
    assert result["globals"] == single["globals"]
    weights = read_checkpoint(dense_folder)
    for name, values in result["globals"].items():
        key = name.removeprefix("model.base_model.model.").replace(".base_layer.", ".").removesuffix("_global")
        assert values == [weights[key].read_global_scale()]
    assert all(g.dtype == torch.float32 for g in result["gradients"].values())
    assert abs(result["loss"] - single["loss"]) < 0.02 * single["loss"]


def get_model_state_dict_keys(rank, folder, port, out):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    root = Policy(nvfp4.build_model(folder, lora_rank=8, lora_alpha=16))
    nvfp4.shard(root)
    nvfp4.load_weights(root, folder)
    state = get_model_state_dict(root, options=StateDictOptions(full_state_dict=True, ignore_frozen_params=True))
    if rank == 0:
        Path(out).write_text(json.dumps(sorted(state)))
    dist.barrier()
    dist.destroy_process_group()


def test_state_dict_without_frozen_parameters_is_the_adapter_alone(dense_folder, tmp_path):
    """A persistent scale buffer would be among them. (The second name of tied embeddings is: a quirk of torch.)"""
    PORT[0] += 1
    args = dense_folder, PORT[0], tmp_path / "keys.json"
    mp.start_processes(get_model_state_dict_keys, args, nprocs=2, start_method="forkserver")
    keys = json.loads((tmp_path / "keys.json").read_text())
    assert len(keys) == 2 * 7 * 2 + 1, "layers · linears · (A, B), and the tied head"
    assert all("lora_" in key for key in keys if not key.endswith("lm_head.weight"))


def peak_of_loading(rank, world, folder, port, out):
    """Peak resident growth while loading, in bytes."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=world)
    root = Policy(nvfp4.build_model(folder, lora_rank=8, lora_alpha=16))
    nvfp4.shard(root)
    status = lambda key: int(next(x for x in open("/proc/self/status") if x.startswith(key)).split()[1]) * 1024  # noqa: E731, SIM115
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = status("VmRSS")
    nvfp4.load_weights(root, folder)
    grown = status("VmHWM") - before
    shard = sum(p.to_local().numel() * p.element_size() for p in root.parameters())
    if rank == 0:
        Path(out).write_text(json.dumps({"grown": grown, "shard": shard}))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_needs_the_shard_and_one_tensor(tmp_path):
    """Host memory while loading stays under the rank's shard + the largest tensor + 1 GiB (held to 50 MiB here)."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "vocab_size": 32000}
    folder = quantized(tiny_checkpoint("Llama", tmp_path / "source", **sizes), tmp_path / "nvfp4")
    PORT[0] += 1
    # Not a fork, whose first touch of each page of a library would count.
    mp.spawn(peak_of_loading, args=(2, folder, PORT[0], tmp_path / "peak.json"), nprocs=2)
    peak = json.loads((tmp_path / "peak.json").read_text())
    largest = 32000 * 1024 * 2
    assert peak["grown"] <= peak["shard"] + largest + 50 * 2**20, peak
    print(peak)
