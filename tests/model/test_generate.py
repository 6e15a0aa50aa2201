"""A cache inside plain transformers: generate, pipelines, streamers, dtypes and autocast."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from dataclasses import replace

import pytest
import torch
from masked_reference import HARD, VOCAB, build, kept, logits, prefilled, tokens
from torch import Tensor
from transformers import DynamicCache, PreTrainedTokenizerFast, TextStreamer, pipeline

import kvkeep
from kvkeep.compress.parse import parse


@pytest.mark.core
@pytest.mark.trap(1)
@pytest.mark.parametrize("method", HARD)
def test_generate_from_full_ids_takes_the_right_suffix(method, model):
    """generate() over prompt and question, on a cache that saw the prompt, feeds the question at its true place."""
    ids = tokens(101)
    cache = prefilled(model, method, 24, ids[:, :90])
    assert cache.get_seq_length() == 90
    by_hand, out = cache.fork(), ids
    got = model.generate(ids, past_key_values=cache, max_new_tokens=5, do_sample=False)
    new = ids[:, 90:]
    for _ in range(5):
        where = torch.arange(out.shape[1] - new.shape[1], out.shape[1])[None]
        new = logits(model, new, by_hand, position_ids=where)[:, -1:].argmax(-1)
        out = torch.cat([out, new], 1)
    assert got.tolist() == out.tolist()
    assert cache.get_seq_length() == 105


@pytest.mark.core
@pytest.mark.parametrize("method", ["streamingllm", "snapkv", "snapkv+adakv", "intentkv+pyramid"])
def test_chunked_prefill_is_bounded_and_exact_with_room(method, model):
    """prefill_chunk_size: the stock tokens where there is room; else at most budget + chunk, then the budget."""
    ids, options = tokens(120), dict(max_new_tokens=6, do_sample=False, prefill_chunk_size=16)
    roomy, want = kvkeep.Cache(model, method, budget=500), model.generate(ids, max_new_tokens=6, do_sample=False)
    assert model.generate(ids, past_key_values=roomy, **options).equal(want)
    notes: list = []
    recipe = parse(method)

    def watching(seen, budget: int) -> Tensor:
        notes.append(sum(seen.lengths) / len(seen.lengths))
        return recipe.scorer(seen, budget)

    cache = kvkeep.Cache(model, replace(recipe, scorer=watching), budget=20)
    model.generate(ids, past_key_values=cache, **options | {"max_new_tokens": 1})
    assert notes and (max(notes) <= 20 + 16 or "pyramid" in method)
    assert sum(n for layer in cache.report().tokens for n in layer[0]) == 20 * 6


@pytest.mark.core
@pytest.mark.parametrize("method", ["snapkv", "snapkv+adakv", "intentkv+adakv+pyramid"])
def test_beam_search(method, model):
    """Three beams: the stock result where there is room, and rows that follow their beams where there is not."""
    ids, options = tokens(40), dict(max_new_tokens=6, num_beams=3, do_sample=False)
    roomy = kvkeep.Cache(model, method, budget=100)
    assert model.generate(ids, past_key_values=roomy, **options).equal(model.generate(ids, **options))
    tight = kvkeep.Cache(model, method, budget=12)
    out = model.generate(ids, past_key_values=tight, **options)
    assert out.shape == (1, 46) and len(tight.tracker.seen) == 3
    assert tight.kept(0)[0] == tight.kept(0)[2]


@pytest.mark.core
@pytest.mark.parametrize("method", ["snapkv", "intentkv+adakv"])
def test_sampling_with_a_seed(method, model):
    """Seeded sampling gives the stock tokens where there is room; several sequences too."""
    ids, options = tokens(40), dict(max_new_tokens=8, do_sample=True, num_return_sequences=2, top_k=20)
    torch.manual_seed(4)
    want = model.generate(ids, **options)
    torch.manual_seed(4)
    assert model.generate(ids, past_key_values=kvkeep.Cache(model, method, budget=100), **options).equal(want)


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"[PAD]": 0, "[UNK]": 1} | {f"w{i}": i for i in range(2, VOCAB)}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", padding_side="left")


@pytest.mark.core
def test_pipeline_takes_a_cache(model, tokenizer):
    """pipeline("text-generation") with room equals the stock one; with a budget it evicts."""
    say = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    text = " ".join(f"w{i}" for i in tokens(60)[0].clamp_min(2).tolist())
    options = dict(max_new_tokens=6, do_sample=False, return_full_text=False)
    want = say(text, **options)
    assert say(text, past_key_values=kvkeep.Cache(model, "snapkv", budget=100), **options) == want
    cache = kvkeep.Cache(model, "snapkv", budget=16)
    assert len(say(text, past_key_values=cache, **options)[0]["generated_text"].split()) == 6
    assert cache.kept(0)[0][0][-1] == 64 and len(cache.kept(0)[0][0]) == 16 + 5


@pytest.mark.core
def test_text_streamer(model, tokenizer):
    """A streamer prints the same words that generate returns."""
    heard = io.StringIO()
    with redirect_stdout(heard):
        out = model.generate(
            tokens(60).clamp_min(2), past_key_values=kvkeep.Cache(model, "intentkv", budget=16), max_new_tokens=6,
            do_sample=False, streamer=TextStreamer(tokenizer, skip_prompt=True),
        )  # fmt: skip
    assert heard.getvalue().split() == tokenizer.decode(out[0, 60:]).split()


@pytest.mark.core
@pytest.mark.parametrize("method", ["full", "snapkv", "snapkv+adakv", "intentkv+adakv+pyramid"])
def test_bfloat16_model(method):
    """A bfloat16 model stores bfloat16, equals the stock model with room, and runs without."""
    model, ids = build().to(torch.bfloat16), tokens(50)
    roomy, stock = kvkeep.Cache(model, method, budget=100), DynamicCache(config=model.config)
    assert torch.equal(logits(model, ids, roomy), logits(model, ids, stock))
    for n in (1, 9):
        assert (logits(model, tokens(n), roomy) - logits(model, tokens(n), stock)).abs().max() < 0.15
    assert roomy.backend.store[0].flat.keys.dtype == torch.bfloat16
    tight = kvkeep.Cache(model, method, budget=12)
    assert model.generate(ids, past_key_values=tight, max_new_tokens=4, do_sample=False).shape == (1, 54)


@pytest.mark.core
def test_inference_mode_and_no_grad_mix(model):
    """A cache filled under inference_mode goes on outside it, as a stock cache does."""
    cache = kvkeep.Cache(model, "snapkv", budget=200)
    with torch.inference_mode():
        model(tokens(150), past_key_values=cache)
        model(tokens(1), past_key_values=cache)
    want = logits(model, tokens(1), cache.fork())
    assert torch.equal(logits(model, tokens(1), cache), want)


@pytest.mark.core
def test_embeddings_as_input(model):
    """inputs_embeds gives what input_ids give."""
    a, b = (kvkeep.Cache(model, "snapkv", budget=20) for _ in range(2))
    with torch.no_grad():
        model(inputs_embeds=model.get_input_embeddings()(tokens(60)), past_key_values=a)
    logits(model, tokens(60), b)
    assert kept(a) == kept(b) and torch.equal(logits(model, tokens(4), a), logits(model, tokens(4), b))


@pytest.mark.core
def test_forward_with_gradients_enabled_is_silent(model):
    """A plain model(ids, past_key_values=cache) outside no_grad works, warns of nothing and holds no graph."""
    cache, always = kvkeep.Cache(model, "snapkv", budget=20), torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # torch tells some things only once per process
    try:
        with torch.enable_grad():
            for n in (60, 1, 5):
                model(tokens(n), past_key_values=cache)
    finally:
        torch.set_warn_always(always)
    assert not cache.backend.store[0].flat.keys.requires_grad and not any(
        q.requires_grad for q in cache.backend.query_buffer.queries.values()
    )


@pytest.mark.core
@pytest.mark.parametrize("method", ["snapkv", "snapkv+adakv"])
@pytest.mark.parametrize("first", [True, False])
def test_autocast_may_come_and_go(method, first, model):
    """Prefill under autocast and decode outside it, or the reverse, as with a stock cache."""
    cache = kvkeep.Cache(model, method, budget=100)
    for number, n in enumerate((120, 1, 1, 5)):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=(number == 0) == first):
            assert logits(model, tokens(n), cache).isfinite().all()
