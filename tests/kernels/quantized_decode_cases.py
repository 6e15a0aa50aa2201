"""Quantized keys and values: the format against plain Python, Triton's kernels against torch's functions.

Run as decode_cases.py is.
"""

import math

import pytest
import torch
from decode_cases import BOUND, DEVICE, KINDS, drawn, off, pairs

from kvkeep.kernels.torch import quantization as plain
from kvkeep.kernels.torch.quantization import GROUP_SIZE, QuantizedKV
from kvkeep.kernels.triton import quantized_decode as fused

BITS = [8, 4]
FINE = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # relative error of rounding
LEAST = {torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 2.0**-25}  # absolute error of a tiny step
LENGTHS = [0, 1, 31, 32, 33, 63, 64, 65, 100, 170]


def write(kv, start, keys, values):
    """Quantize whole groups from slot `start` on. keys [n, dim], values [n, value_dim]"""
    groups = torch.arange(start // GROUP_SIZE, (start + len(keys)) // GROUP_SIZE, device=kv.device)
    plain.write_groups(kv, groups, *(t.reshape(len(groups), GROUP_SIZE, t.shape[1]) for t in (keys, values)))


def read(kv, start, n, dtype=None):
    """Dequantize n tokens to a dtype (None: the model's). -> keys [n, dim], values [n, value_dim]"""
    found = plain._dequantize(kv, torch.arange(start, start + n, device=kv.device))
    return tuple(t.to(dtype or kv.key_scales.dtype) for t in found)


def stored_code(codes, token, channel, width, bits):
    """One code by the format's words: in 4 bits c and c + width / 2 share a byte, the lower channel its low half."""
    if bits == 8:
        return codes[token][channel]
    byte = codes[token][channel % (width // 2)]
    return byte % 16 if channel < width // 2 else byte // 16


def check_shared(numbers, codes, step, zero, got, bits, kind):
    """Numbers that share a step and a zero, in float64: what is stored follows from them, and gives them back."""
    levels = 2**bits - 1
    true = (max(numbers) - min(numbers)) / levels
    assert zero == min(numbers)  # it is one of the model's numbers, hence stored as it is
    rounding = true * (FINE[kind] + 2.0**-22) + LEAST[kind]
    assert abs(step - true) <= rounding
    slack = 1e-6 * max(map(abs, numbers))  # of float32 arithmetic
    for number, code, back in zip(numbers, codes, got, strict=True):
        assert code == 0 or step > 0
        assert code in (0, levels) or abs(code * step + zero - number) <= step / 2 + slack
        assert abs(code * step + zero - back) <= slack
        assert abs(back - number) <= max(step, true) / 2 + levels * rounding + slack


def check_all(kv, start, keys, values, kind):
    """Everything `write` stored and `read` gives back, in loops over plain numbers."""
    n, dim, wide, bits = len(keys), keys.shape[1], values.shape[1], kv.bits
    key_codes, key_scales, key_mins, value_codes, value_scales, value_mins = (t.tolist() for t in kv.tensors)
    got_keys, got_values = (t.tolist() for t in read(kv, start, n, torch.float32))
    keys, values = keys.tolist(), values.tolist()
    for first in range(0, n, 32):
        for c in range(dim):
            tokens = range(first, first + 32)
            check_shared(
                [keys[t][c] for t in tokens], [stored_code(key_codes, start + t, c, dim, bits) for t in tokens],
                key_scales[(start + first) // 32][c], key_mins[(start + first) // 32][c],
                [got_keys[t][c] for t in tokens], bits, kind,
            )  # fmt: skip
    for t in range(n):
        codes = [stored_code(value_codes, start + t, c, wide, bits) for c in range(wide)]
        step, zero = value_scales[start + t], value_mins[start + t]
        check_shared(values[t], codes, step, zero, got_values[t], bits, torch.float32)


@pytest.mark.parametrize("kind", FINE, ids=str)
@pytest.mark.parametrize("bits", BITS)
def test_every_number_is_at_most_half_a_step_off(bits, kind):
    torch.manual_seed(bits)
    kv = QuantizedKV.empty(160, 24, 10, bits, kind, DEVICE)
    keys = drawn(96, 24, kind=kind) * torch.logspace(-3, 3, 24, device=DEVICE).to(kind)
    values = drawn(96, 10, kind=kind, scale=5)
    keys[:32, 3], keys[32:64], values[7] = 0.5, -2.0, 0.0
    write(kv, 32, keys, values)
    check_all(kv, 32, keys, values, kind)
    got = read(kv, 32, 96)
    assert [t.dtype for t in got] == [kind] * 2
    assert got[0][:32, 3].eq(0.5).all() and got[0][32:64].eq(-2.0).all() and got[1][7].eq(0).all()
    assert not any(t[:32].any() or t[128:].any() for t in (kv.key_codes, kv.value_codes))


def test_bytes_are_those_of_the_buffers():
    kv = QuantizedKV.empty(64, 128, 96, 4, torch.bfloat16, DEVICE)
    assert kv.nbytes == 64 * (64 + 48) + 2 * (64 // 32) * 128 * 2 + 2 * 64 * 4
    assert kv.value_dim == 96 and kv.slots == 64 and kv.device.type == DEVICE


@pytest.mark.parametrize(
    "slots, dim, wide, bits, words",
    [
        (32, 15, 16, 4, "keys of 15 .* must be even"), (32, 16, 7, 4, "values of 7 .* must be even"),
        (40, 16, 16, 8, "slots=40.*multiple of 32"), (0, 16, 16, 8, "slots=0"), (32, 16, 16, 2, "bits=2"),
    ],
)  # fmt: skip
def test_what_cannot_be_quantized_is_refused(slots, dim, wide, bits, words):
    with pytest.raises(ValueError, match=words):
        QuantizedKV.empty(slots, dim, wide, bits, torch.float32, DEVICE)


def twice(*tensors):
    """Two copies of the same state, one for each implementation."""

    def copied(x):
        return QuantizedKV(*(t.clone() for t in x.tensors), x.bits) if isinstance(x, QuantizedKV) else x.clone()

    return [[copied(x) for x in tensors] for _ in range(2)]


def same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        for x, y in zip(a.tensors, b.tensors, strict=True) if isinstance(a, QuantizedKV) else [(a, b)]:
            assert x.dtype == y.dtype and torch.equal(x, y)


def room(rows, kv_heads, slots):
    """Stretches of so many slots each, in an order that is not theirs."""
    return (torch.randperm(rows * kv_heads).view(rows, kv_heads) * slots).to(DEVICE)


@pytest.mark.parametrize(
    "bits, dim, wide, kind",
    [
        (8, 24, 24, torch.float32), (4, 24, 24, torch.float32), (8, 64, 40, torch.bfloat16),
        (4, 64, 40, torch.bfloat16), (8, 17, 9, torch.float16), (4, 128, 128, torch.float16),
    ],
)  # fmt: skip
def test_many_appends(bits, dim, wide, kind):
    """70 tokens one by one: both implementations, and packing them all at once, leave the same."""
    torch.manual_seed(dim)
    rows, kv_heads, count = 1, 2, 70
    kv = QuantizedKV.empty(rows * kv_heads * 64, dim, wide, bits, kind, DEVICE)
    starts, active = room(rows, kv_heads, 64), torch.ones(rows, 1, dtype=torch.int64, device=DEVICE)
    tails = [torch.zeros(rows, kv_heads, GROUP_SIZE, size, dtype=kind, device=DEVICE) for size in (dim, wide)]
    keys, values = (drawn(rows, kv_heads, count, size, kind=kind, scale=3) for size in (dim, wide))
    keys[0, 0, :32, 1], keys[0, 1, 32:64], values[0, 1, 40] = 1.5, 0.0, -3.0
    ours, theirs = twice(kv, *tails, torch.zeros_like(starts))
    for i in range(count):
        for function, state in ((plain.append_quantized, ours), (fused.append_quantized, theirs)):
            assert function(*state[:3], keys[:, :, i], values[:, :, i], starts, state[3], active) is None
        same(ours, theirs)
    assert ours[3].eq(count).all()
    for row in range(rows):
        for head in range(kv_heads):
            write(kv, int(starts[row, head]), keys[row, head, :64], values[row, head, :64])
    same([kv], ours[:1])
    assert torch.equal(ours[1][:, :, :6], keys[:, :, 64:]) and torch.equal(ours[2][:, :, :6], values[:, :, 64:])


@pytest.mark.parametrize("whole", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("function", [plain.append_quantized, fused.append_quantized], ids=["torch", "triton"])
def test_rows_that_are_not_active_keep_all(function, bits, whole):
    """Full tails in every row, of which one is active; the others' starts point nowhere, or at its own stretch."""
    torch.manual_seed(1)
    kv = QuantizedKV.empty(128, 16, 16, bits, torch.float32, DEVICE)
    write(kv, 0, drawn(128, 16), drawn(128, 16))
    tails = drawn(3, 2, GROUP_SIZE, 16), drawn(3, 2, GROUP_SIZE, 16)
    key, value = drawn(3, 2, 16), drawn(3, 2, 16)
    starts = torch.tensor([[10**9 + 1, -7], [64, 32], [32, 64]], device=DEVICE, dtype=whole)
    lengths, active = torch.full_like(starts, 31), starts.new_tensor([[0], [1], [0]])
    before, after = twice(kv, *tails, lengths)
    function(*after[:3], key, value, starts, after[3], active)
    assert after[3].tolist() == [[31, 31], [32, 32], [31, 31]]
    before[1][1, :, 31], before[2][1, :, 31] = key[1], value[1]
    same(before[1:3], after[1:3])
    for head, start in enumerate((64, 32)):
        write(before[0], start, before[1][1, head], before[2][1, head])
    same(before[:1], after[:1])


def filled(rows, kv_heads, dim, wide, bits, kind, lengths):
    """Stretches of these lengths. -> kv, tail keys and values, starts, and all that can be read of each"""
    slots = max(GROUP_SIZE, int(lengths.max()) // GROUP_SIZE * GROUP_SIZE)
    kv = QuantizedKV.empty(rows * kv_heads * slots, dim, wide, bits, kind, DEVICE)
    starts = room(rows, kv_heads, slots)
    tails = [drawn(rows, kv_heads, GROUP_SIZE, size, kind=kind) for size in (dim, wide)]
    tokens = {}
    for row in range(rows):
        for head in range(kv_heads):
            start, whole = int(starts[row, head]), int(lengths[row, head]) // GROUP_SIZE * GROUP_SIZE
            write(kv, start, drawn(whole, dim, kind=kind), drawn(whole, wide, kind=kind))
            old, rest = read(kv, start, whole, torch.float64), int(lengths[row, head]) - whole
            tokens[row, head] = [torch.cat([o, t[row, head, :rest].double()]) for o, t in zip(old, tails, strict=True)]
    return kv, *tails, starts, tokens


def attended(query, keys, values, scale, softcap, sink):
    """One query over its tokens, in float64, in words everybody knows."""
    logits = keys @ query.double() * scale
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    largest = max([*logits.tolist(), sink if sink is not None else -math.inf])
    shares = (logits - largest).exp()
    return shares @ values / (shares.sum() + (0 if sink is None else math.exp(sink - largest)))


SHAPES = [  # rows, heads, kv_heads, dim, wide
    (1, 4, 1, 16, 16),
    (5, 4, 2, 24, 24),
    (2, 9, 3, 64, 48),
    (2, 4, 2, 128, 128),
]


@pytest.mark.parametrize("shape, capped, bits, kind", pairs(SHAPES, KINDS, BITS, BOUND), ids=str)
def test_quantized_attention(shape, capped, bits, kind):
    (rows, heads, kv_heads, dim, wide), (softcap, sunk) = shape, capped
    torch.manual_seed(heads + dim)
    order = torch.randperm(len(LENGTHS))[torch.arange(rows * kv_heads) % len(LENGTHS)]
    lengths = torch.tensor(LENGTHS)[order].view(rows, kv_heads).to(DEVICE)
    *state, starts, tokens = filled(rows, kv_heads, dim, wide, bits, kind, lengths)
    queries, sinks = drawn(rows, heads, 1, dim, kind=kind), drawn(heads) if sunk else None
    got = fused.quantized_attention(queries, *state, starts, lengths, 256, 0.3, softcap, sinks)
    wide_state = (state[0], *(tail.float() for tail in state[1:]))
    want = plain.quantized_attention(queries.float(), *wide_state, starts, lengths, 256, 0.3, softcap, sinks)
    bound = BOUND[kind] + (torch.finfo(kind).eps if kind != torch.float32 else 0)
    assert got.dtype == kind and got.shape == want.shape == (rows, heads, 1, wide)
    assert off(got, want) <= bound
    assert plain.quantized_attention(queries, *state, starts, lengths, 256, 0.3, softcap, sinks).dtype == kind
    for row, head in ((r, h) for r in range(rows) for h in range(heads)):
        mine = row, head // (heads // kv_heads)
        if not lengths[mine]:
            assert got[row, head].eq(0).all() and want[row, head].eq(0).all()
            continue
        sink = None if sinks is None else float(sinks[head])
        assert off(want[row, head, 0], attended(queries[row, head, 0], *tokens[mine], 0.3, softcap, sink)) <= 1e-5


@pytest.mark.parametrize("bits", BITS)
def test_every_length_around_a_group(bits):
    torch.manual_seed(7)
    lengths = torch.tensor(LENGTHS, device=DEVICE)[:, None]
    *state, starts, _ = filled(len(LENGTHS), 1, 32, 32, bits, torch.float32, lengths)
    queries = drawn(len(LENGTHS), 2, 1, 32)
    got = fused.quantized_attention(queries, *state, starts, lengths, 200, 0.3)
    assert off(got, plain.quantized_attention(queries, *state, starts, lengths, 200, 0.3)) <= 1e-5
    assert got[0].eq(0).all() and got[1:].ne(0).any(-1).all()


@pytest.mark.parametrize("kind", FINE, ids=str)
@pytest.mark.parametrize("bits", BITS)
def test_values_of_very_different_size(bits, kind):
    """A token with large values beside tokens with small ones, or none: its step is not theirs."""
    torch.manual_seed(8)
    kv, tails = QuantizedKV.empty(64, 16, 16, bits, kind, DEVICE), drawn(2, 1, 1, GROUP_SIZE, 16, kind=kind)
    values = drawn(64, 16) * torch.logspace(-4, 4, 64, device=DEVICE)[:, None]
    values[::3] = 0
    write(kv, 0, drawn(64, 16, kind=kind), values.to(kind))
    query, lengths = drawn(1, 2, 1, 16, kind=kind), torch.tensor([[64]], device=DEVICE)
    rest = torch.zeros_like(lengths), lengths, 64, 0.3
    want = plain.quantized_attention(query.float(), kv, *tails.float(), *rest)
    bound = 1e-5 if kind == torch.float32 else 2e-3 + torch.finfo(kind).eps
    assert off(fused.quantized_attention(query, kv, *tails, *rest), want) <= bound


@pytest.mark.parametrize("bits", BITS)
def test_decoding(bits):
    """Append, attend, append, …: what a decode loop does, from nothing and over the step from 31 to 32 tokens."""
    torch.manual_seed(9)
    kv = QuantizedKV.empty(128, 16, 16, bits, torch.float32, DEVICE)
    starts, active = room(2, 1, 64), torch.tensor([[1], [1]], device=DEVICE)
    ours, theirs = twice(kv, *drawn(2, 2, 1, GROUP_SIZE, 16), torch.tensor([[0], [29]], device=DEVICE))
    for _ in range(5):
        key, value, query = drawn(2, 1, 16), drawn(2, 1, 16), drawn(2, 2, 1, 16)
        outputs = []
        for module, state in ((plain, ours), (fused, theirs)):
            module.append_quantized(*state[:3], key, value, starts, state[3], active)
            outputs.append(module.quantized_attention(query, *state[:3], starts, state[3], 64, 0.3))
        assert off(outputs[1], outputs[0]) <= 1e-5
    same(ours, theirs)


def test_what_is_written_in_place_must_lie_in_one_piece():
    kv = QuantizedKV.empty(32, 16, 16, 8, torch.float32, DEVICE)
    tail, lengths = drawn(1, 1, GROUP_SIZE, 16), torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)
    slanted = drawn(1, 1, 16, GROUP_SIZE).transpose(2, 3)
    with pytest.raises(ValueError, match="tail_values has strides"):
        fused.append_quantized(kv, tail, slanted, drawn(1, 1, 16), drawn(1, 1, 16), lengths, lengths, lengths)
