"""Decode attention of a pool's rows over fetched units, which lie in slots in any order, and near tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.kernels.torch.reference import two_region_attention
from kvkeep.kernels.torch.rotation import rotate

Pair = tuple[Tensor, Tensor]


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
    angles: cosines and sines [tokens, dim] by which the far keys are rotated, the first by those of 0
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
    return (keys, values) if angles is None else (rotate(keys, (angles[0][:m], angles[1][:m])), values)


def _gather(tokens: Tensor, place: Tensor) -> Tensor:
    return tokens.gather(1, place.expand(len(tokens), -1)[..., None].expand(-1, -1, tokens.shape[-1]))
