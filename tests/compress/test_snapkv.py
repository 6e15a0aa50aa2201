"""How SnapKV's votes are counted."""

from __future__ import annotations

import pytest
import torch
from masked_reference import random_qkv
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

import kvkeep
from kvkeep.compress.parse import parse
from kvkeep.compress.pipeline import compress
from kvkeep.types import PAD_POSITION, Observation


def window_attention(queries: Tensor, keys: Tensor, window: int) -> Tensor:
    """The plain way: [heads, window, n]"""
    n = keys.shape[1]
    keys = keys.repeat_interleave(len(queries) // len(keys), 0)
    scores = queries[:, -window:] @ keys.transpose(1, 2) * queries.shape[-1] ** -0.5
    causal = torch.ones(n, n, dtype=torch.bool).tril()[-window:]
    return scores.masked_fill(~causal, -torch.inf).float().softmax(-1)


def top(scores: Tensor, budget: int, window: int) -> list[list[int]]:
    n = scores.shape[1] + window
    return [sorted([*s.topk(budget - window).indices.tolist(), *range(n - window, n)]) for s in scores]


@pytest.mark.core
@pytest.mark.trap(7)
def test_groups_are_averaged_before_max_pooling():
    """Votes of heads that share a KV head are averaged, then pooled; with max pooling the order matters."""
    q, k, v = random_qkv()
    votes = window_attention(q, k, 8).sum(1)[:, :-8]
    first = max_pool1d(votes.view(2, 3, -1).mean(1), 7, 1, 3)
    after = max_pool1d(votes, 7, 1, 3).view(2, 3, -1).mean(1)
    got = kvkeep.select("snapkv", q, k, v, 40, window=8, pool=7, pooling="max").tolist()
    cut = [row.sort(descending=True).values[31] for row in first]  # max pooling ties: compare by score reached
    for head in range(2):
        assert min(first[head, i] for i in got[head][:-8]) >= cut[head]
    assert got != top(after, 40, 8)


@pytest.mark.core
@pytest.mark.trap(8)
def test_votes_are_float32_whatever_the_model():
    """bfloat16 tensors vote as their float32 values do; a cast of the attention before the sum makes ties."""
    differ = 0
    for seed in range(6):
        q, k, v = random_qkv(n=600, seed=seed, dtype=torch.bfloat16)
        exact = window_attention(q.float(), k.float(), 32).view(2, 3, 32, -1).mean(1).sum(1)[:, :-32]
        cast = window_attention(q, k, 32).to(torch.bfloat16).view(2, 3, 32, -1).mean(1).sum(1)[:, :-32]
        got = kvkeep.select("snapkv", q, k, v, 200, window=32, pool=1).tolist()
        assert got == top(exact, 200, 32)
        differ += got != top(cast, 200, 32)
    assert differ, "casting would not have shown"


@pytest.mark.core
@pytest.mark.trap(9)
def test_pooling_divides_by_real_neighbours_and_defaults_are_stated():
    """Border tokens are not lowered by padding zeros; the defaults are window 64, average pool 5."""
    assert dict(parse("snapkv").parameters) == {"window": 64, "pool": 5, "pooling": "avg"}
    differ = 0
    for seed in range(8):
        q, k, v = random_qkv(n=60, seed=seed)
        votes = window_attention(q, k, 8).view(2, 3, 8, -1).mean(1).sum(1)[:, :-8]
        got = kvkeep.select("snapkv", q, k, v, 24, window=8).tolist()
        assert got == top(avg_pool1d(votes, 5, 1, 2, count_include_pad=False), 24, 8)
        differ += got != top(avg_pool1d(votes, 5, 1, 2), 24, 8)
    assert differ, "counting the padding would not have shown"


@pytest.mark.core
@pytest.mark.trap(10)
@pytest.mark.parametrize("budget", [9, 20, 64, 100])
def test_window_is_kept_and_counts_in_the_budget(budget):
    """The observation window is part of the budget, at most half of it, and never competes."""
    q, k, v = random_qkv(n=200)
    window = min(64, budget // 2)
    for head in kvkeep.select("snapkv", q, k, v, budget).tolist():
        assert len(head) == budget and head[-window:] == list(range(200 - window, 200))
    layers = [kvkeep.select("snapkv+pyramid", q, k, v, budget, layer=i, layers=5).lengths for i in range(5)]
    assert sum(sum(lengths) for lengths in layers) == budget * 5 * 2


@pytest.mark.core
@pytest.mark.trap(10)
def test_window_queries_are_causal_among_themselves():
    """A query of the window does not vote for tokens after it."""
    q, k, v = random_qkv(n=40)
    changed = k.clone()
    changed[:, -1] *= 30  # only the last query may see the last key
    votes = window_attention(q, changed, 8).view(2, 3, 8, -1).mean(1).sum(1)[:, :-8]
    got = kvkeep.select("snapkv", q, changed, v, 20, window=8, pool=1).tolist()
    assert got == top(votes, 20, 8)


@pytest.mark.parametrize("lengths", [(96, 96), (96, 70)])
def test_in_decode_lookahead_scores_as_snapkv(lengths):
    """There is no draft: the newest queries see only what is before them."""
    for seed in range(4):
        q, k, v = random_qkv(n=96, seed=seed)
        position = torch.arange(96).expand(2, -1).clone()
        position[1, lengths[1] :] = PAD_POSITION
        seen = Observation(4 * q[:, -16:], k, v, position, lengths, 96, 1, q.shape[-1] ** -0.5)
        kept = [compress(seen, parse(name, window=16), 40) for name in ("lookahead", "snapkv")]
        assert kept[0].tolist() == kept[1].tolist()


@pytest.mark.parametrize("sinks", [1, 4])
def test_lagkv_keeps_its_sinks_whatever_their_values_weigh(sinks):
    q, k, v = random_qkv(n=200)
    v[:, :sinks] *= 1e-3
    v[:, -40:] *= 1e-3
    plain = kvkeep.select("lagkv", q, k, v, 80, sinks=sinks, lag=16).tolist()
    kept = kvkeep.select("lagkv+values", q, k, v, 80, sinks=sinks, lag=16).tolist()
    certain = {*range(sinks), *range(176 + sinks, 200)}  # and the last whole partition
    assert all(certain <= set(head) for head in (*plain, *kept)) and kept != plain
