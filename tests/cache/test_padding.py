"""Rows of a padded batch are what they are alone."""

from __future__ import annotations

import pytest
import torch
from conftest import EVICTING
from masked_reference import HARD, LENGTHS, PAIRED, build, forward_rows, logits, padded, row, tokens
from torch import Tensor

import kvkeep


def conversation(count: int) -> list[list[Tensor]]:
    """Turns of `count` rows: a prompt, a decoded token, a second prompt of other lengths, a token."""
    lengths = [LENGTHS, (1, 1, 1), (5, 20, 12), (1, 1, 1)]
    return [[tokens(n, 100 * t + r)[0] for r, n in enumerate(turn[:count])] for t, turn in enumerate(lengths)]


@pytest.mark.core
@pytest.mark.trap(14)
@pytest.mark.parametrize("method, impl", [case for case in PAIRED if case[0] in (*EVICTING, *HARD)])
def test_left_padded_rows_equal_solo_runs(method, impl):
    """Every row of a padded batch keeps the tokens and gives the logits that it does alone, turn after turn."""
    model, turns = build(impl=impl), conversation(3)
    together, mask = kvkeep.Cache(model, method, budget=14), None
    alone, past = [kvkeep.Cache(model, method, budget=14) for _ in range(3)], [None] * 3
    for turn in turns:
        got, mask = forward_rows(model, together, turn, mask)
        for r, cache in enumerate(alone):
            (want,), past[r] = forward_rows(model, cache, [turn[r]], past[r])
            assert row(together, r) == row(cache)
            assert (got[r] - want).abs().max() < 1e-4


@pytest.mark.core
@pytest.mark.trap(14)
@pytest.mark.parametrize("method", ["snapkv", "intentkv+adakv", "snapkv+adakv+pyramid"])
def test_left_padded_generate_equals_solo_generate(method, model):
    """The same through generate(): same new tokens for each row as alone, on a first and a second turn."""
    rows = [tokens(n, n)[0] for n in LENGTHS]
    ids, mask = padded(rows)
    options = dict(max_new_tokens=4, do_sample=False)
    cache = kvkeep.Cache(model, method, budget=14)
    out = model.generate(ids, attention_mask=mask, past_key_values=cache, **options)
    for r, solo in enumerate(rows):
        alone = model.generate(solo[None], past_key_values=kvkeep.Cache(model, method, budget=14), **options)
        assert out[r, -4:].tolist() == alone[0, -4:].tolist()
    question, shown = padded([tokens(n, 7 * n)[0] for n in (3, 11, 6)])
    out = torch.cat([out, question], 1)
    mask = torch.cat([mask, torch.ones(3, 4, dtype=torch.long), shown], 1)
    again = model.generate(out, attention_mask=mask, past_key_values=cache, **options)
    assert again.shape[1] == out.shape[1] + 4
    assert cache.report().tokens_seen == [n + 4 + q + 3 for n, q in zip(LENGTHS, (3, 11, 6), strict=True)]


@pytest.mark.core
@pytest.mark.trap(14)
def test_fraction_is_taken_from_the_real_length(model):
    """A row of 20 real tokens in a batch of 40 columns keeps half of 20."""
    cache = kvkeep.Cache(model, "snapkv", budget=0.5)
    forward_rows(model, cache, [tokens(40)[0], tokens(20)[0]], None)
    assert [[len(head) for head in r] for r in cache.kept(0)] == [[20, 20], [10, 10]]


@pytest.mark.core
@pytest.mark.parametrize("side", ["right", "empty row"])
def test_unusual_padding_equals_solo_runs(side, model):
    """Right padding, or a row without any token yet, changes nothing for the others."""
    rows = [tokens(40, 1)[0], tokens(25, 2)[0]]
    ids, mask = padded(rows)
    if side == "right":
        ids[1], mask[1] = ids[1].roll(25), mask[1].roll(25)
    else:
        rows[1], mask[1] = rows[1][:0], 0
    cache = kvkeep.Cache(model, "snapkv+adakv", budget=12)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    logits(model, ids, cache, attention_mask=mask, position_ids=positions)
    mask = torch.cat([mask, torch.ones(2, 3, dtype=torch.long)], 1)
    where = torch.stack([torch.arange(len(r), len(r) + 3) for r in rows])
    got = logits(model, tokens(3, rows=2), cache, attention_mask=mask, position_ids=where)
    for r, solo in enumerate(rows):
        alone = kvkeep.Cache(model, "snapkv+adakv", budget=12)
        if len(solo):
            logits(model, solo[None], alone)
        want = logits(model, tokens(3, rows=2)[r : r + 1], alone)
        assert (got[r] - want[0]).abs().max() < 1e-4 and row(cache, r) == row(alone)


@pytest.mark.core
@pytest.mark.trap(14)
def test_row_with_one_token_in_a_longer_turn_equals_its_solo_run(model):
    """One new token is a decode step for its row, whatever its neighbours are doing."""
    turns = [[tokens(mine, mine)[0], tokens(theirs, theirs)[0]] for mine, theirs in ((30, 25), (1, 12), (9, 8))]
    together, mask, alone = kvkeep.Cache(model, "snapkv", budget=14), None, kvkeep.Cache(model, "snapkv", budget=14)
    for turn in turns:
        got, mask = forward_rows(model, together, turn, mask)
        assert (got[0] - logits(model, turn[0][None], alone)[0]).abs().max() < 1e-4
        assert row(together) == row(alone)
