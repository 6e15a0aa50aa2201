"""What a method computes on its way to a decision, token by token: scores, and what is special about it.

One more prefill, which all methods share, with scorers that are watched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvkeep.cache.cache import Cache
from kvkeep.compress.attention import attention, outlier_degree
from kvkeep.compress.grouping import Prototypes
from kvkeep.compress.method import Method
from kvkeep.compress.parse import parse_budget
from kvkeep.compress.scorers.ahakv import AhaKVScorer, relative_value_norms
from kvkeep.compress.scorers.intentkv import IntentKVScorer
from kvkeep.engine.shared_prefill import prefill_shared
from kvkeep.kernels.torch.scoring import row_js_distance
from kvkeep.model.hf_cache import execution_device
from kvkeep.pages.inspection import TokenValues
from kvkeep.pages.packed import Packed, pack_levels, pack_numbers
from kvkeep.types import Observation

MOST = 2**21  # numbers of one array in a page; larger ones are averaged
CLIP = 0.998  # quantile that is shown as the highest value: a few tokens have most of the attention

Found = dict[str, Tensor]  # name -> [kv_heads, w], of the last w tokens
ABOUT = {
    "score": "by which tokens are kept, the highest first",
    "divergence": "IntentKV: distance of a query's attention from that of the window's first query "
    "(boundary=subsequent: of the query before it)",
    "intention": "IntentKV: share of query heads whose boundary is at or before this token: the question to them",
    "value prior": "AhaKV: squared norm of the value, relative to the head's largest",
    "outlier degree": "ProtoKV: how unlike its neighbours a key is; the most unlike become anchors",
    "cluster": "ProtoKV: number of the cluster; those of anchors come first",
    "replay score": "KVzip: most attention from any query of the repeated text",
}


class WatchedScorer:
    """Scores as another scorer does, and notes what is computed on the way."""

    def __init__(self, method: Method) -> None:
        self.method, self.scorer = method, method.scorer
        self.found: list[Found] = []  # of each layer

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        assert self.scorer is not None
        scores = self.scorer(seen, budget)
        self.found.append({"score": scores, **special_values(self.method, seen)})
        return scores

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scorer, name)


def special_values(method: Method, seen: Observation) -> Found:
    """What only this method computes."""
    if isinstance(method.scorer, IntentKVScorer):
        return _intention(method.scorer, seen)
    if isinstance(method.scorer, AhaKVScorer):
        return {"value prior": relative_value_norms(seen.token_state[..., 1])}
    if isinstance(method.group, Prototypes):
        return {"outlier degree": outlier_degree(seen, method.group.kappa), "cluster": method.group.members(seen)}
    return {"replay score": seen.token_state[..., 0]} if method.replay else {}


def _intention(scorer: IntentKVScorer, seen: Observation) -> Found:
    heads, stepwise = attention(seen, scorer.window), scorer.boundary == "subsequent"
    moved = [row_js_distance(rows, scorer.smooth, stepwise).mean(0) for rows in heads]
    asked = [(scorer.weights(rows) > 0).float().mean(0) for rows in heads]
    return {"divergence": torch.stack(moved), "intention": torch.stack(asked)}


def method_values(
    model: Any, tokenizer: Any, ids: Sequence[int], configs: Mapping[str, tuple[Method, Any]]
) -> dict[str, tuple[TokenValues, ...]]:
    """By the names of configs, each a method that evicts and its budget. ids: what is compressed"""
    watched = {name: WatchedScorer(method) for name, (method, _) in configs.items()}
    caches = [
        Cache(model, replace(method, scorer=watched[name]), budget, tokenizer=tokenizer)
        for name, (method, budget) in configs.items()
    ]
    if caches:
        prefill_shared(model, torch.tensor([list(ids)], device=execution_device(model)), caches)
    return {name: tuple(_token_values(scorer.found, len(ids))) for name, scorer in watched.items()}


def _token_values(layers: Sequence[Found], tokens: int) -> list[TokenValues]:
    names = layers[0] if layers else {}
    stacked = {name: torch.stack([layer[name].cpu() for layer in layers]) for name in names}
    return [
        TokenValues(
            name,
            ABOUT[name],
            pack_numbers(values) if name == "cluster" else pack_values(values),
            tokens - values.shape[-1],
        )
        for name, values in stacked.items()
        if name != "cluster" or values.numel() <= MOST
    ]


def pack_values(values: Tensor) -> Packed:
    """[layers, kv_heads, w]; where that is too large for a page, means over heads, then over layers."""
    values = values.float()
    for axis in (1, 0):
        values = values.mean(axis, keepdim=True) if values.numel() > MOST else values
    return pack_levels(values, _quantile(values, CLIP))


def _quantile(values: Tensor, share: float) -> float:
    flat = values.flatten()
    return float(flat.kthvalue(max(1, int(share * len(flat)))).values)


def evicting(configs: Sequence[tuple[str, Any]]) -> dict[str, tuple[Method, Any]]:
    """Those that have scores, as `method_values` takes them."""
    parsed = {name: parse_budget(name, budget) for name, budget in configs}
    return {name: each for name, each in parsed.items() if each[0].scorer and not each[0].retrieval}
