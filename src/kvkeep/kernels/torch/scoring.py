"""Attention statistics and clustering for scorers, in torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d, normalize, pad

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
    probs = softmax(masked_logits(queries, keys, allowed, scale, softcap), sink_logits)
    return probs.nan_to_num_(0.0) if allow_fully_masked else probs


def softmax(logits: Tensor, sink_logits: Tensor | None) -> Tensor:
    """Probabilities of logits [.., kv_heads, group, w, n], each head with its learned sink logit [heads]."""
    if sink_logits is None:
        return logits.softmax(-1)
    extra = sink_logits.float().view(*logits.shape[-4:-2], 1, 1).expand(*logits.shape[:-1], 1)
    return torch.cat([logits, extra], -1).softmax(-1)[..., :-1]


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
    """How many of the queries [heads, q, dim] are computed at a time, where each has n probabilities."""
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


def repeated_attention(
    queries: Tensor,
    keys: Tensor,
    sinks: Tensor,
    own_queries: Tensor,
    own_keys: Tensor,
    scale: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    near: int | None = None,
    key_weights: Tensor | None = None,
    query_weights: Tensor | None = None,
    norm: int = 0,
) -> Tensor:
    """The attention each of `keys` gets from tokens that are read after them: the most of any query and query head.

    norm: of all of them, in the place of the most (0): 1: their sum, 2: the root of the sum of squares
    One softmax of each query: over sinks and keys and, as it is in own_queries, over its own tokens' keys up to itself.
    Queries come in blocks.
    near: the last m queries are of the keys' tokens again; those of tokens at most so far from a key count; None: all
    queries and own_queries [heads, q, dim], own_keys [kv_heads, q, dim], keys [kv_heads, m, dim], sinks [kv_heads, s,
    dim], key_weights [heads, m], query_weights [q]: factors of the attention -> [kv_heads, m] float32
    """
    (kv_heads, m, _), q, count = keys.shape, queries.shape[1], sinks.shape[1]
    text, own_keys = torch.cat([sinks, keys], 1).float(), own_keys.float()
    block, highest = query_block(queries, count + m + q), text.new_zeros(kv_heads, m)
    all_visible = torch.ones(1, 1, 0, dtype=torch.bool, device=keys.device)
    for start in range(0, q, block):
        end = min(start + block, q)
        own = all_visible.new_ones(1, end - start, end - start).tril()
        earlier = masked_logits(queries[:, start:end], text, all_visible, scale, softcap)
        again = masked_logits(own_queries[:, start:end], own_keys[:, :end], own, scale, softcap)
        rows = softmax(torch.cat([earlier, again], -1), sink_logits)[..., count : count + m]
        if key_weights is not None:
            rows = rows * key_weights.view(kv_heads, -1, 1, m)
        if query_weights is not None:
            rows = rows * query_weights[start:end, None]
        if near is not None:
            places = torch.arange(start, end, device=keys.device) - (q - m)
            rows = rows.masked_fill((places[:, None] - torch.arange(m, device=keys.device)).abs() > near, 0)
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


def pool(scores: Tensor, among: Tensor, width: int, kind: str = "avg") -> Tensor:
    """Smooth the scores of the tokens `among`, with each other only. scores, among [kv_heads, n]"""
    if width == 1:
        return scores
    if kind == "max":
        pooled = max_pool1d(scores.masked_fill(~among, float("-inf")), width, 1, width // 2)
    else:
        total, count = (avg_pool1d(x, width, 1, width // 2) for x in (scores * among, among.to(scores.dtype)))
        pooled = total / count.clamp_min(1e-9)
    return torch.where(among, pooled, scores)
