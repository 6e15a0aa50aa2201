"""The scores of a text that is fed again, against the plain loops of tests/oracles/kvzip.py."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from draws import HEADS, many, noise, single
from oracles import kvzip as oracle

import kvkeep
from kvkeep.compress.parse import parse
from kvkeep.compress.scorers.repetition import Replay, output_gram
from kvkeep.errors import BadParameter
from kvkeep.kernels.torch import scoring
from kvkeep.types import Replayed


def draw(seed):
    rng = np.random.default_rng(seed)
    heads, kv_heads = HEADS[seed % len(HEADS)]
    n, fed, dim, hidden = (int(rng.integers(1, top)) for top in (40, 25, 9, 12))
    start = int(rng.integers(0, n))
    end = int(rng.integers(start + 1, n + 1))
    queries, own = noise(rng, heads, fed, dim, scale=2.0), noise(rng, kv_heads, fed, dim)
    keys, values = noise(rng, kv_heads, n, dim), noise(rng, kv_heads, n, dim)
    return queries, own, keys, values, start, end, noise(rng, heads, hidden, dim), noise(rng, fed, hidden)


@pytest.mark.parametrize("by_output", [False, True])
@many(60)
def test_scores(by_output, seed):
    queries, own, keys, values, start, end, wo, hidden = draw(seed)
    sinks, n, scale = seed % 6, keys.shape[1], 0.4
    group = len(queries) // len(keys)
    weights = oracle.worth(values, wo, hidden, group) if by_output else None
    logits = oracle.logits_of(queries, keys, own, scale)
    near, norm = (None, None, 0, 1, 5)[seed % 5], (0, 1, 2)[seed % 3]
    want = oracle.scores_from_logits(logits, start, end, n, sinks, group, weights, near, norm)
    before = single(keys[:, : min(sinks, start)])
    part = single(keys[:, start:end]), single(values[:, start:end]), before
    norms = torch.linalg.vector_norm(single(hidden), dim=1)
    seen = Replayed(single(queries), single(own), *part, scale, output_gram=output_gram(single(wo)), hidden_norms=norms)
    got = Replay(by_output=by_output, near=near, norm=norm).score(seen).numpy()
    np.testing.assert_allclose(got, want, rtol=3e-5, atol=1e-7)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_blocks_of_queries_soft_caps_and_sink_logits(softcap, monkeypatch):
    """However few queries come at a time, the same; and as the softmax over one row says."""
    torch.manual_seed(0)
    q, own, keys, sinks, extra = (torch.randn(*s) for s in ((4, 50, 8), (2, 50, 8), (2, 20, 8), (2, 3, 8), (4,)))
    given = q, keys, sinks, q, own, 0.5, softcap, extra
    whole = scoring.repeated_attention(*given)
    monkeypatch.setitem(scoring.BLOCK_PROBS, "cpu", 1)
    torch.testing.assert_close(scoring.repeated_attention(*given), whole)
    logits = (
        torch.cat([sinks, keys, own], 1).repeat_interleave(2, 0) @ q.transpose(1, 2) * 0.5
    )  # [heads, keys, queries]
    logits = logits if softcap is None else (logits / softcap).tanh() * softcap
    logits[:, 23:].masked_fill_(torch.ones(50, 50, dtype=torch.bool).tril(-1), -torch.inf)
    probs = torch.cat([logits, extra[:, None, None].expand(-1, 1, 50)], 1).softmax(1)
    torch.testing.assert_close(whole, probs[:, 3:23].amax(2).view(2, 2, 20).amax(1), rtol=1e-5, atol=1e-7)


def test_parts_are_what_the_oracle_feeds():
    words, text = ([1001, 1002], [2001], [3001]), list(range(100))
    for chunk in (1, 5, 7, 8, 9, 33, 99, 100, 101):
        fed = []
        for part in Replay(chunk).passes(100, 10**6):
            said = words[1] if part.instruction.endswith("starting with") else words[0]
            lead = text[part.start - part.lead : part.start]
            fed.append((part.start, part.end, said + lead + words[2] + text[part.start : part.end]))
        assert fed == oracle.parts(100, chunk, words, text)


def test_parts_fit_into_the_context_length_where_they_can():
    for room, longest in ((5000, 2048), (1040, 1000), (140, 100), (110, 70), (50, 64), (-3, 64)):
        parts = list(Replay().passes(3000, room))
        assert max(part.end - part.start for part in parts) == longest
        assert [part.start for part in parts[1:]] == [part.end for part in parts[:-1]] and parts[-1].end == 3000


def test_a_text_as_long_as_the_context_length_has_no_more_parts_than_64():
    for tokens in (5000, 131_000):
        assert len(list(Replay().passes(tokens, 72))) == 64


def test_one_budget_for_all_layers_unless_layerwise():
    assert parse("kvzip").heads == parse("echo+shared").heads and parse("kvzip").across_layers
    assert not parse("kvzip", layerwise=True).across_layers
    assert parse("kvzip_plus").memory.by_output and not parse("kvzip").memory.by_output


def test_select_and_sizes_are_refused_by_name():
    given = torch.randn(4, 60, 8), torch.randn(2, 60, 8), torch.randn(2, 60, 8)
    with pytest.raises(BadParameter, match="'kvzip' runs the model again after a prompt"):
        kvkeep.select("kvzip", *given, 16)
    for wrong in ({"chunk": 0}, {"sinks": -1}, {"near": -1}):
        with pytest.raises(BadParameter, match="=(0|-1): use a whole number, [01] or more"):
            parse("kvzip", **wrong)
    for method in ("kvzip", "lookahead"):
        with pytest.raises(BadParameter, match="norm=3: use 0 or 1 or 2"):
            parse(method, norm=3)


@pytest.mark.parametrize(("preset", "spelled"), [
    ("kvkeep_context", "kvzip_plus:local=true:norm=2+shared:floor=0.35"),
    (
        "kvkeep_lookahead",
        "lookahead:tokens=32:window=32:pool=7:pooling=max:hold=8:norm=2:predicting=true+blocks:block=8+values+sinks"
        "+adakv:alpha=0.5",
    ),
])  # fmt: skip
def test_presets_are_what_the_search_measured(preset, spelled):
    mine, theirs = parse(preset), parse(spelled)
    same = [part for part in vars(mine) if part not in ("name", "paper", "keeps", "deviates", "parameters", "heads")]
    assert [getattr(mine, part) for part in same] == [getattr(theirs, part) for part in same] and mine.needs_passes
    assert mine.heads == (replace(theirs.heads, yields=True) if preset == "kvkeep_context" else theirs.heads)
