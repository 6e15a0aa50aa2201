"""lookahead: a draft's queries, decoded by a stock model that sees what snapkv keeps, choose from the whole text."""

import masked_reference
import numpy as np
import pytest
import tiny_chat
import torch
from masked_reference import build, forward_rows, kept, reference, row, tokens
from oracles.common import dots, pool1d, softmax, top
from transformers import DynamicCache
from transformers.modeling_utils import AttentionInterface

import kvkeep
from kvkeep.cache import draft
from kvkeep.cache.decode import runner
from kvkeep.compress.parse import parse
from kvkeep.errors import BadParameter, CacheMisuse

BUDGET, WINDOW = 24, 8


def recorded(model, ids, evictions, first):
    """Queries of a stock model, those from `first` on: layer -> [heads, q, dim]"""
    queries, attend = {}, masked_reference._reference_attention

    def record(module, query, *args, **kwargs):
        queries[module.layer_idx] = query[0, :, first:].double().numpy()
        return attend(module, query, *args, **kwargs)

    AttentionInterface.register("masked_reference", record)
    try:
        reference(model, ids, evictions)
    finally:
        AttentionInterface.register("masked_reference", attend)
    return queries


def drafted(model, ids, cheap, count):
    """Tokens that a stock model writes, given what was kept of the text; and their queries: layer -> [heads, q, dim]"""
    n = ids.shape[1]
    before = [[[j for j in head if j < n - 1] for head in layer] for layer in cheap]
    for _ in range(count):
        logits = reference(model, ids, [(n - 1, before)])
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
    return ids[0, n:].tolist(), recorded(model, ids, [(n - 1, before)], n)


def expected(queries, keys, budget, norm=1):
    """[head] -> tokens: attention of the draft over the text, pooled by 5 before the window, which stays."""
    kv_heads, n, dim = keys.shape
    group, out = len(queries) // kv_heads, []
    for h in range(kv_heads):
        votes = np.zeros(n)
        for member in range(h * group, (h + 1) * group):
            for query in queries[member]:
                paid = softmax(dots(keys[h], query) / dim**0.5)
                votes = np.maximum(votes, paid) if norm == 0 else votes + paid**norm
        votes = votes if norm == 0 else (votes / (group * queries.shape[1])) ** (1 / norm)
        scores = np.full(n, np.inf)
        scores[: n - WINDOW] = pool1d(votes[: n - WINDOW], 5)
        out.append(sorted(top(scores, budget)))
    return out


@pytest.mark.parametrize("count", [1, 3, 8])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_draft_chooses_from_the_whole_text(count, seed):
    model, ids = build().double(), tokens(90, seed)
    cheap = kvkeep.Cache(model, "snapkv", BUDGET, window=WINDOW)
    model(ids, past_key_values=cheap)
    full, cache = DynamicCache(), kvkeep.Cache(model, "lookahead", BUDGET, window=WINDOW, tokens=count)
    model(ids, past_key_values=full)
    model(ids, past_key_values=cache)
    _, queries = drafted(model, ids, row(cheap), count)
    assert all(each.shape[1] == count for each in queries.values())
    want = [expected(queries[i], layer.keys[0].numpy(), BUDGET) for i, layer in enumerate(full.layers)]
    assert row(cache) == want != row(cheap)


@pytest.mark.parametrize("norm", [0, 1, 2])
@pytest.mark.parametrize("end", [1, 2, 5, None])
def test_the_queries_that_predict_the_answer_count(norm, end):
    """From the text's last token on, up to the query that predicts an EOS."""
    model, ids, count = build().double(), tokens(90), 6
    n, how = ids.shape[1], {"window": WINDOW, "tokens": count, "hold": 8, "norm": norm, "predicting": True}
    answer, _ = drafted(model, ids, [[range(n)] * 2] * 3, count)
    model.generation_config.eos_token_id = [len(model.lm_head.weight) - 1, *([answer[end - 1]] if end else [])]
    end = answer.index(answer[end - 1]) + 1 if end else count
    cache, full = kvkeep.Cache(model, "lookahead", BUDGET, **how), DynamicCache()
    model(ids, past_key_values=cache)
    model(ids, past_key_values=full)
    said = torch.cat([ids, torch.tensor([answer])], 1)
    queries = recorded(model, said, [], n - 1)
    want = [expected(queries[i][:, :end], each.keys[0].numpy(), BUDGET, norm) for i, each in enumerate(full.layers)]
    assert row(cache) == want


