"""Bytes are those of kept tokens, counted by KV head; the rest is freed."""

from __future__ import annotations

import gc

import pytest
import torch
from masked_reference import HARD, kept, logits, prefilled, row, tokens
from torch import Tensor, nn

from kvkeep.storage.ragged import RaggedLayer
from kvkeep.types import Tokens


@pytest.mark.core
@pytest.mark.trap(7)
def test_storage_holds_key_heads_not_query_heads(model):
    """The cache stores Hk heads, so memory shrinks by the stated ratio."""
    cache = prefilled(model)
    assert cache.report().kv_heads == 2 and all(len(layer[0]) == 2 for layer in kept(cache))
    assert cache.nbytes == 24 * 3 * 2 * (16 + 16) * 4


def reachable(root) -> dict[int, int]:
    """Bytes by address of every tensor storage reachable from an object's own data, the model excepted."""
    found, todo, done = {}, [root], set()
    while todo:
        thing = todo.pop()
        if id(thing) in done or isinstance(thing, nn.Module):
            continue
        done.add(id(thing))
        if isinstance(thing, Tensor):
            found[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        elif isinstance(thing, dict):
            todo += list(thing.values())
        elif isinstance(thing, list | tuple | set):
            todo += list(thing)
        elif hasattr(thing, "__dict__"):
            todo += list(vars(thing).values())
    return found


@pytest.mark.core
@pytest.mark.parametrize("method", HARD)
def test_bytes_are_those_of_kept_tokens_and_the_rest_is_freed(method, model):
    """nbytes is within 2 % of kept tokens × bytes, through decoding; nothing else holds the keys that were dropped."""
    n, budget, each = 700, 130, (16 + 16) * 4
    cache = prefilled(model, method, budget, tokens(n))
    for _ in range(5):
        held = sum(len(head) for layer in row(cache) for head in layer)
        assert held * each <= cache.nbytes <= 1.02 * held * each
        logits(model, tokens(1), cache)
    gc.collect()
    owned = reachable(cache)
    index = cache.report().index_bytes
    assert sum(owned.values()) <= cache.nbytes + index + 4096
    layer_of_keys = n * 2 * 16 * 4
    alive = [t for t in gc.get_objects() if issubclass(type(t), Tensor) and t.shape[-1:] == (16,)]
    held = [t.shape for t in alive if t.untyped_storage().nbytes() >= layer_of_keys]
    assert not held, f"full keys are still held: {held}"


@pytest.mark.core
@pytest.mark.parametrize("method", HARD)
def test_everything_a_compressed_context_holds_is_accounted_for(method, model):
    """Right after a prompt, all the cache's storages together are what the report says, within 2 %."""
    cache = prefilled(model, method, 24, tokens(300))
    report = cache.report()
    told = sum(v for k, v in report.as_dict().items() if k.endswith("bytes") and k != "full_bytes")
    assert sum(reachable(cache).values()) <= 1.02 * told


def test_an_undone_uneven_append_leaves_uneven_room():
    """Rows of one length are then no rectangle, and are not read as one."""
    layer, keys = RaggedLayer(), torch.arange(10.0).view(2, 5, 1)
    layer.fill([[Tokens(row, row, torch.arange(5))] for row in keys])
    before, new = layer.snapshot(), torch.full((2, 1, 3, 1), -1.0)
    columns = [torch.tensor([2]), torch.arange(3)]
    layer.append(new, new, [5 + torch.arange(len(each)) for each in columns], columns)
    layer.restore(before)
    assert layer.lengths == [5, 5] and len(set(layer.room)) == 2
    assert all(layer.dense(row).keys[0].equal(keys[row]) for row in range(2))


def test_a_copy_shares_buffers_until_one_of_both_appends():
    """With room left over, and after tokens were taken back: neither writes into what the other holds."""

    def new(seed: int, count: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(seed)
        return torch.randn(1, 2, count, 4), torch.randn(1, 2, count, 4)

    def held(layer: RaggedLayer) -> list[list]:
        return [part.tolist() for head in layer.row(0) for part in (head.keys, head.values, head.token_positions)]

    layer = RaggedLayer()
    layer.fill([[Tokens(key, value, torch.arange(5)) for key, value in zip(*(t[0] for t in new(0, 5)), strict=True)]])
    layer.append(*new(1, 3), [torch.arange(5, 8)], None, to_come=20)
    before = layer.snapshot()
    layer.append(*new(2, 2), [torch.arange(8, 10)], None)
    copies, want = [layer.copy(), layer.copy()], held(layer)
    assert {each.flat.keys.data_ptr() for each in copies} == {layer.flat.keys.data_ptr()}
    layer.restore(before)
    layer.append(*new(3, 1), [torch.arange(8, 9)], None)
    copies[0].append(*new(4, 1), [torch.arange(10, 11)], None)
    assert held(copies[1]) == want and len({each.flat.keys.data_ptr() for each in (layer, *copies)}) == 3
    assert layer.lengths == [9, 9] and copies[0].lengths == [11, 11] and copies[1].lengths == [10, 10]
    assert held(copies[0])[0][:10] == want[0] and held(layer)[0][:8] == want[0][:8] != held(layer)[0]
