"""The scripts that measure the papers' claims, where the outcome is known beforehand."""

import importlib
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_chat
import torch

from kvkeep.types import Observation

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def claims(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield importlib.import_module("claims")
    for name in ("claims", "claims_attention"):
        sys.modules.pop(name, None)


@pytest.fixture
def attended(claims):
    return sys.modules["claims_attention"]


@pytest.fixture
def lab(claims):
    model, tokenizer = tiny_chat.sharp()
    return claims.Lab(model, tokenizer, tokenizer("It rained. " * 300).input_ids, samples=3, batch=2)


def prose(n=600, kv_heads=2, dim=8):
    """Queries and keys that know nothing of each other."""
    torch.manual_seed(0)
    queries, keys, values = torch.randn(2 * kv_heads, n, dim), torch.randn(kv_heads, n, dim), torch.ones(kv_heads, n, 4)
    return Observation(queries, keys, values, torch.arange(n).expand(kv_heads, n), (n,) * kv_heads, n, n, dim**-0.5)


def test_an_answer_that_repeats_the_question_is_not_cut(claims, lab, monkeypatch):
    """A model that says twenty words before the number has found it."""
    monkeypatch.setattr(claims.kvkeep, "Cache", lambda *_: None)
    ids, number = lab.needle(0, 400)
    said = [*["word "] * 20, *number]

    def generate(rows, max_new_tokens, **_):
        return torch.cat([rows, torch.arange(len(said))[:max_new_tokens].expand(len(rows), -1)], 1)

    def decoded(rows, **_):
        return ["".join(said[i] for i in row) for row in rows.tolist()]

    monkeypatch.setattr(lab, "needle", lambda *_: (ids, number))
    lab.model, lab.tokenizer = SimpleNamespace(device="cpu", generate=generate), SimpleNamespace(batch_decode=decoded)
    assert lab.found("snapkv", 64, 400) == 1.0


def test_the_segment_that_looks_at_the_answer_hits(attended):
    """Of 40 blocks of 64, the question's rows attend to block 7, others to the second half."""
    n = 40 * 64
    queries, keys = torch.zeros(1, n, 2), torch.zeros(1, n, 2)
    keys[:, 7 * 64 : 8 * 64, 0], keys[:, 20 * 64 :, 1] = 30.0, 30.0
    queries[:, :, 1] = 1.0
    queries[:, -16:] = torch.tensor([1.0, 0.0])
    seen = Observation(queries, keys, keys, torch.arange(n)[None], (n,), n, n, 1.0)
    found = attended._hit(seen, voters=48, n=n, parts=[(n - 32, n - 16), (n - 16, n)], answer=range(7, 8))
    assert found.tolist() == [[0.0, 1.0]]
    both = attended._hit(seen, voters=48, n=n, parts=[(n - 16, n)], answer=range(7, 30))
    assert both.tolist() == [[0.0]], "an answer counts only if all of it is there"


def test_sums_over_all_rows_favour_the_start_and_recent_ones_do_not(attended):
    """AhaKV's figure 2 without a model: whatever the words, the first tokens have been looked at most often."""
    specs = ["h2o", "ahakv:step_gain=false:value_prior=false"]
    judged = attended._judged(prose(), [attended.parse(spec) for spec in specs], 120)
    (h2o, h2o_kept), (aha, aha_kept) = judged
    assert all(share.sum().item() == pytest.approx(1, abs=1e-5) for share in (h2o, aha, *h2o_kept, *aha_kept))
    assert h2o.tolist() == sorted(h2o.tolist(), reverse=True) and h2o[0] > 5 * h2o[-1]
    assert aha[:9].max() < 1.5 * aha[:9].min()
    chosen = [attended._shape(kept[1]) for kept in (h2o_kept, aha_kept)]
    assert chosen[0][0] < 0.3 < 0.4 < chosen[1][0] and chosen[0][1] < chosen[1][1]


def test_every_table_is_made(claims, attended, lab, monkeypatch):
    monkeypatch.setattr(claims, "boundaries", lambda lab: attended.boundaries(lab, 500, 250))
    monkeypatch.setattr(claims, "positions", lambda lab: attended.positions(lab, 120, 40))
    monkeypatch.setattr(claims, "answer_hits", lambda lab: attended.hits(lab, 700))
    with torch.inference_mode():
        for name, rows in (("boundary", 5), ("bias", 6 + 6 + 2), ("hits", 3)):
            lines = [line for line in claims.EXPERIMENTS[name](lab).splitlines() if line.startswith("| ")]
            tables = 3 if name == "bias" else 1
            assert len(lines) == rows + tables
            assert not any("nan" in line for line in lines)


def test_outliers_are_counted_on_the_context_and_without_its_first_tokens(monkeypatch):
    """Of what written tokens give 20 tokens of context: even attention, then all of it on the first token."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("claims_script", BENCHMARKS / "claims.py")
    claims = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "claims_script", claims)
    spec.loader.exec_module(claims)
    keys = torch.randn(2, 24, 8, generator=torch.Generator().manual_seed(0))
    keys[:, :, 0] = 0
    where = torch.arange(24).expand(2, -1)
    even = Observation(torch.zeros(4, 24, 8), keys, keys, where, (24, 24), 24, 24, 1.0)
    assert claims.decode_shares(even, 20, 4) == pytest.approx([2 / 20, 4 / 20, 2 / 16])
    keys[:, 0, 0], queries = 9.0, torch.zeros(4, 24, 8)
    queries[..., 0] = 3.0  # e^27 against 1: the first token gets nearly all there is
    shares = claims.decode_shares(replace(even, queries=queries), 20, 4)
    assert shares[1] == pytest.approx(1) and shares[2] == pytest.approx(2 / 16, abs=1e-3)
