"""Rotary embeddings: moving cached keys to another position with the model's own frequencies."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from kvkeep.errors import UnsupportedModel
from kvkeep.kernels.torch.rotation import Rotation
from kvkeep.model.hf_cache import UNLIMITED, context_length, execution_device, offloaded_weight, text_config

FIXED = ("default", "linear", "llama3", "yarn", "proportional")  # frequencies that do not depend on the text's length
ROTATED: weakref.WeakKeyDictionary[Any, dict[int, bool]] = weakref.WeakKeyDictionary()  # see `rotated_layers`


def rotations(model: Any, layers: list[int]) -> dict[int, Rotation | None]:
    """The rotation of each layer, None for one without RoPE; checked against the model's own code."""
    embedding, name = _embedding(model), type(model).__name__
    if embedding is None:
        raise UnsupportedModel(
            f"{name} has no rotary embedding, so its keys cannot be moved; use a method that leaves them in place."
        )
    config = text_config(model)
    rotated = rotated_layers(model)
    kinds = getattr(config, "layer_types", None)
    kind_of = {layer: kinds[layer] if kinds else None for layer in layers if rotated[layer]}
    of_kind = {kind: _rotation(model, embedding, kind, name) for kind in dict.fromkeys(kind_of.values())}
    return {layer: of_kind[kind_of[layer]] if layer in kind_of else None for layer in layers}


def _embedding(model: Any) -> Any:
    return next((m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding")), None)


def position_limit(model: Any, seen: int) -> int:
    """Positions before which tokens may follow a text of so many, and find its keys rotated as their queries are.

    Learned positions end with the context length. Some frequencies change there, or where a longer context begins.
    """
    embedding = _embedding(model)
    if embedding is None:
        return context_length(model)
    kind = getattr(embedding, "rope_type", "default")
    if kind == "longrope":
        short = text_config(model).rope_parameters["original_max_position_embeddings"]
        return short if seen <= short else UNLIMITED
    return max(seen, context_length(model)) if kind == "dynamic" else UNLIMITED


def last_position(model: Any) -> int:
    """That the model can embed: learned positions end with the context length, others do not."""
    return (context_length(model) if _embedding(model) is None else UNLIMITED) - 1


def learn_rotations(model: Any) -> None:
    """Run the forward pass that `rotations` needs now, not when the first method asks."""
    if _embedding(model) is not None:
        rotated_layers(model)


def rotated_layers(model: Any) -> dict[int, bool]:
    """Which layers rotate their keys: those whose key of a token changes with its position.

    Configurations say so in many ways, or not at all, so one forward pass finds out: rows of a single token, where
    attention has nothing to choose and only the rotation can differ.
    """
    if model not in ROTATED:
        config = text_config(model)
        tokens = torch.arange(1, 9, device=execution_device(model)) % config.vocab_size
        positions = torch.tensor([0, 40], device=execution_device(model)).repeat_interleave(len(tokens))
        cache, training = DynamicCache(config=config), [module for module in model.modules() if module.training]
        model.eval()
        try:
            with torch.no_grad():
                model(tokens.repeat(2)[:, None], position_ids=positions[:, None], past_key_values=cache, use_cache=True)
        finally:
            for module in training:
                module.training = True
        keys = {i: getattr(layer, "keys", None) for i, layer in enumerate(cache.layers)}
        ROTATED[model] = {i: _differ(*both.float().chunk(2)) for i, both in keys.items() if both is not None}
    return ROTATED[model]


def _differ(here: Tensor, there: Tensor) -> bool:
    """Whether any channel differs by more than rounding: large ones that hardly rotate hide none. [.., dim]"""
    moved, size = (t.flatten(0, -2).norm(dim=0) for t in (there - here, here))
    return bool((moved > 0.1 * size).any())


def _rotation(model: Any, embedding: Any, kind: str | None, name: str) -> Rotation:
    rope = getattr(embedding, "rope_type", "default")
    rope = rope.get(kind, "default") if isinstance(rope, dict) else rope
    if rope not in FIXED:
        raise UnsupportedModel(
            f"{name} uses '{rope}' RoPE, whose frequencies change with length, so keys cannot be moved."
        )
    which = f"{kind}_inv_freq" if getattr(embedding, f"{kind}_inv_freq", None) is not None else "inv_freq"
    frequencies = getattr(embedding, which)
    if frequencies.is_meta:
        frequencies = offloaded_weight(embedding, which)
    for interleaved in (False, True):
        rotation = Rotation(frequencies.detach().cpu(), interleaved)
        if _agrees(rotation, model, embedding, kind):
            return rotation
    raise UnsupportedModel(f"{name} rotates its keys in a way kvkeep does not know, so they cannot be moved.")


def _agrees(rotation: Rotation, model: Any, embedding: Any, kind: str | None) -> bool:
    """Does moving a key from one position to another equal the model's own rotation there?"""
    apply = getattr(sys.modules[type(embedding).__module__], "apply_rotary_pos_emb", None)
    if apply is None:
        return False
    device = execution_device(embedding if hasattr(embedding, "inv_freq") else model)
    dim = 2 * len(rotation.frequencies)
    key = torch.linspace(-1, 1, dim, device=device).cos().view(1, 1, 1, dim)
    expected = [_rotated(apply, embedding, key, position, kind) for position in (3, 40)]
    moved = rotation.rotate(expected[0].flatten(0, 2), torch.tensor([37], device=device))
    return torch.allclose(moved, expected[1].flatten(0, 2), atol=1e-4)


def _rotated(apply: Any, embedding: Any, key: Tensor, position: int, kind: str | None) -> Tensor:
    positions = torch.tensor([[position]], device=key.device)
    per_kind = () if hasattr(embedding, "inv_freq") else (kind,)
    cos, sin = embedding(key, positions, *per_kind)
    return apply(key, key, cos, sin)[1]
