"""Attention over two sets of keys merged, and on a GPU causal attention of many queries, beside plain softmax."""

import pytest
import torch
from decode_cases import DEVICE, drawn, off, pairs
from torch.nn.attention import SDPBackend

from kvkeep.kernels.torch.reference import causal_lower_right, joined_attention, masked_chunk_attention
from kvkeep.kernels.triton import prefill_attention


def plain(queries, keys, values, scale, allowed=None):
    """In float64, with each query's log-sum-exp."""
    group = queries.shape[1] // keys.shape[1]
    keys, values = (t.double().repeat_interleave(group, 1) for t in (keys, values))
    logits = queries.double() @ keys.transpose(-1, -2) * scale
    if allowed is not None:
        logits = logits.masked_fill(~allowed, float("-inf"))
    return logits.softmax(-1) @ values, logits.logsumexp(-1)


def replace_kernels(monkeypatch, backend):
    """By plain softmax, where there is no GPU; the numbers of keys that all queries see."""
    lengths = []

    def attend(queries, keys, values, causal, scale):
        allowed = causal_lower_right(queries.shape[2], keys.shape[2], queries.device) if causal else None
        lengths.extend([] if causal else [keys.shape[2]])
        output, lse = plain(queries, keys, values, scale, allowed)
        return output.float(), lse.float()

    monkeypatch.setattr(prefill_attention, "sdpa_backend", lambda *_: backend)
    monkeypatch.setattr(prefill_attention, "_cudnn", attend)
    monkeypatch.setattr(prefill_attention, "_flash", attend)
    return lengths


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
    want, want_lse = plain(queries, keys, values, 0.2, causal_lower_right(q, n, queries.device))
    assert off(masked_chunk_attention(queries, keys, values, 0.2), want) < 1e-4
    if DEVICE == "cuda":
        half = [t.bfloat16() for t in (queries, keys, values)]
        output, lse = prefill_attention.attention_and_lse(*half, 0.2)
        assert off(output, want) < 2e-2 and off(lse, want_lse) < 2e-2
        assert torch.equal(prefill_attention.chunk_attention(*half, 0.2), output)
    replace_kernels(monkeypatch, SDPBackend.CUDNN_ATTENTION)
    output, lse = prefill_attention.attention_and_lse(queries, keys, values, 0.2)
    assert off(output, want) < 1e-5 and off(lse, want_lse) < 1e-5


@pytest.mark.parametrize("backend", [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION])
@pytest.mark.parametrize(
    "rows, heads, kv_heads, q, n, dim",
    [(1, 4, 2, 7, 40, 16), (2, 6, 2, 128, 30, 8), (1, 2, 2, 1, 9, 16), (1, 4, 1, 5, 7, 8)],
)
def test_attention_to_held_and_own_keys_is_one_softmax(rows, heads, kv_heads, q, n, dim, backend, monkeypatch):
    monkeypatch.setattr(prefill_attention, "HELD", 8)
    torch.manual_seed(q)
    queries, keys, values = (drawn(rows, q, h, dim).transpose(1, 2) for h in (heads, kv_heads, kv_heads))
    held_keys, held_values = drawn(2, rows, kv_heads, n + 3, dim)[..., :n, :]
    together = torch.cat([held_keys, keys], 2), torch.cat([held_values, values], 2)
    want, _ = plain(queries, *together, 0.3, causal_lower_right(q, n + q, queries.device))
    parts = queries, held_keys, held_values, keys, values
    assert off(joined_attention(*parts, 0.3), want) < 1e-4
    if DEVICE == "cuda":  # whichever torch takes
        assert off(prefill_attention.appended_attention(*(t.bfloat16() for t in parts), 0.3), want) < 2e-2

    lengths = replace_kernels(monkeypatch, backend)
    assert off(prefill_attention.appended_attention(*parts, 0.3), want) < 1e-5
    assert set(lengths) == {n // 8 * 8} - {0}
