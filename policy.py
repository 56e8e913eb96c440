"""The trained model as one function: a micro-batch in, the log-prob and entropy of each trained token out.

    policy = Policy(build_model(folder, …, attn_implementation="grouped"))
    shard(policy); load_weights(policy, folder)                     # model_nvfp4.py
    logprobs, entropy = token_logprobs(policy, batch, temperature)  # (S,), (S,)

`Policy` is the FSDP root, so that calling it gathers weights and reduces gradients. The (T, V) logits never exist: the head
multiplies a chunk of tokens at a time. No model has code of its own here: what differs is asked of the model (`head_scale`,
`has_state`).

Axis legend: R rows of T tokens · S trained tokens · U of them that differ · V vocabulary · H hidden · k experts of a token.
"""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from errors import UserError
from model_nvfp4 import dense_weight, fp32_linear, other_layers
from tree import Batch


class Policy(nn.Module):
    """The FSDP root: what gets called is the root, so that gathers and gradient reductions really happen."""

    def __init__(self, model: nn.Module, replay_experts: bool = False) -> None:
        super().__init__()
        self.model = model
        self.replays = replay_routers(model.get_base_model()) if replay_experts else {}
        self.sample_a_row = has_state(model.get_base_model())
        self.scale: tuple[float, float | None] | None = None  # of the logits, known after the first forward

    def forward(
        self,
        input_ids: torch.Tensor,  # (R, T)
        position_ids: torch.Tensor,  # (R, T)
        layout: torch.Tensor,  # (1, 1, 2, R·T)
        sources: torch.Tensor,  # (U,)
        targets: torch.Tensor,  # (U,)
        temperature: float,
        experts: torch.Tensor | None,  # (layers, R·T, k)
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs of the targets at `temperature`, and the entropy of the distributions they came from; both (U,)."""
        for layer, replay in self.replays.items():  # stays for the backward too, which may compute the block again
            replay.choice = None if experts is None else experts[layer].long()  # (R·T, k)
        base = self.model.get_base_model()
        mask = layout.view_as(layout)  # its own tensor: what attention notes on it goes with this forward's graph
        inputs = {"input_ids": input_ids, "position_ids": position_ids, "use_cache": False}
        output = base.base_model(attention_mask=mask, **inputs)
        if self.scale is None:
            self.scale = head_scale(base, output, **inputs)
        head = base.get_output_embeddings()
        weight = dense_weight(head, output.last_hidden_state.dtype)  # (V, H)
        picked = output.last_hidden_state.flatten(0, 1)[sources]  # (U, H)
        return TokenLogprobs.apply(picked, weight, head.bias, targets, temperature, *self.scale)


def token_logprobs(policy: nn.Module, batch: Batch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(S,) log-probs by the trainer and (S,) entropies. Collective: every rank must call it equally often."""
    inputs = batch.input_ids, batch.position_ids, batch.layout, batch.sources, batch.targets
    logprobs, entropy = policy(*inputs, temperature, batch.experts)  # (U,), (U,)
    return logprobs[batch.picks], entropy[batch.picks]


# ---------------------------------------------------------------------------------------------------------------------
# Log-probs without (T, V)


class TokenLogprobs(torch.autograd.Function):
    """log p(target) and entropy of U tokens from hidden states, a chunk of tokens at a time: (U, V) never exists.

    The head is frozen, so all that backward needs is ∂logp/∂hidden, a (U, H) tensor that forward can make while it has the
    chunk's probabilities in hand: (onehot − p) W. Nothing is recomputed and memory does not grow with V·U.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,  # (U, H)
        weight: torch.Tensor,  # (V, H)
        bias: torch.Tensor | None,  # (V,)
        targets: torch.Tensor,  # (U,)
        temperature: float,
        multiplier: float,
        softcap: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # fp32 logits of a chunk: 128 MB on a GPU, to keep its matmul busy; 8 MB on a CPU, to stay in the cache.
        chunk = max(16, (2**25 if hidden.is_cuda else 2**21) // weight.shape[0])
        head = fp32_linear(weight, bias)
        logprobs = hidden.new_empty(len(targets), dtype=torch.float32)  # (U,)
        entropy = hidden.new_empty(len(targets), dtype=torch.float32)  # (U,)
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None  # (U, H)
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            logits = head(hidden[part])  # (chunk, V)
            slope: Any = multiplier / temperature
            if softcap is None:
                if slope != 1:  # each pass over (chunk, V) counts
                    logits *= slope
            else:
                logits = torch.tanh(logits * (multiplier / softcap))  # (chunk, V)
                slope = slope * (1 - logits**2)  # (chunk, V)
                logits *= softcap / temperature
            target = targets[part, None]  # (chunk, 1)
            probabilities = logits.softmax(-1)  # (chunk, V)
            logz = logits.amax(-1) - probabilities.amax(-1).log()  # (chunk,); on a CPU far cheaper than V exponentials
            logprobs[part] = logits.gather(1, target)[:, 0] - logz
            entropy[part] = logz - torch.linalg.vecdot(probabilities, logits)
            if gradient is not None:
                probabilities.scatter_add_(1, target, -torch.ones_like(logz)[:, None])  # (chunk, V)
                if softcap is not None:
                    probabilities, slope = probabilities * slope, 1  # (chunk, V)
                gradient[part] = (probabilities.to(weight.dtype) @ weight) * -slope  # (chunk, H)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return (grad_logprobs[:, None] * gradient.float()).to(gradient.dtype), None, None, None, None, None, None


@torch.no_grad()
def head_scale(base: nn.Module, output: Any, **inputs: Any) -> tuple[float, float | None]:
    """(multiplier, soft cap) between the head's product with the hidden states and the logits, by the model's own `forward`.

    Configs have many names for them, and what divides in one class multiplies in the next. So the class is asked: its decoder
    returns hidden states that we know (in `output`, what it has just said), its head known numbers from 2⁻¹⁰ to 2²⁰, and its
    `forward` does to `inputs` what it does. Powers of two, because no cast to another type rounds them.
    Raises UserError when the logits are not cap · tanh(multiplier · product / cap).
    """
    head, device = base.get_output_embeddings(), output.last_hidden_state.device
    width = output.last_hidden_state.shape[-1]
    hidden = 2.0 ** (torch.arange(width, device=device) % 5).double()  # (H,)
    hidden = torch.stack([hidden, 4 * hidden])[None]  # (1, 2, H): a norm would make them alike
    product = 2.0 ** torch.arange(-10, 21, device=device).double()  # (31,)
    known, entered = dataclasses.replace(output, last_hidden_state=hidden), []

    def known_product(x: torch.Tensor) -> torch.Tensor:
        entered.append(x.double() / hidden if x.shape == hidden.shape else math.nan * hidden)  # (1, 2, H)
        return product.expand(*hidden.shape[:2], -1)  # (1, 2, 31)

    with ExitStack() as patched:
        for decoder in (base.base_model, base.get_decoder()):  # one in most classes; OPT calls the inner one
            patched.enter_context(patch.object(decoder, "forward", lambda *_, **__: known))
        patched.enter_context(patch.object(head, "forward", known_product))
        logits = base(**inputs).logits[0, 0].double()  # (31,)
    before, first, last = entered[0][0, 0, 0].item(), logits[0].item(), logits[-1].item()
    softcap = None if math.isclose(last, first * 2**30, rel_tol=1e-6) else last
    multiplier = 2**10 * (first if softcap is None else softcap * math.atanh(first / softcap))
    expected = multiplier * product  # (31,)
    if softcap is not None:
        expected = softcap * torch.tanh(expected / softcap)  # (31,)
    as_expected = (entered[0] / before - 1).abs().max() < 1e-6 and (logits / expected - 1).abs().max() < 1e-6
    if not as_expected or len(entered) > 1 or (before != 1 and head.bias is not None):
        raise UserError(
            f"{type(base).__name__} makes its logits in a way of its own, not cap · tanh(multiplier · product / cap), which is all "
            f"that TokenLogprobs in policy.py does (products of 1 and 1024 with the head gave {logits[10]:g}, {logits[20]:g})."
        )
    return before * multiplier, softcap


# ---------------------------------------------------------------------------------------------------------------------
# Models with a state along the row


def has_state(model: nn.Module) -> bool:
    """Does a layer carry something along the row besides attention: Mamba, linear attention, a short convolution?

    Such a layer is told nothing by `Batch.layout` (transformers drops any 4-D mask for it, `create_recurrent_attention_mask`)
    and would carry one sample into the next, so each sample gets a row of its own, padded. Told by what transformers says of the
    class, by what its file calls, or by the kinds of layer in its config (`other_layers`).
    """
    classes = {type(module) for module in model.modules()}
    calls = any(hasattr(sys.modules[c.__module__], "create_recurrent_attention_mask") for c in classes)
    stateful = any(getattr(c, "_is_stateful", False) for c in classes)
    return calls or stateful or bool(other_layers(model.config))


# ---------------------------------------------------------------------------------------------------------------------
# Experts that the engine chose


class RouterReplay(TorchFunctionMode):
    """Around one MoE block: what its router's top-k would choose gives way to `choice` (T, k), -1 where that is not known.

    The scores stay the router's own, so weights and gradients are those of the chosen experts. transformers writes each model's
    router anew, but each ends in one torch.topk over (T, E); the top-k over groups of experts has other shapes.
    """

    def __init__(self, num_experts: int) -> None:
        self.num_experts, self.choice, self.agreement = num_experts, None, None

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk) or self.choice is None:
            return result
        scores, own = args[0], result.indices  # (T, E), (T, k)
        if own.shape != self.choice.shape or scores.shape[-1] != self.num_experts:
            return result
        known = self.choice[:, :1] >= 0  # (T, 1)
        chosen = torch.where(known, self.choice, own)  # (T, k)
        same = (chosen[:, :, None] == own[:, None, :]).any(2) & known  # (T, k)
        self.agreement = torch.stack([same.sum(), known.sum() * own.shape[1]])  # (2,): choices alike, choices known
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))


def replay_routers(model) -> dict[int, RouterReplay]:
    """{number of the layer: its replay}: from now on each MoE block runs the experts of its `choice`, where that is set."""
    modules, replays = dict(model.named_modules()), {}
    for name in [name for name, module in modules.items() if hasattr(module, "is_transposed")]:  # stacked experts
        block, layer = modules[name.rpartition(".")[0]], int(re.search(r"\.layers\.(\d+)\.", f".{name}")[1])
        replays[layer] = RouterReplay(modules[name].num_experts)
        block.forward = partial(replayed_forward, replays[layer], block.forward)
    assert replays, f"{type(model).__name__} has no stacked experts whose choice could be replayed"
    return replays


def replayed_forward(replay: RouterReplay, forward: Callable, *args, **kwargs):
    with replay:
        return forward(*args, **kwargs)


def replay_stats(policy: nn.Module, logprobs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of the last forward, over all routers: choices in which the trainer's agrees with the engine's, choices replayed."""
    counts = [replay.agreement for replay in policy.replays.values() if replay.choice is not None]
    same, known = torch.stack(counts).sum(0) if counts else logprobs.new_zeros(2)  # (), ()
    return {"experts_alike": same, "experts_known": known}
