"""Moments of queries and the query that retrieves, against float64 oracles."""

import numpy as np
import pytest
from draws import close, draw, in_windows, many, noise, single
from oracles import retrieval as r

from kvkeep.kernels.torch.retrieval_units import activation_bias, concat_heads


@pytest.mark.core
@many(60)
def test_moments_in_any_split(seed):
    rng = np.random.default_rng(seed)
    vectors = noise(rng, int(rng.integers(1, 50)), int(rng.integers(1, 9)), scale=10.0 ** rng.integers(-3, 4))
    found, (mean, variance) = in_windows(rng, vectors), r.moments(vectors)
    size = np.abs(vectors).max()
    assert found.count == len(vectors)
    close(found.mean / size, mean / size)
    close(found.variance / size**2, variance / size**2)


@pytest.mark.core
@many(50)
def test_moments_of_numbers_far_from_nought(seed):
    rng = np.random.default_rng(seed)
    vectors = noise(rng, int(rng.integers(20, 120)), 4, mean=1e4)
    found, (_, variance) = in_windows(rng, vectors), r.moments(vectors)
    close(found.variance, variance, rtol=1e-2)
    naive = (single(vectors) ** 2).mean(0) - single(vectors).mean(0) ** 2
    assert (naive - single(variance)).abs().max() > 0.1, "sums of squares would do: the test shows nothing"


@pytest.mark.core
@many(60)
def test_joined(seed):
    _, q, k = draw(seed)
    close(concat_heads(single(q), len(k)), r.joined(q, len(k)))
    close(concat_heads(single(k), len(k)), r.joined(k, len(k)))


@pytest.mark.core
@pytest.mark.parametrize("kind", ["plain", "some never vary", "far from nought", "all equal", "nothing ever varies"])
@many(25)
def test_the_probe_of_surprising_queries(kind, seed):
    rng = np.random.default_rng(seed)
    w, dim = int(rng.integers(1, 9)), int(rng.integers(1, 8))
    so_far = noise(rng, w + int(rng.integers(0, 40)), dim, mean=100.0 * (kind == "far from nought"))
    if kind == "some never vary":
        so_far[:, :: 1 + seed % 2] = np.float32(0.1)
    if kind == "all equal":
        so_far[-w:] = so_far[-1]
    if kind == "nothing ever varies":
        so_far[:] = so_far[0]
    got = activation_bias(single(so_far[-w:]), in_windows(rng, so_far))
    close(got, r.probe(so_far[-w:], *r.moments(so_far)), rtol=1e-4, atol=1e-4)
