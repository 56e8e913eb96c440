"""Make an NVFP4 checkpoint from a dense one, or show what a checkpoint holds.

    python quantize.py SRC DST --a16        # SRC: a Hugging Face folder, a Hub name or a .gguf file
    python quantize.py --inspect DIR        # layers, formats, sizes, scale checks, and what LoRA would train

The text decoder's linears and routed experts are packed; embeddings, norms, routers and the head stay as they are. Matrices
that vLLM multiplies as one share their global scale. The folder appears under its name only when it is complete.

Left out:
1. No calibration: block scales come from the weights alone, the activation scale of W4A4 is a constant.
2. Experts that a dense checkpoint stores as one tensor stay as they are.
"""

from __future__ import annotations

import argparse
import atexit
import hashlib
import json
import math
import os
import re
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

from checkpoint import BLOCK, Weight, check_checkpoint, fused_families, is_ignored, read_checkpoint, read_headers
from errors import UserError, end_in_a_sentence, read_json, require
from model_nvfp4 import Rows, account, decoder_linears, empty_model, expert_parameters, place_weights, read_config

# 2688 / 672: where activations are 4 bit, a block scale is exact (not subnormal) for block maxima from .02 up to 672.
INPUT_GLOBAL_SCALE = 4.0


# ---------------------------------------------------------------------------------------------------------------------
# One matrix


