"""Doubts about a model, collected on its device during a forward pass and settled once, at its end."""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.errors import BadTensor, UnsupportedModel
from kvkeep.kernels.reference import probabilities
from kvkeep.model.attention import Handover


class Watch:
    """Is what we see what the model computes, and is it made of numbers?"""

    def __init__(self, model: str):
        self.model = model
        self.errors: list[Tensor] = []
        self.strange: list[Tensor] = []

    def compare(self, new: Handover, output: Tensor, columns: list[Tensor] | None) -> None:
        """Recompute the last query's output of one row from what was handed over, and note how far it is off."""
        row = 0 if columns is None else max(range(len(columns)), key=lambda r: len(columns[r]))
        real = slice(None) if columns is None else columns[row]
        query, key, value = (t[row][:, real] for t in (new.query, new.key, new.value))
        if not key.shape[1]:
            return
        allowed = torch.ones(1, 1, key.shape[1], dtype=torch.bool, device=key.device).expand(len(key), -1, -1)
        ours = probabilities(query[:, -1:], key, allowed, new.scale, new.softcap, new.sinks) @ value.float()[:, None]
        theirs = output[row][real][-1].float()
        off = (ours.reshape(theirs.shape) - theirs).abs().max() / theirs.abs().max().clamp_min(1e-6)
        self.errors.append(off - (1e-3 if output.dtype == torch.float32 else 5e-2))

    def numbers(self, keys: Tensor) -> None:
        self.strange.append(keys.isnan().any())

    def settle(self) -> None:
        """Raise what was noted. One look at the device."""
        errors, strange, self.errors, self.strange = self.errors, self.strange, [], []
        if strange and any(bool(s) for s in strange):
            raise BadTensor(f"{self.model} produced keys that are not numbers (NaN); check the input and the model's dtype.")
        if errors and max(float(e) for e in errors) > 0:
            raise UnsupportedModel(
                f"{self.model} computes attention in a way kvkeep does not observe correctly (its output differs from "
                "softmax(q·k)·v over what it handed to attention); it is not supported."
            )
