"""Calls of every function that starts Triton kernels, by the module it is in, with tensors of the sizes of an 8B model.

Each function here gives the calls for one dtype of the model, with all options or with none: names of the table of
kernels (kernels/dispatch.py), or functions, and their arguments. Only dtypes, shapes and strides mean anything.
"""

from functools import partial

import torch

from kvkeep.kernels.torch.fp8 import quantize_rows
from kvkeep.kernels.torch.quantization import GROUP_SIZE, QuantizedKV
from kvkeep.kernels.torch.votes import VoteRule

ROWS, HEADS, KV_HEADS, DIM = 3, 32, 8, 128
HIDDEN, INNER = 4096, 14336
N, NEW = 600, 300  # tokens that are held, and that are new
SCALE = DIM**-0.5


def of(kind, *shape):
    return torch.ones(shape, dtype=kind)


floats, longs, ints = (partial(of, kind) for kind in (torch.float32, torch.int64, torch.int32))


def capped(options):
    """softcap and sink logits"""
    return (30.0, floats(HEADS)) if options else (None, None)


def column_mass(kind, options):
    queries, keys, positions = of(kind, HEADS, NEW, DIM), of(kind, KV_HEADS, N, DIM), ints(KV_HEADS, N)
    held = N if options else 2 * N  # without evictions, positions are indices
    yield "column_mass", queries, keys, positions, held, SCALE, *capped(options)
    weights = floats(HEADS, NEW) if options else None
    yield "column_mass", queries[:, :8], keys, positions, held, SCALE, *capped(options), weights, floats(HEADS, 8)
    largest = 2**17 // DIM // kind.itemsize
    yield "chunk_mass", of(kind, HEADS, N, DIM), keys, largest if options else 128
    own = of(kind, KV_HEADS, NEW, DIM)
    weights = (floats(HEADS, N), floats(NEW)) if options else (None, None)
    given = queries, keys, keys[:, :4], queries, own, SCALE, *capped(options), 64 if options else None
    for norm in (1, 2) if options else (0,):
        yield "repeated_attention", *given, *weights, norm


def decode(kind, options):
    query, lengths = of(kind, ROWS, HEADS, 1, DIM), longs(ROWS, KV_HEADS)
    keys, values, starts = of(kind, ROWS * KV_HEADS * N, DIM), of(kind, ROWS * KV_HEADS * N, DIM), longs(ROWS, KV_HEADS)
    sums = (floats(ROWS, HEADS, 65), longs(ROWS)) if options else None
    logits = floats(ROWS, HEADS, N) if options else None
    yield "ragged_attention", query, keys, values, starts, lengths, N, SCALE, *capped(options), sums, logits
    held = of(kind, ROWS, KV_HEADS, N, DIM)
    yield "padded_attention", query, held, held, lengths, SCALE, *capped(options)
    new = of(kind, ROWS, 1, KV_HEADS, DIM).transpose(1, 2)
    yield "append_ragged", keys, values, new, new, starts, lengths, longs(ROWS, 1)
    yield "copy_segments", keys, values, starts.flatten(), (keys, values), starts.flatten(), starts.flatten(), N
    queries = of(kind, ROWS, NEW, HEADS, DIM).transpose(1, 2)
    yield "extend_attention", queries, keys, values, starts, lengths, longs(ROWS), SCALE, *capped(options)


def divergence(kind, options):
    given = of(kind, HEADS, 64, DIM), of(kind, KV_HEADS, N, DIM), ints(KV_HEADS, N), N, 8, SCALE
    yield "js_distance", *given, *capped(options), options


