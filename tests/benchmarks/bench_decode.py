"""How fast packed weights decode, against the definition; on a GPU also against the copy bandwidth of the device.

    python tests/benchmarks/bench_decode.py            # two cores: about one minute

CPU: the demand is at least 2 times the naive decode (`decode_reference`). `byte table` is the alternative that was
tried: 256 entries of two fp32 codes, then the scale.
GPU: the demand is at least 80 % of the bandwidth of a device copy that moves as many bytes.
"""

import argparse
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
import model_nvfp4 as nvfp4
from checkpoint import BLOCK

SHAPES = [(576, 576), (1536, 576), (576, 1536), (4096, 4096), (14336, 4096)]  # SmolLM2-135M, then Llama 8B


def decode_byte_table(packed, scale, global_scale, dtype=torch.bfloat16):
    byte = torch.arange(256)
    pairs = nvfp4.E2M1[torch.stack((byte & 15, byte >> 4), dim=-1)]  # (256, 2)
    values = torch.nn.functional.embedding(packed.int(), pairs).flatten(-2)  # (N, K)
    scales = (scale.view(torch.float8_e4m3fn).float() * global_scale).unsqueeze(-1)  # (N, K/16, 1)
    return values.unflatten(-1, (-1, BLOCK)).mul_(scales).flatten(-2).to(dtype)


def seconds(run, repeats=10, cuda=False) -> float:
    """Fastest of `repeats` after one to warm up."""
    run()
    times = []
    for _ in range(repeats):
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)


def random_packed(n, k, device="cpu"):
    packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device)
    scale = torch.randint(1, 126, (n, k // 16), dtype=torch.uint8, device=device)
    return packed, scale, torch.full((1,), 1 / 20608, device=device)


def main() -> None:
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; milliseconds, and speed over naive")
    for n, k in SHAPES:
        parts = random_packed(n, k)
        naive = seconds(lambda parts=parts: nvfp4.decode_reference(*parts))
        line = f"{n:6d} × {k:5d}   naive {naive * 1e3:8.2f}"
        for name, decode in (("byte table", decode_byte_table), ("pair table (used)", nvfp4.decode_table)):
            assert torch.equal(decode(*parts), nvfp4.decode_reference(*parts)), name
            took = seconds(lambda parts=parts, decode=decode: decode(*parts))
            line += f"   {name} {took * 1e3:8.2f} ({naive / took:.1f}×)"
        print(line, flush=True)
    if not torch.cuda.is_available():
        print("no GPU here: bandwidth of the Triton kernel not measured")
        return
    print(torch.cuda.get_device_name())
    for n, k in [*SHAPES[3:], (128 * 1024, 6144)]:
        parts = random_packed(n, k, "cuda")
        assert torch.equal(nvfp4.decode(*parts), nvfp4.decode_reference(*parts)), "not bit-equal to the reference"
        moved = n * k * (0.5 + 1 / 16 + 2)  # codes and scales read, bf16 written
        source = torch.empty(int(moved / 2), dtype=torch.uint8, device="cuda")
        copied = torch.empty_like(source)
        copy = moved / seconds(lambda source=source, copied=copied: copied.copy_(source), 50, cuda=True)
        took = moved / seconds(lambda parts=parts: nvfp4.decode(*parts), 50, cuda=True)
        print(f"{n:6d} × {k:5d}   decode {took / 1e9:7.0f} GB/s   copy {copy / 1e9:7.0f} GB/s   {took / copy:.0%}")


if __name__ == "__main__":
    main()
