"""Jensen–Shannon distance of each query's attention from that of the window's first, or of its predecessor (IntentKV).

No attention row is stored. Two passes over the keys: the first finds every query's log-sum-exp, the second sums each
key's term of the divergence, split over the keys.
"""

import triton
import triton.language as tl

from kvkeep.kernels.triton.column_mass import log_sum_exp
from kvkeep.kernels.triton.common import cdiv, floats, kernel, padded
from kvkeep.kernels.triton.tiles import attention_logits, dot, load_rows

KEYS = 64  # per block
PROGRAMS = 2048  # enough to fill a large GPU, with an even end


def js_distance(queries, keys, positions, seq_len, smooth, scale, softcap=None, sink_logits=None, stepwise=False):
    """Do what the reference does, for windows small enough that one program holds all w queries."""
    heads, w, dim = queries.shape
    kv_heads, n, _ = keys.shape
    queries, keys, positions = queries.contiguous(), keys.contiguous(), positions.contiguous()
    lse = log_sum_exp(queries, keys, positions, seq_len, scale, softcap)  # without the sink: these rows sum to 1
    splits = max(1, min(cdiv(n, 4 * KEYS), PROGRAMS // heads))
    parts = floats(queries, heads, splits, w)
    _divergence[heads, splits](
        queries, keys, positions, lse, sink_logits, parts, seq_len - w, w, n, heads // kv_heads, dim, scale, softcap,
        smooth, splits, stepwise, padded(dim), padded(w), KEYS, num_warps=4, num_stages=2,
    )  # fmt: skip
    return parts.sum(1).sqrt()


@kernel(do_not_specialize=["before", "w", "n", "smooth", "splits"])
def _divergence(
    queries, keys, positions, lse, sink_logits, parts, before, w, n, group, dim, scale, softcap, smooth, splits,
    STEPWISE: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    head, split, query_ids = tl.program_id(0), tl.program_id(1), tl.arange(0, ROWS)
    query = load_rows(queries + (head * w + query_ids).to(tl.int64) * dim, query_ids < w, dim, DIM)
    query_lse = tl.load(lse + head * w + query_ids, mask=query_ids < w, other=float("inf"))
    key_mass = tl.where(query_lse == float("inf"), 0.0, 1.0)  # attention of a row on keys, without the sink
    if sink_logits is not None:
        key_mass = key_mass / (1 + tl.exp(tl.load(sink_logits + head).to(tl.float32) - query_lse))
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
        k = load_rows(key_base + tokens.to(tl.int64) * dim, valid, dim, DIM)
        position = tl.load(key_positions + tokens, mask=valid, other=2147483647)
        logits = attention_logits(query, tl.trans(k), scale, softcap)
        seen = position[None, :] <= (before + query_ids)[:, None]
        probs = tl.where(seen, tl.exp(logits - query_lse[:, None]), 0.0)
        scaled = probs * key_mass[:, None]
        smoothed = dot(band.to(tl.bfloat16), scaled) / band_mass[:, None]
        if STEPWISE:
            previous = dot(prev_band.to(tl.bfloat16), scaled) / prev_mass[:, None]
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
