"""Attention over padded and ragged rows, and column mass, on random and edge shapes.

Run by test_triton.py, and on a GPU by `make gpu-test`.
"""

from itertools import combinations, product

import pytest
import torch

from kvkeep.kernels.torch import reference, scoring
from kvkeep.kernels.triton import column_mass, decode
from kvkeep.types import PAD_POSITION

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOUND = {torch.float32: 1e-5, torch.bfloat16: 2e-3}
KINDS = [(None, False), (2.0, False), (None, True), (1.5, True)]


def off(got, want):
    """Largest difference, relative to the largest value."""
    return float((got.float() - want.float()).abs().max() / want.float().abs().max().clamp_min(1e-6))


def drawn(*shape, kind=torch.float32, scale=1.0):
    return (torch.randn(*shape) * scale).to(kind).to(DEVICE)


def pairs(*axes):
    """All combinations on a GPU; in the interpreter, which is slow, as few as let every two values of two axes meet."""
    every = list(product(*(list(axis) for axis in axes)))
    if DEVICE == "cuda":
        return every
    met = {case: set(combinations(enumerate(case), 2)) for case in every}
    open_, chosen = set().union(*met.values()), []
    while open_:
        chosen.append(max(every, key=lambda case: len(met[case] & open_)))
        open_ -= met[chosen[-1]]
    return chosen


