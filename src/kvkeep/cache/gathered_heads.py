"""Methods that compare KV heads, where each process has some of them: all decide on all heads, each keeps its own."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor
from torch.nn.functional import pad

from kvkeep.cache.cache_state import CacheState
from kvkeep.compress.budget.heads import EqualHeads
from kvkeep.errors import BadParameter
from kvkeep.model.head_shards import HeadShards
from kvkeep.types import PAD_POSITION, Observation, Selection

WHOLE = "load the model with device_map='auto'"


def gather_heads(seen: Observation, shards: HeadShards) -> Observation:
    """The observation of all heads: the same in every process."""
    lengths = shards.gather_numbers(seen.lengths, seen.keys.device)
    longer = max(lengths) - seen.tokens

    def tokens(part: Tensor, fill: int = 0) -> Tensor:  # [kv_heads, n, …]
        return shards.gather(pad(part, (0, 0) * (part.ndim - 2) + (0, longer), value=fill)) if len(part) else part

    return replace(
        seen, queries=shards.gather(seen.queries), keys=tokens(seen.keys), values=tokens(seen.values),
        token_positions=tokens(seen.token_positions, PAD_POSITION), lengths=tuple(lengths),
        token_state=tokens(seen.token_state), lse=None if seen.lse is None else shards.gather(seen.lse),
        sink_logits=None if seen.sink_logits is None else shards.gather(seen.sink_logits), memo=None, shared=None,
    )  # fmt: skip


def own_heads(selection: Selection | None, shards: HeadShards) -> Selection | None:
    """What this process keeps."""
    if selection is None:
        return None
    mine = shards.own(len(selection.lengths))
    lengths = selection.lengths[mine]
    return Selection(selection.index[mine, : max(lengths)], lengths, selection.coverage)


def check_shards(cache: CacheState) -> None:
    """Refuse what processes with a part of the heads each cannot decide on."""
    if not cache.shards:
        return
    method, split = cache.method, f"which tensor parallelism splits over {cache.shards.size} processes"
    if method.retrieval and not method.per_head:
        raise BadParameter(
            f"'{method.name}' retrieves the same tokens for all KV heads, {split}; use one that retrieves for each "
            f"head ('quest', 'clusterkv') or evicts ('kvkeep', 'snapkv'), or {WHOLE}."
        )
    if method.needs_output:
        raise BadParameter(
            f"'{method.name}' needs the whole output projection, {split}; use a method without it, or {WHOLE}."
        )
    if method.placement and not isinstance(method.heads, EqualHeads):
        raise BadParameter(
            f"'{method.name}' gives KV heads new positions by the fullest of them, {split}; use it without a modifier "
            f"that shares a budget between heads, or {WHOLE}."
        )
    if method.across_layers:
        raise BadParameter(
            f"'{method.name}' shares one budget between the KV heads of all layers, {split}; use +adakv, or {WHOLE}."
        )
