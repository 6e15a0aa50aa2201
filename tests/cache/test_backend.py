"""What a cache exchanges with the device, and on which device it keeps what."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from masked_reference import build, logits, tokens
from torch.utils._python_dispatch import TorchDispatchMode

import kvkeep
from kvkeep.model.hf_attention import AttentionCall


class Syncs(TorchDispatchMode):
    """Counts the moments a device and its host wait for each other: a number read back, a list sent over."""

    aten = torch.ops.aten
    waiting = (aten._local_scalar_dense.default, aten.nonzero.default, aten.lift_fresh.default)
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in self.waiting
        return func(*args, **(kwargs or {}))


def waits(layers: int, method: str) -> tuple[int, int]:
    """Waits of a prefill, and of a decode step that finds room in the cache."""
    model = build(num_hidden_layers=layers)
    cache = kvkeep.Cache(model, method, budget=130)
    with Syncs() as prefill:
        logits(model, tokens(200), cache)
    logits(model, tokens(1), cache)
    with Syncs() as decode:
        logits(model, tokens(1), cache)
    return prefill.count, decode.count


@pytest.mark.trap(23)
@pytest.mark.parametrize("method", ["snapkv", "snapkv+adakv"])
def test_decoding_does_not_wait_for_the_device_in_every_layer(method):
    """A decode step exchanges nothing with the device that grows with the number of layers."""
    assert waits(2, method)[1] == waits(6, method)[1]


@pytest.mark.trap(23)
def test_prefill_does_not_read_back_from_every_layer(monkeypatch):
    """With equal heads all sizes are known beforehand: no layer's selection needs an answer from the device."""
    monkeypatch.setattr(Syncs, "waiting", Syncs.waiting[:2])
    assert waits(2, "snapkv")[0] == waits(6, "snapkv")[0]


@pytest.mark.core
@pytest.mark.trap(25)
def test_positions_live_where_the_layers_keys_live(model):
    """Under a device map, a layer's index lies on that layer's device, not on the first one's."""
    cache = kvkeep.Cache(model, "full")
    nothing = {name: lambda *_: None for name in ("check", "check_nan", "raise_if_failed")}
    cache.backend.attention_check = SimpleNamespace(**nothing)
    for index, device in enumerate(("cpu", "meta", "meta")):
        q, kv = torch.zeros(1, 4, 5, 16, device=device), torch.zeros(1, 2, 5, 16, device=device)
        cache.attend(index, AttentionCall(q, kv, kv, None, lambda q=q: (q.transpose(1, 2), None), 0.25, None, None))
    for store in cache.backend.store.values():
        assert store.flat.token_positions.device == store.flat.keys.device
