"""Checks that a model computes attention as kvkeep observes it: collected on its device, raised once per pass."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvkeep.cache.padding import BatchLayout
from kvkeep.errors import BadTensor, UnsupportedModel
from kvkeep.kernels.torch.scoring import probabilities
from kvkeep.model.hf_attention import AttentionCall
from kvkeep.storage.ragged import RaggedLayer
from kvkeep.storage.upload import Download

MAX_KEYS = 2048  # enough to tell one attention from another
_passed: WeakKeyDictionary[Any, dict[str, set[int]]] = WeakKeyDictionary()  # by model and its attention: layers


class AttentionCheck:
    """Compares the model's attention output with softmax(q·k)·v, once per layer, and looks for NaN in keys."""

    def __init__(self, model: str, passed: set[int]):
        """passed: layers whose attention was found to be right; several caches of a model may have one set"""
        self.model, self.passed = model, passed
        self.compared: set[int] = set()  # layers whose comparison nobody has waited for yet
        self.errors: list[Tensor] = []
        self.has_nan: list[Tensor] = []
        self.sent: list[tuple[list[Download], list[Download]]] = []  # of both, on their way to the host

    @classmethod
    def of(cls, model: Any, name: str) -> AttentionCheck:
        """For a cache of a model: what another one has compared is not compared again."""
        attention = str(model.config.get_text_config(decoder=True)._attn_implementation)
        return cls(name, _passed.setdefault(model, {}).setdefault(attention, set()))

    def fork(self) -> AttentionCheck:
        return AttentionCheck(self.model, self.passed)

    def is_due(self, layer: int) -> bool:
        return layer not in self.passed and layer not in self.compared

    def check(self, index: int, call: AttentionCall, layout: BatchLayout, layer: RaggedLayer | None = None) -> None:
        """Compare the row with most new tokens, over what its layer holds or, if that is empty, over the new tokens."""
        row = max(range(len(layout.counts)), key=layout.counts.__getitem__)
        if not (self.is_due(index) and layout.counts[row]):
            return
        if layer:
            tokens, shortest = layer.dense(row), min(layer.row_lengths(row))
            keys, values = tokens.keys[:, :shortest], tokens.values[:, :shortest]
        else:
            keys, values = layout.unpad(call.key, row), layout.unpad(call.value, row)
        self.compare(index, call, layout.unpad(call.query, row)[:, -1], keys, values)

    @torch.no_grad()
    def compare(self, layer: int, call: AttentionCall, query: Tensor, keys: Tensor, values: Tensor) -> None:
        """Record by how much one query's output differs between our attention and the model's own.

        Once per layer, as soon as there are two keys: over a single one, any attention gives the same.
        query [heads, dim], keys and values [kv_heads, n, dim]
        """
        if not self.is_due(layer) or keys.shape[1] < 2:
            return
        self.compared.add(layer)
        keys, values = (t[:, -MAX_KEYS:].to(query.dtype) for t in (keys, values))
        allowed = torch.ones(len(keys), 1, 0, dtype=torch.bool, device=keys.device)  # of the last 0 keys: all are seen
        weights = probabilities(query[:, None], keys, allowed, *call.how)
        ours = (weights @ values.float()[:, None]).flatten()
        theirs = call.hf_attention(query[None, :, None], keys[None], values[None], None)[0].float().flatten()
        off = (ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-6)
        kind = query.device.type  # a GPU may round float32 products to TF32
        exact = query.dtype == torch.float32 and kind == "cpu" and not torch.is_autocast_enabled(kind)
        self.errors.append(off - (1e-3 if exact else 5e-2))

    def check_nan(self, keys: Iterable[Tensor]) -> None:
        self.has_nan += [each.sum().isnan() for each in keys]

    def send(self) -> None:
        """Have the host told what failed, as soon as the device knows: whatever is launched after this comes later."""
        errors, has_nan, self.errors, self.has_nan = self.errors, self.has_nan, [], []
        if errors or has_nan:
            self.sent.append((_to_host(has_nan), _to_host([error > 0 for error in errors])))

    def raise_if_failed(self) -> None:
        """Wait for the device and raise what failed since the last call; what passed is not compared again."""
        self.send()
        sent, self.sent = self.sent, []
        compared, self.compared = self.compared, set()
        if any(any(flags()) for has_nan, _ in sent for flags in has_nan):
            raise BadTensor(
                f"{self.model} produced keys that are not numbers (NaN); check the input and the model's dtype."
            )
        if any(any(flags()) for _, errors in sent for flags in errors):
            raise UnsupportedModel(
                f"{self.model} computes attention in a way kvkeep does not observe correctly (its output differs from "
                "softmax(q·k)·v over what it handed to attention); it is not supported."
            )
        self.passed |= compared


def _to_host(flags: list[Tensor]) -> list[Download]:
    """One copy per device."""
    devices = {flag.device for flag in flags}
    return [Download(torch.stack([flag for flag in flags if flag.device == device])) for device in devices]
