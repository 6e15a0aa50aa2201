"""Fewer and larger operations in a model's layers, on a GPU: the numbers stay those of the model's own code.

Projections of one input are one matrix product (projections.py); RMS norms, gated activations and the rotation of
queries and keys have a kernel each (kernels/triton/layer_ops.py); the sums of a layer are part of the products before
them; what takes a module's place is in fused_layer.py. What a module computes is found out by comparing its output with
the fused one's. A module that computes anything else keeps its own code.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvkeep.kernels.dispatch import rms_norm, rotate_heads
from kvkeep.kernels.torch.elementwise import ACTIVATIONS
from kvkeep.model.fp8_linear import Fp8Linear, Fp8Projections, can_join_fp8, is_fp8
from kvkeep.model.fused_layer import NORM_NAMES, Forward, Fp8Layer, Fp8MLP, GatedMLP, Layer, Norm
from kvkeep.model.hf_attention import attention_modules
from kvkeep.model.projections import Projections, SharedInput, can_join, is_plain

SAME = 8  # roundings by which the same operation may differ
LOCK = RLock()
ROPE = "apply_rotary_pos_emb"  # its name in transformers' models
NORMS = (0.0, True), (0.0, False), (1.0, False)  # offset, rounds: Llama's, OLMo's, Gemma's
GATE_UP = "gate_proj", "up_proj"
QKV = "q_proj", "k_proj", "v_proj"
_prepared: WeakKeyDictionary[PreTrainedModel, Prepared] = WeakKeyDictionary()


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


def fused_mlp(module: nn.Module, parts: dict[str, nn.Module], like: Tensor) -> GatedMLP | None:
    """like: a weight of the model, of the dtype that layers in 8-bit floats have as input"""
    if not all(name in parts for name in (*GATE_UP, "down_proj", "act_fn")):
        return None
    layers, down = [parts[name] for name in GATE_UP], parts["down_proj"]
    project = joint(layers)
    fp8 = isinstance(project, Fp8Projections)
    if project is None or not (is_fp8(down) if fp8 else isinstance(down, nn.Linear)):
        return None
    x = random(4, project.layers[0].in_features, like=like if fp8 else project.layers[0].weight)
    activation = next((kind for kind in ACTIVATIONS if same(ACTIVATIONS[kind](x), parts["act_fn"](x))), None)
    if activation is None:
        return None
    mlp, theirs = (Fp8MLP if fp8 else GatedMLP)(project, activation, down), output_of(module, x)
    if fp8 and isinstance(theirs, Tensor):  # one rounding may move a number of the last input to the next e4m3
        return mlp if same(mlp(x).bfloat16(), theirs.bfloat16()) else None
    return mlp if same(mlp(x), theirs) else None


def joint(layers: list[nn.Module]) -> Projections | None:
    """Layers of one input as one; None where they cannot be."""
    if can_join_fp8(layers):
        return Fp8Projections(layers)
    return Projections(layers) if can_join(layers) else None


def fused_layer(
    module: nn.Module, parts: dict[str, nn.Module], fused: dict[nn.Module, Forward], known: dict[Any, bool]
) -> Layer | None:
    """Fuse a decoder layer whose parts are fused already."""
    if not all(name in parts for name in ("mlp", "self_attn", *NORM_NAMES)):
        return None
    attention = dict(parts["self_attn"].named_children())
    mlp, output = fused.get(parts["mlp"]), attention.get("o_proj")
    if output is None or not isinstance(mlp, GatedMLP) or not all(parts[name] in fused for name in NORM_NAMES):
        return None
    if isinstance(mlp, Fp8MLP):
        return _fp8_layer(module, parts, fused, known) if is_fp8(output) else None
    if not is_plain(output) or not is_plain(mlp.down) or output.bias is not None or mlp.down.bias is not None:
        return None
    if type(module) not in known:
        known[type(module)] = _adds_up(module, parts) and _ends_with_output(parts, output)
    return Layer(module, parts, output, mlp) if known[type(module)] else None


def _fp8_layer(
    module: nn.Module, parts: dict[str, nn.Module], fused: dict[nn.Module, Forward], known: dict[Any, bool]
) -> Fp8Layer | None:
    """The same for a layer in 8-bit floats."""
    attention = dict(parts["self_attn"].named_children())
    inputs, output = [attention[name] for name in QKV if name in attention], attention["o_proj"]
    shared = getattr(getattr(fused.get(inputs[0]), "func", None), "__self__", None) if inputs else None
    norms: list[Any] = [fused[parts[name]] for name in NORM_NAMES]
    if not isinstance(shared, SharedInput) or not isinstance(shared.project, Fp8Projections):
        return None
    if (key := (type(module), Fp8Linear)) not in known:
        ends = _ends_with_output(parts, output) and _reads_alone(parts, inputs, output)
        known[key] = ends and _adds_up(module, parts)
    if not known[key]:
        return None
    return Fp8Layer(module, parts, output, fused[parts["mlp"]], shared=shared, fused_norms=norms)


def _adds_up(module: nn.Module, parts: dict[str, nn.Module]) -> bool:
    """Whether the layer adds up as `Layer` does, with simple functions in the place of attention and MLP."""
    first, second = (parts[name] for name in NORM_NAMES)
    x = random(1, 4, len(_norm_weight(parts)), like=_norm_weight(parts))

    def attention(*_: Any, hidden_states: Tensor, **__: Any) -> tuple[Tensor, None]:
        return hidden_states * 2, None

    with (
        Replacement(vars(parts["self_attn"]), "forward", attention),
        Replacement(vars(parts["mlp"]), "forward", torch.sin),
    ):
        theirs = output_of(module, x)
    middle = x + 2 * first(x)
    return same(middle + second(middle).sin(), theirs)


def _ends_with_output(parts: dict[str, nn.Module], output: nn.Module) -> bool:
    """Whether attention returns the very tensor that its output projection returned."""
    result = torch.zeros(())
    with Replacement(vars(output), "forward", lambda _: result):
        returned = output_of(*_attention_call(parts))
    return isinstance(returned, tuple) and returned[0] is result


def _reads_alone(parts: dict[str, nn.Module], inputs: list[nn.Module], output: nn.Module) -> bool:
    """Whether attention's projections, once each, are all that reads its input."""
    found: list[list[Tensor]] = []

    def project(result: Tensor, x: Tensor) -> Tensor:
        found[-1].append(x)
        return result

    sizes = [len(layer.get_parameter("weight")) for layer in inputs]
    results = [random(1, 4, size, like=_norm_weight(parts)) for size in sizes]
    with ExitStack() as stack:
        for layer, result in zip(inputs, results, strict=True):
            stack.enter_context(Replacement(vars(layer), "forward", partial(project, result)))
        stack.enter_context(Replacement(vars(output), "forward", lambda x: project(x, x)))
        for _ in range(2):
            found.append([])
            call, x = _attention_call(parts)
            output_of(call, x)
            if len(found[-1]) != len(inputs) + 1 or any(each is not x for each in found[-1][:-1]):
                return False
    return torch.equal(found[0][-1], found[1][-1])


