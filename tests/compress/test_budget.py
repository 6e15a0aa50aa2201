"""Budgets in tokens and fractions are spent exactly, the smallest and the largest too."""

from __future__ import annotations

from fractions import Fraction

import pytest
from masked_reference import EVERY, fits, logits, prefilled, random_qkv, tokens

import kvkeep
from kvkeep.compress.parse import parse
from kvkeep.types import Budget


@pytest.mark.core
@pytest.mark.trap(16)
def test_fractions_are_floored_without_float_error():
    """budget=0.1 of 1000 tokens is 100, not 99: the fraction that was written, times n, rounded down."""
    for percent in range(1, 101):
        for n in (1, 7, 10, 29, 100, 1000, 3000, 131072):
            assert Budget(percent / 100).tokens(n) == max(1, int(Fraction(percent, 100) * n)), (percent, n)


@pytest.mark.core
@pytest.mark.trap(16)
@pytest.mark.parametrize("budget", [5, 0.3])
@pytest.mark.parametrize("method", [m for m in EVERY if not m.startswith("full")])
def test_budget_is_spent_exactly(method, budget, model):
    """Blocks, heads and layers are rounded, the total is not; what is reported is what is held."""
    if parse(method).guard.size(5) > 5:
        budget = max(budget, 12) if isinstance(budget, int) else budget
    cache = prefilled(model, method, budget)
    want = (budget if isinstance(budget, int) else 27) * 6
    report = cache.report()
    assert sum(n for layer in report.tokens for r in layer for n in r) == want
    assert cache.nbytes == report.bytes == want * (16 + 16) * 4
    assert report.full_bytes == 90 * 6 * (16 + 16) * 4


@pytest.mark.core
@pytest.mark.parametrize("method", ["snapkv", "snapkv+adakv", "intentkv+adakv+pyramid"])
def test_every_turn_ends_within_budget(method, model):
    """After each prompt, whatever its length, the cache is back at its budget."""
    cache = kvkeep.Cache(model, method, budget=18)
    for n in (70, 2, 40, 5):
        logits(model, tokens(n, n), cache)
        assert cache.report().kept_per_head <= 18
        logits(model, tokens(1), cache)


@pytest.mark.core
@pytest.mark.parametrize("method", EVERY)
def test_smallest_prompts_and_budgets(method, model):
    """One token in, a budget of one (or the least the method allows), a huge one: all run."""
    least = next(b for b in range(1, 20) if fits(method, b))
    for budget, n in ((least, 1), (least, 2), (least, 30), (10**9, 30), (1.0, 1)):
        cache = kvkeep.Cache(model, method, budget=budget)
        out = model.generate(tokens(n), past_key_values=cache, max_new_tokens=3, do_sample=False)
        assert out.shape == (1, n + 3)
        if not parse(method).needs_passes:
            assert kvkeep.select(method, *random_qkv(n=1), budget).tolist() == [[0], [0]]


@pytest.mark.core
def test_one_token_fits_any_fraction(model):
    """Where n <= B nothing is dropped, so nothing can be too small: B is at least 1."""
    q, k, v = random_qkv(n=1)
    assert kvkeep.select("streamingllm", q, k, v, 0.5).tolist() == [[0], [0]]
