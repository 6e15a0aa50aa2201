"""Attention in plain torch: the probabilities a scorer votes with, and the output over a ragged cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad
from torch.nn.functional import scaled_dot_product_attention as sdpa

AT_ONCE = {"cpu": 2**22}  # attention probabilities held at a time while mass is summed: what a processor's cache holds
AT_ONCE_ELSEWHERE = 2**26  # 256 MB
STRETCH = 1024  # tokens at a time where several passes over them follow


def probabilities(
    queries: Tensor,
    keys: Tensor,
    allowed: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    blind: bool = False,
) -> Tensor:
    """Softmax in float32 of each query over the keys it may see; with `blind`, one that sees none gives zeros.

    queries [heads, w, dim], keys [kv_heads, n, dim], sinks [heads] -> [kv_heads, group, w, n]
    allowed [kv_heads, w, m]: about the last m keys; all queries may see those before
    """
    logits = masked_logits(queries, keys, allowed, scale, softcap)
    if sinks is not None:
        extra = sinks.float().view(logits.shape[0], logits.shape[1], 1, 1).expand(*logits.shape[:-1], 1)
        return torch.cat([logits, extra], dim=-1).softmax(-1)[..., :-1]
    return logits.softmax(-1).nan_to_num_(0.0) if blind else logits.softmax(-1)


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


def column_mass(
    queries: Tensor,
    keys: Tensor,
    positions: Tensor,
    cursor: int,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    weights: Tensor | None = None,
    sums: Tensor | None = None,
) -> Tensor:
    """Attention each key gets from all queries, averaged over the group, without ever holding all of it.

    Queries stand at `cursor - q … cursor - 1` and are taken in blocks; a block only meets the keys it can see.
    queries [heads, q, dim], keys [kv_heads, n, dim], positions [kv_heads, n] -> [kv_heads, n] float32
    weights [heads, q]: of each query's attention; sums [heads, q]: log-sum-exp of its logits, for who can use it
    """
    q, n = queries.shape[1], keys.shape[1]
    at_once = AT_ONCE.get(keys.device.type, AT_ONCE_ELSEWHERE)
    block = max(16, min(256, at_once // (queries.shape[0] * n) // 16 * 16))
    mass = keys.new_zeros(keys.shape[0], n, dtype=torch.float32)
    keys = keys.float().transpose(1, 2).contiguous().transpose(1, 2)  # laid out for products with many small blocks
    even = bool((positions[:, -1] == n - 1).all())  # nothing was dropped: only its own keys can be too new for a block
    blind = not even  # some keys are gone, perhaps all that a query could see
    ahead = q - min(q, block)  # keys the first block cannot see, if the newest q keys are the queries' own
    for start in range(0, q, block):
        part = queries[:, start : start + block]
        reach = n - max(0, ahead - start)
        where = torch.arange(cursor - q + start, cursor - q + start + part.shape[1], device=keys.device)
        newest = positions[:, reach - part.shape[1] : reach] if even else positions[:, :reach]
        allowed = newest[:, None] <= where[:, None]
        chances = probabilities(part, keys[:, :reach], allowed, scale, softcap, sinks, blind)
        if weights is not None:
            chances *= weights[:, start : start + block].view(*chances.shape[:3], 1)
        mass[:, :reach] += total(chances)
    return mass


def total(rows: Tensor) -> Tensor:
    """What each key gets from all rows, averaged over the group. [kv_heads, group, w, n] -> [kv_heads, n]"""
    flat = rows.flatten(1, 2)
    return torch.bmm(flat.new_full((len(flat), 1, flat.shape[1]), 1 / rows.shape[1]), flat)[:, 0]


def attend_step(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """One query per row over equal heads, with its logits and probabilities shown.

    queries [rows, heads, 1, dim], keys and values [rows, kv_heads, n, dim]
    -> output [rows, heads, 1, dim], logits and probabilities [rows, kv_heads, group, n] float32
    """
    rows, heads, _, dim = queries.shape
    grouped = (queries * scale).to(keys.dtype).reshape(rows, keys.shape[1], -1, dim)
    logits = (grouped @ keys.transpose(-1, -2)).float()
    if softcap is not None:
        logits = (logits / softcap).tanh() * softcap
    if sinks is None:
        chances = logits.softmax(-1)
    else:
        extra = sinks.float().view(1, keys.shape[1], -1, 1).expand(rows, -1, -1, 1)
        chances = torch.cat([logits, extra], -1).softmax(-1)[..., :-1]
    output = chances.to(values.dtype) @ values
    return output.reshape(rows, heads, 1, -1).to(queries.dtype), logits, chances


def attend_even(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """`attend_step` for those who only want the output."""
    if softcap is None and sinks is None:
        return _even(queries.to(keys.dtype), keys, values.to(keys.dtype), scale).to(queries.dtype)
    return attend_step(queries, keys, values, scale, softcap, sinks)[0]


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    segments: Sequence[tuple[int, int]],
    fresh: Sequence[int],
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of new tokens over a ragged cache that already ends with their own keys.

    `segments` gives the (start, length) of every (row, key head) in the flat cache, row by row; `fresh` how many
    of each row's queries are real: its last ones. Other queries give zeros.
    queries [rows, heads, q, dim], keys and values [slots, dim] -> [rows, heads, q, dim]
    """
    rows, heads, q, dim = queries.shape
    kv_heads = len(segments) // rows
    asked, queries, values = queries.dtype, queries.to(keys.dtype), values.to(keys.dtype)
    plain = softcap is None and sinks is None
    if plain and (stride := _even_stride(segments)) and all(count == q for count in fresh):
        length = segments[0][1]
        dense = (
            t[segments[0][0] :][: len(segments) * stride].view(rows, kv_heads, stride, -1)[:, :, :length]
            for t in (keys, values)
        )
        return _even(queries, *dense, scale).to(asked)
    output = queries.new_zeros(rows, heads, q, values.shape[-1])
    group = heads // kv_heads
    for i, (start, length) in enumerate(segments):
        row, head = divmod(i, kv_heads)
        if not (count := fresh[row]):
            continue
        mine = slice(head * group, (head + 1) * group)
        query = queries[row, mine, q - count :]
        key, value = keys[start : start + length], values[start : start + length]
        cap = None if sinks is None else sinks[mine]
        output[row, mine, q - count :] = _one(query, key, value, scale, softcap, cap)
    return output.to(asked)


