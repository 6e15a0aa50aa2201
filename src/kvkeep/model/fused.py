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
from kvkeep.model.hf_attention import attention_modules
from kvkeep.model.projections import Projections, SharedInput, can_join, is_plain

SAME = 8  # roundings by which the same operation may differ
LOCK = RLock()
ROPE = "apply_rotary_pos_emb"  # its name in transformers' models
NORMS = (0.0, True), (0.0, False), (1.0, False)  # offset, rounds: Llama's, OLMo's, Gemma's
GATE_UP = "gate_proj", "up_proj"
NORM_NAMES = "input_layernorm", "post_attention_layernorm"
QKV = "q_proj", "k_proj", "v_proj"
_prepared: WeakKeyDictionary[PreTrainedModel, Prepared] = WeakKeyDictionary()

Forward = Callable[..., Any]


class Replacement:
    """A function in the place of another one for as long as anybody is inside."""

    def __init__(self, names: dict[str, Any], name: str, function: Forward) -> None:
        """names: of a module's attributes or of a file's functions"""
        self.names, self.name = names, name
        self.function = function
        self.users = 0
        self.before: Forward | None = None

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


def random(*shape: int, like: Tensor) -> Tensor:
    return torch.randn(shape, device=like.device).to(like.dtype)


def output_of(function: Forward, *args: Tensor) -> Any:
    """None where it takes other arguments."""
    with suppress(TypeError, RuntimeError, AttributeError):
        return function(*args)


def same(ours: Tensor, theirs: Any) -> bool:
    return difference(ours, theirs) <= SAME


def difference(ours: Tensor, theirs: Any) -> float:
    """The difference in roundings of the largest number."""
    if not isinstance(theirs, Tensor) or ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return float("inf")
    off = (ours.float() - theirs.float()).abs().max() / theirs.float().abs().max().clamp_min(1e-6)
    return float(off) / torch.finfo(ours.dtype).eps


@dataclass
class GatedMLP:
    """down(activation(gate(x)) * up(x)), at most CHUNK_TOKENS at a time, to save memory."""

    project: Projections
    activation: str
    down: nn.Linear

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[-2] <= CHUNK_TOKENS:
            return self.down(self._hidden(x))
        output = torch.empty_like(x)
        for part, into in zip(x.split(CHUNK_TOKENS, -2), output.split(CHUNK_TOKENS, -2), strict=True):
            into.copy_(self.down(self._hidden(part)))
        return output

    def add_to(self, total: Tensor, x: Tensor) -> None:
        """Add in place, for a plain `down` without bias."""
        for part, into in zip(_tokens(x).split(CHUNK_TOKENS), _tokens(total).split(CHUNK_TOKENS), strict=True):
            into.addmm_(self._hidden(part), self.down.weight.t())

    def _hidden(self, x: Tensor) -> Tensor:
        return gated(*self.project(x), self.activation)


def fused_mlp(module: nn.Module, parts: dict[str, nn.Module]) -> GatedMLP | None:
    if not all(name in parts for name in (*GATE_UP, "down_proj", "act_fn")):
        return None
    layers, down = [parts[name] for name in GATE_UP], parts["down_proj"]
    if not can_join(layers) or not isinstance(down, nn.Linear):
        return None
    x = random(4, layers[0].in_features, like=layers[0].weight)
    activation = next((kind for kind in ACTIVATIONS if same(ACTIVATIONS[kind](x), parts["act_fn"](x))), None)
    if activation is None:
        return None
    theirs = output_of(module, x)
    mlp = GatedMLP(Projections(layers), activation, down)
    return mlp if same(mlp(x), theirs) else None


