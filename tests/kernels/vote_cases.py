"""Eviction by votes, step after step, beside torch's: the same tokens stay, wherever they lie."""

import pytest
import torch
from decode_cases import DEVICE

from kvkeep.kernels.torch import reference
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

    def __init__(self, shape, rule, kind, rows=3):
        self.kv_heads, group, dim, v_dim = shape
        self.rule, self.heads = rule, self.kv_heads * group
        room = self.kv_heads * (rule.budget + 1)
        slots = rows * self.kv_heads * room
        self.keys, self.values = (torch.randn(slots + 1, d).to(DEVICE, kind) for d in (dim, v_dim))
        self.order, self.positions = (torch.zeros(slots + 1, dtype=torch.int32, device=DEVICE) for _ in range(2))
        self.starts = torch.arange(0, slots, room, device=DEVICE).view(rows, self.kv_heads)
        held = torch.tensor([rule.budget, rule.budget - 3, 0][:rows], device=DEVICE)
        self.lengths = held[:, None].repeat(1, self.kv_heads)
        self.queries = torch.randn(rows, rule.window + 2, self.heads, dim).to(DEVICE, kind)
        self.seen = self.lengths[:, 0].clone()
        self.lse = torch.full((rows, self.heads, rule.window + 2), torch.nan, device=DEVICE)
        self.known = torch.zeros(rows, self.kv_heads, dtype=torch.int32, device=DEVICE)
        self.in_order(slice(None))

    def in_order(self, rows):
        for start in self.starts[rows].flatten().tolist():
            held = torch.arange(self.rule.budget, dtype=torch.int32, device=DEVICE)
            self.order[start : start + len(held)], self.positions[start : start + len(held)] = held, held

    def admit(self, row, keys, queries):
        """Another sequence takes a row, with as many tokens as the budget; its values are its keys."""
        slots = self.starts[row][:, None] + torch.arange(self.rule.budget, device=DEVICE)
        self.keys[slots], self.values[slots] = keys, keys
        self.queries[row, :-1], self.known[row], self.lse[row] = queries, 0, torch.nan
        self.lengths[row] = self.seen[row] = self.rule.budget
        self.in_order(row)

    def append(self, keys, values, queries, *how):
        """One token more of the rows in use, and attention, as in a step."""
        used = self.lengths[:, 0] > 0
        where, places = (self.starts + self.lengths)[used], self.seen % (self.rule.window + 1)
        self.keys[where], self.values[where] = keys[used], values[used]
        self.queries[used, places[used]] = queries[used]
        self.lengths[used] += 1
        self.seen += used
        places = torch.where(used, places, self.rule.window + 1)
        spans = self.starts, self.lengths, 5 * self.rule.budget
        reference.ragged_attention(queries[:, :, None], self.keys, self.values, *spans, *how, (self.lse, places))

    def evict(self, function, *how):
        parts = self.keys, self.values, self.order, self.positions, self.starts, self.lengths, self.queries, self.seen
        function(*parts, self.lse, self.known, 5 * self.rule.budget, self.rule, *how)

    def tokens(self):
        """Of every row and KV head, in order: positions, keys and values."""
        for start, n in zip(self.starts.flatten().tolist(), self.lengths.flatten().tolist(), strict=True):
            here = slice(start, start + n)
            assert self.order[here].sort().values.tolist() == list(range(n))
            slots = self.order[here].argsort() + start
            assert (self.positions[slots].diff() > 0).all()
            yield self.positions[slots].tolist(), self.keys[slots].tolist(), self.values[slots].tolist()


def drawn(shape, kind):
    return torch.randn(shape).to(DEVICE, kind)


def step(layers, norm, kind, *how):
    """The same new tokens for both layers, which evict by torch and by Triton. norm: what norms of keys grow by"""
    one, (key_dim, value_dim) = layers[0], (layers[0].keys.shape[1], layers[0].values.shape[1])
    rows, kv_heads = one.starts.shape
    keys = drawn((rows, kv_heads, key_dim), kind) * norm ** drawn((rows, kv_heads, 1), kind)
    new = keys, drawn((rows, kv_heads, value_dim), kind), drawn((rows, one.heads, key_dim), kind)
    for layer, function in zip(layers, (torch_votes.evict_voted, triton_votes.evict_voted), strict=True):
        layer.append(*new, *how)
        layer.evict(function, *how)


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
        step(layers, 1.0, kind, 0.3, softcap, sinks)
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
        layer.append(*[torch.zeros(3, 3, 16, device=DEVICE)] * 3, 1.0, None, None)
        layer.evict(function, 1.0)
        evicted.append([set(range(21)) - set(positions) for positions, _, _ in list(layer.tokens())[:3]])
    assert evicted[0] == evicted[1] == [{0}, {0}, {0}]


@pytest.mark.parametrize(
    ("kind", "softcap", "learned", "sure"), [(torch.float32, None, False, 20), (torch.bfloat16, 3.0, True, 10)]
)
def test_kept_log_sum_exps_are_those_of_the_keys(kind, softcap, learned, sure):
    """Of 84 steps, a window passes every 6. Keys of any norm: queries lose little, much, or most at once."""
    rule, layers = VoteRule(20, sure, 6, 1, 6, 3, "avg"), []
    for _ in range(2):
        torch.manual_seed(sure)
        layers.append(Layer((2, 2, 16, 16), rule, kind, rows=2))
    sinks, known = torch.randn(4, device=DEVICE) if learned else None, []
    for number in range(84):
        if number == 40:
            new = drawn((2, rule.budget, 16), kind), drawn((rule.window + 1, 4, 16), kind)
            for layer in layers:
                layer.admit(1, *new)
        step(layers, 3.0, kind, 0.3, softcap, sinks)
        assert list(layers[0].tokens()) == list(layers[1].tokens()), number
        assert_right(layers[1], 0.3, softcap, sinks)
        known.append(layers[1].known.tolist())
    known = torch.tensor(known)
    assert not known[:3, 1].any() and known[3:].float().mean() > 0.5
    assert softcap or not known[3:].all()  # capped logits are too even for a query to lose most of its sum


def assert_right(layer, scale, softcap, sinks):
    """What is kept of the window's queries where it counts as known, against float64."""
    rule, group = layer.rule, layer.heads // layer.kv_heads
    for row, head in layer.known.nonzero().tolist():
        start, n = int(layer.starts[row, head]), int(layer.lengths[row, head])
        ages = n - 1 - layer.order[start : start + n]
        for age in range(rule.window):
            place, mine = (int(layer.seen[row]) - 1 - age) % (rule.window + 1), slice(head * group, (head + 1) * group)
            logits = layer.queries[row, place, mine].double() @ layer.keys[start : start + n].double().T * scale
            logits = logits if softcap is None else softcap * (logits / softcap).tanh()
            want = logits.masked_fill(ages < age, -torch.inf).logsumexp(-1)
            want = want if sinks is None else torch.logaddexp(want, sinks[mine].double())
            torch.testing.assert_close(layer.lse[row, mine, place].double(), want, atol=1e-4, rtol=0)
