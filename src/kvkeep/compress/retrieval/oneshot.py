"""The decision of a retrieval method on tensors: what the last query attends to when all before it was read."""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.compress.method import Method
from kvkeep.compress.retrieval.index import Asking, EachToken, Leaving
from kvkeep.compress.retrieval.query import Moments, joined
from kvkeep.compress.retrieval.topk import by_unit, spend
from kvkeep.errors import BadParameter
from kvkeep.kernels.torch.reference import attend_apart
from kvkeep.types import Observation, Selection


def recall_once(seen: Observation, method: Method, budget: int) -> Selection | None:
    """Sinks, the units the last query asks for, and what is near; None where all of it fits.

    Keys are taken as they are: to rank them without their positions, give queries and keys without rotation.
    """
    recall, n = method.recall, seen.tokens
    if n <= budget:
        return None
    if recall.needs:
        raise BadParameter(
            f"'{method.name}' cuts text by {recall.needs}, which tensors do not tell; use kvkeep.Engine."
        )
    recall.check(budget, method.name)
    sizes = recall.sizes(budget)
    away = recall.cut.ready(None, n - 1 - sizes.sinks - sizes.near, budget)
    begin, end = sizes.sinks, sizes.sinks + away
    keys = seen.keys[:, begin:end]
    member = recall.cut.members(keys, None, budget)
    order, size = by_unit(member)
    mass = _mass(seen, sizes.near, recall.index.per_head)[..., begin:end] if recall.index.wants_mass else None
    about = (
        [keys]
        if isinstance(recall.index, EachToken)
        else recall.index.describe(Leaving(keys, mass, member, size.shape[1]))
    )
    moments = Moments.of(joined(seen.queries, seen.kv_heads)) if recall.index.wants_moments else None
    asking = Asking(seen.queries[:, -1:], seen.kv_heads, seen.scale, moments, reading=False)
    worth = recall.index.worth(asking, about, size)
    unit = recall.cut.whole(budget)
    quota = max(0, budget - sizes.sinks - (n - end)) // unit * unit
    index = spend(worth, size.expand(len(worth), -1), quota, recall.neighbours).index
    fetched = order.expand(len(index), -1).gather(1, index) + begin
    fetched = fetched.sort(1).values.expand(seen.kv_heads, -1)
    ends = [torch.arange(*span, device=keys.device).expand(seen.kv_heads, -1) for span in ((0, begin), (end, n))]
    kept = torch.cat([ends[0], fetched, ends[1]], 1)
    return Selection(kept, (kept.shape[1],) * seen.kv_heads)


def _mass(seen: Observation, band: int, per_head: bool) -> Tensor:
    """What each token got from the queries close behind it. [n], or [heads, n]"""
    near, rest = (seen.keys, seen.values), (seen.scale, seen.softcap, seen.sinks, band, None, per_head)
    mass = attend_apart(seen.queries, seen.queries, None, near, *rest)[1]
    assert mass is not None
    return mass