def encode(weight, amax, recipe="max"):
    """weight (N, K), amax = largest magnitude of its fused family -> packed (N, K/2) u8, scale (N, K/16) u8, fp32 (1,).

    `max` maps the largest weight of a block to 6; `four-over-six` to 6 or 4, whichever has the smaller squared error
    (its smaller global range leaves room for the larger block scale); `mse` searches the block scale on a grid.
    """
    top = 256 if recipe == "four-over-six" else 448
    factors = {"max": [1], "four-over-six": [1, 1.5], "mse": [i / 20 for i in range(14, 31)]}[recipe]
    global_scale = (amax.float() / (6 * top)).reshape(1).clamp(min=torch.finfo(torch.float32).tiny)  # (1,)
    # Rows in pieces that stay in the cache: the search passes over them fifteen times a factor.
    pieces = [encode_rows(rows, global_scale, factors) for rows in weight.split(max(1, 2**17 // weight.shape[1]))]
    packed, scale = (torch.cat(parts) for parts in zip(*pieces))  # (N, K/2), (N, K/16)
    return packed, scale, global_scale


def encode_rows(weight, global_scale, factors):
    """(N, K) -> packed (N, K/2) u8, scale (N, K/16) u8: of the block scales 6·factor the one with the least squared error."""
    blocks = weight.float().unflatten(-1, (-1, BLOCK))  # (N, K/16, 16)
    size, least, best = blocks.abs(), None, None  # (N, K/16, 16)
    largest = size.amax(-1)  # (N, K/16)
    for factor in factors:
        scale = (largest * factor / (6 * global_scale)).clamp(max=448).to(torch.float8_e4m3fn)
        # All-zero block: any scale does, compressed-tensors writes 1/8.
        scale = torch.where(scale.float() == 0, 0.125, scale.float())  # (N, K/16)
        scaled = size / (scale * global_scale).unsqueeze(-1)  # (N, K/16, 16)
        # The grid's step is .5 to 2, 1 to 4, 2 to 6; torch rounds ties to even, and here that is the even code.
        step = 0.5 + 0.5 * (scaled >= 2) + (scaled >= 4)  # (N, K/16, 16)
        nearest = (scaled / step).round_().mul_(step).clamp_(max=6)  # (N, K/16, 16)
        error = nearest.sub_(scaled).mul_(scale.unsqueeze(-1)).square_().sum(-1)  # (N, K/16)
        if least is None:
            least, best = error, scale
        best, least = torch.where(error < least, scale, best), torch.minimum(least, error)  # (N, K/16) each
    scaled = size.div_((best * global_scale).unsqueeze(-1))  # (N, K/16, 16)
    # Round to nearest, ties to the even code: a tie goes down at .25, 1.25, 2.5 and 5, up at .75, 1.75 and 3.5.
    codes = sum((scaled > tie).byte() for tie in (0.25, 1.25, 2.5, 5.0))  # (N, K/16, 16)
    codes = codes + sum((scaled >= tie).byte() for tie in (0.75, 1.75, 3.5))  # (N, K/16, 16)
    codes = codes + (blocks.signbit().byte() << 3)  # (N, K/16, 16)
    codes = codes.flatten(-2)  # (N, K)
    return codes[:, 0::2] | (codes[:, 1::2] << 4), best.to(torch.float8_e4m3fn).view(torch.uint8)


# ---------------------------------------------------------------------------------------------------------------------
# A checkpoint


def family(weight: Weight) -> tuple:
    """Siblings that read the same input share a global scale, so that whatever vLLM fuses does."""
    return weight.name.rpartition(".")[0].rpartition(".")[0], weight.shape[-1]


def choose_weights(model, placed: dict[str, Rows], ignore: list[str]) -> set[str]:
    """Names of the weights to pack: the text decoder's linears and routed experts that are stored one by one."""
    targets = {f"{name}.weight" for name in decoder_linears(model)} | expert_parameters(model).keys()
    chosen = set()
    for target in targets & placed.keys():
        for weight in placed[target].weights if placed[target].ids is not None else ():
            if len(weight.shape) != 2 or is_ignored(weight.name.removesuffix(".weight"), ignore):
                continue
            if weight.shape[1] % BLOCK:
                print(f"{weight.name} stays dense: K = {weight.shape[1]} is no multiple of {BLOCK}", file=sys.stderr)
                continue
            chosen.add(weight.name)
    return chosen


def quantize(source: Path, target: Path, *, a16: bool, ignore: list[str], recipe: str, dialect: str) -> None:
    """Fills the folder `target` with the NVFP4 form of the dense checkpoint `source`, file by file."""
    from safetensors.torch import save_file
    from tqdm import tqdm

    weights = read_checkpoint(source)
    sound = all(w.format == "plain" for w in weights.values())
    require(sound, f"{source} holds FP8 weights; give a dense checkpoint")
    model = empty_model(read_config(source))
    placed, unused = place_weights(model, weights)
    account(model, placed, unused, source)
    chosen = choose_weights(model, placed, ignore)
    amax: dict[tuple, torch.Tensor] = {}
    for name in tqdm(sorted(chosen), desc="global scales", unit="tensor", mininterval=1):
        largest = weights[name].data.read().abs().amax()
        require(largest.isfinite(), f"{weights[name].data} holds NaN or infinity")
        amax[family(weights[name])] = torch.maximum(amax.get(family(weights[name]), largest), largest)
    ct, weight_map = dialect == "compressed-tensors", {}
    with tqdm(total=len(weights), desc="quantize", unit="tensor", mininterval=1) as progress:
        for file in sorted({w.data.file for w in weights.values()}):
            out = {}
            for name, weight in weights.items():
                if weight.data.file != file:
                    continue
                progress.update()
                base, data = name.removesuffix(".weight"), weight.data.read()
                if name not in chosen:
                    out[name] = data
                    continue
                packed, scale, factor = encode(data, amax[family(weight)], recipe)
                out[f"{base}.weight_packed" if ct else name] = packed
                out[f"{base}.weight_scale"] = scale.view(torch.float8_e4m3fn)
                out[f"{base}.weight_{'global_scale' if ct else 'scale_2'}"] = 1 / factor if ct else factor[0]
                if not a16:
                    value = INPUT_GLOBAL_SCALE if ct else 1 / INPUT_GLOBAL_SCALE
                    out[f"{base}.input_{'global_scale' if ct else 'scale'}"] = torch.full((1,) if ct else (), value)
            save_file({k: v.contiguous() for k, v in out.items()}, target / file.name, {"format": "pt"})
            (target / file.name).chmod(0o644)
            weight_map |= dict.fromkeys(out, file.name)
    if len(set(weight_map.values())) > 1:
        index = {"metadata": {}, "weight_map": dict(sorted(weight_map.items()))}
        (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    dense = sorted(n.removesuffix(".weight") for n, w in weights.items() if n not in chosen and len(w.shape) == 2)
    write_configs(source, target, ignore=[n for n in dense if "embed" not in n], a16=a16, dialect=dialect)


def share_global_scales(source: Path, target: Path) -> None:
    """Copies an NVFP4 checkpoint with one global scale for each family that vLLM fuses: the largest, the difference moved
    into the block scales. Only where that is exact (ratios that are powers of two, mostly), else UserError."""
    from safetensors.torch import save_file

    packed = [w for w in read_checkpoint(source).values() if w.format == "nvfp4"]
    by_module = {w.name.removesuffix(".weight"): w for w in packed}
    changed = {}
    for members in fused_families(by_module):
        values = {name: by_module[name].read_global_scale() for name in members}
        for name in members:
            weight, common = by_module[name], max(values.values())
            wanted = weight.scale.read().float() * (values[name] / common)  # (N, K/16)
            scale = wanted.to(torch.float8_e4m3fn)
            sentence = f"{source}: {', '.join(members)} have global scales that cannot be made equal without loss"
            require(torch.equal(scale.float(), wanted), f"{sentence}; quantize the dense model instead")
            top = next(by_module[m].global_scale for m in members if values[m] == common)
            changed |= {weight.scale.key: scale, weight.global_scale.key: top.read()}
    stored = read_headers(source)
    for file in sorted({tensor.file for tensor in stored.values()}):
        out = {key: changed.get(key, t.read()) for key, t in stored.items() if t.file == file}
        save_file(out, target / file.name, {"format": "pt"})
    for name in ("config.json", "hf_quant_config.json", "model.safetensors.index.json"):
        if (source / name).is_file():
            shutil.copy(source / name, target)


def write_configs(source: Path, target: Path, *, ignore: list[str], a16: bool, dialect: str) -> None:
    ignore = sorted({"lm_head", *ignore})
    weights = {"num_bits": 4, "type": "float", "group_size": BLOCK, "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None if a16 else weights}
    quant = {"quant_method": dialect, "config_groups": {"group_0": group}, "ignore": ignore}
    if dialect == "modelopt":
        quant["quant_algo"] = "W4A16_NVFP4" if a16 else "NVFP4"
        old = {"quant_algo": quant["quant_algo"], "kv_cache_quant_algo": None, "group_size": BLOCK}
        old = {"producer": {"name": "modelopt"}, "quantization": old | {"exclude_modules": ignore}}
        (target / "hf_quant_config.json").write_text(json.dumps(old, indent=2) + "\n")
    else:
        weights |= {"strategy": "tensor_group", "symmetric": True}
        weights |= {"scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"}
        group["format"] = quant["format"] = "nvfp4-pack-quantized"
        quant["quantization_status"] = "compressed"
        if not a16:
            group["input_activations"] = weights | {"dynamic": "local"}
    config = read_json(source, "config.json") | {"quantization_config": quant}
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def gguf_to_folder(gguf: Path, folder: Path) -> None:
    """A dense Hugging Face folder from a GGUF file, all of it in memory at once (transformers has no other way)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    require(find_spec("gguf"), f"{gguf} needs the package gguf to be read: pip install gguf")
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    quant = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16, quantization_config=quant)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


# ---------------------------------------------------------------------------------------------------------------------
# inspect


def inspect(folder: Path) -> dict:
    """What the checkpoint holds, per kind of module (layer and expert numbers as *), and what LoRA would train."""
    report = check_checkpoint(folder)
    weights = read_checkpoint(folder)
    model = empty_model(read_config(folder))
    placed, unused = place_weights(model, weights)
    account(model, placed, unused, folder)
    linears = {f"{name}.weight" for name in decoder_linears(model) if not name.endswith("kv_b_proj")}
    experts = expert_parameters(model)
    trains = {w.name: "yes" for t, rows in placed.items() if t in linears for w in rows.weights}
    trains |= {w.name: "--lora-experts" for t, rows in placed.items() if t in experts for w in rows.weights}
    kinds: dict[tuple, list[Weight]] = {}
    for weight in weights.values():
        kind = re.sub(r"\.\d+(?=\.|$)", ".*", weight.name), weight.format, weight.shape
        kinds.setdefault(kind, []).append(weight)
    report["modules"] = []
    for (name, form, shape), members in kinds.items():
        size, count = sum(w.bytes for w in members), len(members) * math.prod(shape)
        row = {"name": name, "count": len(members), "format": form, "shape": list(shape), "bytes": size}
        row |= {"bits": 8 * size / max(count, 1), "lora": trains.get(members[0].name, ""), "scales": ""}
        if form == "nvfp4":
            for weight in members:
                weight.read_scale(torch.arange(weight.data.rows))  # raises on NaN
            values = [weight.read_global_scale() for weight in members]
            row["scales"] = f"ok, global {min(values):.2g} to {max(values):.2g}"
        report["modules"].append(row)
    report["bits_per_weight"] = 8 * report["weight_bytes"] / report["parameters"]
    return report


def print_report(report: dict) -> None:
    rows = [["module", "count", "format", "shape", "bits", "MB", "LoRA", "block scales"]]
    for m in report["modules"]:
        shape = " × ".join(map(str, m["shape"]))
        rows.append([m["name"], str(m["count"]), m["format"], shape, f"{m['bits']:.2f}", f"{m['bytes'] / 1e6:.2f}",
                     m["lora"], m["scales"]])  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    print(
        f"\n{report['architecture']}, {report['dialect']}, activations {report['activations']}: "
        f"{report['parameters'] / 1e6:,.1f} M parameters in {report['weight_bytes'] / 1e6:,.1f} MB, "
        f"{report['bits_per_weight']:.2f} bits a weight"
    )


# ---------------------------------------------------------------------------------------------------------------------
# The command


def quantize_command(args) -> None:
    source, target = Path(args.source), Path(args.target)
    if target.exists():
        check_checkpoint(target)
        print(f"{target} is complete already")
        return
    if args.sha256:
        digest = hashlib.sha256(source.read_bytes()).hexdigest() if source.is_file() else "no file"
        sentence = f"{source} has sha256 {digest}, not {args.sha256}: damaged, or not the file you mean"
        require(digest == args.sha256, sentence)
    if not source.exists():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

        try:
            source = Path(snapshot_download(args.source, ignore_patterns=["*.bin", "*.pth", "original/*"]))
        except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
            raise UserError(f"{args.source} is neither a path here nor a model the Hub gives: {error}") from error
    unfinished = target.with_name(f"{target.name}.{os.getpid()}.tmp")  # renamed at the end: complete or absent
    unfinished.mkdir(parents=True)
    atexit.register(shutil.rmtree, unfinished, ignore_errors=True)  # after a failure; else it has its name by then
    dense = source
    if source.suffix == ".gguf":
        dense = unfinished / "dense"
        gguf_to_folder(source, dense)
    if any(weight.format == "nvfp4" for weight in read_checkpoint(dense).values()):
        share_global_scales(dense, unfinished)
    else:
        quantize(dense, unfinished, a16=args.a16, ignore=args.ignore, recipe=args.recipe, dialect=args.dialect)
    for file in dense.iterdir():
        written = file.name in ("config.json", "hf_quant_config.json") or file.name.endswith(".index.json")
        if file.is_file() and not written and file.suffix not in (".safetensors", ".bin", ".pth", ".gguf"):
            shutil.copy(file, unfinished)
    if dense != source:
        shutil.rmtree(dense)
    unfinished.rename(target)
    print(f"{target}: {sum(f.stat().st_size for f in target.iterdir()) / 1e6:.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("source", help="Hugging Face folder, Hub name or .gguf file; with --inspect the folder to show")
    add("target", nargs="?", help="folder to write; left alone when it is complete already")
    add("--a16", action="store_true", help="weight-only: activations stay bf16 in every engine")
    add("--ignore", action="append", default=[], help="module to leave dense: name, wildcard or re:…; repeatable")
    add("--recipe", choices=["max", "mse", "four-over-six"], default="mse",
        help="block scales: mse searches the best (slow), max and four-over-six are quicker and train worse")  # fmt: skip
    add(
        "--dialect", choices=["compressed-tensors", "modelopt"], default="compressed-tensors", help="names in the files"
    )
    add("--sha256", help="checksum that the source file must have")
    add("--inspect", action="store_true", help="show layers, formats, sizes, scale checks and what LoRA would train")
    add("--json", action="store_true", help="with --inspect: for programs")
    args = parser.parse_args()
    if args.inspect:
        report = inspect(Path(args.source))
        print(json.dumps(report, indent=2)) if args.json else print_report(report)
    elif args.target is None:
        parser.error("give a target folder (python quantize.py SRC DST), or --inspect")
    else:
        quantize_command(args)


if __name__ == "__main__":
    end_in_a_sentence(main)
