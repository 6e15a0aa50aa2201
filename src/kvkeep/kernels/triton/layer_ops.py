"""The small operations between a layer's matrix products: each reads its input once and writes its output once."""

import torch
import triton
import triton.language as tl

from kvkeep.kernels.triton.common import cdiv, kernel, pow2
from kvkeep.kernels.triton.tiles import load_rows, store_rows

ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
NORM_BLOCK = 1024  # numbers of a program, at least: short vectors are normalized several at a time
GATE_BLOCK = 2048
ROTATED = 16  # tokens of a program that rotates by given angles


def rms_norm(x, weight, eps, offset=0.0, rounds=True):
    """Do what the reference does, for x [tokens…, dim] or, each head by itself, [rows, n, heads, dim]; last stride 1"""
    dim, heads = x.shape[-1], x.shape[2] if x.ndim == 4 else 1
    vectors = x.reshape(-1, heads, dim)
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = max(1, NORM_BLOCK // pow2(dim))
    _rms_norm[cdiv(len(vectors) * heads, block),](
        vectors, weight, output, *vectors.stride()[:2], len(vectors) * heads, heads, dim, eps, offset, rounds, block,
        pow2(dim), num_warps=8 if dim > 2048 else 4,
    )  # fmt: skip
    return output


def gated(gate, up, activation):
    """Do what the reference does, for last strides of 1"""
    dim = gate.shape[-1]
    output = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    gate, up = gate.reshape(-1, dim), up.reshape(-1, dim)
    _gated[len(gate), cdiv(dim, GATE_BLOCK)](
        gate, up, output, gate.stride(0), up.stride(0), dim, ACTIVATIONS[activation], GATE_BLOCK, num_warps=8,
    )  # fmt: skip
    return output


def rotate_heads(queries, keys, cos, sin):
    """Do what the reference does, for last strides of 1; a token's heads lie beside each other in the result."""
    rows, heads, n, dim = queries.shape
    kv_heads = keys.shape[1]
    outputs = [t.new_empty(rows, n, t.shape[1], dim) for t in (queries, keys)]
    cos, sin = (t.expand(rows, n, dim).contiguous() for t in (cos, sin))
    _rotate_heads[rows * n,](
        queries, keys, cos, sin, *outputs, *queries.stride()[:3], *keys.stride()[:3], n, heads, kv_heads, dim // 2,
        pow2(heads), pow2(kv_heads), pow2(dim // 2), num_warps=4,
    )  # fmt: skip
    return outputs[0].transpose(1, 2), outputs[1].transpose(1, 2)


@kernel(do_not_specialize=["count"])
def _rms_norm(
    x, weight, output, token_stride, head_stride, count, heads, dim, eps, offset, ROUNDS: tl.constexpr,
    BLOCK: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    vectors = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    where = x + (vectors // heads) * token_stride + (vectors % heads) * head_stride
    value = load_rows(where, vectors < count, dim, DIM)
    result = normed(value, weight, dim, eps, offset, ROUNDS, DIM)
    store_rows(output + vectors * dim, result, vectors < count, dim, DIM)


@triton.jit
def normed(vectors, weight, dim, eps, offset, ROUNDS: tl.constexpr, DIM: tl.constexpr):
    """RMS norms in float32. vectors [rows, DIM]"""
    value, channels = vectors.to(tl.float32), tl.arange(0, DIM)
    unit = value * tl.rsqrt(tl.sum(value * value, 1) / dim + eps)[:, None]
    scale = tl.load(weight + channels, mask=channels < dim, other=0.0).to(tl.float32) + offset
    if ROUNDS:
        unit = unit.to(vectors.dtype).to(tl.float32)
    return unit * scale[None, :]


@kernel()
def _gated(gate, up, output, gate_stride, up_stride, dim, KIND: tl.constexpr, BLOCK: tl.constexpr):
    token, channels = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < dim
    g = tl.load(gate + token * gate_stride + channels, mask=inside, other=0.0)
    u = tl.load(up + token * up_stride + channels, mask=inside, other=0.0)
    result = activated(g, KIND).to(tl.float32) * u.to(tl.float32)
    tl.store(output + token * dim + channels, result.to(g.dtype), mask=inside)


@triton.jit
def activated(gate, KIND: tl.constexpr):
    """The activation in float32, rounded to the dtype of the gate."""
    x = gate.to(tl.float32)
    if KIND == 0:
        x = x * _sigmoid(x)
    elif KIND == 1:
        x = x * 0.5 * (1 + tl.erf(x * 0.7071067811865476))
    else:
        x = x * _sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))  # (1 + tanh(y)) / 2 = sigmoid(2y)
    return x.to(gate.dtype)


@triton.jit
def _sigmoid(x):
    return 1 / (1 + tl.exp(tl.minimum(-x, 80.0)))


@kernel(do_not_specialize=["n"])
def _rotate_heads(
    queries, keys, cos, sin, query_output, key_output, query_row, query_head, query_token, key_row, key_head, key_token,
    n, heads, kv_heads, half, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    token, pairs = tl.program_id(0).to(tl.int64), tl.arange(0, HALF)
    row, place, valid = token // n, token % n, pairs < half
    cos, sin = cos + token * 2 * half + pairs, sin + token * 2 * half + pairs
    cos_a = tl.load(cos, mask=valid, other=0.0).to(tl.float32)[None, :]
    cos_b = tl.load(cos + half, mask=valid, other=0.0).to(tl.float32)[None, :]
    sin_a = tl.load(sin, mask=valid, other=0.0).to(tl.float32)[None, :]
    sin_b = tl.load(sin + half, mask=valid, other=0.0).to(tl.float32)[None, :]
    source, target = queries + row * query_row + place * query_token, query_output + token * heads * 2 * half
    _rotate_token(source, target, query_head, heads, half, cos_a, cos_b, sin_a, sin_b, HEADS, HALF)
    source, target = keys + row * key_row + place * key_token, key_output + token * kv_heads * 2 * half
    _rotate_token(source, target, key_head, kv_heads, half, cos_a, cos_b, sin_a, sin_b, KV_HEADS, HALF)


@triton.jit
def _rotate_token(
    source, target, head_stride, heads, half, cos_a, cos_b, sin_a, sin_b, HEADS: tl.constexpr, HALF: tl.constexpr
):
    """All heads of one token."""
    head = tl.arange(0, HEADS)
    source, target, valid = source + head * head_stride, target + head * 2 * half, head < heads
    a = load_rows(source, valid, half, HALF).to(tl.float32)
    b = load_rows(source + half, valid, half, HALF).to(tl.float32)
    store_rows(target, a * cos_a - b * sin_a, valid, half, HALF)
    store_rows(target + half, b * cos_b + a * sin_b, valid, half, HALF)


def apply_angles(vectors, cos, sin, interleaved, dtype):
    """Do what the reference does; vectors [heads, n, dim] with last stride 1, angles [n, pairs] or [heads, n, pairs]"""
    (heads, n, dim), pairs = vectors.shape, cos.shape[-1]
    output, rest = torch.empty(heads, n, dim, dtype=dtype, device=vectors.device), dim - 2 * pairs
    _apply_angles[heads * cdiv(n, ROTATED),](
        vectors, cos, sin, output, *vectors.stride()[:2], n * pairs if cos.ndim == 3 else 0, n, heads, dim, pairs,
        interleaved, rest > 0, ROTATED, pow2(pairs), pow2(max(1, rest)), num_warps=4,
    )  # fmt: skip
    return output


@kernel(do_not_specialize=["n"])
def _apply_angles(
    vectors, cos, sin, output, head_stride, token_stride, angle_head, n, heads, dim, pairs, INTERLEAVED: tl.constexpr,
    PARTIAL: tl.constexpr, TOKENS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    # heads of the same tokens follow each other, and find their angles in the cache
    head = (tl.program_id(0) % heads).to(tl.int64)
    tokens = (tl.program_id(0) // heads * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    valid, pair = tokens < n, tl.arange(0, PAIRS)
    source, target = vectors + head * head_stride + tokens * token_stride, output + (head * n + tokens) * dim
    inside = valid[:, None] & (pair < pairs)[None, :]
    first, second = pair, pair + pairs
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    angle = head * angle_head + tokens * pairs
    c, s = load_rows(cos + angle, valid, pairs, PAIRS), load_rows(sin + angle, valid, pairs, PAIRS)
    a = tl.load(source[:, None] + first[None, :], mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source[:, None] + second[None, :], mask=inside, other=0.0).to(tl.float32)
    kind = output.dtype.element_ty
    tl.store(target[:, None] + first[None, :], (a * c - b * s).to(kind), mask=inside)
    tl.store(target[:, None] + second[None, :], (b * c + a * s).to(kind), mask=inside)
    if PARTIAL:
        rest = load_rows(source + 2 * pairs, valid, dim - 2 * pairs, REST)
        store_rows(target + 2 * pairs, rest, valid, dim - 2 * pairs, REST)
