"""Fewer and larger operations in a model's layers, on a GPU: the numbers stay those of the model's own code.

Projections of one input are one matrix product (projections.py); RMS norms, gated activations and the rotation of
queries and keys have a kernel each (kernels/triton/layer_ops.py); the sums of a layer are part of the products before
them. What a module computes is found out by comparing its output with the fused one's. A module that computes anything
else keeps its own code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from threading import RLock, local
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from kvkeep.kernels.dispatch import gated, rms_norm, rotate_heads
from kvkeep.kernels.torch.elementwise import ACTIVATIONS
from kvkeep.model.chunked_mlp import CHUNK_TOKENS
from kvkeep.model.modules import attention_modules
from kvkeep.model.projections import Projections, SharedInput, is_plain

ROPE = "apply_rotary_pos_emb"  # its name in transformers' models
NORMS = (0.0, True), (0.0, False), (1.0, False)  # offset, rounds: Llama's, OLMo's, Gemma's
QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
SAME = 8  # roundings by which the same operation may differ
LOCK = RLock()
_prepared: WeakKeyDictionary[PreTrainedModel, Prepared] = WeakKeyDictionary()

Forward = Callable[..., Any]


@contextmanager
def fused_ops(model: PreTrainedModel) -> Iterator[None]:
    """Within, and for inference, the model's layers run with fused operations where that is faster: on a GPU."""
    if torch.is_grad_enabled() or model.training or not is_faster(model):
        yield
        return
    with LOCK:
        if model not in _prepared:
            _prepared[model] = _prepare(model)
        used = _prepared[model].used()
    with ExitStack() as stack:
        for replacement in used:
            stack.enter_context(replacement)
        yield


def is_faster(model: PreTrainedModel) -> bool:
    compiled = hasattr(model, "_orig_mod") or model._compiled_call_impl is not None
    return model.device.type == "cuda" and not compiled


class Replacement:
    """A function in the place of another one for as long as anybody is inside."""

    def __init__(self, names: dict[str, Any], name: str, function: Forward) -> None:
        """names: of a module's attributes or of a file's functions"""
        self.names, self.name, self.function = names, name, function
        self.users, self.before = 0, None

    def __enter__(self) -> None:
        with LOCK:
            if not self.users:
                self.before = self.names.get(self.name)
                self.names[self.name] = self.function
            self.users += 1

    def __exit__(self, *_: Any) -> None:
        with LOCK:
            self.users -= 1
            if self.users:
                return
            if self.before is None:
                del self.names[self.name]
            else:
                self.names[self.name] = self.before


@dataclass(frozen=True)
class Prepared:
    """Of one model."""

    operations: list[Replacement]
    layers: list[Replacement]
    watched: list[nn.Module]  # a hook on one may keep a tensor that layers change in place

    def used(self) -> list[Replacement]:
        hooked = any(module._forward_hooks or module._forward_pre_hooks for module in self.watched)
        return self.operations if hooked else self.operations + self.layers


@torch.inference_mode(False)
@torch.no_grad()
def _prepare(model: PreTrainedModel) -> Prepared:
    forwards: dict[nn.Module, Forward] = {}
    layers: dict[nn.Module, Forward] = {}
    known: dict[Any, Any] = {}  # class of modules -> what it computes
    for module in reversed(list(model.modules())):  # parts first
        if "forward" in vars(module):  # accelerate's hooks, say
            continue
        parts = dict(module.named_children())
        if all(name in parts for name in QKV):
            forwards |= _shared_input([parts[name] for name in QKV])
        elif forward := _mlp(module, parts) or _norm(module, known):
            forwards[module] = forward
        elif layer := _layer(module, parts, forwards, known):
            layers |= {module: layer, layer.attention.o_proj: layer.output_projection}
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # where weights lay before
    rope = [found for file in _attention_files(model) if (found := _rope(file))]
    watched = [module for layer in layers for module in layer.modules()]
    return Prepared(_all_forwards(forwards) + rope, _all_forwards(layers), watched)


def _all_forwards(forwards: dict[nn.Module, Forward]) -> list[Replacement]:
    return [Replacement(vars(module), "forward", forward) for module, forward in forwards.items()]


