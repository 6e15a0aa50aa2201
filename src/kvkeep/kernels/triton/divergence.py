"""Jensen–Shannon distance of each query's attention from that of the window's first, or of its predecessor (IntentKV).

No attention row is stored. Two passes over the keys: the first finds every query's log-sum-exp, the second sums each
key's term of the divergence, split over the keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvkeep.kernels.triton.column_mass import log_sum_exp
from kvkeep.kernels.triton.common import INTERPRETED, MIN_BLOCK, cdiv, dot, fast_launch, pow2, softcapped

KEYS = 64  # per block
PROGRAMS = 2048  # enough to fill a large GPU, with an even end


def js_distance(
    queries: Tensor,
    keys: Tensor,
    positions: Tensor,
    seq_len: int,
    smooth: int,
    scale: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    stepwise: bool = False,
) -> Tensor:
    """Do what the reference does, for windows small enough that one program holds all w queries."""
    heads, w, dim = queries.shape
    kv_heads, n, _ = keys.shape
    queries, keys, positions = queries.contiguous(), keys.contiguous(), positions.contiguous()
    lse = log_sum_exp(queries, keys, positions, seq_len, scale, softcap)  # without the sink: these rows sum to 1
    sizes = (seq_len - w, w, n, heads // kv_heads, dim, scale, softcap or 0.0, softcap is not None)
    splits = max(1, min(cdiv(n, 4 * KEYS), PROGRAMS // heads))
    parts = queries.new_empty(heads, splits, w, dtype=torch.float32)
    extra = lse if sink_logits is None else sink_logits.float().contiguous()
    _divergence[heads, splits](
        queries, keys, positions, lse, extra, parts, *sizes, smooth, splits, sink_logits is not None, stepwise,
        INTERPRETED, max(MIN_BLOCK, pow2(dim)), max(MIN_BLOCK, pow2(w)), KEYS, num_warps=4, num_stages=2,
    )  # fmt: skip
    return parts.sum(1).sqrt()


@fast_launch
@triton.jit(do_not_specialize=["before", "w", "n", "smooth", "splits"])
def _divergence(
    queries, keys, positions, lse, sink_logits, parts, before, w, n, group, dim, scale, softcap, CAPPED: tl.constexpr,
    smooth, splits, HAS_SINK: tl.constexpr, STEPWISE: tl.constexpr, WIDEN: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    head, split = tl.program_id(0), tl.program_id(1)
    query_ids, channels = tl.arange(0, ROWS), tl.arange(0, DIM)
    inside_q, rows = (query_ids < w)[:, None] & (channels < dim)[None, :], (head * w + query_ids)[:, None].to(tl.int64)
    query = tl.load(queries + rows * dim + channels[None, :], mask=inside_q, other=0.0)
    query_lse = tl.load(lse + head * w + query_ids, mask=query_ids < w, other=float("inf"))
    key_mass = tl.where(query_lse == float("inf"), 0.0, 1.0)  # attention of a row on keys, without the sink
    if HAS_SINK:
        key_mass = key_mass / (1 + tl.exp(tl.load(sink_logits + head) - query_lse))
    band, band_mass = _smoothing(query_ids, query_ids, key_mass, smooth)
    if STEPWISE:
        prev_band, prev_mass = _smoothing(tl.maximum(query_ids - 1, 0), query_ids, key_mass, smooth)

    kv_head = (head // group).to(tl.int64)
    key_base, key_positions = keys + kv_head * n * dim, positions + kv_head * n
    split_tokens = tl.cdiv(tl.cdiv(n, splits), KEYS) * KEYS
    total = tl.zeros([ROWS], tl.float32)
    for start in range(split * split_tokens, tl.minimum(split * split_tokens + split_tokens, n), KEYS):
        tokens = start + tl.arange(0, KEYS)
        valid = tokens < n
        inside = valid[:, None] & (channels < dim)[None, :]
        k = tl.load(key_base + tokens[:, None].to(tl.int64) * dim + channels[None, :], mask=inside, other=0.0)
        position = tl.load(key_positions + tokens, mask=valid, other=2147483647)
        logits = softcapped(dot(query, tl.trans(k), WIDEN) * scale, softcap, CAPPED)
        seen = position[None, :] <= (before + query_ids)[:, None]
        probs = tl.where(seen, tl.exp(logits - query_lse[:, None]), 0.0)
        scaled = probs * key_mass[:, None]
        smoothed = dot(band.to(tl.bfloat16), scaled, WIDEN) / band_mass[:, None]
        if STEPWISE:
            previous = dot(prev_band.to(tl.bfloat16), scaled, WIDEN) / prev_mass[:, None]
            total += tl.sum(_js_term(smoothed, previous), 1)
        else:
            first = tl.sum(tl.where((query_ids == 0)[:, None], smoothed, 0.0), 0)
            total += tl.sum(_js_term(smoothed, first[None, :]), 1)
    tl.store(parts + (head * splits + split) * w + query_ids, total, mask=query_ids < w)


@triton.jit
def _smoothing(starts, query_ids, key_mass, smooth):
    """Mask of the rows that each smoothed row sums, and their total attention on keys."""
    ahead = query_ids[None, :] - starts[:, None]
    band = tl.where((ahead >= 0) & (ahead < smooth), 1.0, 0.0)
    return band, tl.maximum(tl.sum(band * key_mass[None, :], 1), 1e-30)


@triton.jit
def _js_term(p, q):
    """A key's term: m / 2 · (a ln a + b ln b), m = (p + q) / 2, a = p / m, b = q / m.

    The sum over keys is H(m) - (H(p) + H(q)) / 2, but no small difference of large entropies is taken; with
    a = 1 + d and b = 1 - d, small d are a series: d² + d⁴ / 6 + d⁶ / 15 + d⁸ / 28 + …
    """
    both = p + q
    twice = 2 / tl.maximum(both, 1e-30)
    a, b = p * twice, q * twice
    d = (p - q) * (twice / 2)
    s = d * d
    near = s * (1 + s * (1 / 6 + s * (1 / 15 + s * (1 / 28 + s / 45))))
    far = a * tl.log(tl.maximum(a, 1e-30)) + b * tl.log(tl.maximum(b, 1e-30))
    return both / 4 * tl.where(s < 0.0625, near, far)
