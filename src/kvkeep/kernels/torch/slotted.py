"""Attention over retrieved (far) and near tokens: of one sequence, and of a pool's rows, whose units lie in slots."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvkeep.kernels.torch.elementwise import apply_angles

Pair = tuple[Tensor, Tensor]


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


def slotted_attention(
    queries: Tensor,
    rotated: Tensor,
    far: Pair,
    slots: Tensor | None,
    num_far: Tensor,
    near: Pair,
    begin: Tensor,
    end: Tensor,
    sinks: int,
    unit: int,
    scale: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    angles: Pair | None = None,
    mass: Tensor | None = None,
    band: int = 0,
    active: Tensor | None = None,
) -> Tensor:
    """`two_region_attention` of one query per row: far tokens are the sinks and the units in `slots`, in this order.

    queries, rotated [rows, heads, dim]; far: keys and values [rows, kv_heads, sinks + slots * unit, dim], slots [rows,
    1 or kv_heads, most], None where units lie in this order, num_far [rows] tokens; near: [rows, kv_heads, size, dim],
    of which begin … end [rows] count
    angles: cosines and sines [tokens, dim / 2] by which the far keys are rotated, the first by those of 0
    mass [rows, 1 or heads, size]: what near tokens of active rows [rows] get is added to it; see `band` there
    -> [rows, heads, dim]
    """
    output = queries.new_zeros(*queries.shape[:2], near[1].shape[-1])
    for row, (m, first, last) in enumerate(zip(num_far.tolist(), begin.tolist(), end.tolist(), strict=True)):
        if first == last:
            continue
        row_far = (lambda row=row, m=m: _far(far, slots, row, m, sinks, unit, angles)) if m else None
        row_near = near[0][row, :, first:last], near[1][row, :, first:last]
        given = queries[row, :, None], rotated[row, :, None], row_far, row_near, scale, softcap, sink_logits
        if mass is None:
            output[row] = two_region_attention(*given)[0][:, 0]
            continue
        mine = mass[row, :, first:last] if len(mass[row]) > 1 else mass[row, 0, first:last]
        result, got = two_region_attention(*given, band, mine[..., :-1], mine.dim() == 2)
        output[row] = result[:, 0]
        if got is not None and (active is None or active[row]):
            mine.copy_(got)
    return output


def _far(far: Pair, slots: Tensor | None, row: int, m: int, sinks: int, unit: int, angles: Pair | None) -> Pair:
    """The first m far tokens of a row. [kv_heads, m, dim]"""
    if slots is None:
        keys, values = (t[row, :, :m] for t in far)
    else:
        token = torch.arange(m, device=slots.device) - sinks
        place = slots[row].long()[:, token.clamp_min(0) // unit] * unit + token % unit + sinks
        keys, values = (_gather(t[row], torch.where(token < 0, token + sinks, place)) for t in far)
    if angles is not None:
        keys = apply_angles(keys, angles[0][:m], angles[1][:m], False, keys.dtype)
    return keys, values


def _gather(tokens: Tensor, place: Tensor) -> Tensor:
    return tokens.gather(1, place.expand(len(tokens), -1)[..., None].expand(-1, -1, tokens.shape[-1]))
