"""Attention over ragged caches, and the copies that fill them, in torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention as sdpa

from kvkeep.kernels.torch.scoring import masked_logits, probabilities, softmax

DenseAttention = Callable[[Tensor, Tensor, Tensor, float], Tensor]  # queries, keys, values, scale


def masked_chunk_attention(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Attention of the last q of n tokens over all of them.

    queries [rows, heads, q, dim], keys and values [rows, kv_heads, n, dim] -> [rows, heads, q, dim]
    """
    q, n, grouped = queries.shape[2], keys.shape[2], queries.shape[1] != keys.shape[1]
    if q == n:
        return sdpa(queries, keys, values, is_causal=True, scale=scale, enable_gqa=grouped)
    mask = causal_lower_right(q, n, queries.device)
    return sdpa(queries, keys, values, attn_mask=mask, scale=scale, enable_gqa=grouped)


def causal_lower_right(q: int, n: int, device: torch.device) -> Tensor:
    """Causal mask of the last q of n tokens: query i sees the first n - q + i + 1. [q, n] bool"""
    return torch.ones(q, n, dtype=torch.bool, device=device).tril(n - q)


def sdpa_backend(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> SDPBackend | None:
    """The kernel in which torch computes attention in half precision without a mask; None where it has none."""
    if queries.dtype not in (torch.float16, torch.bfloat16) or queries.requires_grad:
        return None
    grouped = queries.shape[1] != keys.shape[1]
    choice = torch._fused_sdp_choice(queries, keys, values, None, 0.0, False, scale=scale, enable_gqa=grouped)
    kinds = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION
    return next((kind for kind in kinds if kind.value == choice), None)


def without_lse(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> None:
    """Return nothing: no kernel returns log-sum-exps, and a caller that needs them computes them."""


def joined_attention(
    queries: Tensor,
    held_keys: Tensor,
    held_values: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    dense: DenseAttention = masked_chunk_attention,
) -> Tensor:
    """Attention of new tokens, over all that are held and causally over their own.

    queries [rows, heads, q, dim], held [rows, kv_heads, n, dim], keys and values [rows, kv_heads, q, dim]
    -> [rows, heads, q, dim]
    """
    return dense(queries, torch.cat([held_keys, keys], 2), torch.cat([held_values, values], 2), scale)


def decode_attention_with_logits(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    softcap: float | None,
    sink_logits: Tensor | None,
    masked: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of one query per row where all KV heads hold the same number of tokens, with its logits.

    queries [rows, heads, 1, dim], keys and values [rows, kv_heads, n, dim], masked [rows, kv_heads, 1, n]
    -> output [rows, heads, 1, dim], logits [rows, kv_heads, group, n] float32
    """
    rows, heads, _, dim = queries.shape
    grouped = (queries * scale).to(keys.dtype).reshape(rows, keys.shape[1], -1, dim)
    logits = (grouped @ keys.transpose(-1, -2)).float()
    if softcap is not None:
        logits = (logits / softcap).tanh() * softcap
    if masked is not None:
        logits = logits.masked_fill(masked, float("-inf"))
    probs = softmax(logits[:, :, :, None], sink_logits)[:, :, :, 0]
    output = probs.to(values.dtype) @ values
    return output.reshape(rows, heads, 1, -1).to(queries.dtype), logits


def dense_attention(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float | None, sink_logits: Tensor | None
) -> Tensor:
    """The output of `decode_attention_with_logits` alone."""
    if softcap is None and sink_logits is None:
        return _dense_sdpa(queries.to(keys.dtype), keys, values.to(keys.dtype), scale).to(queries.dtype)
    return decode_attention_with_logits(queries, keys, values, scale, softcap, sink_logits)[0]


def segment_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    segments: Sequence[tuple[int, int]],
    new_counts: Sequence[int],
    scale: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    dense: DenseAttention = masked_chunk_attention,
) -> Tensor:
    """Attention of new tokens over a flat ragged cache whose segments already end with their own keys.

    segments: (start, length) of every (row, KV head), row by row; new_counts: of each row's queries the last so many
    are tokens, the others are padding and give zeros; dense: computes several queries over segments of one length
    queries [rows, heads, q, dim], keys and values [slots, dim] -> [rows, heads, q, dim]
    """
    rows, heads, q, dim = queries.shape
    kv_heads = len(segments) // rows
    dtype, queries, values = queries.dtype, queries.to(keys.dtype), values.to(keys.dtype)
    sdpa_suffices = softcap is None and sink_logits is None
    stride = uniform_stride(segments)
    fits = stride and segments[-1][0] + stride <= len(keys)
    if sdpa_suffices and fits and all(count == q for count in new_counts):
        length = segments[0][1]
        dense_keys, dense_values = (
            t[segments[0][0] :][: len(segments) * stride].view(rows, kv_heads, stride, -1)[:, :, :length]
            for t in (keys, values)
        )
        return _dense_sdpa(queries, dense_keys, dense_values, scale, dense).to(dtype)
    output = queries.new_zeros(rows, heads, q, values.shape[-1])
    group = heads // kv_heads
    for i, (start, length) in enumerate(segments):
        row, head = divmod(i, kv_heads)
        if not (count := new_counts[row]):
            continue
        mine = slice(head * group, (head + 1) * group)
        query = queries[row, mine, q - count :]
        key, value = keys[start : start + length], values[start : start + length]
        sink = None if sink_logits is None else sink_logits[mine]
        output[row, mine, q - count :] = _single_head(query, key, value, scale, softcap, sink)
    return output.to(dtype)


def padded_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    scale: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    logits_out: Tensor | None = None,
) -> Tensor:
    """Attention over a padded batch: each KV head uses its first `lengths` slots.

    queries [rows, heads, 1, dim], keys and values [rows, kv_heads, size, dim], lengths [rows, kv_heads]
    -> [rows, heads, 1, dim]
    logits_out [rows, heads, size] float32: -inf, and filled up to `lengths`
    """
    unused = torch.arange(keys.shape[2], device=keys.device) >= lengths[..., None, None]
    output, logits = decode_attention_with_logits(queries, keys, values, scale, softcap, sink_logits, unused)
    if logits_out is not None:
        logits_out.copy_(logits.detach().flatten(1, 2))
    return output


def ragged_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    lengths: Tensor,
    longest: int,
    scale: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    lse_out: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Attention over a flat buffer with one segment, of any size, per row and KV head.

    queries [rows, heads, q, dim], keys and values [slots, dim], starts and lengths [rows, kv_heads], none longer than
    `longest` -> [rows, heads, q, dim]
    lse_out: [rows or more, heads, places] and a place of each row, where the log-sum-exps of its one query are written
    """
    softmax, rows = (scale, softcap, sink_logits), zip(queries, starts.tolist(), lengths.tolist(), strict=True)
    if lse_out is not None:
        for lse, place, query, start, length in zip(*lse_out, queries, starts, lengths, strict=False):
            lse[:, place] = _log_sum_exp(query, keys, start, length, *softmax)
    segments = ((row[None], list(zip(*spans, strict=True))) for row, *spans in rows)
    return torch.cat([segment_attention(row, keys, values, mine, row.shape[2:3], *softmax) for row, mine in segments])


def _log_sum_exp(
    query: Tensor,
    keys: Tensor,
    starts: Tensor,
    lengths: Tensor,
    scale: float,
    softcap: float | None,
    sink_logits: Tensor | None,
) -> Tensor:
    """That of one query's logits, in each head. query [heads, 1, dim], starts and lengths [kv_heads] -> [heads]"""
    index = torch.arange(int(lengths.max()), device=keys.device)
    held = keys[(starts[:, None] + index).clamp_max(len(keys) - 1)]
    logits = masked_logits(query, held, index < lengths[:, None, None], scale, softcap)
    sums = logits.logsumexp(-1).flatten()
    return sums if sink_logits is None else torch.logaddexp(sums, sink_logits.float())


def extend_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    lengths: Tensor,
    counts: Tensor,
    scale: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """`segment_attention` where segments and counts are known to the device. starts, lengths [rows, kv_heads]"""
    segments = list(zip(starts.flatten().tolist(), lengths.flatten().tolist(), strict=True))
    return segment_attention(queries, keys, values, segments, counts.tolist(), scale, softcap, sink_logits)


def append_ragged(
    keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, starts: Tensor, lengths: Tensor, active: Tensor
) -> None:
    """Append one token to each segment of such a buffer in place; lengths grow in active rows only.

    keys and values [slots, dim], new ones [rows, kv_heads, 1, dim], starts and lengths [rows, kv_heads],
    active [rows, 1]
    """
    where = (starts + lengths).flatten()
    for buffer, new in ((keys, new_keys), (values, new_values)):
        buffer.index_copy_(0, where, new[:, :, 0].flatten(0, 1).to(buffer.dtype))
    lengths += active


def copy_segments(
    keys: Tensor, values: Tensor, starts: Tensor, source: tuple[Tensor, Tensor], first: Tensor, ends: Tensor, total: int
) -> None:
    """Copy segments of another such buffer, `source`, into this one, in place.

    starts: of each segment here; first, ends: there [segments]; total: tokens of all segments
    """
    lengths = ends - first
    shifts = torch.stack([first, starts]) - (lengths.cumsum(0) - lengths)
    taken, put = shifts.repeat_interleave(lengths, dim=1, output_size=total) + torch.arange(total, device=ends.device)
    for buffer, other in zip((keys, values), source, strict=True):
        buffer.index_copy_(0, put, other[taken].to(buffer.dtype))


def uniform_stride(segments: Sequence[tuple[int, int]]) -> int:
    """Distance between segments when all are equally long and equally spaced, else 0."""
    (first, length), *rest = segments
    if not rest:
        return length
    stride = rest[0][0] - first
    even = all(n == length and start == first + i * stride for i, (start, n) in enumerate(rest, 1))
    return stride if even else 0


def _dense_sdpa(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, dense: DenseAttention = masked_chunk_attention
) -> Tensor:
    """One batched call: all KV heads of all rows hold the same number of tokens. keys [rows, kv_heads, n, dim]"""
    rows, heads, q, dim = queries.shape
    kv_heads = keys.shape[1]
    if q == 1:  # the heads of a group are more queries over the same keys
        return sdpa(queries.reshape(rows, kv_heads, -1, dim), keys, values, scale=scale).reshape(rows, heads, 1, -1)
    return dense(queries, keys, values, scale)


def _single_head(
    query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float | None, sink_logits: Tensor | None
) -> Tensor:
    """One KV head: query [group, q, dim] over key [n, dim], the last q of which are the queries' own."""
    q, n = query.shape[1], key.shape[0]
    if softcap is None and sink_logits is None:
        if q == 1:
            return sdpa(query.transpose(0, 1)[None], key[None, None], value[None, None], scale=scale)[0].transpose(0, 1)
        mask = causal_lower_right(q, n, query.device)
        key, value = (t.expand(1, len(query), -1, -1) for t in (key, value))
        return sdpa(query[None], key, value, attn_mask=mask, scale=scale)[0]
    allowed = causal_lower_right(q, n, query.device)[None]
    return probabilities(query, key[None], allowed, scale, softcap, sink_logits)[0].to(value.dtype) @ value
