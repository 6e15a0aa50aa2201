"""Norms, gated activations and RoPE on random and edge shapes, beside a plain loop in float64."""

import math

import pytest
import torch
from decode_cases import DEVICE, drawn, off, pairs

from kvkeep.kernels.torch import elementwise as reference
from kvkeep.kernels.triton import layer_ops

BOUND = {torch.float32: 1e-5, torch.bfloat16: 6e-3, torch.float16: 1e-3}
NORMS = [(0.0, True), (0.0, False), (1.0, False)]  # offset, rounds
BOTH = [reference, layer_ops]


def plain_norm(x, weight, eps, offset):
    flat, result = x.double().reshape(-1, x.shape[-1]).tolist(), []
    for vector in flat:
        root = math.sqrt(sum(value * value for value in vector) / len(vector) + eps)
        result.append([v / root * (w + offset) for v, w in zip(vector, weight.double().tolist(), strict=True)])
    return torch.tensor(result, dtype=torch.float64).view(x.shape)


def plain_gate(gate, up, activation):
    def act(x):
        if activation == "silu":
            return x / (1 + math.exp(-x))
        if activation == "gelu":
            return x * 0.5 * (1 + math.erf(x / math.sqrt(2)))
        return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    pairs_ = zip(gate.double().flatten().tolist(), up.double().flatten().tolist(), strict=True)
    return torch.tensor([act(g) * u for g, u in pairs_], dtype=torch.float64).view(gate.shape)


def plain_rotation(x, cos, sin):
    """One number at a time: its partner is half a vector away, negated for the first half."""
    x, cos, sin, half = x.double().cpu(), cos.double().cpu(), sin.double().cpu(), x.shape[-1] // 2
    result = torch.empty_like(x)
    for row in range(x.shape[0]):
        for channel in range(x.shape[-1]):
            partner = -x[row, ..., channel + half] if channel < half else x[row, ..., channel - half]
            angle = row % len(cos)
            result[row, ..., channel] = x[row, ..., channel] * cos[angle, :, channel] + partner * sin[angle, :, channel]
    return result


@pytest.mark.parametrize("module", BOTH)
@pytest.mark.parametrize(
    "shape, kind, how",
    pairs([(1, 1, 1), (2, 5, 48), (1, 3, 4096), (1, 7, 3, 16), (2, 2, 9, 128)], BOUND, NORMS),
    ids=str,
)
def test_rms_norm(module, shape, kind, how):
    torch.manual_seed(len(shape))
    wide = drawn(*shape[:-1], 2 * shape[-1], kind=kind, scale=3.0)
    weight = drawn(shape[-1], kind=kind)
    for x in (wide[..., : shape[-1]].contiguous(), wide[..., shape[-1] :]):
        got = module.rms_norm(x, weight, 1e-3, *how)
        assert got.dtype == kind and got.shape == x.shape
        assert off(got.cpu().double(), plain_norm(x.cpu(), weight.cpu(), 1e-3, how[0])) < 2 * BOUND[kind]


@pytest.mark.parametrize("module", BOTH)
@pytest.mark.parametrize(
    "shape, kind, activation",
    pairs([(1, 1, 1), (2, 3, 40), (3, 2050), (1, 2, 4096)], BOUND, reference.ACTIVATIONS),
    ids=str,
)
def test_gated(module, shape, kind, activation):
    torch.manual_seed(len(shape))
    both = drawn(*shape[:-1], 2 * shape[-1], kind=kind, scale=3.0)
    gate, up = both.chunk(2, -1)
    got = module.gated(gate, up, activation)
    assert got.dtype == kind and off(got.cpu().double(), plain_gate(gate.cpu(), up.cpu(), activation)) < 2 * BOUND[kind]


@pytest.mark.parametrize("module", BOTH)
@pytest.mark.parametrize(
    "shape, kind, rows",
    pairs([(1, 1, 1, 1, 2), (2, 6, 2, 9, 16), (3, 5, 5, 4, 48), (2, 8, 1, 3, 128)], BOUND, ["own", "shared"]),
    ids=str,
)
def test_rotate_heads(module, shape, kind, rows):
    (batch, heads, kv_heads, n, dim), _ = shape, torch.manual_seed(sum(shape))
    joined = drawn(batch, n, (heads + kv_heads) * dim, kind=kind)
    queries, keys = (
        part.view(batch, n, -1, dim).transpose(1, 2) for part in joined.split([heads * dim, kv_heads * dim], -1)
    )
    cos, sin = (drawn(batch if rows == "own" else 1, n, dim, kind=kind) for _ in range(2))
    for got, x in zip(module.rotate_heads(queries, keys, cos, sin), (queries, keys), strict=True):
        assert got.dtype == kind and got.shape == x.shape
        assert off(got.cpu().double(), plain_rotation(x, cos, sin)) < BOUND[kind]


def test_nothing_is_computed_for_no_tokens():
    empty = torch.empty(1, 0, 16, device=DEVICE)
    assert layer_ops.rms_norm(empty, torch.ones(16, device=DEVICE), 1e-6).shape == empty.shape