class Layer:
    """x + attention(norm(x)), then x + mlp(norm(x)); both sums in place, as part of a matrix product."""

    def __init__(self, module: nn.Module, parts: dict[str, nn.Module], output: nn.Linear, mlp: GatedMLP) -> None:
        """output: the attention's last product"""
        self.module, self.own = module, module.forward
        self.now = local()
        self.attention = parts["self_attn"]
        self.output, self.mlp = output, mlp
        self.norms = [parts[name] for name in NORM_NAMES]

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not self._can_add_to(hidden_states):
            return self.own(hidden_states, *args, **kwargs)
        self.now.total = hidden_states
        try:
            self.attention(*args, hidden_states=self.norms[0](hidden_states), **kwargs)
        finally:
            self.now.total = None
        self._add_mlp(hidden_states)
        return hidden_states

    @contextmanager
    def only(self, shown: int | Tensor) -> Iterator[None]:
        """Within, the MLP runs for the last `shown` tokens alone, or for those at these places; 0: for all."""
        before, self.now.shown = getattr(self.now, "shown", 0), shown
        try:
            yield
        finally:
            self.now.shown = before

    def _add_mlp(self, total: Tensor) -> None:
        shown = getattr(self.now, "shown", 0) if len(total) == 1 else 0
        part = total[:, shown] if isinstance(shown, Tensor) else total[:, -shown:]
        self.mlp.add_to(part, self.norms[1](part))
        if isinstance(shown, Tensor):
            total[:, shown] = part

    def _can_add_to(self, total: Tensor) -> bool:
        if self.module._forward_hooks:  # with output_hidden_states, transformers hooks every layer during the call
            return False
        alike = total.dtype == self.mlp.down.weight.dtype and not torch.is_autocast_enabled(total.device.type)
        return alike and total.is_contiguous()

    def output_projection(self, x: Tensor) -> Tensor:
        """Forward of `output`."""
        weight, total = self.output.weight, getattr(self.now, "total", None)
        if total is None:
            return linear(x, weight)
        _tokens(total).addmm_(_tokens(x), weight.t())
        return total


def fused_layer(
    module: nn.Module, parts: dict[str, nn.Module], fused: dict[nn.Module, Forward], known: dict[Any, bool]
) -> Layer | None:
    """Fuse a decoder layer whose parts are fused already."""
    if not all(name in parts for name in ("mlp", "self_attn", *NORM_NAMES)):
        return None
    mlp, output = fused.get(parts["mlp"]), dict(parts["self_attn"].named_children()).get("o_proj")
    if not isinstance(mlp, GatedMLP) or not is_plain(output) or not is_plain(mlp.down):
        return None
    if output.bias is not None or mlp.down.bias is not None:
        return None
    if not all(parts[name] in fused for name in NORM_NAMES):
        return None
    if type(module) not in known:
        known[type(module)] = _adds_up(module, parts) and _ends_with_output(parts["self_attn"], output)
    return Layer(module, parts, output, mlp) if known[type(module)] else None


def _adds_up(module: nn.Module, parts: dict[str, nn.Module]) -> bool:
    """Whether the layer adds up as `Layer` does, with simple functions in the place of attention and MLP."""
    first, second = (parts[name] for name in NORM_NAMES)
    weight = first.get_parameter("weight")
    x = random(1, 4, len(weight), like=weight)

    def attention(*_: Any, hidden_states: Tensor, **__: Any) -> tuple[Tensor, None]:
        return hidden_states * 2, None

    with (
        Replacement(vars(parts["self_attn"]), "forward", attention),
        Replacement(vars(parts["mlp"]), "forward", torch.sin),
    ):
        theirs = output_of(module, x)
    middle = x + 2 * first(x)
    return same(middle + second(middle).sin(), theirs)


def _ends_with_output(attention: nn.Module, output: nn.Linear) -> bool:
    """Whether attention returns the very tensor that its output projection returned."""
    weight, dim = output.weight, getattr(attention, "head_dim", 0)
    x, angle, result = random(1, 4, weight.shape[0], like=weight), random(1, 4, dim, like=weight), torch.zeros(())
    call = partial(attention, hidden_states=x, position_embeddings=(angle, angle), attention_mask=None)
    with Replacement(vars(output), "forward", lambda _: result):
        returned = output_of(call)
    return isinstance(returned, tuple) and returned[0] is result


def _tokens(x: Tensor) -> Tensor:
    """[tokens, dim], never a copy."""
    return x.view(-1, x.shape[-1])


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
