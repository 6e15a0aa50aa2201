"""The small operations between a layer's matrix products, in torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
}


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, rounds: bool = True) -> Tensor:
    """x / sqrt(mean(x²) + eps) * (weight + offset) over the last axis, in float32.

    rounds: to the dtype of x before the product with the weight, too. x [..., dim], weight [dim] -> [..., dim]
    """
    wide = x.float()
    unit = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    scale = weight.float() + offset
    return ((unit.to(x.dtype) if rounds else unit) * scale).to(x.dtype)


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up. gate and up [..., dim]"""
    return ACTIVATIONS[activation](gate) * up


def rotate_heads(queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """RoPE with pairs half a vector apart, in float32, rounded once.

    queries [rows, heads, n, dim], keys [rows, kv_heads, n, dim], cos and sin [rows or 1, n, dim]
    """
    return _rotate(queries, cos[:, None], sin[:, None]), _rotate(keys, cos[:, None], sin[:, None])


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, -1)
    return (x.float() * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


def apply_angles(vectors: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, dtype: torch.dtype) -> Tensor:
    """Rotate the first 2 * pairs channels, in float32 at least; the others stay.

    vectors [.., n, dim], cos, sin [.., n, pairs]
    """
    pairs = cos.shape[-1]
    wide = torch.promote_types(vectors.dtype, torch.float32)
    paired, rest = vectors[..., : 2 * pairs].to(wide), vectors[..., 2 * pairs :]
    a, b = (paired[..., 0::2], paired[..., 1::2]) if interleaved else paired.chunk(2, -1)
    rotated = (a * cos - b * sin, b * cos + a * sin)
    both = torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, -1)
    return torch.cat([both.to(dtype), rest.to(dtype)], -1)
