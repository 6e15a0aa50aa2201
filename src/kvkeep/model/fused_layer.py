"""What takes the place of a decoder layer's parts: norms, gated MLPs, and the layer whose sums are part of products.

Each exists for layers in the model's dtype and for layers in 8-bit floats (fp8_linear.py), whose inputs come out of the
operation before them quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import local
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from kvkeep.kernels.dispatch import gated, gated_quantized, quantize_rows, rms_norm, rms_norm_quantized
from kvkeep.kernels.torch.fp8 import Fp8Rows
from kvkeep.model.chunked_mlp import CHUNK_TOKENS
from kvkeep.model.fp8_linear import Fp8Linear, Fp8Projections
from kvkeep.model.projections import Projections, SharedInput

Forward = Callable[..., Any]
NORM_NAMES = "input_layernorm", "post_attention_layernorm"


@dataclass
class Norm:
    """RMS norm over the last axis. offset, rounds: as in rms_norm"""

    module: nn.Module
    eps: float
    offset: float
    rounds: bool

    @property
    def weight(self) -> Tensor:
        return self.module.get_parameter("weight")

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.offset, self.rounds)

    def quantized(self, x: Tensor) -> Fp8Rows:
        return rms_norm_quantized(x, self.weight, self.eps, self.offset, self.rounds)


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
        """Add in place, for a plain `down` without bias."""
        for part, into in zip(tokens_of(x).split(CHUNK_TOKENS), tokens_of(total).split(CHUNK_TOKENS), strict=True):
            into.addmm_(self._hidden(part), self.down.get_parameter("weight").t())

    def _hidden(self, x: Tensor) -> Tensor:
        return gated(*self.project(x), self.activation)


class Fp8MLP(GatedMLP):
    project: Fp8Projections
    down: Fp8Linear

    def add_rows(self, total: Tensor, norm: Norm) -> None:
        """Add what comes of the norm of `total` in place."""
        for part in tokens_of(total).split(CHUNK_TOKENS):
            hidden = gated_quantized(*self.project.of_rows(norm.quantized(part)), self.activation)
            self.down.product(hidden, part)


class Layer:
    """x + attention(norm(x)), then x + mlp(norm(x)); both sums in place, as part of a matrix product."""

    def __init__(self, module: nn.Module, parts: dict[str, nn.Module], output: nn.Module, mlp: GatedMLP) -> None:
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
            self._attend(hidden_states, *args, **kwargs)
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

    def _attend(self, total: Tensor, *args: Any, **kwargs: Any) -> None:
        self.attention(*args, hidden_states=self.norms[0](total), **kwargs)

    def _add_mlp(self, total: Tensor) -> None:
        shown = getattr(self.now, "shown", 0) if len(total) == 1 else 0
        part = total[:, shown] if isinstance(shown, Tensor) else total[:, -shown:]
        self._add_part(part)
        if isinstance(shown, Tensor):
            total[:, shown] = part

    def _add_part(self, total: Tensor) -> None:
        self.mlp.add_to(total, self.norms[1](total))

    def _can_add_to(self, total: Tensor) -> bool:
        if self.module._forward_hooks:  # with output_hidden_states, transformers hooks every layer during the call
            return False
        alike = total.dtype == self._dtype() and not torch.is_autocast_enabled(total.device.type)
        return alike and total.is_contiguous()

    def _dtype(self) -> torch.dtype:
        return self.mlp.down.get_parameter("weight").dtype

    def output_projection(self, x: Tensor) -> Tensor:
        """Forward of `output`."""
        weight, total = self.output.get_parameter("weight"), getattr(self.now, "total", None)
        if total is None:
            return linear(x, weight)
        tokens_of(total).addmm_(tokens_of(x), weight.t())
        return total


class Fp8Layer(Layer):
    """The same where attention reads its input through its projections alone: they get it from the norm, quantized."""

    output: Fp8Linear
    mlp: Fp8MLP

    def __init__(self, *parts: Any, shared: SharedInput, fused_norms: list[Norm]) -> None:
        """shared: of queries, keys and values; fused_norms: forwards of the norms"""
        super().__init__(*parts)
        self.shared, self.fused_norms = shared, fused_norms

    def _attend(self, total: Tensor, *args: Any, **kwargs: Any) -> None:
        project = self.shared.project
        assert isinstance(project, Fp8Projections)
        with self.shared.computed(total, project.of_rows(self.fused_norms[0].quantized(total))):
            self.attention(*args, hidden_states=total, **kwargs)

    def _add_part(self, total: Tensor) -> None:
        self.mlp.add_rows(total, self.fused_norms[1])

    def _dtype(self) -> torch.dtype:
        return self.norms[1].get_parameter("weight").dtype

    def output_projection(self, x: Tensor) -> Tensor:
        return self.output.product(quantize_rows(x), getattr(self.now, "total", None))


def tokens_of(x: Tensor) -> Tensor:
    """[tokens, dim], never a copy."""
    return x.view(-1, x.shape[-1])
