"""The queries that vote are a row's own, each at its own position, however the prompt came."""

from __future__ import annotations

import pytest
import torch
from masked_reference import build, forward_rows, logits, spied, tokens

import kvkeep


@pytest.mark.core
@pytest.mark.trap(26)
@pytest.mark.parametrize("pieces", [(60,), (50, 10), (30, 27, 3), (56, 2, 2)])
def test_voting_queries_keep_their_own_rotation(pieces):
    """Queries remembered over the pieces of a prompt vote as the stock model's did, each at its own position."""
    model, ids, (method, notes) = build(impl="eager"), tokens(60), spied(window=8)
    with torch.no_grad():
        want = model(ids, output_attentions=True).attentions
    cache = kvkeep.Cache(model, method, budget=59)
    for piece in ids.split(pieces, 1):
        logits(model, piece, cache)
    for (_, seen, got), theirs in zip(notes[-3:], want, strict=True):
        assert seen == 60 and (got.flatten(0, 1) - theirs[0, :, -8:]).abs().max() < 1e-5


@pytest.mark.core
@pytest.mark.trap(26)
def test_voting_queries_of_a_padded_row_are_its_own():
    """In a left-padded batch the voters are each row's last real queries, over its real keys only."""
    model, (method, notes) = build(impl="eager"), spied(window=8)
    rows = [tokens(40, 1)[0], tokens(25, 2)[0]]
    forward_rows(model, kvkeep.Cache(model, method, budget=20), rows, None)
    for r, solo in enumerate(rows):
        with torch.no_grad():
            want = model(solo[None], output_attentions=True).attentions
        for (_, seen, got), theirs in zip(notes[r::2], want, strict=True):
            assert seen == len(solo) and (got.flatten(0, 1) - theirs[0, :, -8:]).abs().max() < 1e-5