@pytest.mark.parametrize(
    "shape, capped, kind",
    pairs([(1, 1, 1, 1, 16), (2, 4, 2, 9, 16), (3, 9, 3, 300, 64), (2, 8, 1, 129, 24)], KINDS, BOUND),
    ids=str,
)
def test_padded_attention(shape, capped, kind):
    (rows, heads, kv_heads, size, dim), (softcap, sunk) = shape, capped
    torch.manual_seed(rows)
    queries, keys, values = (drawn(rows, h, n, dim, kind=kind) for h, n in ((heads, 1), *[(kv_heads, size)] * 2))
    lengths = torch.randint(1, size + 1, (rows, kv_heads), device=DEVICE)
    lengths[0, 0], lengths[-1, -1] = 1, size
    how = lengths, 0.3, softcap, drawn(heads) if sunk else None
    got = decode.padded_attention(queries, keys, values, *how)
    want = reference.padded_attention(queries.float(), keys.float(), values.float(), *how)
    # the result of a lower precision is rounded to it, whoever computes it
    assert got.dtype == kind and off(got, want) <= BOUND[kind] + (torch.finfo(kind).eps if kind != torch.float32 else 0)
    logits = torch.full((2, rows, 3, heads, size), float("-inf"), device=DEVICE)[:, :, 1]  # one of three layers
    assert torch.equal(decode.padded_attention(queries, keys, values, *how, logits[0]), got)
    again = reference.padded_attention(queries.float(), keys.float(), values.float(), *how, logits[1])
    assert off(again, want) <= 1e-5 and torch.equal(logits[0].isinf(), logits[1].isinf())
    unused = torch.arange(size, device=DEVICE) >= lengths.repeat_interleave(heads // kv_heads, 1)[..., None]
    assert torch.equal(logits[0].isinf(), unused)
    assert off(*(each.masked_fill(unused, 0.0) for each in logits)) <= BOUND[kind]


@pytest.mark.parametrize(
    "shape, capped, kind",
    pairs([(1, 1, 1, 1, 16), (2, 4, 2, 9, 16), (2, 9, 3, 70, 64), (1, 80, 1, 5, 24), (3, 8, 4, 17, 40)], KINDS, BOUND),
    ids=str,
)
def test_several_new_tokens_over_heads_of_any_length(shape, capped, kind):
    """Padding gives zeros; a head may hold nothing but the new tokens."""
    (rows, heads, kv_heads, q, dim), (softcap, sunk) = shape, capped
    torch.manual_seed(q)
    counts = torch.randint(1, q + 1, (rows,), device=DEVICE)
    counts[-1] = q
    lengths = torch.randint(0, 150, (rows, kv_heads), device=DEVICE) + counts[:, None]
    lengths[-1, -1] = q
    room = (lengths + 3).flatten()
    starts = (room.cumsum(0) - room).view_as(lengths)
    queries, extra = drawn(rows, q, heads, dim, kind=kind).transpose(1, 2), drawn(heads) if sunk else None
    keys, values = (drawn(int(room.sum()), d, kind=kind) for d in (dim, 2 * dim))
    given = starts, lengths, counts, 0.3, softcap, extra
    got = decode.extend_attention(queries, keys, values, *given)
    want = reference.extend_attention(queries.float(), keys.float(), values.float(), *given)
    assert got.dtype == kind and off(got, want) <= BOUND[kind] + (torch.finfo(kind).eps if kind != torch.float32 else 0)
    for row, count in enumerate(counts.tolist()):
        assert not got[row, :, : q - count].any()


@pytest.mark.parametrize("kind", BOUND, ids=str)
@pytest.mark.parametrize("rows, heads, kv_heads, dim", [(1, 4, 1, 16), (3, 6, 3, 24), (2, 8, 2, 64)])
def test_ragged_attention(rows, heads, kv_heads, dim, kind):
    torch.manual_seed(heads)
    lengths = torch.randint(0, 200, (rows, kv_heads), device=DEVICE)
    lengths[0, 0] = 1
    room = lengths + torch.randint(0, 9, (rows, kv_heads), device=DEVICE)
    starts = (room.flatten().cumsum(0) - room.flatten()).view_as(lengths)
    queries, keys, values = (
        drawn(rows, heads, 1, dim, kind=kind),
        *(drawn(int(room.sum()) + 5, dim, kind=kind) for _ in range(2)),
    )
    got = decode.ragged_attention(queries, keys, values, starts, lengths, 256, 0.3)
    for row in range(rows):
        for head in range(heads):
            mine = head // (heads // kv_heads)
            first, count = int(starts[row, mine]), int(lengths[row, mine])
            if not count:
                assert got[row, head].eq(0).all()
                continue
            k, v = (t[first : first + count].double() for t in (keys, values))
            want = (k @ queries[row, head, 0].double() * 0.3).softmax(0) @ v
            assert off(got[row, head, 0], want) <= BOUND[kind] + (torch.finfo(kind).eps if kind != torch.float32 else 0)


@pytest.mark.parametrize(("softcap", "learned"), KINDS)
def test_ragged_attention_writes_log_sum_exps(softcap, learned):
    """Of each row to its place; rows that are not of this step, and other places, stay as they are."""
    torch.manual_seed(0)
    queries, keys, values = drawn(2, 4, 1, 16), drawn(400, 16), drawn(400, 16)
    starts, lengths = (torch.tensor(each, device=DEVICE) for each in ([[0, 150], [160, 165]], [[150, 9], [1, 200]]))
    sinks, places = drawn(4) if learned else None, torch.tensor([2, 0], device=DEVICE)
    want = torch.full((3, 4, 3), 7.0, dtype=torch.float64, device=DEVICE)
    for row, head in product(range(2), range(4)):
        first, count = int(starts[row, head // 2]), int(lengths[row, head // 2])
        logits = keys[first : first + count].double() @ queries[row, head, 0].double() * 0.3
        logits = logits if softcap is None else softcap * (logits / softcap).tanh()
        logits = logits if sinks is None else torch.cat([logits, sinks[head : head + 1].double()])
        want[row, head, places[row]] = logits.logsumexp(0)
    for function in (decode.ragged_attention, reference.ragged_attention):
        got = torch.full_like(want, 7.0, dtype=torch.float32)
        function(queries, keys, values, starts, lengths, 256, 0.3, softcap, sinks, (got, places))
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", BOUND, ids=str)
@pytest.mark.parametrize("rows, kv_heads, dim, wide", [(1, 1, 16, 16), (3, 2, 24, 40), (5, 3, 128, 64)])
def test_append_ragged(rows, kv_heads, dim, wide, kind):
    torch.manual_seed(rows)
    lengths = torch.randint(0, 9, (rows, 2, kv_heads), device=DEVICE)[:, 1]
    starts = torch.arange(0, rows * kv_heads * 10, 10, device=DEVICE).view_as(lengths)
    active = torch.ones(rows, 1, dtype=torch.int64, device=DEVICE)
    active[-1] = rows == 1
    buffers = [drawn(rows * kv_heads * 10, size, kind=kind) for size in (dim, wide)]
    new = [drawn(rows, 1, kv_heads, size, kind=kind).transpose(1, 2) for size in (dim, wide)]  # as attention has them
    got, want = ([*(t.clone() for t in buffers), lengths.repeat(1, 2)[:, kv_heads:]] for _ in range(2))
    for module, (keys, values, counts) in ((decode, got), (reference, want)):
        module.append_ragged(keys, values, *new, starts, counts, active)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert torch.equal(got[2], lengths + active) and not torch.equal(got[0], buffers[0])


@pytest.mark.parametrize("lengths", [(0,), (5, 0, 300), (64, 65, 63, 1)], ids=str)
@pytest.mark.parametrize("kind, wider", [(torch.float32, 0), (torch.bfloat16, 24)], ids=str)
def test_copy_segments(lengths, kind, wider):
    torch.manual_seed(len(lengths))
    rooms = [n + 3 for n in lengths]
    first = torch.tensor([2 + sum(rooms[:i]) for i in range(len(rooms))], device=DEVICE)
    starts = torch.stack([first.flip(0), first + 700], 1)[:, 1]
    source = [drawn(2 + sum(rooms), dim, kind=kind) for dim in (40, 40 + wider)]
    target = [drawn(1200, dim) for dim in (40, 40 + wider)]
    got, want = [t.clone() for t in target], [t.clone() for t in target]
    ends = first + torch.tensor(lengths, device=DEVICE)
    for module, pair in ((decode, got), (reference, want)):
        module.copy_segments(*pair, starts, source, first, ends, sum(lengths))
    for have, should, before, given in zip(got, want, target, source, strict=True):
        for begin, to, n in zip(first.tolist(), starts.tolist(), lengths, strict=True):
            before[to : to + n] = given[begin : begin + n].float()
        assert have.equal(should) and have.equal(before)


def test_a_head_with_nothing_gives_zeros():
    queries, keys, values = drawn(1, 2, 1, 16), drawn(1, 2, 5, 16), drawn(1, 2, 5, 16)
    got = decode.padded_attention(queries, keys, values, torch.tensor([[0, 3]], device=DEVICE), 0.3)
    assert got[0, 0].eq(0).all() and got[0, 1].ne(0).any()


MASSES = [  # heads, kv_heads, q, n, dim, seq_len
    (2, 1, 0, 9, 16, 9),
    (1, 1, 1, 1, 16, 1),
    (4, 2, 5, 9, 16, 9),
    (6, 3, 70, 200, 24, 200),
    (2, 2, 64, 130, 8, 400),
    (4, 1, 130, 130, 64, 130),
]


@pytest.mark.parametrize("shape, capped, kind", pairs(MASSES, KINDS, BOUND), ids=str)
def test_column_mass(shape, capped, kind):
    (heads, kv_heads, q, n, dim, seq_len), (softcap, sunk) = shape, capped
    torch.manual_seed(n)
    queries, keys = drawn(heads, q, dim, kind=kind, scale=2), drawn(kv_heads, n, dim, kind=kind)
    positions = torch.stack([torch.randperm(seq_len)[:n].sort().values for _ in range(kv_heads)]).int().to(DEVICE)
    sinks = drawn(heads) if sunk else None
    got = column_mass.column_mass(queries, keys, positions, seq_len, 0.3, softcap, sinks)
    want = scoring.column_mass(queries.float(), keys.float(), positions, seq_len, 0.3, softcap, sinks)
    assert off(got, want) <= BOUND[kind]


REPEATED = [(1, 1, 1, 0, 16), (4, 2, 65, 4, 16), (6, 3, 130, 2, 24), (4, 1, 64, 4, 64)]


# more queries than keys, near, (weighted, norm); echo reads the keys' tokens with other queries
FED = [7, -3, 0], [None, 0, 3, 70], product([False, True], [0, 1, 2])


@pytest.mark.parametrize("shape, capped, kind, more, near, mass", pairs(REPEATED, KINDS, BOUND, *FED), ids=str)
def test_repeated_attention(shape, capped, kind, more, near, mass):
    (heads, kv_heads, m, sinks, dim), (softcap, sunk), (weighted, norm) = shape, capped, mass
    q = max(1, m + more)
    torch.manual_seed(m)
    queries, again = (drawn(heads, q, dim, kind=kind, scale=2) for _ in range(2))
    own, keys, first = (drawn(kv_heads, n, dim, kind=kind) for n in (q, m, sinks))
    given = queries, keys, first, *((queries, own) if more else (again, keys))
    weights = (torch.rand(heads, m, device=DEVICE), torch.rand(q, device=DEVICE) + 0.1) if weighted else (None, None)
    how = 0.3, softcap, drawn(heads) if sunk else None, near, *weights, norm
    got = column_mass.repeated_attention(*given, *how)
    want = scoring.repeated_attention(*(t.float() for t in given), *how)
    assert off(got, want) <= BOUND[kind]


CHUNKS = [  # heads, kv_heads, chunks, size, dim
    (1, 1, 1, 1, 16),
    (4, 2, 3, 5, 16),
    (6, 2, 2, 100, 24),
    (4, 1, 2, 256, 64),
    (2, 1, 1, 300, 32),
]


@pytest.mark.parametrize("shape, kind", pairs(CHUNKS, BOUND), ids=str)
def test_chunk_mass(shape, kind):
    heads, kv_heads, chunks, size, dim = shape
    torch.manual_seed(size)
    queries = drawn(heads, chunks * size + 2, dim, kind=kind)[:, 1:-1]
    keys = drawn(chunks * size, kv_heads, dim, kind=kind).transpose(0, 1)
    got, want = column_mass.chunk_mass(queries, keys, size), scoring.chunk_mass(queries, keys, size)
    assert off(got, want) <= BOUND[torch.float32]  # no product is rounded
    assert got.view(kv_heads, chunks, size).sum(-1).allclose(torch.tensor(float(size), device=DEVICE))


def test_chunk_mass_of_logits_beyond_the_exponential():
    queries, keys = 100 * torch.eye(16, device=DEVICE)[None, :8], torch.eye(16, device=DEVICE)[None, :8]
    assert column_mass.chunk_mass(queries, keys, 4)[0].allclose(torch.ones(8, device=DEVICE))


def test_column_mass_of_queries_with_more_digits_than_keys():
    torch.manual_seed(0)
    queries, keys = drawn(4, 33, 64, scale=2), drawn(2, 200, 64, kind=torch.bfloat16)
    rest = keys, torch.arange(200, device=DEVICE).expand(2, -1), 200, 0.3
    assert off(column_mass.column_mass(queries, *rest), scoring.column_mass(queries, *rest)) <= BOUND[torch.float32]


@pytest.mark.parametrize("q, n", [(300, 300), (130, 530), (5, 300)])
def test_column_mass_with_weights_and_known_sums(q, n):
    torch.manual_seed(q)
    queries, keys, weights = drawn(4, q, 32, scale=2), drawn(2, n, 32), torch.rand(4, q, device=DEVICE)
    rest = keys, torch.arange(n, device=DEVICE).expand(2, -1), n, 0.3
    want = scoring.column_mass(queries, *rest, weights=weights)
    sums = column_mass.log_sum_exp(queries.contiguous(), keys, rest[1].contiguous(), n, 0.3, None)
    seen = torch.arange(n, device=DEVICE) <= torch.arange(n - q, n, device=DEVICE)[:, None]
    logits = (queries.view(2, 2, q, 32) @ keys[:, None].transpose(2, 3) * 0.3).masked_fill(~seen, float("-inf"))
    assert off(sums, logits.logsumexp(-1).view(4, q)) <= 1e-5
    assert off(column_mass.column_mass(queries, *rest, weights=weights), want) <= 1e-5
    assert off(column_mass.column_mass(queries, *rest, None, None, weights, sums), want) <= 1e-5
    ones = scoring.column_mass(queries, *rest)
    assert off(want, ones) > 0.1 and off(column_mass.column_mass(queries, *rest), ones) <= 1e-5


@pytest.mark.parametrize("module", [column_mass, scoring])
@pytest.mark.parametrize("n, q, kept", [(40, 6, 25), (256, 80, 100), (300, 200, 290)])
def test_column_mass_where_one_head_kept_all_and_another_did_not(n, q, kept, module):
    torch.manual_seed(0)
    queries, keys = drawn(2, q, 16), drawn(2, n, 16)
    positions = torch.arange(n, device=DEVICE).repeat(2, 1)
    positions[1, :kept] = torch.cat([torch.randperm(n - q)[: kept - q].sort().values, torch.arange(n - q, n)])
    positions[1, kept:] = PAD_POSITION
    keys[1, kept:] = 0
    got = module.column_mass(queries, keys, positions, n, 0.3)
    for head, tokens in enumerate((n, kept)):
        seen = positions[head, :tokens] <= torch.arange(n - q, n, device=DEVICE)[:, None]
        logits = (queries[head].double() @ keys[head, :tokens].double().T * 0.3).masked_fill(~seen, float("-inf"))
        assert off(got[head, :tokens], logits.softmax(-1).sum(0)) <= 1e-5
    assert got[1, kept:].eq(0).all()
