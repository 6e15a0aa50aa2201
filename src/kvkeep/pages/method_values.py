"""What a method computes on its way to a decision, token by token: scores, and what is special about it.

One more prefill, which all methods share, with scorers that are watched. Beside it: what an answer attended to over the
full cache, and which tokens a retrieval method attends to, window by window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvkeep.cache.cache import Cache
from kvkeep.compress.attention import attention, attention_received, outlier_degree
from kvkeep.compress.grouping import Prototypes
from kvkeep.compress.method import Method
from kvkeep.compress.parse import parse_budget
from kvkeep.compress.scorers.ahakv import AhaKVScorer, relative_value_norms
from kvkeep.compress.scorers.intentkv import IntentKVScorer
from kvkeep.engine.sequence import SequenceConfig
from kvkeep.evaluate.prefill import prefill_shared
from kvkeep.kernels.torch.scoring import row_js_distance
from kvkeep.model.hf_attention import AttentionCall
from kvkeep.model.hf_cache import execution_device
from kvkeep.pages.html import Packed, pack_levels, pack_numbers
from kvkeep.pages.inspection import TokenValues, Windows, binned, kept_mask
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
    """Collect the values by the names of configs, each a method that evicts and its budget. ids: what is compressed"""
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
    flat = values.flatten()
    return pack_levels(values, float(flat.kthvalue(max(1, int(CLIP * len(flat)))).values))


def evicting(configs: Sequence[tuple[str, Any]]) -> dict[str, tuple[Method, Any]]:
    """Those that have scores, as `method_values` takes them."""
    parsed = {name: parse_budget(name, budget) for name, budget in configs}
    return {name: each for name, each in parsed.items() if each[0].scorer and not each[0].retrieval}


class AttentionRecorder(Cache):
    """A full cache that sums the attention of a forward pass's last queries, layer by layer."""

    def __init__(self, model: Any, last: int) -> None:
        super().__init__(model, "full")
        self.last, self.received = last, dict[int, Tensor]()  # layer -> [kv_heads, n]

    def attend(self, index: int, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        query, key, value = call.query[0], call.key[0], call.value[0]
        heads, n = key.shape[:2]
        positions = torch.arange(n, device=key.device).expand(heads, n)
        seen = Observation(query[:, -self.last :], key, value, positions, (n,) * heads, n, n, *call.how)
        self.received[index] = attention_received(seen, self.last).cpu()
        return super().attend(index, call)


def answer_attention(model: Any, prompt: list[int], answer: list[int]) -> Tensor:
    """Attention to each token of a prompt, on average over the queries that predict the answer's tokens.

    Of each layer, averaged over the query heads of a KV head. -> [layers, kv_heads, tokens] float32
    """
    recorder = AttentionRecorder(model, len(answer))
    ids = torch.tensor([prompt + answer[:-1]], device=execution_device(model))
    with torch.inference_mode():
        model(ids, past_key_values=recorder, logits_to_keep=1)
    return torch.stack(list(recorder.received.values()))[..., : len(prompt)] / len(answer)


def window_retrieval(
    model: Any, tokenizer: Any, ids: list[int], tokens: int, method: Method, budget: Any, question: str | None
) -> Windows | None:
    """Prefills once more, a window at a time; None for a method that has no windows.

    tokens: of the prompt that ids are the beginning of; question: if it is known then
    """
    if not (method.retrieval and method.retrieval.window):
        return None
    size = method.retrieval.window
    sequence = SequenceConfig(model, tokenizer, method, budget, prefill_chunk_size=size).new_sequence()
    if question:
        sequence.set_question(question, len(ids))
    prompt, rows = torch.tensor(ids), []
    each = binned(torch.ones(1, tokens))
    while len(chunk := sequence.next_chunk(prompt)):
        sequence.forward(chunk)
        rows.append(binned(kept_mask(sequence.cache, tokens).float().mean(1)) / each)
    return Windows(size, pack_levels(torch.stack(rows, 1), 1.0))
