"""Turning cached keys to another position with the model's own frequencies."""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from kvkeep.errors import UnsupportedModel
from kvkeep.model.hf_cache import put_away, runs_on

STEADY = ("default", "linear", "llama3", "yarn", "proportional")  # frequencies that do not depend on the text's length
SEEN: weakref.WeakKeyDictionary[Any, dict[int, bool]] = weakref.WeakKeyDictionary()  # model -> see `rotating`


@dataclass(frozen=True)
class Rotation:
    """One layer's rotary embedding: frequencies, and which numbers of a key form a pair."""

    frequencies: Tensor  # [pairs]
    interleaved: bool

    def turn(self, keys: Tensor, by: Tensor) -> Tensor:
        """Keys as if they stood `by` positions later. keys [.., n, dim], by [.., n]"""
        return self.rotated(keys, *self.angles(by))

    def angles(self, by: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of turning `by` positions. [.., n, pairs]"""
        angle = by.to(torch.float32)[..., None] * self.frequencies.to(by.device, torch.float32)
        return angle.cos(), angle.sin()

    def rotated(self, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        pairs = len(self.frequencies)
        turning, rest = keys[..., : 2 * pairs].float(), keys[..., 2 * pairs :]
        a, b = (turning[..., 0::2], turning[..., 1::2]) if self.interleaved else turning.chunk(2, -1)
        turned = (a * cos - b * sin, b * cos + a * sin)
        both = torch.stack(turned, -1).flatten(-2) if self.interleaved else torch.cat(turned, -1)
        return torch.cat([both.to(keys.dtype), rest], -1)


def rotations(model: Any, layers: list[int]) -> dict[int, Rotation | None]:
    """The rotation of each layer, None for one without positions; checked against the model's own code."""
    config = model.config.get_text_config(decoder=True)
    embedding = next((m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding")), None)
    name = type(model).__name__
    if embedding is None:
        raise UnsupportedModel(
            f"{name} has no rotary embedding, so its keys cannot be moved; use a method that leaves them in place."
        )
    turning = rotating(model, config)
    found: dict[int, Rotation | None] = {}
    of_kind: dict[str | None, Rotation] = {}
    for layer in layers:
        if not turning[layer]:
            found[layer] = None
            continue
        kind = config.layer_types[layer] if getattr(config, "layer_types", None) else None
        if kind not in of_kind:
            of_kind[kind] = _rotation(model, embedding, kind, name)
        found[layer] = of_kind[kind]
    return found


def rotating(model: Any, config: Any) -> dict[int, bool]:
    """Which layers rotate their keys: those that make another key of the same token in another place.

    Configurations say so in many ways, or not at all, so the model is asked, once: tokens alone in their rows, where
    attention has no choice and all but the rotation is the same.
    """
    if model not in SEEN:
        tokens = torch.arange(1, 9, device=runs_on(model)) % config.vocab_size
        places = torch.tensor([0, 40], device=runs_on(model)).repeat_interleave(len(tokens))
        cache, training = DynamicCache(config=config), [module for module in model.modules() if module.training]
        model.eval()
        try:
            with torch.no_grad():
                model(tokens.repeat(2)[:, None], position_ids=places[:, None], past_key_values=cache, use_cache=True)
        finally:
            for module in training:
                module.training = True
        keys = {i: layer.keys for i, layer in enumerate(cache.layers) if getattr(layer, "keys", None) is not None}
        SEEN[model] = {i: _differ(*both.float().chunk(2)) for i, both in keys.items()}
    return SEEN[model]


def _differ(here: Tensor, there: Tensor) -> bool:
    """By more than rounding, in any channel: large ones that hardly turn must not hide the others. [.., dim]"""
    moved, size = (t.flatten(0, -2).norm(dim=0) for t in (there - here, here))
    return bool((moved > 0.1 * size).any())


def _rotation(model: Any, embedding: Any, kind: str | None, name: str) -> Rotation:
    rope = getattr(embedding, "rope_type", "default")
    rope = rope.get(kind, "default") if isinstance(rope, dict) else rope
    if rope not in STEADY:
        raise UnsupportedModel(
            f"{name} uses '{rope}' RoPE, whose frequencies change with length, so keys cannot be moved."
        )
    which = f"{kind}_inv_freq" if getattr(embedding, f"{kind}_inv_freq", None) is not None else "inv_freq"
    frequencies = getattr(embedding, which)
    if frequencies.is_meta:
        frequencies = put_away(embedding, which)
    for interleaved in (False, True):
        rotation = Rotation(frequencies.detach().cpu(), interleaved)
        if _agrees(rotation, model, embedding, kind):
            return rotation
    raise UnsupportedModel(f"{name} rotates its keys in a way kvkeep does not know, so they cannot be moved.")


def _agrees(rotation: Rotation, model: Any, embedding: Any, kind: str | None) -> bool:
    """Does turning a key from one place to another equal rotating it there afresh?"""
    apply = getattr(sys.modules[type(embedding).__module__], "apply_rotary_pos_emb", None)
    if apply is None:
        return False
    device = runs_on(embedding if hasattr(embedding, "inv_freq") else model)
    dim = 2 * len(rotation.frequencies)
    key = torch.linspace(-1, 1, dim, device=device).cos().view(1, 1, 1, dim)
    fresh = [_rotated(apply, embedding, key, place, kind) for place in (3, 40)]
    turned = rotation.turn(fresh[0].flatten(0, 2), torch.tensor([37], device=device))
    return torch.allclose(turned, fresh[1].flatten(0, 2), atol=1e-4)


def _rotated(apply: Any, embedding: Any, key: Tensor, place: int, kind: str | None) -> Tensor:
    where = torch.tensor([[place]], device=key.device)
    per_kind = () if hasattr(embedding, "inv_freq") else (kind,)
    cos, sin = embedding(key, where, *per_kind)
    return apply(key, key, cos, sin)[1]
