"""Eviction by votes, step after step, beside torch's: the same tokens stay, wherever they lie."""

import pytest
import torch
from decode_cases import DEVICE

from kvkeep.kernels.torch import votes as torch_votes
from kvkeep.kernels.torch.votes import VoteRule
from kvkeep.kernels.triton import evict_voted as triton_votes

RULES = [  # kv_heads, heads of a group, dim, v_dim; rule
    ((2, 2, 16, 16), VoteRule(24, 10, 8, 0, 8, 5, "avg")),
    ((3, 1, 24, 40), VoteRule(70, 40, 6, 2, 9, 3, "max")),  # of several parts
    ((1, 3, 16, 16), VoteRule(16, 8, 8, 0, 8, 1, "avg")),
    ((4, 2, 16, 16), VoteRule(30, 30, 5, 0, 5, 5, "avg")),  # heads of one length
]
KINDS = [(torch.float32, None, False), (torch.bfloat16, 20.0, True)]  # softcap, learned sinks


class Layer:
    """Rows of one layer: full, short, not in use."""

    def __init__(self, shape, rule, kind):
        self.kv_heads, group, dim, v_dim = shape
        self.rule, self.heads = rule, self.kv_heads * group
        room, rows = self.kv_heads * (rule.budget + 1), 3
        slots = rows * self.kv_heads * room
        self.keys, self.values = (torch.randn(slots + 1, d).to(DEVICE, kind) for d in (dim, v_dim))
        self.order, self.positions = (torch.zeros(slots + 1, dtype=torch.int32, device=DEVICE) for _ in range(2))
        self.starts = torch.arange(0, slots, room, device=DEVICE).view(rows, self.kv_heads)
        self.lengths = torch.tensor([rule.budget, rule.budget - 3, 0], device=DEVICE)[:, None].repeat(1, self.kv_heads)
        self.queries = torch.randn(rows, rule.window + 2, self.heads, dim).to(DEVICE, kind)
        self.seen = self.lengths[:, 0].clone()
        for start in self.starts.flatten().tolist():
            held = torch.arange(rule.budget, dtype=torch.int32, device=DEVICE)
            self.order[start : start + rule.budget], self.positions[start : start + rule.budget] = held, held

    def append(self, keys, values, queries):
        where = (self.starts + self.lengths)[:2]
        self.keys[where], self.values[where] = keys, values
        self.queries[torch.arange(2), self.seen[:2] % (self.rule.window + 1)] = queries
        self.lengths[:2] += 1
        self.seen[:2] += 1

    def evict(self, function, *how):
        parts = self.keys, self.values, self.order, self.positions, self.starts, self.lengths, self.queries, self.seen
        function(*parts, 5 * self.rule.budget, self.rule, *how)

    def tokens(self):
        """Of every row and KV head, in order: positions, keys and values."""
        for start, n in zip(self.starts.flatten().tolist(), self.lengths.flatten().tolist(), strict=True):
            here = slice(start, start + n)
            assert self.order[here].sort().values.tolist() == list(range(n))
            slots = self.order[here].argsort() + start
            assert (self.positions[slots].diff() > 0).all()
            yield self.positions[slots].tolist(), self.keys[slots].tolist(), self.values[slots].tolist()


@pytest.mark.parametrize(("kind", "softcap", "learned"), KINDS)
@pytest.mark.parametrize(("shape", "rule"), RULES)
def test_the_same_tokens_stay(shape, rule, kind, softcap, learned, monkeypatch):
    monkeypatch.setattr(triton_votes, "CHOSEN_FROM", 16)
    monkeypatch.setattr(triton_votes, "MOVED", 16)
    layers, held = [], []
    for _ in range(2):
        torch.manual_seed(rule.budget)
        layers.append(Layer(shape, rule, kind))
    sinks = torch.randn(layers[0].heads, device=DEVICE) if learned else None
    for _ in range(6):
        wanted = (shape[0], shape[2]), (shape[0], shape[3]), (layers[0].heads, shape[2])
        new = [torch.randn(2, *each).to(DEVICE, kind) for each in wanted]
        for layer, function in zip(layers, (torch_votes.evict_voted, triton_votes.evict_voted), strict=True):
            layer.append(*new)
            layer.evict(function, 0.3, softcap, sinks)
        assert list(layers[0].tokens()) == list(layers[1].tokens())
        held.append(layers[0].lengths.tolist())
    assert all(sum(full) == rule.budget * shape[0] and not any(unused) for full, _, unused in held)
    assert sum(held[-1][1]) == rule.budget * shape[0]
    assert shape[0] == 1 or (rule.sure == rule.budget) == all(len(set(full)) == 1 for full, _, _ in held)


def test_of_equal_votes_the_first_leaves_and_of_the_last_head():
    rule, evicted = VoteRule(20, 8, 4, 0, 4, 1, "avg"), []
    for function in (torch_votes.evict_voted, triton_votes.evict_voted):
        layer = Layer((3, 1, 16, 16), rule, torch.float32)
        layer.queries.zero_()
        layer.keys.zero_()
        layer.append(*[torch.zeros(2, 3, 16, device=DEVICE)] * 3)
        layer.evict(function, 1.0)
        evicted.append([set(range(21)) - set(positions) for positions, _, _ in list(layer.tokens())[:3]])
    assert evicted[0] == evicted[1] == [{0}, {0}, {0}]