@pytest.mark.parametrize("chunks", [[90], [50, 40]])
def test_of_a_long_text_so_many_budgets_are_held(chunks):
    """Layer by layer, what snapkv keeps of them: the draft is decoded from that, and chooses from it."""
    model, ids, hold, count = build().double(), tokens(90), 2, 3
    held, full = kvkeep.Cache(model, "snapkv", hold * BUDGET, window=WINDOW), DynamicCache()
    cache = kvkeep.Cache(model, "lookahead", BUDGET, window=WINDOW, tokens=count, hold=hold)
    for each in (held, full):
        model(ids, past_key_values=each)
    cache.defer_eviction(90)
    for part in ids.split(chunks, 1):
        model(part, past_key_values=cache)
    keys = [np.stack([layer.keys[0, h, j].numpy() for h, j in enumerate(row(held)[i])])
            for i, layer in enumerate(full.layers)]  # fmt: skip

    def tokens_of(i, queries):
        chosen = expected(queries[i], keys[i], BUDGET)
        return [[row(held)[i][h][j] for j in head] for h, head in enumerate(chosen)]

    _, queries = drafted(model, ids, row(held), count)
    assert row(cache) == [tokens_of(i, queries) for i in range(len(keys))]
    report, layers = cache.report(), len(keys)
    if len(chunks) == 1:  # in chunks a prompt is whole until its end, with every method
        layerwise = (2 + (layers - 1) * hold * BUDGET / 90) / layers  # one layer whole, also as the model has it
        in_the_end = (hold * BUDGET + max(count + 1, 2 * BUDGET / layers)) / 90  # with a draft, or a layer of the kept
        assert report.peak_bytes <= report.full_bytes * max(layerwise, in_the_end)


def test_chunks_rows_turns_and_engine():
    model, ids = build().double(), tokens(90)
    how = {"window": WINDOW, "tokens": 3}
    whole = kvkeep.Cache(model, "lookahead", BUDGET, **how)
    model(ids, past_key_values=whole)
    chunks = kvkeep.Cache(model, "lookahead", BUDGET, **how)
    chunks.defer_eviction(90)
    for part in ids.split([40, 21, 29], 1):
        model(part, past_key_values=chunks)
    assert kept(chunks) == kept(whole)
    for follow in (ids[:, :1], ids[:, :30], ids[:, :1]):
        model(follow, past_key_values=whole)
    assert whole.report().kept_per_head == BUDGET + 1
    made, words = tiny_chat.sharp()
    engine, text = kvkeep.Engine(made, words, "lookahead", 40, **how), "abcdefgh. " * 20
    assert engine.generate([text, text[3:]], max_new_tokens=4) == [
        engine.generate(each, max_new_tokens=4) for each in (text, text[3:])
    ]
    context = engine.read(text, question="Why?")
    assert context.report().kept_per_head <= 40 and isinstance(context.ask("Why?", max_new_tokens=4), str)


def test_rows_are_drafted_together(monkeypatch):
    """In one pass for each token; a row that fits has none, and each keeps what it keeps alone."""
    model, own, drafts = build().double(), runner.decode_step, []

    def watched(pool, forward, ids, positions, last):
        drafts.append(positions[:, 0].tolist())
        return own(pool, forward, ids, positions, last)

    monkeypatch.setattr(runner, "decode_step", watched)
    rows = [tokens(n, n)[0] for n in (90, 20, 70)]
    cache, alone = (kvkeep.Cache(model, "lookahead", BUDGET, window=WINDOW, tokens=2) for _ in range(2))
    forward_rows(model, cache, rows, None)
    assert drafts == [[89, 69], [90, 70], [91, 71]]
    for r, text in enumerate(rows):
        alone.reset()
        model(text[None], past_key_values=alone)
        assert row(cache, r) == row(alone)


