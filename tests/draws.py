"""Random tensors that float32 holds exactly, for comparisons with float64 oracles."""

import inspect
from functools import wraps

import numpy as np
import torch

from kvkeep.kernels.torch.retrieval_units import Moments
from kvkeep.storage.offload.host import HostStore

HEADS = [(4, 4), (4, 2), (6, 2), (4, 1), (1, 1), (3, 3)]
LENGTHS = [1, 2, 3, 5, 8, 13, 21, 34]
CPU = torch.device("cpu")


def many(draws):
    """One test on so many random draws; a failure names its seed."""

    def decorate(test):
        @wraps(test)
        def run(**given):
            for seed in range(draws):
                try:
                    test(seed=seed, **given)
                except Exception as error:
                    raise AssertionError(f"with seed={seed}") from error

        known = inspect.signature(test).parameters.values()
        run.__signature__ = inspect.Signature([p for p in known if p.name != "seed"])
        return run

    return decorate


def noise(rng, *shape, mean=0.0, scale=1.0):
    """Normal numbers that float32 holds exactly, as float64."""
    return (mean + scale * rng.standard_normal(shape)).astype(np.float32).astype(np.float64)


def single(array):
    return torch.tensor(np.asarray(array), dtype=torch.float32)


def draw(seed):
    """A generator, and random queries and keys; some keys come twice."""
    rng = np.random.default_rng(seed)
    heads, kv_heads = HEADS[seed % len(HEADS)]
    n, dim, w = LENGTHS[seed % len(LENGTHS)], int(rng.choice([1, 3, 4, 8])), int(rng.choice([1, 2, 7]))
    q, k = noise(rng, heads, w, dim), noise(rng, kv_heads, n, dim)
    if seed % 4 == 0:
        k[:, n // 2 : n // 2 * 2] = k[:, : n // 2]
    return rng, q, k


def cut_up(rng, n):
    """The unit of each token: stretches with a short last one, or scattered units of any size."""
    if rng.random() < 0.5:
        return np.arange(n) // int(rng.choice([1, 2, 5, n, n + 1]))
    return np.unique(rng.integers(0, max(1, n // 3), n), return_inverse=True)[1]


def tokens_of(member):
    return [np.flatnonzero(member == unit) for unit in range(member.max() + 1)]


def close(got, want, rtol=1e-5, atol=1e-5):
    np.testing.assert_allclose(np.asarray(got, dtype=np.float64), np.asarray(want), rtol=rtol, atol=atol)


def fill(rng, host_budget, blocks=None, heads=None):
    """A store of random blocks, and all that is in it as two plain tensors."""
    heads, (dim, value_dim) = heads or int(rng.integers(1, 4)), rng.integers(1, 5, 2).tolist()
    host, pairs = HostStore(host_budget, CPU), []
    for _ in range(blocks or int(rng.integers(1, 7))):
        n = int(rng.integers(1, 8))
        pairs.append((single(noise(rng, heads, n, dim)), single(noise(rng, heads, n, value_dim))))
        host = host.put(*pairs[-1])
    return host, tuple(torch.cat(part, 1) for part in zip(*pairs, strict=True))


def some(rng, rows, n, count):
    """Ascending token numbers [rows, count]"""
    return torch.tensor(np.sort([rng.choice(n, count, replace=False) for _ in range(rows)]))


def same(pair, whole, index):
    index = index.expand(len(whole[0]), -1)
    return all(
        got.equal(torch.stack([part[h, row] for h, row in enumerate(index)]))
        for got, part in zip(pair, whole, strict=True)
    )


def in_windows(rng, vectors):
    """Moments brought up to date window by window, wherever the windows end."""
    ends = sorted({*rng.integers(1, len(vectors) + 1, rng.integers(0, 6)).tolist(), len(vectors)})
    known = None
    for first, last in zip([0, *ends], ends, strict=False):
        mine = Moments.of(single(vectors[first:last]))
        known = known.merge(mine) if known else mine
    return known
