"""The selection of a retrieval method on plain tensors: what the last query attends to after a prefill."""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.compress.method import Method
from kvkeep.compress.retrieval.index import OffloadedTokens, RetrievalQuery
from kvkeep.compress.retrieval.topk import by_unit, select_units
from kvkeep.errors import BadParameter
from kvkeep.kernels.torch.retrieval_units import Moments, concat_heads
from kvkeep.kernels.torch.slotted import two_region_attention
from kvkeep.types import NOTHING, Observation, Selection


def retrieve_once(seen: Observation, method: Method, budget: int) -> Selection | None:
    """Sinks, the units the last query retrieves, and near tokens; None where everything fits.

    Keys are used as given: to score them without their positions, give unrotated queries and keys.
    """
    config, n = method.retrieval, seen.tokens
    assert config is not None
    if n <= budget:
        return None
    if config.needs:
        raise BadParameter(
            f"'{method.name}' chunks text by {config.needs}, which tensors do not tell; use kvkeep.Engine."
        )
    config.check(budget, method.name)
    sizes = config.sizes(budget)
    offloaded = config.chunking.num_ready(NOTHING, n - 1 - sizes.sinks - sizes.near, budget)
    begin, end = sizes.sinks, sizes.sinks + offloaded
    keys = seen.keys[:, begin:end]
    member = config.chunking.members(keys, NOTHING, budget)
    order, size = by_unit(member)
    needs, mass = config.index.needs, NOTHING
    if "mass" in needs:
        mass = _mass(seen, sizes.near, "mass_per_head" in needs)[..., begin:end]
    built = config.index.build(OffloadedTokens(keys, mass, member, size.shape[1]))
    unit_index = [keys] if "keys" in needs else built
    moments = Moments.of(concat_heads(seen.queries, seen.kv_heads)) if "moments" in needs else None
    query = RetrievalQuery(seen.queries[:, -1:], seen.kv_heads, seen.scale, moments, prefill=False)
    scores = config.index.score(query, unit_index, size)
    unit = config.chunking.uniform_size(budget)
    quota = max(0, budget - sizes.sinks - (n - end)) // unit * unit
    index = select_units(scores, size.expand(len(scores), -1), quota, config.neighbours).index
    retrieved = order.expand(len(index), -1).gather(1, index) + begin
    retrieved = retrieved.sort(1).values.expand(seen.kv_heads, -1)
    ends = [torch.arange(*span, device=keys.device).expand(seen.kv_heads, -1) for span in ((0, begin), (end, n))]
    kept = torch.cat([ends[0], retrieved, ends[1]], 1)
    return Selection(kept, (kept.shape[1],) * seen.kv_heads)


def _mass(seen: Observation, band: int, per_head: bool) -> Tensor:
    """Attention each token got from the queries close behind it. [n], or [heads, n]"""
    near, rest = (seen.keys, seen.values), (seen.scale, seen.softcap, seen.sink_logits, band, None, per_head)
    mass = two_region_attention(seen.queries, seen.queries, None, near, *rest)[1]
    assert mass is not None
    return mass
