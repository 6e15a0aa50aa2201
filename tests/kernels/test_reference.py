"""Attention over padded rows, in torch, is attention."""

import cmath
import math
import operator

import pytest
import torch

from kvkeep.kernels.torch import elementwise, scoring
from kvkeep.kernels.torch.reference import padded_attention


@pytest.mark.parametrize("softcap, sinks", [(None, False), (2.0, False), (None, True), (1.5, True)])
def test_attention_over_slots_is_attention(softcap, sinks):
    torch.manual_seed(1)
    rows, heads, kv_heads, size, dim, scale = 2, 4, 2, 9, 3, 0.7
    queries, keys, values = torch.randn(rows, heads, 1, dim), *torch.randn(2, rows, kv_heads, size, dim)
    lengths, extra = torch.tensor([[1, 9], [5, 2]]), torch.randn(heads)
    got = padded_attention(queries, keys, values, lengths, scale, softcap, extra if sinks else None)
    for row, head in torch.cartesian_prod(torch.arange(rows), torch.arange(heads)).tolist():
        mine, seen = head // 2, int(lengths[row, head // 2])
        logits = [scale * float(queries[row, head, 0].double() @ keys[row, mine, i].double()) for i in range(seen)]
        logits = [softcap * math.tanh(each / softcap) for each in logits] if softcap else logits
        total = sum(map(math.exp, logits)) + (math.exp(float(extra[head])) if sinks else 0)
        want = sum(math.exp(each) / total * values[row, mine, i].double() for i, each in enumerate(logits))
        assert torch.allclose(got[row, head, 0].double(), want, atol=1e-5)


@pytest.mark.parametrize("logits", [1, 2**25])
def test_attention_within_chunks_is_a_softmax_of_each_query(logits, monkeypatch):
    monkeypatch.setattr(scoring, "CHUNK_LOGITS", logits)  # one chunk at a time, or all
    torch.manual_seed(0)
    heads, kv_heads, chunks, size, dim = 4, 2, 3, 5, 6
    queries, keys = torch.randn(heads, chunks * size, dim), torch.randn(kv_heads, chunks * size, dim)
    want = torch.zeros(kv_heads, chunks * size, dtype=torch.float64)
    for head, i in torch.cartesian_prod(torch.arange(heads), torch.arange(chunks * size)).tolist():
        mine, first = head // 2, i // size * size
        weights = [math.exp(float(queries[head, i].double() @ keys[mine, first + j].double())) for j in range(size)]
        for j, weight in enumerate(weights):
            want[mine, first + j] += weight / sum(weights) / 2
    assert torch.allclose(scoring.chunk_mass(queries, keys, size).double(), want, atol=1e-5)


def test_a_quadratic_form_of_every_key_and_query_head():
    torch.manual_seed(0)
    keys, matrices, vectors = torch.randn(2, 7, 5), torch.randn(6, 5, 5), torch.randn(6, 5)
    got = scoring.quadratic_form(keys, matrices, vectors)
    for head, i in torch.cartesian_prod(torch.arange(6), torch.arange(7)).tolist():
        key, matrix, vector = (t.tolist() for t in (keys[head // 3, i].double(), matrices[head], vectors[head]))
        want = sum(key[a] * matrix[a][b] * key[b] for a in range(5) for b in range(5))
        assert float(got[head, i]) == pytest.approx(want + sum(map(operator.mul, key, vector)), abs=1e-5)


@pytest.mark.parametrize("interleaved", [True, False])
def test_pairs_are_rotated_and_other_channels_stay(interleaved):
    torch.manual_seed(0)
    vectors, angles = torch.randn(2, 3, 10), torch.randn(3, 4) * 9
    got = elementwise.apply_angles(vectors, angles.cos(), angles.sin(), interleaved, torch.float32)
    assert got[..., 8:].equal(vectors[..., 8:])
    for head, i, pair in torch.cartesian_prod(*map(torch.arange, (2, 3, 4))).tolist():
        a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + 4)
        turned = complex(vectors[head, i, a], vectors[head, i, b]) * cmath.exp(1j * float(angles[i, pair]))
        assert complex(got[head, i, a], got[head, i, b]) == pytest.approx(turned, abs=1e-5)
