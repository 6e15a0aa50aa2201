"""Cached keys moved to other RoPE positions: attention, forks and files follow."""

import numpy as np
import pytest
import torch
from conftest import make_llama
from draws import many, noise, single

import kvkeep
from kvkeep.cache.rope_shift import RopeShift
from kvkeep.errors import BadParameter
from kvkeep.kernels.torch.rotation import Rotation


def places(cache, layer=0):
    return [head.rope_positions.tolist() for head in cache.backend.store[layer].row(0)]


@pytest.mark.core
def test_streaming_reads_as_if_the_dropped_had_never_been():
    """StreamingLLM's cache is contiguous: sinks and recent tokens at positions 0…B-1 give the same next logits."""
    model = make_llama(num_hidden_layers=1)
    ids = torch.randint(0, 128, (1, 80))
    cache = kvkeep.Cache(model, "streamingllm", 20)
    model(ids, past_key_values=cache)
    assert places(cache) == [list(range(60, 80))] * 4
    kept = torch.cat([ids[:, :4], ids[:, 64:], ids[:, :1]], 1)  # one layer: keys do not depend on what was dropped
    got = model(ids[:, :1], past_key_values=cache).logits[0, -1]
    torch.testing.assert_close(got, model(kept).logits[0, -1], atol=1e-4, rtol=0)
    model(ids[:, :30], past_key_values=cache)  # a second turn moves what was moved before
    assert places(cache) == [list(range(91, 111))] * 4


@pytest.mark.core
def test_a_gap_puts_the_far_past_behind_it():
    model = make_llama(num_hidden_layers=1, max_position_embeddings=200)
    ids = torch.randint(0, 128, (1, 90))
    cache = kvkeep.Cache(model, "intelllm", 20, gap=50)
    model(ids, past_key_values=cache)
    assert places(cache) == [[*range(30, 40), *range(80, 90)]] * 4
    plain = kvkeep.Cache(model, "intelllm", 100)
    model(ids, past_key_values=plain)
    assert places(plain) == [list(range(90))] * 4, "nothing was dropped, so nothing moves"
    with pytest.raises(BadParameter, match="gap=195"):
        model(ids, past_key_values=kvkeep.Cache(model, "intelllm", 20, gap=195))


@pytest.mark.core
def test_distances_are_capped_at_the_trained_window():
    model = make_llama(num_hidden_layers=1, max_position_embeddings=64)
    cache = kvkeep.Cache(model, "lm_infinite", 30)
    model(torch.randint(0, 128, (1, 100)), past_key_values=cache)
    assert places(cache) == [[44] * 10 + list(range(80, 100))] * 4, "56 away, so that 8 tokens may follow"


@pytest.mark.core
def test_moved_keys_survive_fork_and_file(tiny, tmp_path):
    ids = torch.randint(0, 128, (1, 90))
    cache = kvkeep.Cache(tiny, "streamingllm", 20)
    tiny(ids, past_key_values=cache)
    cache.save(tmp_path / "c")
    others = [cache.fork(), kvkeep.Cache.load(tmp_path / "c", tiny)]
    for more in (1, 30, 1):
        want = tiny(ids[:, :more], past_key_values=cache).logits
        assert all(torch.equal(tiny(ids[:, :more], past_key_values=other).logits, want) for other in others)
        assert all(places(other, 2) == places(cache, 2) for other in others)


@pytest.mark.core
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
@many(8)
def test_turns_are_the_rotations(interleaved, kind, seed):
    rng = np.random.default_rng(seed)
    n, pairs, rest, first = int(rng.integers(1, 9)), int(rng.choice([1, 4])), int(rng.choice([0, 2])), 1000 * seed
    turn = Rotation(torch.rand(pairs, generator=torch.Generator().manual_seed(seed)), interleaved)
    vectors = single(noise(rng, 3, n, 2 * pairs + rest)).to(kind)
    shift, where = RopeShift({0: turn, 1: turn, 2: None}), torch.arange(first, first + n)
    for layer in (0, 1):
        assert shift.unrotate(layer, vectors, first).equal(turn.rotate(vectors, -where))
        assert shift.rotate(layer, vectors, first).equal(turn.rotate(vectors, where))
        twice = turn.rotate(turn.rotate(vectors, -where), torch.full((n,), 7))
        assert shift.rotate_to(layer, vectors, first, 7).equal(twice)
    assert len(shift.angles_of) == 3 and shift.unrotate(2, vectors, first) is vectors
    shift.begin()
    assert not shift.angles_of
