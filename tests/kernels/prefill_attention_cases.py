"""Attention over two sets of keys merged, and on a GPU causal attention of many queries, beside plain softmax."""

import pytest
import torch
from decode_cases import DEVICE, drawn, off, pairs

from kvkeep.kernels.chunk_attention import causal_lower_right, masked_chunk_attention
from kvkeep.kernels.triton import prefill_attention


def plain(queries, keys, values, scale, allowed=None):
    """In float64, with each query's log-sum-exp."""
    group = queries.shape[1] // keys.shape[1]
    keys, values = (t.double().repeat_interleave(group, 1) for t in (keys, values))
    logits = queries.double() @ keys.transpose(-1, -2) * scale
    if allowed is not None:
        logits = logits.masked_fill(~allowed, float("-inf"))
    return logits.softmax(-1) @ values, logits.logsumexp(-1)


@pytest.mark.parametrize(
    "shape, kind", pairs([(1, 1, 1, 16), (2, 3, 9, 24), (1, 2, 17, 128)], [torch.float32, torch.bfloat16]), ids=str
)
def test_merge(shape, kind):
    torch.manual_seed(len(shape))
    rows, heads, n, dim = shape
    queries, keys, values = (drawn(rows, heads, m, dim) for m in (n, 40, 40))
    want, _ = plain(queries, keys, values, 0.3)
    parts = [plain(queries, keys[:, :, part], values[:, :, part], 0.3) for part in (slice(15), slice(15, None))]
    (one, lse), (other, other_lse) = [(out.to(kind), lse.float()) for out, lse in parts]
    other = torch.cat([other, other[:, :, :1]], 2)  # what is cut off
    other_lse = torch.cat([other_lse, other_lse[:, :, :1]], 2)
    output = torch.empty(rows, n, heads, dim, dtype=kind, device=DEVICE).transpose(1, 2)
    bound = 1e-5 if kind == torch.float32 else 1e-2
    for into in (output, one):
        assert off(prefill_attention.merge(one, lse, other, other_lse, into), want) < bound


@pytest.mark.parametrize(
    "q, n",
    [(1, 1), (2, 2), (300, 300), (512, 512), (7, 300), (256, 768), (256, 700), (600, 600), (700, 1500), (256, 2000)],
)
def test_causal_attention(q, n, monkeypatch):
    monkeypatch.setattr(prefill_attention, "BLOCK", 512)
    monkeypatch.setattr(prefill_attention, "SPAN", 256)
    monkeypatch.setattr(prefill_attention, "LARGE", 2**19)
    torch.manual_seed(n)
    queries = drawn(2, q, 4, 64).transpose(1, 2)
    keys, values = (drawn(2, n, 2, 64).transpose(1, 2) for _ in range(2))
    want, _ = plain(queries, keys, values, 0.2, causal_lower_right(q, n, queries.device))
    assert off(masked_chunk_attention(queries, keys, values, 0.2), want) < 1e-4
    if DEVICE == "cuda":
        half = (t.bfloat16() for t in (queries, keys, values))
        assert off(prefill_attention.chunk_attention(*half, 0.2), want) < 2e-2