def _shared_input(layers: list[nn.Module]) -> dict[nn.Module, Forward]:
    if not is_plain(*layers):
        return {}
    shared = SharedInput(layers)
    return {layer: partial(shared.forward, index) for index, layer in enumerate(layers)}


@dataclass
class GatedMLP:
    """down(activation(gate(x)) * up(x)), at most CHUNK_TOKENS at a time, to save memory."""

    project: Projections
    activation: str
    down: nn.Module

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[-2] <= CHUNK_TOKENS:
            return self.down(self._hidden(x))
        output = torch.empty_like(x)
        for part, into in zip(x.split(CHUNK_TOKENS, -2), output.split(CHUNK_TOKENS, -2), strict=True):
            into.copy_(self.down(self._hidden(part)))
        return output

    def add_to(self, total: Tensor, x: Tensor) -> None:
        """In place, for a plain `down` without bias."""
        for part, into in zip(_tokens(x).split(CHUNK_TOKENS), _tokens(total).split(CHUNK_TOKENS), strict=True):
            into.addmm_(self._hidden(part), self.down.weight.t())

    def _hidden(self, x: Tensor) -> Tensor:
        return gated(*self.project(x), self.activation)


def _mlp(module: nn.Module, parts: dict[str, nn.Module]) -> GatedMLP | None:
    if not all(name in parts for name in (*GATE_UP, "down_proj", "act_fn")):
        return None
    layers = [parts[name] for name in GATE_UP]
    if not is_plain(*layers) or not isinstance(parts["down_proj"], nn.Linear):
        return None
    x = _random(4, layers[0].in_features, like=layers[0].weight)
    activation = next((kind for kind in ACTIVATIONS if _same(ACTIVATIONS[kind](x), parts["act_fn"](x))), None)
    if activation is None:
        return None
    theirs = _output(module, x)
    mlp = GatedMLP(Projections(layers), activation, parts["down_proj"])
    return mlp if _same(mlp(x), theirs) else None


def _norm(module: nn.Module, known: dict[Any, tuple[float, bool] | None]) -> Forward | None:
    names = [name for name, _ in module.named_parameters()]
    eps = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None)
    if names != ["weight"] or module.weight.ndim != 1 or eps is None or module.weight.device.type == "meta":
        return None
    key = type(module), module.weight.shape, module.weight.dtype
    if key not in known:
        x = _random(1, 4, len(module.weight), like=module.weight)
        off = {kind: _difference(rms_norm(x, module.weight, eps, *kind), _output(module, x)) for kind in NORMS}
        best = min(NORMS, key=off.__getitem__)
        known[key] = best if off[best] <= SAME else None
    kind = known[key]
    return None if kind is None else lambda x: rms_norm(x, module.weight, eps, *kind)


class Layer:
    """x + attention(norm(x)), then x + mlp(norm(x)); both sums in place, as part of a matrix product."""

    def __init__(self, module: nn.Module, mlp: GatedMLP) -> None:
        self.norms = module.input_layernorm, module.post_attention_layernorm
        self.own, self.attention, self.mlp, self.now = module.forward, module.self_attn, mlp, local()

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not self._can_add_to(hidden_states):
            return self.own(hidden_states, *args, **kwargs)
        self.now.total = hidden_states
        try:
            self.attention(*args, hidden_states=self.norms[0](hidden_states), **kwargs)
        finally:
            self.now.total = None
        self.mlp.add_to(hidden_states, self.norms[1](hidden_states))
        return hidden_states

    def _can_add_to(self, total: Tensor) -> bool:
        same = total.dtype == self.mlp.down.weight.dtype and not torch.is_autocast_enabled(total.device.type)
        return same and total.is_contiguous()

    def output_projection(self, x: Tensor) -> Tensor:
        """Forward of the attention's last product."""
        weight, total = self.attention.o_proj.weight, getattr(self.now, "total", None)
        if total is None:
            return linear(x, weight)
        _tokens(total).addmm_(_tokens(x), weight.t())
        return total