def _attention_call(parts: dict[str, nn.Module]) -> tuple[Forward, Tensor]:
    """A call of attention, and a random input that it takes; angles are those of the first call."""
    weight, dim = _norm_weight(parts), getattr(parts["self_attn"], "head_dim", 0)
    angle = torch.linspace(-1, 1, 4 * dim, device=weight.device).to(weight.dtype).view(1, 4, dim)
    how = {"position_embeddings": (angle, angle), "attention_mask": None}
    return lambda x: parts["self_attn"](hidden_states=x, **how), random(1, 4, len(weight), like=weight)


def _norm_weight(parts: dict[str, nn.Module]) -> Tensor:
    return parts[NORM_NAMES[0]].get_parameter("weight")


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


def forget(model: PreTrainedModel) -> None:
    """Drop what is prepared for a model, before its modules are changed."""
    with LOCK:
        _prepared.pop(model, None)


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
    like = next(model.parameters())
    *_, final = attention_modules(model)
    for module in reversed(list(model.modules())):  # parts first
        if "forward" in vars(module):  # accelerate's hooks, say
            continue
        parts = dict(module.named_children())
        if all(name in parts for name in QKV):
            forwards |= _shared_input([parts[name] for name in QKV])
        elif forward := fused_mlp(module, parts, like) or _norm(module, known):
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
    project = joint(layers)
    if project is None:
        return {}
    shared = SharedInput(project)
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
    return None if kind is None else Norm(module, eps, *kind)


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
