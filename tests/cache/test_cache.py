"""One cache through its life: pieces, turns, copies, files."""

import gc
import json
import weakref
from functools import partial

import pytest
import torch
from conftest import make_llama
from oracles.intentkv import oracle_intentkv
from oracles.snapkv import oracle_snapkv
from oracles.streams import stream
from oracles.tova import oracle_tova
from transformers.cache_utils import Cache as TransformersCache

import kvkeep
from kvkeep.cache.padding import BatchLayout
from kvkeep.cache.report import format_bytes
from kvkeep.compress.method import Method
from kvkeep.errors import BadCacheFile, BadParameter, BadTensor, BudgetTooSmall, CacheMisuse, UnknownName

IDS = torch.arange(240).mul(37).remainder(128)[None]


def fed(model, spec, budget, ids=IDS, piece=None, **parameters):
    cache = kvkeep.Cache(model, spec, budget, **parameters)
    for part in ids.split(piece or ids.shape[1], dim=1):
        model(part, past_key_values=cache)
    return cache


def first_layer(model, ids):
    """Queries, keys and values of layer 0, which no eviction can change, as float64 arrays."""
    noted = {}

    def note(seen, budget):
        noted.update(q=seen.queries, k=seen.keys, v=seen.values) if seen.layer == 0 else None
        return torch.zeros(seen.keys.shape[:2])

    fed(model, Method("note", note, observation_window=10_000), 1, ids)
    return [noted[name].double().numpy() for name in "qkv"]


@pytest.mark.parametrize(
    "spec, oracle",
    [
        ("snapkv", oracle_snapkv),
        ("intentkv", oracle_intentkv),
        ("intentkv:boundary=subsequent", partial(oracle_intentkv, boundary="subsequent")),
        ("tova", oracle_tova),
    ],
)
@pytest.mark.parametrize("piece", [240, 100, 64, 7])
def test_a_prompt_in_pieces_is_a_running_competition(tiny, spec, oracle, piece):
    """After each piece, what was kept and what is new compete, judged by the newest queries of the whole prompt."""
    assert fed(tiny, spec, 50, piece=piece).kept(0)[0] == stream(oracle, *first_layer(tiny, IDS), 50, piece)


@pytest.mark.parametrize("spec", ["snapkv", "intentkv", "tova", "streamingllm", "snapkv+adakv", "snapkv+pyramid"])
def test_pieces_choose_like_one_shot_when_nothing_was_dropped_before_the_last(tiny, spec):
    short = IDS[:, :150]
    whole, pieces = fed(tiny, spec, 120, short), fed(tiny, spec, 120, short, piece=50)
    assert whole.report().kept_per_head == 120, "something was dropped"
    assert [whole.kept(i) for i in range(4)] == [pieces.kept(i) for i in range(4)]


def test_recency_chooses_alike_in_pieces_of_any_size(tiny):
    assert fed(tiny, "streamingllm", 40).kept(3) == fed(tiny, "streamingllm", 40, piece=11).kept(3)


def test_prefill_in_pieces_never_holds_more_than_budget_and_piece(tiny):
    cache, most = kvkeep.Cache(tiny, "snapkv", 32), 0
    keep = type(cache.backend.store[0]).append

    def spy(layer, *args):
        nonlocal most
        keep(layer, *args)
        most = max(most, *layer.lengths)

    type(cache.backend.store[0]).append = spy
    try:
        tiny.generate(IDS, past_key_values=cache, prefill_chunk_size=16, max_new_tokens=1)
    finally:
        type(cache.backend.store[0]).append = keep
    assert most == 48


def test_a_question_on_a_fork_leaves_the_context_alone(tiny):
    context = fed(tiny, "snapkv+adakv", 40)
    before = [context.kept(i) for i in range(4)]
    answers = [tiny(IDS[:, a:b], past_key_values=context.fork()).logits for a, b in ((0, 12), (30, 31), (0, 12))]
    assert torch.equal(answers[0], answers[2]) and [context.kept(i) for i in range(4)] == before
    assert torch.equal(tiny(IDS[:, :12], past_key_values=context).logits, answers[0])