def _layer(
    module: nn.Module, parts: dict[str, nn.Module], fused: dict[nn.Module, Forward], known: dict[Any, bool]
) -> Layer | None:
    """Of a module whose parts are fused already."""
    mlp, attention = fused.get(parts.get("mlp")), parts.get("self_attn")
    output = getattr(attention, "o_proj", None)
    if not isinstance(mlp, GatedMLP) or output is None or not is_plain(output) or not is_plain(mlp.down):
        return None
    if output.bias is not None or mlp.down.bias is not None:
        return None
    if not all(parts.get(name) in fused for name in ("input_layernorm", "post_attention_layernorm")):
        return None
    if type(module) not in known:
        known[type(module)] = _adds_up(module, parts) and _ends_with_output(attention)
    return Layer(module, mlp) if known[type(module)] else None


def _adds_up(module: nn.Module, parts: dict[str, nn.Module]) -> bool:
    """Whether the layer adds up as `Layer` does, with simple functions in the place of attention and MLP."""
    x = _random(1, 4, len(parts["input_layernorm"].weight), like=parts["input_layernorm"].weight)

    def attention(*_: Any, hidden_states: Tensor, **__: Any) -> tuple[Tensor, None]:
        return hidden_states * 2, None

    with (
        Replacement(vars(parts["self_attn"]), "forward", attention),
        Replacement(vars(parts["mlp"]), "forward", torch.sin),
    ):
        theirs = _output(module, x)
    middle = x + 2 * parts["input_layernorm"](x)
    return _same(middle + parts["post_attention_layernorm"](middle).sin(), theirs)


def _ends_with_output(attention: nn.Module) -> bool:
    """Whether attention returns the very tensor that its output projection returned."""
    weight, dim = attention.o_proj.weight, getattr(attention, "head_dim", 0)
    x, angle, result = _random(1, 4, weight.shape[0], like=weight), _random(1, 4, dim, like=weight), torch.zeros(())
    with Replacement(vars(attention.o_proj), "forward", lambda _: result):
        returned = _output(partial(attention, hidden_states=x, position_embeddings=(angle, angle), attention_mask=None))
    return isinstance(returned, tuple) and returned[0] is result


def _attention_files(model: PreTrainedModel) -> set[Any]:
    files = {sys.modules[type(module).__module__] for module in attention_modules(model)}
    return {file for file in files if hasattr(file, ROPE)}


@cache
def _rope(file: Any) -> Replacement | None:
    """RoPE is a function in the file of the attention modules."""
    own = getattr(file, ROPE)
    q, k = torch.randn(2, 3, 5, 16), torch.randn(2, 1, 5, 16)
    cos, sin = torch.randn(1, 5, 16), torch.randn(1, 5, 16)
    theirs = _output(own, q, k, cos, sin)

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or q.requires_grad or q.ndim != 4 or cos.ndim != 3 or cos.shape[-1] != q.shape[-1]:
            return own(q, k, cos, sin, *args, **kwargs)
        return rotate_heads(q, k, cos, sin)

    same = isinstance(theirs, tuple) and all(map(_same, rotate_heads(q, k, cos, sin), theirs))
    return Replacement(vars(file), ROPE, rotate) if same else None


def _tokens(x: Tensor) -> Tensor:
    """[tokens, dim], never a copy."""
    return x.view(-1, x.shape[-1])


def _random(*shape: int, like: Tensor) -> Tensor:
    return torch.randn(shape, device=like.device).to(like.dtype)


def _output(function: Forward, *args: Tensor) -> Any:
    """None where it takes other arguments."""
    with suppress(TypeError, RuntimeError, AttributeError):
        return function(*args)


def _same(ours: Tensor, theirs: Any) -> bool:
    return _difference(ours, theirs) <= SAME


def _difference(ours: Tensor, theirs: Any) -> float:
    """In roundings of the largest number."""
    if not isinstance(theirs, Tensor) or ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return float("inf")
    off = (ours.float() - theirs.float()).abs().max() / theirs.float().abs().max().clamp_min(1e-6)
    return float(off) / torch.finfo(ours.dtype).eps
