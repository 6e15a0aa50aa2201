"""Pictures of a cache, and its text in a notebook."""

import re

import pytest
import tiny_chat
import torch

import kvkeep
from kvkeep.cache.report import ShadedText
from kvkeep.errors import CacheMisuse
from kvkeep.model.user_text import token_texts

TEXT = "The keeper counted <b>geese</b> & 🦢🦢, مرحبا.\n" * 6


@pytest.fixture
def cache():
    model, tokenizer = tiny_chat.sharp()
    cache = kvkeep.Cache(model, "snapkv+adakv", 40)
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    model(ids, past_key_values=cache)
    return cache, tokenizer, ids


def test_maps_show_what_is_kept(cache):
    plots = pytest.importorskip("kvkeep.plots", reason="matplotlib is not installed", exc_type=ImportError)
    cache, _, ids = cache
    kept = [cache.kept(layer)[0] for layer in (0, 1)]
    figure = plots.budgets(cache)
    panel, bar = figure.axes
    assert panel.images[0].get_array().tolist() == [[len(head) for head in heads] for heads in kept]
    assert (panel.get_xlabel(), panel.get_ylabel(), bar.get_ylabel()) == ("KV head", "layer", "tokens kept")
    n = ids.shape[1]
    shares = plots.kept_map(cache, bins=10).axes[0].images[0].get_array().tolist()
    for heads, row in zip(kept, shares, strict=True):
        for number, share in enumerate(row):
            inside = [i for i in range(n) if i * 10 // n == number]
            held = sum(i in head for head in heads for i in inside)
            assert share == pytest.approx(held / (len(heads) * len(inside)))
    assert plots.plt.get_fignums() == []  # a notebook shows a figure that is left open once more
    with pytest.raises(CacheMisuse, match="empty"):
        plots.budgets(kvkeep.Cache(cache.model, "snapkv", 40))


def test_the_text_in_a_notebook(cache):
    cache, tokenizer, ids = cache
    shown = cache.show(tokenizer, ids)
    html = shown._repr_html_()
    counts = [sum(i in head for layer in (0, 1) for head in cache.kept(layer)[0]) for i in range(ids.shape[1])]
    assert [int(n) for n in re.findall(r'title="held by (\d+) of 4 heads"', html)] == counts == list(shown.counts)
    assert "<b>geese" not in html and "&lt;b&gt;"[:4] in html and "🦢" in html
    assert "".join(shown.texts) == TEXT
    plain = repr(shown).splitlines()
    assert plain[0].startswith("<kvkeep.Cache snapkv+adakv") and plain[1] == TEXT.splitlines()[0]
    shades = {sign for line in plain[2::2] for sign in line}
    assert "█" in shades and " " in shades
    assert repr(ShadedText("", ["a", "b", "c"], [0, 1, 4], heads=4)).splitlines()[1:] == ["abc", " ░█"]


def test_a_list_of_ids_and_what_was_not_seen(cache):
    cache, tokenizer, ids = cache
    longer = ids[0].tolist() + [5, 6]  # an answer's last token is never fed
    assert cache.show(tokenizer, longer) == cache.show(tokenizer, ids[0])


@pytest.mark.parametrize("text", ["", "plain words", "🦢 a 🦢🦢", "\ufffd", "ab\u0301 \u4f60\u597d"])
def test_texts_of_tokens(text):
    tokenizer = tiny_chat.tokenizer()
    ids = tokenizer(text, add_special_tokens=False).input_ids
    texts = token_texts(tokenizer, ids)
    assert "".join(texts) == text and len(texts) == len(ids)


def test_a_character_that_is_cut_short():
    tokenizer = tiny_chat.tokenizer()
    ids = tokenizer("🦢🦢", add_special_tokens=False).input_ids[1:-1]
    assert len(token_texts(tokenizer, ids)) == len(ids) and torch.tensor(ids).numel() == 6