@pytest.mark.parametrize("spec", ["snapkv", "snapkv+adakv+pyramid", "intentkv", "full"])
def test_a_saved_cache_goes_on_where_it_was(tiny, tmp_path, spec):
    cache = fed(tiny, spec, 40)
    tiny(IDS[:, :1], past_key_values=cache)
    cache.save(tmp_path / "cache")
    loaded = kvkeep.Cache.load(tmp_path / "cache", tiny)
    assert loaded.report() == cache.report() and loaded.kept(2) == cache.kept(2)
    for ids in (IDS[:, :9], IDS[:, :1], IDS[:, 40:90]):
        assert torch.equal(tiny(ids, past_key_values=loaded).logits, tiny(ids, past_key_values=cache).logits)


def test_a_file_that_is_not_right_is_refused(tiny, tmp_path):
    path = tmp_path / "cache"
    with pytest.raises(BadCacheFile, match="not a saved cache"):
        kvkeep.Cache.load(path, tiny)
    fed(tiny, "snapkv", 40).save(path)
    with pytest.raises(BadCacheFile, match="another model"):
        kvkeep.Cache.load(path, make_llama(seed=1))
    tensors, described = path / "cache.safetensors", path / "cache.json"
    whole, text = tensors.read_bytes(), described.read_text()
    for damaged in (whole[:-100], whole[:-5] + bytes(5), b""):
        tensors.write_bytes(damaged)
        with pytest.raises(BadCacheFile, match="truncated or was changed"):
            kvkeep.Cache.load(path, tiny)
    tensors.write_bytes(whole)
    for damaged in (text.replace('"budget": 40', '"budget": 41'), text[:50], "[]", "{}"):
        described.write_text(damaged)
        with pytest.raises(BadCacheFile):
            kvkeep.Cache.load(path, tiny)
    described.write_text(text)
    assert kvkeep.Cache.load(path, tiny).report().kept_per_head == 40