def evict_voted(kind, options):
    slots, budget = ROWS * KV_HEADS * N + 1, N // 2
    held = of(kind, slots, DIM), of(kind, slots, DIM), ints(slots), ints(slots)
    spans, sums = (longs(ROWS, KV_HEADS), longs(ROWS, KV_HEADS)), floats(ROWS, HEADS, 66)
    rule = VoteRule(budget, budget if options else budget // 2, 64, 4, 64, 5, "max" if options else "avg")
    queries = of(kind, ROWS, 66, HEADS, DIM), longs(ROWS), sums, ints(ROWS, KV_HEADS)
    yield "evict_voted", *held, *spans, *queries, N, rule, SCALE, *capped(options)


def fp8_product(kind, options):
    weight = quantize_rows(of(kind, HIDDEN, HIDDEN))
    for rows in (1, 32, 64):
        bias, total = (of(kind, HIDDEN), of(kind, rows, HIDDEN)) if options else (None, None)
        yield "fp8_linear", quantize_rows(of(kind, rows, HIDDEN)), weight, bias, total


def fp8_rows(kind, options):
    yield "quantize_rows", of(kind, NEW, HIDDEN)
    yield "rms_norm_quantized", of(kind, ROWS, NEW, HIDDEN), of(kind, HIDDEN), 1e-5, *norm(options)
    for activation in ("gelu", "gelu_tanh") if options else ("silu",):
        yield "gated_quantized", *of(kind, NEW, 2 * INNER).chunk(2, -1), activation


def norm(options):
    """offset, rounds"""
    return (1.0, False) if options else (0.0, True)


def host_gather(kind, options):
    near, blocks = of(kind, KV_HEADS, N, DIM)[:, 5:], of(kind, KV_HEADS, N - 5, DIM)
    table, index = longs(3, 64), longs(KV_HEADS if options else 1, 60)
    yield "put_block", near, near, (blocks, blocks), table, 0, N
    front = (blocks[:, :4].contiguous(),) * 2 if options else None
    found = of(kind, KV_HEADS, 64 if options else 60, DIM)
    yield "gather_blocks", index, table, 9, found, found, front
    lists, most = KV_HEADS if options else 1, 40
    selected, unit_of, pair = ints(ROWS, lists, most), ints(ROWS, lists, 60), slotted(kind)
    maps = ints(ROWS, lists, N), unit_of, unit_of, ints(ROWS, lists), selected, longs(ROWS, 5, 90), longs(ROWS)
    yield "fetch_units", selected, longs(ROWS), longs(ROWS), *maps, pair, 4, 32


def slotted(kind):
    """Keys and values: 4 sinks, and 60 units of 32 tokens"""
    return (of(kind, ROWS, KV_HEADS, 4 + 60 * 32, DIM),) * 2


def key_products(kind, options):
    keys, member = of(kind, KV_HEADS, N, DIM), longs(KV_HEADS, N)
    yield "key_similarity", keys, of(torch.bool, KV_HEADS, N), 5
    yield "quadratic_form", keys.bfloat16(), floats(HEADS, DIM, DIM), floats(HEADS, DIM)
    yield "assign", keys, floats(KV_HEADS, 40, DIM), longs(KV_HEADS, 40) if options else None
    yield "means", keys, member, 40


def layer_ops(kind, options):
    x, heads, angles = of(kind, ROWS, NEW, HIDDEN), of(kind, ROWS, NEW, HEADS, DIM), of(kind, ROWS, NEW, DIM)
    yield "rms_norm", x, of(kind, HIDDEN), 1e-5, *norm(options)
    yield "rms_norm", heads, of(kind, DIM), 1e-5, *norm(options)
    for activation in ("gelu", "gelu_tanh") if options else ("silu",):
        yield "gated", *of(kind, NEW, 2 * INNER).chunk(2, -1), activation
    yield "rotate_heads", heads.transpose(1, 2), heads[:, :, :KV_HEADS].transpose(1, 2), angles, angles
    pairs = DIM // 4 if options else DIM // 2
    angle = floats(KV_HEADS, N, pairs) if options else floats(N, pairs)
    yield "apply_angles", of(kind, KV_HEADS, N, DIM), angle, angle, options, torch.float32 if options else kind


def prefill_attention(kind, options):
    from kvkeep.kernels.triton.prefill_attention import merge  # its callers call torch's kernels for a GPU

    part, lse = of(kind, 1, HEADS, NEW, DIM), floats(1, HEADS, NEW)
    other = of(kind, 1, NEW, HEADS, DIM).transpose(1, 2) if options else part
    yield merge, part, lse, other, lse, part


def quantized_decode(kind, options):
    kv = QuantizedKV.empty(ROWS * KV_HEADS * 640, DIM, DIM, 4 if options else 8, kind)
    tail, new = of(kind, ROWS, KV_HEADS, GROUP_SIZE, DIM), of(kind, ROWS, KV_HEADS, DIM)
    starts, lengths = longs(ROWS, KV_HEADS), longs(ROWS, KV_HEADS)
    yield "append_quantized", kv, tail, tail, new, new, starts, lengths, longs(ROWS, 1)
    given = of(kind, ROWS, HEADS, 1, DIM), kv, tail, tail, starts, lengths, N, SCALE
    yield "quantized_attention", *given, *capped(options)


def retrieval_attention(kind, options):
    queries, pair = of(kind, HEADS, NEW, DIM), (of(kind, KV_HEADS, N, DIM),) * 2
    far, before = (lambda: pair) if options else None, floats(HEADS, N - NEW)
    yield "two_region_attention", queries, queries, far, pair, SCALE, *capped(options), 64, before[0]
    yield "two_region_attention", queries, queries, far, pair, SCALE, *capped(options), 64, before, True


def row_queries(kind, options):
    moments = floats(ROWS, 2, KV_HEADS * DIM) if options else None
    yield "mean_queries", of(kind, ROWS, HEADS, DIM), KV_HEADS, moments, floats(ROWS)
    yield "share_quota", floats(ROWS, N), longs(ROWS), longs(ROWS), of(torch.float64, ROWS, 32, 2), 3, 40
    known = (70, *floats(2, KV_HEADS * DIM)) if options else (0, None, None)
    question = floats(9, KV_HEADS * DIM) if options else None
    yield "weighted_query", of(kind, HEADS, NEW, DIM), KV_HEADS, *known, question


def selection(kind, options):
    scores, rank, mask = floats(KV_HEADS, N), longs(KV_HEADS, N), of(torch.bool, KV_HEADS, N)
    units = (longs(KV_HEADS, N) * 0, floats(KV_HEADS, 40)) if options else (None, None)
    yield "ranks", scores, *((mask, mask) if options else (None, None)), *units
    yield "top_counts", scores, rank, of(torch.float64, KV_HEADS), N, *units
    yield "places_of", rank, longs(KV_HEADS), N


def slotted_attention(kind, options):
    far, near = slotted(kind), (of(kind, ROWS, KV_HEADS, N, DIM),) * 2
    query, slots = of(kind, ROWS, HEADS, DIM), ints(ROWS, KV_HEADS if options else 1, 40)
    ends = longs(ROWS, KV_HEADS)[:, 0]  # as a pool has them
    angles = (floats(N, DIM // 2),) * 2 if options else None
    mass, active = floats(ROWS, HEADS if options else 1, N), longs(ROWS) if options else None
    where = far, slots, longs(ROWS), near, longs(ROWS), ends, 4, 32
    yield "slotted_attention", query, query, *where, SCALE, *capped(options), angles, mass, 64, active


def unit_scores(kind, options):
    units, width = longs(ROWS) if options else None, KV_HEADS * DIM
    yield "score_representatives", floats(ROWS, width), of(kind, ROWS, N, width), options, units
    yield "score_page_bounds", of(kind, ROWS * HEADS, DIM), of(kind, ROWS * KV_HEADS, N, 2, DIM), units
    yield "score_tokens", of(kind, ROWS, HEADS, DIM), of(kind, ROWS, KV_HEADS, N, DIM), SCALE, longs(ROWS)
    yield "unit_representatives", of(kind, KV_HEADS, 640, DIM), floats(HEADS, 640), 20, 4, options


def unit_select(kind, options):
    yield "select_uniform_units", floats(KV_HEADS, N), 32, 32 * 40
    selected = ints(ROWS, KV_HEADS if options else 1, 40)
    for most in (N, 20_000):  # by one program, and by many
        yield "select_counted", floats(*selected.shape[:2], most), longs(ROWS), longs(ROWS), selected
