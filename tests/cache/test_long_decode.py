"""Memory stays flat in long answers: 2,000 tokens where a step evicts, and with a buffer of each kind of heads."""

import pytest
import torch
from conftest import EVICTING, make_llama

import kvkeep
from kvkeep.compress.budget.layers import EqualLayers

BUFFER = 64
LONG, SHORT = 2000, 400  # tokens: one way to fill a buffer is like another


@pytest.mark.parametrize("spec", [name for name in EVICTING if name != "full"])
@pytest.mark.slow
def test_long_answers_in_flat_memory(spec):
    method, budget = kvkeep.methods[spec], 48
    alone = isinstance(method.layers, EqualLayers) and method.reuse == 1  # no layer knows of another: one shows all
    model, own = make_llama(num_hidden_layers=1 if alone else 2), method.schedule.every
    cache = kvkeep.Cache(model, spec, budget, schedule=None if own else BUFFER)
    sizes, allowed = [], budget + (own or BUFFER) - 1
    steps = LONG if spec in ("h2o", "kvkeep", "snapkv", "cake") else SHORT
    with torch.inference_mode():
        token = model(torch.arange(100)[None] % 128, past_key_values=cache).logits[:, -1:].argmax(-1)
        for step in range(steps):
            token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
            if step % 3 == 0:  # a buffer is a power of two: over time, wherever it stands
                report = cache.report()
                assert report.kept_per_head <= allowed, step
                sizes.append(report.bytes + report.index_bytes)
    half = len(sizes) // 2
    assert max(sizes[half:]) <= max(sizes[:half]) + moved(cache, sizes) and cache.get_seq_length() == 100 + steps


def moved(cache, sizes):
    """Bytes that come and go where heads share a budget: a segment has a 64th of room, rounded down, so what the same
    tokens take depends on how they are shared out, by less than a slot for each segment."""
    if not cache.method.heads.needs_scores:
        return 0
    rooms = [layer.room for layer in cache.backend.store.values()]
    return sum(len(room) - 1 for room in rooms) * sizes[-1] / sum(map(sum, rooms))
