"""Doubts about a model, collected on its device during a forward pass and settled once, at its end."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from kvkeep.cache.padding import Arrival
from kvkeep.errors import BadTensor, UnsupportedModel
from kvkeep.kernels.torch.reference import probabilities
from kvkeep.model.hf_attention import Handover
from kvkeep.storage.ragged import LayerCache

MANY = 2048  # keys are enough to tell


class Watch:
    """Is what we see what the model computes, and is it made of numbers?"""

    def __init__(self, model: str):
        self.model = model
        self.checked: set[int] = set()  # layers whose attention was found to be what we take it for
        self.errors: list[Tensor] = []
        self.strange: list[Tensor] = []

    def check(self, index: int, new: Handover, arrival: Arrival, layer: LayerCache) -> None:
        """Look at the row with the most new tokens, over what its layer holds or, if that is nothing yet, over them."""
        row = max(range(len(arrival.counts)), key=arrival.counts.__getitem__)
        if index in self.checked or not arrival.counts[row]:
            return
        if layer:
            tokens, shortest = layer.dense(row), min(layer.row_lengths(row))
            keys, values = tokens.keys[:, :shortest], tokens.values[:, :shortest]
        else:
            keys, values = arrival.real(new.key, row), arrival.real(new.value, row)
        self.compare(index, new, arrival.real(new.query, row)[:, -1], keys, values)

    @torch.no_grad()
    def compare(self, layer: int, new: Handover, query: Tensor, keys: Tensor, values: Tensor) -> None:
        """Compute one query's output from what was handed over and by the model's own attention; note the difference.

        Once per layer, as soon as there are two keys: over a single one, any attention gives the same.
        query [heads, dim], keys and values [kv_heads, n, dim]
        """
        if layer in self.checked or keys.shape[1] < 2:
            return
        self.checked.add(layer)
        keys, values = (t[:, -MANY:].to(query.dtype) for t in (keys, values))
        allowed = torch.ones(len(keys), 1, 0, dtype=torch.bool, device=keys.device)  # of the last 0 keys: all are seen
        ours = probabilities(query[:, None], keys, allowed, new.scale, new.softcap, new.sinks) @ values.float()[:, None]
        theirs = new.stock(query[None, :, None], keys[None], values[None], None)[0].float().flatten()
        off = (ours.flatten() - theirs).abs().max() / theirs.abs().max().clamp_min(1e-6)
        kind = query.device.type  # a GPU may round float32 products to TF32
        exact = query.dtype == torch.float32 and kind == "cpu" and not torch.is_autocast_enabled(kind)
        self.errors.append(off - (1e-3 if exact else 5e-2))

    def numbers(self, keys: Iterable[Tensor]) -> None:
        self.strange += [each.sum().isnan() for each in keys]

    def settle(self) -> None:
        """Raise what was noted."""
        errors, strange, self.errors, self.strange = self.errors, self.strange, [], []
        if any_true(strange):
            raise BadTensor(
                f"{self.model} produced keys that are not numbers (NaN); check the input and the model's dtype."
            )
        if any_true([error > 0 for error in errors]):
            raise UnsupportedModel(
                f"{self.model} computes attention in a way kvkeep does not observe correctly (its output differs from "
                "softmax(q·k)·v over what it handed to attention); it is not supported."
            )


def any_true(flags: list[Tensor]) -> bool:
    """One look at each device."""
    devices = {flag.device for flag in flags}
    return any(bool(torch.stack([flag for flag in flags if flag.device == device]).any()) for device in devices)
