"""Which tokens are kept whatever their score."""

from __future__ import annotations

import pytest
from masked_reference import logits, prefilled, random_qkv, row, tokens

import kvkeep


@pytest.mark.core
@pytest.mark.trap(13)
def test_each_method_says_whether_it_protects_the_first_tokens(model):
    """StreamingLLM always keeps its sinks; IntentKV when asked; SnapKV judges them like any other token."""
    streaming, asked = prefilled(model, "streamingllm", 10), prefilled(model, "intentkv", 10, sinks=3)
    assert all(head[:4] == [0, 1, 2, 3] for layer in row(streaming) for head in layer)
    assert all(head[:3] == [0, 1, 2] for layer in row(asked) for head in layer)
    q, k, v = random_qkv()
    k[:, :4] = -q[:3, -1:].mean(0) * 10  # nobody looks at the first tokens
    q[:] = q[:3, -1:].mean(0)
    assert all(head[0] > 3 for head in kvkeep.select("snapkv", q, k, v, 20).tolist())


@pytest.mark.core
@pytest.mark.trap(18)
def test_streamingllm_keeps_few_first_and_many_last(model):
    """Four sinks and the rest recent, after a prompt in one piece, in chunks, and after a second turn."""
    whole = prefilled(model, "streamingllm", 20)
    chunked = kvkeep.Cache(model, "streamingllm", budget=20)
    for piece in tokens(90).split(17, 1):
        logits(model, piece, chunked)
    for cache in (whole, chunked):
        assert all(head == [0, 1, 2, 3, *range(74, 90)] for layer in row(cache) for head in layer)
    logits(model, tokens(30, 2), whole)
    assert all(head == [0, 1, 2, 3, *range(104, 120)] for layer in row(whole) for head in layer)
    q, k, v = random_qkv()
    assert kvkeep.select("streamingllm", q, k, v, 10).tolist() == [[0, 1, 2, 3, *range(114, 120)]] * 2
