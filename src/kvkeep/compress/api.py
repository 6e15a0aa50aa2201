"""Token selection on plain tensors, without a model: `kvkeep.select`."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor

from kvkeep.arguments import Positive, Range, check_value
from kvkeep.compress.method import Method
from kvkeep.compress.parse import parse_budget
from kvkeep.compress.pipeline import compress, update_token_state
from kvkeep.compress.retrieval.index import OffloadedTokens, RetrievalQuery, by_unit, select_units
from kvkeep.errors import BadParameter, BadTensor
from kvkeep.kernels.torch.rotation import Rotation
from kvkeep.kernels.torch.slotted import two_region_attention
from kvkeep.types import NOTHING, Budget, Observation, Selection


def select(
    method: str | Method,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    budget: int | float | str | None = None,
    *,
    scale: float | None = None,
    layer: int = 0,
    layers: int = 1,
    frequencies: Tensor | None = None,
    output_weight: Tensor | None = None,
    **parameters: Any,
) -> Selection:
    """The tokens a method keeps, given the queries, keys and values of one layer of one sequence.

    queries [heads, n, dim], keys and values [kv_heads, n, dim], as attention used them
    output_weight [heads, hidden, dim of values]: of attention's output projection, where a method needs it (+critical)
    frequencies [dim // 2]: of the model's RoPE, for a method that moves queries (echo); None: 10000 ** (-2i / dim)
    """
    chosen_method, budget = parse_budget(method, budget, **parameters)
    check_value("scale", scale, Annotated[float, Range(above=0)] | None)
    check_value("layers", layers, Positive)
    check_value("layer", layer, Annotated[int, Range(0, layers - 1)])
    if chosen_method.needs_passes:
        raise BadParameter(
            f"'{chosen_method.name}' runs the model again after a prompt, and select sees one layer's tensors; use "
            "kvkeep.Cache or kvkeep.Engine, or a method that does not, such as 'echo' or 'snapkv'."
        )
    check(queries, keys, values)
    if chosen_method.needs_output:
        check_output_weight(output_weight, queries, values, chosen_method.name)
    kv_heads, n, dim = keys.shape
    if layers > 1 and chosen_method.layers.layer_weight:
        raise BadParameter(f"'{chosen_method.name}' compares layers, and select sees one; leave out layer and layers.")
    positions = torch.arange(n, device=keys.device).expand(kv_heads, -1)
    width = chosen_method.memory.width if chosen_method.memory else 0
    token_state = keys.new_zeros(kv_heads, n, width, dtype=torch.float32)
    rotate = _rotation(frequencies, dim).rotate
    if chosen_method.summary:
        queries = chosen_method.summary(queries, 0, rotate)
    seen = Observation(
        queries, keys, values, positions, (n,) * kv_heads, n, n, scale or dim**-0.5,
        token_state=token_state, layer=layer, layers=layers, rotate=rotate, output_weight=output_weight,
    )  # fmt: skip
    tokens = Budget(budget).tokens(n)
    if chosen_method.retrieval:
        kept = retrieve_once(seen, chosen_method, tokens)
    else:
        kept = compress(update_token_state(seen, chosen_method, tokens), chosen_method, tokens)
    return kept or Selection(positions, seen.lengths)


def _rotation(frequencies: Tensor | None, dim: int) -> Rotation:
    if frequencies is None:
        frequencies = 10000.0 ** (-2 * torch.arange(dim // 2) / dim)
    check_tensor("frequencies", frequencies)
    if frequencies.ndim != 1 or len(frequencies) > dim // 2:  # fewer: the other channels do not turn
        raise BadTensor(f"frequencies has shape {tuple(frequencies.shape)}; pass [{dim // 2}], half of the keys' dim.")
    return Rotation(frequencies, interleaved=False)


def check_output_weight(weight: Tensor | None, queries: Tensor, values: Tensor, method: str) -> None:
    heads, dim = len(queries), values.shape[-1]  # values may be of another size than keys
    if weight is None:
        raise BadParameter(
            f"'{method}' weighs values by the output projection: give output_weight=, [heads, hidden, dim]."
        )
    check_tensor("output_weight", weight)
    if weight.ndim != 3 or weight.shape[::2] != (heads, dim):
        raise BadTensor(f"output_weight has shape {tuple(weight.shape)}; pass [{heads}, hidden, {dim}].")


def check_tensor(name: str, t: Any) -> None:
    if not isinstance(t, Tensor) or not t.is_floating_point():
        kind = f"dtype {t.dtype}" if isinstance(t, Tensor) else f"a {type(t).__name__}"
        raise BadTensor(f"{name} is {kind}; pass a floating-point torch tensor.")


def check(queries: Tensor, keys: Tensor, values: Tensor) -> None:
    """Raise for tensors that cannot be the queries, keys and values of one layer."""
    named = {"queries": queries, "keys": keys, "values": values}
    for name, t in named.items():
        check_tensor(name, t)
        if t.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            raise BadTensor(f"{name} has dtype {t.dtype}; pass float64, float32, bfloat16 or float16.")
        if t.ndim != 3:
            raise BadTensor(
                f"{name} has shape {tuple(t.shape)}; pass [heads, tokens, dim] of one layer of one sequence."
            )
        if t.device != queries.device:
            raise BadTensor(f"{name} is on {t.device}, queries are on {queries.device}; put them on one device.")
    (heads, n, dim), (kv_heads, _, _) = queries.shape, keys.shape
    if (
        not n
        or not dim
        or keys.shape != (kv_heads, n, dim)
        or values.shape[:2] != (kv_heads, n)
        or not kv_heads
        or heads % kv_heads
    ):
        shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in named.items())
        raise BadTensor(
            f"{shapes} do not fit together; use [heads, n, dim] and twice [kv_heads, n, dim], heads = g·kv_heads."
        )
    for name, t in named.items():
        if not bool(t.isfinite().all()):
            head, token, _ = (~t.isfinite()).nonzero()[0].tolist()
            raise BadTensor(f"{name} holds a value that is not a finite number at head {head}, token {token}.")


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
    scores = config.index.score(RetrievalQuery(seen.queries[:, -1:], seen.kv_heads, seen.scale), unit_index, size)
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