def test_nothing_is_drafted_where_the_text_fits_and_cut_short_it_is_whole(monkeypatch):
    model, ids, own = build(), tokens(90), runner.decode_step
    calls = []

    def fail(pool, forward, ids, positions, last):
        calls.append(positions.tolist())
        if len(calls) == 4:
            raise KeyboardInterrupt
        return own(pool, forward, ids, positions, last)

    monkeypatch.setattr(runner, "decode_step", fail)
    model(ids, past_key_values=kvkeep.Cache(model, "lookahead", 90))
    assert not calls
    cache, want = (kvkeep.Cache(model, "lookahead", BUDGET, tokens=2) for _ in range(2))
    model(ids, past_key_values=want)
    assert calls == [[[89]], [[90]], [[91]]]
    with pytest.raises(KeyboardInterrupt):
        model(ids, past_key_values=cache)
    assert cache.report().kept_per_head == 90
    steps = [model(ids[:, :1], past_key_values=each).logits for each in (cache, want)]
    torch.testing.assert_close(*steps)
    assert kept(cache) == kept(want)


@pytest.mark.parametrize("spec", ["lookahead:tokens=3", "kvkeep_lookahead:tokens=3", "kvzip"])
@pytest.mark.parametrize("messages", [1, 3])
def test_a_chat_goes_on_after_a_draft_that_was_interrupted(spec, messages, monkeypatch):
    """Old: a draft that was to wait for others was not made up for, and the next turn refused."""
    talk = [
        {"role": role, "content": text}
        for role, text in (("user", "the quick brown fox " * 9), ("assistant", "it"), ("user", "and?"))
    ]
    with monkeypatch.context() as patched:
        patched.setattr("kvkeep.cache.passes.draft_queries", interrupt)
        engine = kvkeep.Engine(*tiny_chat.sharp(), spec, 24)
        with pytest.raises(KeyboardInterrupt):
            engine.chat(talk[:1], max_new_tokens=4)
    report = engine.cache.report()
    assert report.host_bytes == report.full_bytes and engine.cache.seen > 100
    assert report.kept_per_head == (engine.cache.seen if parse(spec).draft and parse(spec).draft.hold else 0)
    engine.chat(talk[:messages], max_new_tokens=4)
    assert engine.cache.report().kept_per_head <= 24 + 4  # and the answer


def interrupt(*_):
    raise KeyboardInterrupt


def test_a_draft_ends_where_an_answer_does(monkeypatch):
    """Old: at the model's EOS alone, not at the tokenizer's or the template's."""
    seen, own, (model, tokenizer) = [], draft._ends, tiny_chat.sharp()
    monkeypatch.setattr(draft, "_ends", lambda drafted, eos: seen.append(set(eos.tolist())) or own(drafted, eos))
    model.generation_config.eos_token_id, tokenizer.eos_token_id = [250, 251], 7
    engine = kvkeep.Engine(model, tokenizer, "kvkeep_lookahead:tokens=3", 24)
    engine.generate("the quick brown fox " * 9, max_new_tokens=4)
    assert seen == [{1, 7, 250, 251}]  # 1: the template ends a turn with it


def test_with_auto_a_prompt_within_the_budget_is_drafted_after_too(monkeypatch):
    """Old: it was scored by its own queries, as if they were a draft's."""
    model, ids, calls, own = build(), tokens(3, 60), [], runner.decode_step
    monkeypatch.setattr(runner, "decode_step", lambda *how: calls.append(how) or own(*how))
    model(ids, past_key_values=kvkeep.Cache(model, "lookahead", 64))
    assert not calls
    model(ids, past_key_values=kvkeep.Cache(model, "lookahead", "auto", max_budget=64))
    assert calls


def test_what_it_cannot_do_is_refused_by_name():
    given = torch.randn(4, 60, 8), torch.randn(2, 60, 8), torch.randn(2, 60, 8)
    with pytest.raises(BadParameter, match="'lookahead' runs the model again"):
        kvkeep.select("lookahead", *given, 16)
    with pytest.raises(BadParameter, match="tokens=0: use a whole number, 1 or more"):
        parse("lookahead", tokens=0)
    with pytest.raises(BadParameter, match="pooling='sum': use 'avg' or 'max'"):
        parse("lookahead", pooling="sum")
    with pytest.raises(CacheMisuse, match="drafts an answer of its own"):
        kvkeep.Cache(build(), "lookahead", 16).activate_past_recording()
    assert parse("lookahead").query_aware
