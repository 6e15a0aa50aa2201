"""Reference implementations in torch: attention probabilities for scorers, attention over ragged caches, clustering."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad
from torch.nn.functional import scaled_dot_product_attention as sdpa

from kvkeep.kernels.chunk_attention import causal_lower_right, chunk_attention

BLOCK_PROBS = {"cpu": 2**22}  # attention probabilities held while `column_mass` sums them: what a CPU's cache holds
BLOCK_PROBS_GPU = 2**26  # 256 MB
BLOCK_TOKENS = 1024  # tokens per block where several passes over a block follow
CHUNK_LOGITS = 2**25  # held at a time by `chunk_mass`


def probabilities(
    queries: Tensor,
    keys: Tensor,
    allowed: Tensor,
    scale: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    allow_fully_masked: bool = False,
) -> Tensor:
    """Attention probabilities in float32; with `allow_fully_masked`, zeros for a query whose keys are all masked.

    queries [heads, w, dim], keys [kv_heads, n, dim], sink_logits [heads] -> [kv_heads, group, w, n]
    allowed [kv_heads, w, m]: mask of the last m keys; earlier ones are visible to all queries
    """
    logits = masked_logits(queries, keys, allowed, scale, softcap)
    if sink_logits is not None:
        extra = sink_logits.float().view(logits.shape[0], logits.shape[1], 1, 1).expand(*logits.shape[:-1], 1)
        return torch.cat([logits, extra], dim=-1).softmax(-1)[..., :-1]
    return logits.softmax(-1).nan_to_num_(0.0) if allow_fully_masked else logits.softmax(-1)


def masked_logits(queries: Tensor, keys: Tensor, allowed: Tensor, scale: float, softcap: float | None = None) -> Tensor:
    """Scaled (and capped) logits in float32, -inf where not allowed. Shapes as in `probabilities`."""
    kv_heads, group = keys.shape[0], queries.shape[0] // keys.shape[0]
    grouped = (queries.float() * scale).reshape(kv_heads, -1, queries.shape[-1])
    with torch.autocast(keys.device.type, enabled=False):
        logits = (grouped @ keys.float().transpose(1, 2)).view(kv_heads, group, queries.shape[1], -1)
    if softcap is not None:
        logits = (logits / softcap).tanh_().mul_(softcap)
    if allowed.shape[-1]:
        logits[..., -allowed.shape[-1] :].masked_fill_(~allowed[:, None], float("-inf"))
    return logits


def query_block(queries: Tensor, n: int) -> int:
    """Of the queries [heads, q, dim], so many at a time, where each has n probabilities."""
    most = BLOCK_PROBS.get(queries.device.type, BLOCK_PROBS_GPU)
    return max(16, min(256, most // (queries.shape[0] * n) // 16 * 16))


def column_mass(
    queries: Tensor,
    keys: Tensor,
    positions: Tensor,
    seq_len: int,
    scale: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    weights: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """Attention each key receives, summed over queries, averaged over the group, without a matrix of queries × keys.

    Queries are at positions `seq_len - q … seq_len - 1` and come in blocks; a block skips the keys after it.
    queries [heads, q, dim], keys [kv_heads, n, dim], positions [kv_heads, n] -> [kv_heads, n] float32
    weights [heads, q]: of each query's attention; lse [heads, q]: log-sum-exp of its logits, used by the kernel only
    """
    q, n = queries.shape[1], keys.shape[1]
    block = query_block(queries, n)
    mass = keys.new_zeros(keys.shape[0], n, dtype=torch.float32)
    keys = keys.float().transpose(1, 2).contiguous().transpose(1, 2)  # layout for products with many small blocks
    uniform = bool((positions[:, -1] == n - 1).all())  # nothing was evicted: only a block's own keys are masked
    allow_fully_masked = not uniform  # all keys that a query could see may be evicted
    ahead = q - min(q, block)  # keys the first block cannot see, as the newest q keys are the queries' own
    for start in range(0, q, block):
        part = queries[:, start : start + block]
        reach = n - max(0, ahead - start)
        where = torch.arange(seq_len - q + start, seq_len - q + start + part.shape[1], device=keys.device)
        newest = positions[:, reach - part.shape[1] : reach] if uniform else positions[:, :reach]
        allowed = newest[:, None] <= where[:, None]
        probs = probabilities(part, keys[:, :reach], allowed, scale, softcap, sink_logits, allow_fully_masked)
        if weights is not None:
            probs *= weights[:, start : start + block].view(*probs.shape[:3], 1)
        mass[:, :reach] += sum_over_queries(probs)
    return mass


def column_maximum(
    queries: Tensor,
    moved: Tensor,
    keys: Tensor,
    sinks: Tensor,
    scale: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    near: int | None = None,
) -> Tensor:
    """The most attention each key of a chunk gets from any query of it, or query head, when the chunk is read again.

    One softmax of each query: `moved` over sinks and keys, `queries` over the keys up to their own, which stand for the
    second reading so far. Queries come in blocks.
    near: only queries of tokens at most so far from the key's count; None: all
    queries and moved [heads, m, dim], keys [kv_heads, m, dim], sinks [kv_heads, s, dim] -> [kv_heads, m] float32
    """
    m, count, kv_heads = queries.shape[1], sinks.shape[1], len(keys)
    reach, places = m if near is None else near, torch.arange(m, device=keys.device)
    block = query_block(queries, m)
    all_keys, all_visible = torch.cat([sinks, keys], 1).float(), keys.new_ones(1, 1, 0, dtype=torch.bool)
    highest = keys.new_full((kv_heads, m), -torch.inf, dtype=torch.float32)
    for start in range(0, m, block):
        end = min(start + block, m)
        own = all_visible.new_ones(1, end - start, end - start).tril()
        second = masked_logits(moved[:, start:end], all_keys, all_visible, scale, softcap)
        first = masked_logits(queries[:, start:end], all_keys[:, count : count + end], own, scale, softcap)
        lse = torch.logaddexp(first.logsumexp(-1), second.logsumexp(-1))
        if sink_logits is not None:
            lse = torch.logaddexp(lse, sink_logits.float().view(kv_heads, -1, 1))
        low, high = max(0, start - reach), min(m, end + reach)
        far = (places[start:end, None] - places[low:high]).abs() > reach
        second = second[..., count + low : count + high].sub_(lse[..., None]).masked_fill_(far, -torch.inf)
        highest[:, low:high] = torch.maximum(highest[:, low:high], second.flatten(1, 2).amax(1))
    return highest.exp()


def repeated_attention(
    queries: Tensor,
    own_keys: Tensor,
    keys: Tensor,
    sinks: Tensor,
    scale: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    near: int | None = None,
    key_weights: Tensor | None = None,
    query_weights: Tensor | None = None,
    norm: int = 0,
) -> Tensor:
    """The attention each of `keys` gets from tokens that are fed after them: the most of any query and query head.

    norm: of all of them, in the place of the most (0): 1: their sum, 2: the root of the sum of squares
    One softmax of each query, over sinks, keys, and its own tokens' keys up to itself. Queries come in blocks.
    near: the last m queries are of the keys' tokens again; those of tokens at most so far from a key count; None: all
    queries [heads, q, dim], own_keys [kv_heads, q, dim], keys [kv_heads, m, dim], sinks [kv_heads, s, dim]
    key_weights [heads, m], query_weights [q]: factors of the attention -> [kv_heads, m] float32
    """
    (kv_heads, m, _), q, count = keys.shape, queries.shape[1], sinks.shape[1]
    all_keys = torch.cat([sinks, keys, own_keys], 1).float()
    block, highest = query_block(queries, all_keys.shape[1]), all_keys.new_zeros(kv_heads, m)
    for start in range(0, q, block):
        end = min(start + block, q)
        own = torch.ones(1, end - start, end - start, dtype=torch.bool, device=keys.device).tril()
        visible = all_keys[:, : count + m + end]
        rows = probabilities(queries[:, start:end], visible, own, scale, softcap, sink_logits)[..., count : count + m]
        if key_weights is not None:
            rows = rows * key_weights.view(kv_heads, -1, 1, m)
        if query_weights is not None:
            rows = rows * query_weights[start:end, None]
        if near is not None:
            again = torch.arange(start, end, device=keys.device) - (q - m)
            rows = rows.masked_fill((again[:, None] - torch.arange(m, device=keys.device)).abs() > near, 0)
        if norm:
            highest += rows.pow(norm).sum((1, 2))
        else:
            highest = torch.maximum(highest, rows.flatten(1, 2).amax(1))
    return highest.pow(1 / norm) if norm else highest


def chunk_mass(queries: Tensor, keys: Tensor, size: int) -> Tensor:
    """Attention each key receives from the queries of its own chunk, summed over them, averaged over the group.

    Every query sees its whole chunk, without a scale. Some chunks at a time.
    queries [heads, m, dim], keys [kv_heads, m, dim], m a multiple of the chunks' size -> [kv_heads, m] float32
    """
    together = size * max(1, CHUNK_LOGITS // (len(queries) * size**2))
    received = []
    for some, theirs in zip(queries.split(together, 1), keys.split(together, 1), strict=True):
        grouped = some.float().unflatten(1, (-1, size)).unflatten(0, (len(keys), -1))
        keys_of_each = theirs.float().unflatten(1, (-1, size))[:, None]
        received.append((grouped @ keys_of_each.transpose(-1, -2)).softmax(-1).sum(-2).mean(1).flatten(1))
    return torch.cat(received, 1)


def quadratic_form(keys: Tensor, matrices: Tensor, vectors: Tensor) -> Tensor:
    """k M kᵀ + v kᵀ of each key k, for every query head of its group, in float32.

    keys [kv_heads, n, dim], matrices [heads, dim, dim], vectors [heads, dim] -> [heads, n]
    """
    keys, output = keys.float(), keys.new_empty(len(matrices), keys.shape[1], dtype=torch.float32)
    group = len(matrices) // len(keys)
    for member in range(group):
        products = torch.baddbmm(vectors[member::group, None], keys, matrices[member::group])
        output[member::group] = torch.linalg.vecdot(products, keys)
    return output


def sum_over_queries(rows: Tensor) -> Tensor:
    """Attention summed over queries, averaged over the group. [kv_heads, group, w, n] -> [kv_heads, n]"""
    flat = rows.flatten(1, 2)
    return torch.bmm(flat.new_full((len(flat), 1, flat.shape[1]), 1 / rows.shape[1]), flat)[:, 0]


def decode_attention_with_logits(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    softcap: float | None,
    sink_logits: Tensor | None,
    masked: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of one query per row where all key heads hold the same number of tokens, with its logits.

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
    if sink_logits is None:
        probs = logits.softmax(-1)
    else:
        extra = sink_logits.float().view(1, keys.shape[1], -1, 1).expand(rows, -1, -1, 1)
        probs = torch.cat([logits, extra], -1).softmax(-1)[..., :-1]
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
) -> Tensor:
    """Attention of new tokens over a flat ragged cache whose segments already end with their own keys.

    segments: (start, length) of every (row, key head), row by row; new_counts: of each row's queries the last so many
    are tokens, the others are padding and give zeros.
    queries [rows, heads, q, dim], keys and values [slots, dim] -> [rows, heads, q, dim]
    """
    rows, heads, q, dim = queries.shape
    kv_heads = len(segments) // rows
    dtype, queries, values = queries.dtype, queries.to(keys.dtype), values.to(keys.dtype)
    sdpa_suffices = softcap is None and sink_logits is None
    if sdpa_suffices and (stride := uniform_stride(segments)) and all(count == q for count in new_counts):
        length = segments[0][1]
        dense_keys, dense_values = (
            t[segments[0][0] :][: len(segments) * stride].view(rows, kv_heads, stride, -1)[:, :, :length]
            for t in (keys, values)
        )
        return _dense_sdpa(queries, dense_keys, dense_values, scale).to(dtype)
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
    """Attention over a padded batch: each key head uses its first `lengths` slots, ending with the queries' keys.

    queries [rows, heads, q, dim], keys and values [rows, kv_heads, size, dim], lengths [rows, kv_heads]
    -> [rows, heads, q, dim]
    logits_out [rows, heads, size] float32, of one query each: -inf, and filled up to `lengths`
    """
    rows, heads, q, dim = queries.shape
    kv_heads, size = keys.shape[1:3]
    if logits_out is not None:
        unused = torch.arange(size, device=keys.device) >= lengths[..., None, None]
        output, logits = decode_attention_with_logits(queries, keys, values, scale, softcap, sink_logits, unused)
        logits_out.copy_(logits.detach().flatten(1, 2))
        return output
    ahead = torch.arange(q - 1, -1, -1, device=keys.device)  # new tokens after each query
    seen = torch.arange(size, device=keys.device) < (lengths[..., None] - ahead)[..., None]
    seen = seen[:, :, None].expand(-1, -1, heads // kv_heads, -1, -1).reshape(rows, kv_heads, -1, size)
    grouped = queries.to(keys.dtype).reshape(rows, kv_heads, -1, dim)
    if softcap is None and sink_logits is None:
        output = sdpa(grouped, keys, values.to(keys.dtype), attn_mask=seen, scale=scale)
    else:
        logits = (grouped @ keys.transpose(-1, -2)).float() * scale
        logits = (logits if softcap is None else (logits / softcap).tanh() * softcap).masked_fill(~seen, float("-inf"))
        if sink_logits is not None:
            extra = sink_logits.float().view(1, kv_heads, -1, 1).repeat_interleave(q, 2).expand(rows, -1, -1, -1)
            logits = torch.cat([logits, extra], -1)
        output = logits.softmax(-1)[..., :size].to(values.dtype) @ values
    return output.reshape(rows, heads, q, -1).to(queries.dtype)


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
) -> Tensor:
    """`padded_attention` over a flat buffer with one segment, of any size, per row and key head.

    queries [rows, heads, q, dim], keys and values [slots, dim], starts and lengths [rows, kv_heads], none longer than
    `longest` -> [rows, heads, q, dim]
    """
    how, rows = (scale, softcap, sink_logits), zip(queries, starts.tolist(), lengths.tolist(), strict=True)
    segments = ((row[None], list(zip(*spans, strict=True))) for row, *spans in rows)
    return torch.cat([segment_attention(row, keys, values, mine, row.shape[2:3], *how) for row, mine in segments])


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


def _dense_sdpa(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """One batched call: all key heads of all rows hold the same number of tokens. keys [rows, kv_heads, n, dim]"""
    rows, heads, q, dim = queries.shape
    kv_heads = keys.shape[1]
    if q == 1:  # the heads of a group are more queries over the same keys
        return sdpa(queries.reshape(rows, kv_heads, -1, dim), keys, values, scale=scale).reshape(rows, heads, 1, -1)
    return chunk_attention(queries, keys, values, scale)


def _single_head(
    query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float | None, sink_logits: Tensor | None
) -> Tensor:
    """One key head: query [group, q, dim] over key [n, dim], the last q of which are the queries' own."""
    q, n = query.shape[1], key.shape[0]
    if softcap is None and sink_logits is None:
        if q == 1:
            return sdpa(query.transpose(0, 1)[None], key[None, None], value[None, None], scale=scale)[0].transpose(0, 1)
        mask = causal_lower_right(q, n, query.device)
        return sdpa(
            query[None],
            key.expand(1, len(query), -1, -1),
            value.expand(1, len(query), -1, -1),
            attn_mask=mask,
            scale=scale,
        )[0]
    allowed = causal_lower_right(q, n, query.device)[None]
    return probabilities(query, key[None], allowed, scale, softcap, sink_logits)[0].to(value.dtype) @ value


