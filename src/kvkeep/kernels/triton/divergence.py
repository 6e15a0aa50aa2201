"""How far the attention of each row of a window lies from its first row's, or from the one's before it (IntentKV).

The rows themselves are never held. Two passes over the keys: the first finds every query's log-sum-exp, the second
sums, key by key, what each adds to the divergence. Split over the keys, then added up.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvkeep.kernels.triton.column_mass import log_sums
from kvkeep.kernels.triton.common import AT_LEAST, INTERPRETED, capped, cdiv, power, product

KEYS = 64  # at a time
PROGRAMS = 2048  # enough to fill a large GPU, and to end together


def distance(
    queries: Tensor,
    keys: Tensor,
    positions: Tensor,
    cursor: int,
    smooth: int,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    stepwise: bool = False,
) -> Tensor:
    """Square root of the Jensen–Shannon divergence (natural log) of every smoothed row of attention from the first.

    Queries stand at `cursor - w … cursor - 1`; a row is smoothed with its smooth - 1 successors. Small windows only:
    all of it is held at once. stepwise: of every row from the one before it, the first's is 0.
    queries [heads, w, dim], keys [kv_heads, n, dim], positions [kv_heads, n] -> [heads, w] float32
    """
    heads, w, dim = queries.shape
    kv_heads, n, _ = keys.shape
    queries, keys, positions = queries.contiguous(), keys.contiguous(), positions.contiguous()
    sums = log_sums(queries, keys, positions, cursor, scale, softcap)  # without the sink: these rows add up to 1
    sums = sums.masked_fill(sums == -torch.inf, torch.inf).contiguous()
    wide = max(AT_LEAST, power(dim))
    how = (cursor - w, w, n, heads // kv_heads, dim, scale, softcap or 0.0, softcap is not None)
    splits = max(1, min(cdiv(n, 4 * KEYS), PROGRAMS // heads))
    parts = queries.new_empty(heads, splits, w, dtype=torch.float32)
    extra = sums if sinks is None else sinks.float().contiguous()
    _divergence[heads, splits](
        queries, keys, positions, sums, extra, parts, *how, smooth, splits, sinks is not None, stepwise, INTERPRETED,
        wide, max(AT_LEAST, power(w)), KEYS, num_warps=4, num_stages=2,
    )  # fmt: skip
    return parts.sum(1).sqrt()


@triton.jit
def _divergence(
    queries, keys, positions, sums, sinks, parts, before, w, n, group, dim, scale, softcap, CAPPED: tl.constexpr,
    smooth, splits, SUNK: tl.constexpr, STEPWISE: tl.constexpr, WIDEN: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    head, split = tl.program_id(0), tl.program_id(1)
    asks, channels = tl.arange(0, ROWS), tl.arange(0, DIM)
    known = (asks < w)[:, None] & (channels < dim)[None, :]
    a = tl.load(queries + (head * w + asks)[:, None].to(tl.int64) * dim + channels[None, :], mask=known, other=0.0)
    below = tl.load(sums + head * w + asks, mask=asks < w, other=float("inf"))
    share = tl.where(below == float("inf"), 0.0, 1.0)  # of its attention that a row gives to keys
    if SUNK:
        share = share / (1 + tl.exp(tl.load(sinks + head) - below))
    band, whole = _band(asks, asks, share, smooth)
    if STEPWISE:
        last_band, last_whole = _band(tl.maximum(asks - 1, 0), asks, share, smooth)

    key_base, stood = keys + (head // group).to(tl.int64) * n * dim, positions + (head // group).to(tl.int64) * n
    stretch = tl.cdiv(tl.cdiv(n, splits), KEYS) * KEYS
    total = tl.zeros([ROWS], tl.float32)
    for start in range(split * stretch, tl.minimum(split * stretch + stretch, n), KEYS):
        tokens = start + tl.arange(0, KEYS)
        real = tokens < n
        inside = real[:, None] & (channels < dim)[None, :]
        k = tl.load(key_base + tokens[:, None].to(tl.int64) * dim + channels[None, :], mask=inside, other=0.0)
        where = tl.load(stood + tokens, mask=real, other=2147483647)
        logits = capped(product(a, tl.trans(k), WIDEN) * scale, softcap, CAPPED)
        seen = where[None, :] <= (before + asks)[:, None]
        chances = tl.where(seen, tl.exp(logits - below[:, None]), 0.0)
        given = chances * share[:, None]
        smoothed = product(band.to(tl.bfloat16), given, WIDEN) / whole[:, None]
        if STEPWISE:
            last = product(last_band.to(tl.bfloat16), given, WIDEN) / last_whole[:, None]
            total += tl.sum(_apart(smoothed, last), 1)
        else:
            first = tl.sum(tl.where((asks == 0)[:, None], smoothed, 0.0), 0)
            total += tl.sum(_apart(smoothed, first[None, :]), 1)
    tl.store(parts + (head * splits + split) * w + asks, total, mask=asks < w)


@triton.jit
def _band(starts, asks, share, smooth):
    """Which rows each smoothed one adds up, from its start on, and what they give to keys together."""
    ahead = asks[None, :] - starts[:, None]
    band = tl.where((ahead >= 0) & (ahead < smooth), 1.0, 0.0)
    return band, tl.maximum(tl.sum(band * share[None, :], 1), 1e-30)


@triton.jit
def _apart(p, q):
    """What a key adds: m / 2 · (a ln a + b ln b), m = (p + q) / 2, a = p / m, b = q / m.

    The sum over keys is H(m) - (H(p) + H(q)) / 2, but no small difference of large entropies is ever taken; with
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
