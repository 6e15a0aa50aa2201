"""RoPE with given angles, of all channels or the first ones."""

import torch
import triton.language as tl

from kvkeep.kernels.triton.common import cdiv, kernel, pow2
from kvkeep.kernels.triton.tiles import load_rows, store_rows

TOKENS = 16  # per program


def apply_angles(vectors, cos, sin, interleaved, dtype):
    """Do what the reference does; vectors [heads, n, dim] with last stride 1, angles [n, pairs] or [heads, n, pairs]"""
    (heads, n, dim), pairs = vectors.shape, cos.shape[-1]
    output, rest = torch.empty(heads, n, dim, dtype=dtype, device=vectors.device), dim - 2 * pairs
    _apply_angles[heads * cdiv(n, TOKENS),](
        vectors, cos, sin, output, *vectors.stride()[:2], n * pairs if cos.ndim == 3 else 0, n, heads, dim, pairs,
        interleaved, rest > 0, TOKENS, pow2(pairs), pow2(max(1, rest)), num_warps=4,
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