def attend_slots(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention over slots of which each key head's first `lengths` are used, ending with the queries' own keys.

    queries [rows, heads, q, dim], keys and values [rows, kv_heads, size, dim], lengths [rows, kv_heads]
    -> [rows, heads, q, dim]
    """
    rows, heads, q, dim = queries.shape
    kv_heads, size = keys.shape[1:3]
    ahead = torch.arange(q - 1, -1, -1, device=keys.device)  # of each query's own tokens, those it must not see
    seen = torch.arange(size, device=keys.device) < (lengths[..., None] - ahead)[..., None]
    seen = seen[:, :, None].expand(-1, -1, heads // kv_heads, -1, -1).reshape(rows, kv_heads, -1, size)
    grouped = queries.to(keys.dtype).reshape(rows, kv_heads, -1, dim)
    if softcap is None and sinks is None:
        output = sdpa(grouped, keys, values.to(keys.dtype), attn_mask=seen, scale=scale)
    else:
        logits = (grouped @ keys.transpose(-1, -2)).float() * scale
        logits = (logits if softcap is None else (logits / softcap).tanh() * softcap).masked_fill(~seen, float("-inf"))
        if sinks is not None:
            extra = sinks.float().view(1, kv_heads, -1, 1).repeat_interleave(q, 2).expand(rows, -1, -1, -1)
            logits = torch.cat([logits, extra], -1)
        output = logits.softmax(-1)[..., :size].to(values.dtype) @ values
    return output.reshape(rows, heads, q, -1).to(queries.dtype)


def attend_ragged(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    lengths: Tensor,
    longest: int,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`attend_slots` over a flat buffer, in which each row and key head has a stretch of its own, of any size.

    queries [rows, heads, q, dim], keys and values [slots, dim], starts and lengths [rows, kv_heads], none longer than
    `longest` -> [rows, heads, q, dim]
    """
    where = (starts[..., None] + torch.arange(longest, device=keys.device)).clamp_max(len(keys) - 1)
    return attend_slots(queries, keys[where], values[where], lengths, scale, softcap, sinks)


def append_ragged(
    keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, starts: Tensor, lengths: Tensor, active: Tensor
) -> None:
    """Put one token behind each stretch of such buffers, and count it where its row is active. In place.

    keys and values [slots, dim], new ones [rows, kv_heads, 1, dim], starts and lengths [rows, kv_heads],
    active [rows, 1]
    """
    where = (starts + lengths).flatten()
    for buffer, new in ((keys, new_keys), (values, new_values)):
        buffer.index_copy_(0, where, new[:, :, 0].flatten(0, 1).to(buffer.dtype))
    lengths += active


def _even_stride(segments: Sequence[tuple[int, int]]) -> int:
    """Distance between segments when all are equally long and equally spaced, else 0."""
    (first, length), *rest = segments
    if not rest:
        return length
    stride = rest[0][0] - first
    even = all(n == length and start == first + i * stride for i, (start, n) in enumerate(rest, 1))
    return stride if even else 0


def _even(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """All key heads of all rows hold the same number of tokens: one batched call. keys [rows, kv_heads, n, dim]"""
    rows, heads, q, dim = queries.shape
    kv_heads = keys.shape[1]
    if q == 1:  # the heads of a group are just more queries over the same keys
        return sdpa(queries.reshape(rows, kv_heads, -1, dim), keys, values, scale=scale).reshape(rows, heads, 1, -1)
    mask = lower_right(q, keys.shape[2], queries.device)
    return sdpa(queries, keys, values, attn_mask=mask, scale=scale, enable_gqa=heads != kv_heads)


def _one(
    query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """One key head: query [group, q, dim] over key [n, dim], the last q of which are the queries' own."""
    q, n = query.shape[1], key.shape[0]
    if softcap is None and sinks is None:
        if q == 1:
            return sdpa(query.transpose(0, 1)[None], key[None, None], value[None, None], scale=scale)[0].transpose(0, 1)
        mask = lower_right(q, n, query.device)
        return sdpa(
            query[None],
            key.expand(1, len(query), -1, -1),
            value.expand(1, len(query), -1, -1),
            attn_mask=mask,
            scale=scale,
        )[0]
    allowed = lower_right(q, n, query.device)[None]
    return probabilities(query, key[None], allowed, scale, softcap, sinks)[0].to(value.dtype) @ value


def lower_right(q: int, n: int, device: torch.device) -> Tensor:
    """Causal mask of the last q of n tokens: query i sees the first n - q + i + 1. [q, n] bool"""
    return torch.ones(q, n, dtype=torch.bool, device=device).tril(n - q)


def attend_apart(
    queries: Tensor,
    turned: Tensor,
    far: Callable[[], tuple[Tensor, Tensor]] | None,
    near: tuple[Tensor, Tensor],
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    band: int = 0,
    before: Tensor | None = None,
    per_head: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Queries over far keys, which they meet `turned`, and near ones that end with their own; one softmax over both.

    queries, turned [heads, w, dim]; far and near: keys and values [kv_heads, n, dim]; far is called once the products
    with near keys are under way, so that fetching can overlap with them
    -> output [heads, w, dim]; with a band, what each near key got from queries at most so far behind it (never from
    its own), averaged over all heads [n], and before [m]: what the first of them had got already; per_head: of each
    query head alone, [heads, n] and [heads, m]
    """
    (near_keys, near_values), (heads, w, dim), n = near, queries.shape, near[0].shape[1]
    kv_heads = len(near_keys)
    grouped = [(q * scale).to(near_keys.dtype).reshape(kv_heads, -1, dim) for q in (queries, turned)]
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
    if sinks is not None:
        extra = sinks.float().view(kv_heads, -1, 1).expand(-1, -1, w).reshape(kv_heads, -1, 1)
        chances = torch.cat([logits.float(), extra], -1).softmax(-1)[..., :-1]
    else:
        chances = logits.softmax(-1, dtype=torch.float32)
    output = (chances.to(values.dtype) @ values).view(heads, w, -1).to(queries.dtype)
    rows = chances[..., -n:].reshape(heads, w, n)
    return output, _banded(rows if per_head else rows.mean(0), band, before) if band else None


def _banded(chances: Tensor, band: int, before: Tensor | None) -> Tensor:
    """Sum over queries 1 … band behind each key. chances [..., w, n], the queries' own keys last -> [..., n]"""
    w, n = chances.shape[-2:]
    mass = chances.tril_(n - w - 1).triu_(n - w - band).sum(-2)
    if before is not None:
        mass[..., : before.shape[-1]] += before
    return mass


def entropy(chances: Tensor) -> Tensor:
    """-Σ p ln p over the last axis; several times faster than torch.special.entr on a processor."""
    return -torch.linalg.vecdot(chances, chances.clamp_min(1e-38).log_())


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
    """`row_distance` of the attention of the newest w queries, which end at `cursor`. Shapes as in `column_mass`."""
    seen = positions[:, None] <= torch.arange(cursor - queries.shape[1], cursor, device=keys.device)[:, None]
    rows = probabilities(queries, keys, seen, scale, softcap, sinks, blind=True)
    return row_distance(rows.flatten(0, 1), smooth, stepwise)


def row_distance(rows: Tensor, smooth: int, stepwise: bool = False) -> Tensor:
    """Square root of the Jensen–Shannon divergence (natural log) of every smoothed row from the first.

    A row is smoothed with its smooth - 1 successors. JSD(p, q) = H((p + q) / 2) - (H(p) + H(q)) / 2, summed over
    stretches that fit a processor's cache. stepwise: of every row from the one before it, the first's is 0.
    rows [heads, w, n] -> [heads, w]
    """
    band = torch.ones(rows.shape[1], rows.shape[1], device=rows.device).triu().tril(smooth - 1)
    weights = band / (band @ rows.sum(-1, keepdim=True)).clamp_min(1e-30)
    disorder, between = rows.new_zeros(rows.shape[:2]), rows.new_zeros(rows.shape[:2])
    for part in rows.split(STRETCH, -1):
        smoothed = weights @ part
        disorder += entropy(smoothed)
        between += entropy((smoothed + _other(smoothed, stepwise)).mul_(0.5))
    return (between - (disorder + _other(disorder, stepwise)) / 2).clamp_min(0).sqrt()


def _other(rows: Tensor, stepwise: bool) -> Tensor:
    """What each row is compared with: the first, or the one before it (the first with itself). rows [heads, w, ..]"""
    return torch.cat([rows[:, :1], rows[:, :-1]], 1) if stepwise else rows[:, :1]


def assign(keys: Tensor, centres: Tensor, sizes: Tensor | None = None) -> Tensor:
    """The centre of highest cosine, ties to the lower number; a centre of size 0 is out of reach.

    keys [kv_heads, n, dim], centres [kv_heads, c, dim], sizes [kv_heads, c] -> [kv_heads, n] int64
    """
    keys, centres = keys.float(), normalize(centres.float(), dim=-1)
    if sizes is not None:  # one number more puts them there
        keys, centres = pad(keys, (0, 1), value=1.0), torch.cat([centres, -1e30 * (sizes == 0)[..., None]], -1)
    blocks = keys.split(4 * STRETCH, 1)  # a long text has many centres
    return torch.cat([(block @ centres.transpose(1, 2)).max(-1).indices for block in blocks], 1)


def means(keys: Tensor, member: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The mean key of each cluster, zeros where there is none, and how many it has.

    Whose member is `count` or more belongs to nobody.
    keys [kv_heads, n, dim], member [kv_heads, n] -> [kv_heads, count, dim] float32, [kv_heads, count] int64
    """
    keys, mine = keys.float(), member.clamp_max(count)
    total = keys.new_zeros(len(keys), count + 1, keys.shape[-1]).scatter_add(1, mine[..., None].expand_as(keys), keys)
    size = mine.new_zeros(len(keys), count + 1).scatter_add(1, mine, torch.ones_like(mine))
    return (total / size.clamp_min(1)[..., None])[:, :count], size[:, :count]


def likeness(keys: Tensor, real: Tensor, kappa: int) -> Tensor:
    """Mean cosine of a key with its neighbours up to kappa away, itself included; only tokens that are real count.

    keys [kv_heads, n, dim], real [kv_heads, n] bool -> [kv_heads, n] float32
    """
    unit = normalize(keys.float(), dim=-1) * real[..., None]
    total, near = unit.square().sum(-1), real.float()
    count = near.clone()
    for step in range(1, min(kappa, keys.shape[1] - 1) + 1):
        pairs = torch.linalg.vecdot(unit[:, step:], unit[:, :-step])
        for sums, one, other in ((total, pairs, pairs), (count, near[:, :-step], near[:, step:])):
            sums[:, step:] += one
            sums[:, :-step] += other
    return total / count.clamp_min(1)