def two_region_attention(
    queries: Tensor,
    rotated: Tensor,
    far: Callable[[], tuple[Tensor, Tensor]] | None,
    near: tuple[Tensor, Tensor],
    scale: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    band: int = 0,
    prior_mass: Tensor | None = None,
    per_head: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`rotated` queries over retrieved (far) keys, `queries` over near keys that end with their own; one softmax.

    queries, rotated [heads, w, dim]; far and near: keys and values [kv_heads, n, dim]; far is called once the products
    with near keys are launched, so that the gather overlaps with them
    -> output [heads, w, dim]; with a band, the attention each near key receives from the `band` queries after it,
    averaged over all heads, on top of prior_mass [m] of the first keys: [n]; per_head: of each query head, [heads, n]
    """
    (near_keys, near_values), (heads, w, dim), n = near, queries.shape, near[0].shape[1]
    kv_heads = len(near_keys)
    grouped = [(q * scale).to(near_keys.dtype).reshape(kv_heads, -1, dim) for q in (queries, rotated)]
    logits = grouped[0] @ near_keys.transpose(1, 2)
    values = near_values
    if far is not None:
        far_keys, far_values = far()
        logits = torch.cat([grouped[1] @ far_keys.transpose(1, 2), logits], -1)
        values = torch.cat([far_values, near_values], 1)
    if softcap is not None:
        logits = (logits.float() / softcap).tanh_().mul_(softcap)
    if w > 1:
        own = torch.ones(w, w, dtype=torch.bool, device=queries.device).triu_(1)
        logits.view(kv_heads, -1, w, logits.shape[-1])[..., -w:].masked_fill_(own, float("-inf"))
    if sink_logits is not None:
        extra = sink_logits.float().view(kv_heads, -1, 1).expand(-1, -1, w).reshape(kv_heads, -1, 1)
        probs = torch.cat([logits.float(), extra], -1).softmax(-1)[..., :-1]
    else:
        probs = logits.softmax(-1, dtype=torch.float32)
    output = (probs.to(values.dtype) @ values).view(heads, w, -1).to(queries.dtype)
    rows = probs[..., -n:].reshape(heads, w, n)
    return output, _band_mass(rows if per_head else rows.mean(0), band, prior_mass) if band else None


def _band_mass(probs: Tensor, band: int, prior_mass: Tensor | None) -> Tensor:
    """Sum over queries 1 … band after each key. probs [..., w, n], the queries' own keys last -> [..., n]"""
    w, n = probs.shape[-2:]
    mass = probs.tril_(n - w - 1).triu_(n - w - band).sum(-2)
    if prior_mass is not None:
        mass[..., : prior_mass.shape[-1]] += prior_mass
    return mass


def entropy(probs: Tensor) -> Tensor:
    """-Σ p ln p over the last axis; several times faster than torch.special.entr on a CPU."""
    return -torch.linalg.vecdot(probs, probs.clamp_min(1e-38).log_())


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
    """`row_js_distance` of the attention of the newest w queries. Shapes as in `column_mass`."""
    seen = positions[:, None] <= torch.arange(seq_len - queries.shape[1], seq_len, device=keys.device)[:, None]
    rows = probabilities(queries, keys, seen, scale, softcap, sink_logits, allow_fully_masked=True)
    return row_js_distance(rows.flatten(0, 1), smooth, stepwise)


def row_js_distance(rows: Tensor, smooth: int, stepwise: bool = False) -> Tensor:
    """Square root of the Jensen–Shannon divergence (natural log) of every smoothed row from the first.

    A row is smoothed with its smooth - 1 successors. JSD(p, q) = H((p + q) / 2) - (H(p) + H(q)) / 2, summed over
    blocks that fit a CPU's cache. stepwise: of every row from its predecessor; 0 for the first.
    rows [heads, w, n] -> [heads, w]
    """
    band = torch.ones(rows.shape[1], rows.shape[1], device=rows.device).triu().tril(smooth - 1)
    weights = band / (band @ rows.sum(-1, keepdim=True)).clamp_min(1e-30)
    own, mixed = rows.new_zeros(rows.shape[:2]), rows.new_zeros(rows.shape[:2])
    for part in rows.split(BLOCK_TOKENS, -1):
        smoothed = weights @ part
        own += entropy(smoothed)
        mixed += entropy((smoothed + _compared_with(smoothed, stepwise)).mul_(0.5))
    return (mixed - (own + _compared_with(own, stepwise)) / 2).clamp_min(0).sqrt()


def _compared_with(rows: Tensor, stepwise: bool) -> Tensor:
    """The first row, or each row's predecessor (the first row has itself). rows [heads, w, ..]"""
    return torch.cat([rows[:, :1], rows[:, :-1]], 1) if stepwise else rows[:, :1]


def assign(keys: Tensor, centres: Tensor, sizes: Tensor | None = None) -> Tensor:
    """The centre of highest cosine, ties to the lower index; a centre of size 0 gets no key.

    keys [kv_heads, n, dim], centres [kv_heads, c, dim], sizes [kv_heads, c] -> [kv_heads, n] int64
    """
    keys, centres = keys.float(), normalize(centres.float(), dim=-1)
    if sizes is not None:  # an extra channel lowers their cosine
        keys, centres = pad(keys, (0, 1), value=1.0), torch.cat([centres, -1e30 * (sizes == 0)[..., None]], -1)
    blocks = keys.split(4 * BLOCK_TOKENS, 1)  # a long text has many centres: bound the product's size
    return torch.cat([(block @ centres.transpose(1, 2)).max(-1).indices for block in blocks], 1)


def means(keys: Tensor, member: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The mean key of each cluster, zeros for an empty one, and its size. Keys with member >= count are left out.

    keys [kv_heads, n, dim], member [kv_heads, n] -> [kv_heads, count, dim] float32, [kv_heads, count] int64
    """
    keys, mine = keys.float(), member.clamp_max(count)
    total = keys.new_zeros(len(keys), count + 1, keys.shape[-1]).scatter_add(1, mine[..., None].expand_as(keys), keys)
    size = mine.new_zeros(len(keys), count + 1).scatter_add(1, mine, torch.ones_like(mine))
    return (total / size.clamp_min(1)[..., None])[:, :count], size[:, :count]


def key_similarity(keys: Tensor, token_mask: Tensor, kappa: int) -> Tensor:
    """Mean cosine of a key with its neighbours up to kappa away, itself included; padding does not count.

    keys [kv_heads, n, dim], token_mask [kv_heads, n] bool -> [kv_heads, n] float32
    """
    unit = normalize(keys.float(), dim=-1) * token_mask[..., None]
    total, near = unit.square().sum(-1), token_mask.float()
    count = near.clone()
    for step in range(1, min(kappa, keys.shape[1] - 1) + 1):
        pairs = torch.linalg.vecdot(unit[:, step:], unit[:, :-step])
        for sums, one, other in ((total, pairs, pairs), (count, near[:, :-step], near[:, step:])):
            sums[:, step:] += one
            sums[:, :-step] += other
    return total / count.clamp_min(1)
