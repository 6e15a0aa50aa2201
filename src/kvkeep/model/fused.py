"""Fewer and larger operations in a model's layers, on a GPU: the numbers stay those of the model's own code.

Projections of one input are one matrix product (projections.py); RMS norms, gated activations and the rotation of
queries and keys have a kernel each (kernels/triton/layer_ops.py); the sums of a layer are part of the products before
them. What a module computes is found out by comparing its output with the fused one's. A module that computes anything
else keeps its own code.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvkeep.kernels.dispatch import rms_norm, rotate_heads
from kvkeep.model.fused_layer import (
    LOCK,
    SAME,
    Forward,
    Layer,
    Replacement,
    difference,
    fused_layer,
    fused_mlp,
    output_of,
    random,
    same,
)
from kvkeep.model.modules import attention_modules
from kvkeep.model.projections import SharedInput, can_join

ROPE = "apply_rotary_pos_emb"  # its name in transformers' models
NORMS = (0.0, True), (0.0, False), (1.0, False)  # offset, rounds: Llama's, OLMo's, Gemma's
QKV = "q_proj", "k_proj", "v_proj"
_prepared: WeakKeyDictionary[PreTrainedModel, Prepared] = WeakKeyDictionary()


@contextmanager
def fused_ops(model: PreTrainedModel, shown: int | Tensor = 0) -> Iterator[None]:
    """Within, and for inference, the model's layers run with fused operations where that is faster: on a GPU.

    shown: whose logits are needed, as in transformers' `logits_to_keep`: the last tokens, or those at these places; 0:
    all. The last layer's MLP runs for these alone.
    """
    if torch.is_grad_enabled() or model.training or not is_faster(model):
        yield
        return
    with LOCK:
        if model not in _prepared:
            _prepared[model] = _prepare(model)
        prepared = _prepared[model]
        used = prepared.used()
    with ExitStack() as stack:
        for replacement in used:
            stack.enter_context(replacement)
        if prepared.last:
            stack.enter_context(prepared.last.only(shown))
        yield


def is_faster(model: PreTrainedModel) -> bool:
    compiled = hasattr(model, "_orig_mod") or model._compiled_call_impl is not None
    return model.device.type == "cuda" and not compiled


@dataclass(frozen=True)
class Prepared:
    """What is prepared once for one model."""

    operations: list[Replacement]
    layers: list[Replacement]
    last: Layer | None  # the model's last one, if it is fused
    watched: list[nn.Module]  # a hook on one may keep a tensor that layers change in place

    def used(self) -> list[Replacement]:
        hooked = any(module._forward_hooks or module._forward_pre_hooks for module in self.watched)
        return self.operations if hooked else self.operations + self.layers


@torch.inference_mode(False)
@torch.no_grad()
def _prepare(model: PreTrainedModel) -> Prepared:
    forwards: dict[nn.Module, Forward] = {}
    layers: dict[nn.Module, Forward] = {}
    last = None
    known: dict[Any, Any] = {}  # class of modules -> what it computes
    *_, final = attention_modules(model)
    for module in reversed(list(model.modules())):  # parts first
        if "forward" in vars(module):  # accelerate's hooks, say
            continue
        parts = dict(module.named_children())
        if all(name in parts for name in QKV):
            forwards |= _shared_input([parts[name] for name in QKV])
        elif forward := fused_mlp(module, parts) or _norm(module, known):
            forwards[module] = forward
        elif layer := fused_layer(module, parts, forwards, known):
            layers[module], layers[layer.output] = layer, layer.output_projection
            last = layer if layer.attention is final else last
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # where weights lay before
    rope = [found for file in _attention_files(model) if (found := _rope(file))]
    watched = [module for layer in layers for module in layer.modules()]
    return Prepared(_all_forwards(forwards) + rope, _all_forwards(layers), last, watched)


def _all_forwards(forwards: dict[nn.Module, Forward]) -> list[Replacement]:
    return [Replacement(vars(module), "forward", forward) for module, forward in forwards.items()]


def _shared_input(layers: list[nn.Module]) -> dict[nn.Module, Forward]:
    if not can_join(layers):
        return {}
    shared = SharedInput(layers)
    return {layer: partial(shared.forward, index) for index, layer in enumerate(layers)}


def _norm(module: nn.Module, known: dict[Any, tuple[float, bool] | None]) -> Forward | None:
    names = [name for name, _ in module.named_parameters()]
    eps = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None)
    if names != ["weight"] or eps is None:
        return None
    weight = module.get_parameter("weight")
    if weight.ndim != 1 or weight.device.type == "meta":
        return None
    key = type(module), weight.shape, weight.dtype
    if key not in known:
        x = random(1, 4, len(weight), like=weight)
        off = {kind: difference(rms_norm(x, weight, eps, *kind), output_of(module, x)) for kind in NORMS}
        best = min(NORMS, key=off.__getitem__)
        known[key] = best if off[best] <= SAME else None
    kind = known[key]
    return None if kind is None else lambda x: rms_norm(x, module.weight, eps, *kind)


def _attention_files(model: PreTrainedModel) -> set[Any]:
    files = {sys.modules[type(module).__module__] for module in attention_modules(model)}
    return {file for file in files if hasattr(file, ROPE)}


@cache
def _rope(file: Any) -> Replacement | None:
    """RoPE is a function in the file of the attention modules."""
    own = getattr(file, ROPE)
    q, k = torch.randn(2, 3, 5, 16), torch.randn(2, 1, 5, 16)
    cos, sin = torch.randn(1, 5, 16), torch.randn(1, 5, 16)
    theirs = output_of(own, q, k, cos, sin)

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or q.requires_grad or q.ndim != 4 or cos.ndim != 3 or cos.shape[-1] != q.shape[-1]:
            return own(q, k, cos, sin, *args, **kwargs)
        return rotate_heads(q, k, cos, sin)

    is_same = isinstance(theirs, tuple) and all(map(same, rotate_heads(q, k, cos, sin), theirs))
    return Replacement(vars(file), ROPE, rotate) if is_same else None