def test_saving_over_something_else_writes_nothing(tiny, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    with pytest.raises(BadCacheFile, match="not just a saved cache"):
        fed(tiny, "snapkv", 40).save(tmp_path / "notes")
    assert [p.name for p in tmp_path.rglob("*")] == ["notes", "a.txt"]


def test_a_report_prints_and_counts(tiny):
    report = fed(tiny, "snapkv", 60).report()
    assert json.loads(json.dumps(report.as_dict()))["kept_per_head"] == 60
    assert report.bytes * 4 == report.full_bytes
    assert "60 of the prompt (4 layers" in str(report) and "25.0%" in str(report)


@pytest.mark.parametrize(
    "error, words, call",
    [
        (UnknownName, "Did you mean 'snapkv'", lambda m: kvkeep.Cache(m, "snapvk", 64)),
        (UnknownName, "Did you mean 'adakv'", lambda m: kvkeep.Cache(m, "snapkv+adavk", 64)),
        (BadParameter, "budget=0", lambda m: kvkeep.Cache(m, "snapkv", 0)),
        (BadParameter, "budget=-3", lambda m: kvkeep.Cache(m, "snapkv", -3)),
        (BadParameter, "budget=1.5", lambda m: kvkeep.Cache(m, "snapkv", 1.5)),
        (BadParameter, "budget=0.0", lambda m: kvkeep.Cache(m, "snapkv", 0.0)),
        (BadParameter, "budget=nan", lambda m: kvkeep.Cache(m, "snapkv", float("nan"))),
        (BadParameter, "budget=True", lambda m: kvkeep.Cache(m, "snapkv", True)),
        (BadParameter, "needs a budget", lambda m: kvkeep.Cache(m, "snapkv")),
        (BudgetTooSmall, "budget=4", lambda m: kvkeep.Cache(m, "streamingllm", 4)),
        (BudgetTooSmall, "budget=9", lambda m: kvkeep.Cache(m, "intentkv", 9, sinks=4, recent=6)),
        (BadParameter, "no parameter 'windw'.*Did you mean 'window'", lambda m: kvkeep.Cache(m, "snapkv", 64, windw=3)),
        (BadParameter, "block=0", lambda m: kvkeep.Cache(m, "intentkv", 64, block=0)),
        (BadParameter, "window='x'", lambda m: kvkeep.Cache(m, "snapkv", 64, window="x")),
        (BadParameter, "alpha=2.0", lambda m: kvkeep.Cache(m, "snapkv+adakv", 64, alpha=2.0)),
        (BadParameter, "kappa=-1", lambda m: kvkeep.Cache(m, "protokv", 64, kappa=-1)),
        (BadParameter, "kappa=-1", lambda m: kvkeep.Cache(m, "satkv", 64, kappa=-1)),
        (BadParameter, "bits=40", lambda m: kvkeep.Cache(m, "protokv", 64, bits=40)),
        (BadParameter, "chunk=0", lambda m: kvkeep.Cache(m, "chunkkv", 64, chunk=0)),
        (BadParameter, "chunk=500.*240 tokens", lambda m: fed(m, "chunkkv", 64, chunk=500)),
        (BadParameter, "gap=4090.*context length of 4096", lambda m: fed(m, "intelllm", 64, gap=4090)),
        (BadParameter, "random=1.5", lambda m: kvkeep.Cache(m, "nacl", 64, random=1.5)),
        (BadParameter, "mode='far'", lambda m: kvkeep.Cache(m, "intelllm", 64, mode="far")),
        (BadParameter, "votes='loud'", lambda m: kvkeep.Cache(m, "protokv", 64, votes="loud")),
        (BadParameter, "pool=4", lambda m: kvkeep.Cache(m, "ahakv", 64, pool=4)),
        (BadParameter, "reuse=0", lambda m: kvkeep.Cache(m, "chunkkv", 64, reuse=0)),
        (BadParameter, "set reuse=1", lambda m: kvkeep.Cache(m, "chunkkv+pyramid", 64)),
        (BadParameter, "allocated among layers already", lambda m: kvkeep.Cache(m, "pyramidkv+cake", 64)),
        (BadParameter, "tau1=0.0", lambda m: kvkeep.Cache(m, "snapkv+cake", 64, tau1=0.0)),
        (BadParameter, "no scores", lambda m: kvkeep.Cache(m, "streamingllm+adakv", 64)),
        (BadParameter, "no budget to allocate", lambda m: kvkeep.Cache(m, "full+pyramid", 64)),
    ],
)
def test_bad_words_are_answered_with_the_way_out(tiny, error, words, call):
    with pytest.raises(error, match=words):
        call(tiny)


GOOD = (torch.randn(4, 20, 8), torch.randn(2, 20, 8), torch.randn(2, 20, 8))


@pytest.mark.parametrize(
    "words, change",
    [
        ("queries is dtype torch.int64", lambda q, k, v: (q.long(), k, v)),
        ("keys is a list", lambda q, k, v: (q, k.tolist(), v)),
        (r"keys has shape \(1, 2, 20, 8\)", lambda q, k, v: (q, k[None], v)),
        ("do not fit together", lambda q, k, v: (q[:3], k, v)),
        ("do not fit together", lambda q, k, v: (q[:, :9], k, v)),
        ("do not fit together", lambda q, k, v: (q, k, v[:, :9])),
        ("do not fit together", lambda q, k, v: (q[:, :0], k[:, :0], v[:, :0])),
        ("keys holds a value that is not a finite number at head 1, token 7", lambda q, k, v: (q, poisoned(k), v)),
    ],
)
def test_bad_tensors_are_refused(words, change):
    with pytest.raises(BadTensor, match=words):
        kvkeep.select("snapkv", *change(*GOOD), 8)


def poisoned(keys):
    keys = keys.clone()
    keys[1, 7, 3] = float("nan")
    return keys


def test_keys_that_are_not_numbers_leave_an_empty_cache(tiny):
    cache = kvkeep.Cache(tiny, "snapkv", 40)
    tiny.model.layers[2].self_attn.k_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(BadTensor, match="NaN"):
        tiny(IDS, past_key_values=cache)
    assert cache.nbytes == 0 and cache.get_seq_length() == 0
    tiny.model.layers[2].self_attn.k_proj.weight.data[0, 0] = 0.0
    tiny(IDS, past_key_values=cache)
    assert cache.report().kept_per_head == 40


def test_a_cache_that_failed_halfway_through_a_later_turn_says_so(tiny):
    cache = fed(tiny, "snapkv", 40)
    tiny.model.layers[2].self_attn.k_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(BadTensor, match="NaN"):
        tiny(IDS, past_key_values=cache)
    with pytest.raises(CacheMisuse, match="unusable"):
        tiny(IDS, past_key_values=cache)


def test_misuse_is_named(tiny):
    cache = fed(tiny, "snapkv", 40)
    with pytest.raises(CacheMisuse, match="cannot be cropped"):
        cache.crop(-1)
    with pytest.raises(CacheMisuse, match="not compressed"):
        cache.kept(9)
    with pytest.raises(CacheMisuse, match="holds 1 rows, but 2 came"):
        tiny(IDS.repeat(2, 1), past_key_values=fed(tiny, "snapkv", 40))
    mask = torch.ones(1, 5, dtype=torch.long)
    mask[0, 0] = 0
    with pytest.raises(CacheMisuse, match="covers 5 tokens"):
        tiny(IDS[:, :5], attention_mask=mask, past_key_values=fed(tiny, "snapkv", 40))


@pytest.mark.parametrize("spec", ["snapkv", "h2o", "actqkv", "quest"])
def test_a_cache_nobody_holds_is_freed_at_once(spec):
    model = make_llama()
    cache = kvkeep.Cache(model, spec, 40)
    model.generate(torch.arange(100)[None], past_key_values=cache, max_new_tokens=3)
    gone = weakref.ref(cache)
    gc.disable()
    del cache
    gc.enable()
    assert gone() is None


# what is held, in words


def test_a_report_parts_what_was_kept_of_the_prompt_from_what_was_generated(tiny, tmp_path):
    """Old: 'kept 78' at a budget of 60."""
    cache = fed(tiny, "snapkv", 60)
    assert cache.report().kept == {"prompt": 60, "generated": 0}
    for i in range(18):
        tiny(IDS[:, i : i + 1], past_key_values=cache)
    report = cache.report()
    assert report.kept == {"prompt": 60, "generated": 18} and report.kept_per_head == 78
    assert "kept per KV head 60 of the prompt + 18 generated (4 layers × 4 heads, on average)" in str(report)
    cache.save(tmp_path / "c")
    assert kvkeep.Cache.load(tmp_path / "c", tiny).report().kept == report.kept == cache.fork().report().kept
    tiny(IDS[:, :30], past_key_values=cache)  # a second turn: what was generated is part of its prompt
    assert cache.report().kept == {"prompt": 60, "generated": 0}


def test_generated_tokens_that_were_dropped_do_not_count(tiny):
    cache = fed(tiny, "h2o", 60)
    for i in range(40):
        tiny(IDS[:, i : i + 1], past_key_values=cache)
    kept, cut = cache.report().kept, IDS.shape[1]
    heads = [head for layer in cache.compressed_layers for head in cache.kept(layer)[0]]
    assert kept["prompt"] == sum(p < cut for head in heads for p in head) / len(heads)
    assert kept["prompt"] + kept["generated"] == 60 and 0 < kept["generated"] <= 40


def test_rows_of_a_batch_have_prompts_of_their_own(tiny):
    cache = kvkeep.Cache(tiny, "full")
    mask = torch.ones(2, 40, dtype=torch.int64)
    mask[1, :25] = 0
    tiny(IDS[:, :40].repeat(2, 1), attention_mask=mask, past_key_values=cache)
    for i in range(3):
        mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
        tiny(IDS[:, i : i + 1].repeat(2, 1), attention_mask=mask, past_key_values=cache)
    assert cache.report().kept == {"prompt": (40 + 15) / 2, "generated": 3}
    assert "27.5 of the prompt + 3 generated" in str(cache.report())
    cache.batch_select_indices(torch.tensor([1]))
    assert cache.report().kept == {"prompt": 15, "generated": 3}


def test_a_cache_says_in_a_line_what_it_is(tiny):
    cache = kvkeep.Cache(tiny, "snapkv", 60)
    assert repr(cache) == "<kvkeep.Cache snapkv, budget 60: 0 tokens seen, 0 of the prompt kept per KV head, 0 B>"
    tiny(IDS, past_key_values=cache)
    tiny(IDS[:, :1], past_key_values=cache)
    held = "60 of the prompt + 1 generated kept per KV head"
    size = format_bytes(cache.nbytes)
    assert repr(cache) == f"<kvkeep.Cache snapkv, budget 60: {IDS.shape[1] + 1} tokens seen, {held}, {size}>"
    away = kvkeep.Cache(tiny, "quest", 60)
    tiny(IDS, past_key_values=away)
    size = format_bytes(away.report().host_bytes)
    assert size != "0 B" and repr(away).endswith(f", {size} offloaded>")


def test_a_full_cache_is_all_of_a_full_cache_and_has_no_budget(tiny):
    """Old: 102 %, with the room for tokens to come."""
    cache = fed(tiny, "full", None)
    tiny(IDS[:, :1], past_key_values=cache)
    report = cache.report()
    assert report.bytes > report.full_bytes and "(100.0%)" in str(report) and str(report).startswith("full, budget –")


def test_bytes_for_people():
    sizes = {0: "0 B", 999: "999 B", 1000: "1.0 kB", 23_500_000: "23.5 MB", 10**9: "1.0 GB", 5 * 10**12: "5000.0 GB"}
    assert {size: format_bytes(size) for size in sizes} == sizes


@pytest.mark.parametrize("ratio", [0.75, "high", 2])
def test_a_ratio_of_kvpress_is_answered_with_a_budget(tiny, ratio):
    q, kv = torch.randn(8, 30, 8), torch.randn(4, 30, 8)
    method = kvkeep.methods["snapkv"]
    for make in (
        lambda: kvkeep.Cache(tiny, "snapkv", compression_ratio=ratio),
        lambda: kvkeep.Cache(tiny, method, 60, compression_ratio=ratio),
        lambda: kvkeep.Engine(tiny, None, "snapkv", compression_ratio=ratio),
        lambda: kvkeep.select("snapkv", q, kv, kv, compression_ratio=ratio),
        lambda: kvkeep.compress.parse.parse(f"snapkv:compression_ratio={ratio}+adakv"),
    ):
        with pytest.raises(BadParameter, match=r"budget=: tokens per.*compression_ratio=0\.75 .* is budget=0\.25"):
            make()
    with pytest.raises(BadParameter, match=r"compression_ratio=0\.9 in kvpress is budget=0\.1\b"):
        kvkeep.Cache(tiny, "snapkv", compression_ratio=0.9)
    with pytest.raises(BadParameter, match="'snapkv' needs a budget"):
        kvkeep.select("snapkv", q, kv, kv)
    assert kvkeep.select("full", q, kv, kv).tolist() == [list(range(30))] * 4


@pytest.mark.parametrize("spec", ["h2o", "cake", "keydiff+shared", "infllm"])
@pytest.mark.parametrize("guess", ["assistant_model", "prompt_lookup_num_tokens"])
def test_assisted_generation_is_refused_before_a_token_is_read(tiny, spec, guess, monkeypatch):
    """Old: the prompt was read and tokens were guessed before crop() was called."""
    if not hasattr(TransformersCache, "activate_past_recording"):
        pytest.skip("this version of transformers says nothing before it crops")
    cache, helper = kvkeep.Cache(tiny, spec, 60), {"assistant_model": make_llama(1), "prompt_lookup_num_tokens": 3}
    monkeypatch.setattr(tiny, "forward", lambda *_, **__: pytest.fail("the model was run"))
    with pytest.raises(CacheMisuse, match=r"assisted generation and prompt lookup \(assistant_model=, prompt_lookup"):
        tiny.generate(IDS, past_key_values=cache, max_new_tokens=4, do_sample=False, **{guess: helper[guess]})
    assert cache.seen == 0
    monkeypatch.undo()
    assert tiny.generate(IDS, past_key_values=cache, max_new_tokens=4, do_sample=False).shape[1] == IDS.shape[1] + 4


def test_padding_is_put_before_the_queries_and_comes_back_to_its_columns():
    queries = torch.arange(1.0, 2 * 3 * 6 * 4 + 1).view(2, 3, 6, 4)
    columns = [torch.tensor([2, 3, 4, 5]), torch.tensor([0, 4])]
    layout = BatchLayout([4, 2], columns, [torch.arange(4), torch.arange(2)], [True, True], [0, 0])
    packed = layout.pack(queries)
    assert torch.equal(packed[0, :, 2:], queries[0, :, 2:]) and not packed[0, :, :2].any()
    assert torch.equal(packed[1, :, 4:], queries[1][:, [0, 4]]) and not packed[1, :, :4].any()
    back = layout.unpack(packed)
    for row, where in enumerate(columns):
        others = [j for j in range(6) if j not in where]
        assert torch.equal(back[row][:, where], queries[row][:, where]) and not back[row][:, others].any()
