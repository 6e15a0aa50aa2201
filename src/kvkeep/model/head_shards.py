"""Tensor parallelism (`tp_plan="auto"`): every process has some of the KV heads of each layer.

All processes run the same forward passes and see the same logits. Each keeps tokens of its own heads; what they have to
decide alike they tell each other here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from kvkeep.errors import UnsupportedModel
from kvkeep.model.hf_attention import attention_modules

KEYS = "k_proj"
_shards: WeakKeyDictionary[PreTrainedModel, HeadShards | None] = WeakKeyDictionary()


@dataclass(frozen=True)
class HeadShards:
    """The processes that share the KV heads of a model, in the order of their heads, as many each."""

    group: Any
    rank: int
    size: int

    def gather(self, part: Tensor) -> Tensor:
        """The parts of all processes, of the same shape, along the first axis."""
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        return torch.cat(parts)

    def gather_numbers(self, numbers: Sequence[int], device: torch.device) -> list[int]:
        return self.gather(torch.tensor(numbers, dtype=torch.int64, device=device)).tolist()

    def own(self, heads: int) -> slice:
        """Those of this process, of so many heads of all."""
        each = heads // self.size
        return slice(self.rank * each, (self.rank + 1) * each)


def head_shards(model: Any) -> HeadShards | None:
    """None where every process has all heads."""
    mesh = getattr(model, "_device_mesh", None)
    if mesh is None:
        return None
    if model not in _shards:
        _shards[model] = _find(model, mesh)
    return _shards[model]


def _find(model: Any, mesh: Any) -> HeadShards | None:
    parts: list[tuple[str, Any]] = [part for module in attention_modules(model) for part in module.named_children()]
    split = {name for name, part in parts if _is_split(part)}
    cut = {name for name, part in parts if name == KEYS and len(part.weight) != part.out_features} - split
    if cut or (split and KEYS not in split):  # cut by hand, or packed with others
        raise UnsupportedModel(
            f"tensor parallelism splits {', '.join(sorted(cut | split))} of {type(model).__name__} in a way that does "
            "not tell which heads a process has; load it with device_map='auto' instead."
        )
    if not split:
        return None
    group = mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")
    return HeadShards(group, dist.get_rank(group), dist.get_world_size(group))


def _is_split(module: Any) -> bool:
    weight = getattr(module, "weight", None)
    return any(each.is_shard() for each in getattr(weight, "placements", ()))


def agree_on_least(model: Any, number: int) -> int:
    """The least number that any process has; without tensor parallelism, this one."""
    shards = head_shards(model)
    if shards is None:
        return number
    return min(shards.gather_numbers([number], next(model.parameters()).device))
