"""Retrieval methods, against replays of the whole history and against plain attention."""

from dataclasses import replace

import numpy as np
import pytest
import tiny_chat
import torch
from conftest import RETRIEVING, make_llama
from families import FAMILIES, build, prompt
from oracles import reading
from test_step_eviction import seen_by

import kvkeep
from kvkeep.cache import retrieval
from kvkeep.cache.retrieval import LayerRetriever, PrefillChunk
from kvkeep.compress.parse import parse
from kvkeep.errors import BadParameter, BudgetTooSmall, CacheMisuse, UnsupportedModel
from kvkeep.kernels.torch import retrieval_units
from kvkeep.storage.offload.device_lru import DeviceLRU

ALONE = [name for name in RETRIEVING if not parse(name).retrieval.needs]  # these need nothing but keys and queries
IDS = torch.randperm(512, generator=torch.Generator().manual_seed(0))[None, :400]  # no token comes twice: no ties


def llama(**changes):
    return make_llama(vocab_size=512, **changes)


def raw(model, ids):
    """Queries, keys and values of every token as they were before rotation. float64"""
    q, k, v = seen_by(model, ids)
    freq = model.model.rotary_emb.inv_freq.double().numpy()
    back = [np.array([reading.rotate(x, -p, freq) for p, x in enumerate(head)]) for t in (q, k) for head in t]
    return np.stack(back[: len(q)]), np.stack(back[len(q) :]), v, freq


def outputs(model, cache, *turns):
    """What the one layer's attention gave for every token of prompts and decoded tokens. [heads, total, dim]"""
    noted, total = [], 0
    projection = model.model.layers[0].self_attn.o_proj
    hook = projection.register_forward_pre_hook(lambda _, args: noted.append(args[0][0]))
    for new, decoded in turns:
        model(IDS[:, total : total + new], past_key_values=cache)
        total += new
        for t in range(total, total + decoded):
            model(IDS[:, t : t + 1], past_key_values=cache)
        total += decoded
    hook.remove()
    heads = model.config.num_attention_heads
    return torch.cat(noted).view(total, heads, -1).transpose(0, 1).double().numpy()


SETTINGS = {  # budget, sinks, local, window, chunk, representatives, prompt, total
    "usual": (64, 4, 16, 16, 8, 2, 200, 240),
    "odd windows": (50, 3, 11, 13, 5, 4, 157, 200),
    "no sinks": (40, 0, 8, 32, 4, 1, 120, 150),
    "all from writing": (48, 2, 12, 16, 6, 2, 30, 150),
}


KINDS = [
    ("actqkv", True),
    ("actqkv", False),
    ("infllm", True),
    ("infllm", False),
    ("qllm", True),
    ("tokenselect", False),
]


@pytest.mark.core
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind, per_head", KINDS)
def test_reading_and_writing_equal_the_replay(kind, per_head, setting):
    """Every kind and every setting with either number of heads."""
    heads, kv_heads = [(8, 4), (4, 1)][(KINDS.index((kind, per_head)) + list(SETTINGS).index(setting)) % 2]
    budget, sinks, local, window, chunk, representatives, prompt, total = SETTINGS[setting]
    model = llama(num_hidden_layers=1, num_attention_heads=heads, num_key_value_heads=kv_heads)
    q, k, v, freq = raw(model, IDS[:, :total])
    options = {"window": window, "sinks": sinks, "local": local}
    if kind == "tokenselect":
        options["similar"] = None  # the replay asks anew for every token
    else:
        options |= {"representatives": representatives, ("chunk" if kind == "actqkv" else "block"): chunk}
        options["per_head"] = per_head
    weight = 0.5 if kind == "actqkv" and setting == "odd windows" else 0.0
    if weight:
        options["question_weight"] = weight
    cache = kvkeep.Cache(model, kind, budget, **options)
    question = None
    if kind in ("actqkv", "qllm") and setting != "no sinks":
        question = np.random.default_rng(0).normal(size=(3, k.shape[0] * k.shape[2]))
        cache.backend.question[0] = torch.tensor(question, dtype=torch.float32)
    scale = model.model.layers[0].self_attn.scaling
    want, chosen = reading.replay(
        kind,
        q,
        k,
        v,
        freq,
        scale,
        prompt,
        budget,
        sinks,
        local,
        window,
        chunk,
        representatives,
        question,
        per_head=per_head,
        question_weight=weight,
    )
    got = outputs(model, cache, (prompt, total - prompt))
    off = np.abs(got - want).max((0, 2))
    assert off.max() < 1e-4, f"token {int(off.argmax())} is off by {off.max():.2g}"
    assert any(chosen[-1]), "nothing was fetched: the test shows nothing"
    unit = 1 if kind == "tokenselect" else chunk
    fetched = [sinks + c * unit + j for c in chosen[-1] for j in range(unit)]
    assert [p for p in cache.kept(0)[0][0] if sinks <= p][: len(fetched)] == fetched


@pytest.mark.core
@pytest.mark.parametrize("kind, per_head", KINDS)
def test_every_turn_of_a_chat_equals_the_replay(kind, per_head):
    """Short questions after long answers and the reverse: none sees what another one retrieved."""
    turns, window, chunk = [(157, 9), (21, 7), (5, 6), (40, 3)], 16, 4
    total = sum(map(sum, turns))
    model = llama(num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=4)
    q, k, v, freq = raw(model, IDS[:, :total])
    options = {"window": window, "sinks": 2, "local": 8}
    if kind == "tokenselect":
        options["similar"] = None
    else:
        options |= {"representatives": 2, "per_head": per_head, ("chunk" if kind == "actqkv" else "block"): chunk}
    cache = kvkeep.Cache(model, kind, 32, **options)
    scale, sizes = model.model.layers[0].self_attn.scaling, (157, 32, 2, 8, window, chunk, 2)
    pieces = reading.turns_of(turns, window)
    want, chosen = reading.replay(kind, q, k, v, freq, scale, *sizes, per_head=per_head, pieces=pieces)
    assert np.abs(outputs(model, cache, *turns) - want).max() < 1e-4 and any(chosen[-1])


def offload_everything(cache, budget):
    """As if the budget had been exceeded, without having attended to less."""
    retrieval = cache.backend
    for index, rows in retrieval.states.items():
        for row, state in enumerate(rows):
            layer, nothing = LayerRetriever(retrieval, index, row, None, True), state.near[0][:, :0]
            rows[row] = layer.offload(state, PrefillChunk(layer, state, nothing, nothing, nothing), budget)


@pytest.mark.core
@pytest.mark.parametrize("spec", RETRIEVING)
def test_fetching_everything_is_full_attention(spec):
    model, method = llama(), parse(spec)
    method = replace(
        method, retrieval=replace(method.retrieval, far_positions="original", density=False, neighbours=0.0)
    )
    want = model(IDS[:, :150]).logits
    cache = kvkeep.Cache(model, method, 1000)
    if method.retrieval.needs:
        cache.backend.set_token_marks(0, torch.arange(150) % 7 == 6)
    got = [model(IDS[:, :100], past_key_values=cache).logits]
    offload_everything(cache, 48)
    away = cache.backend.states[0][0].host.tokens
    got += [model(IDS[:, 100:120], past_key_values=cache).logits]
    got += [model(IDS[:, t : t + 1], past_key_values=cache).logits for t in range(120, 150)]
    assert away >= 40 and cache.kept(0)[0] == [list(range(150))] * 4
    assert (torch.cat(got, 1) - want).abs().max() < 1e-4


@pytest.mark.core
@pytest.mark.parametrize("spec", RETRIEVING)
def test_a_budget_that_never_binds_changes_nothing(spec):
    model = llama()
    want = model.generate(IDS[:, :60], max_new_tokens=12, do_sample=False)
    cache = kvkeep.Cache(model, spec, 200)
    assert model.generate(IDS[:, :60], past_key_values=cache, max_new_tokens=12, do_sample=False).equal(want)
    assert model(IDS[:, :60], past_key_values=kvkeep.Cache(model, spec, 200)).logits.equal(model(IDS[:, :60]).logits)


@pytest.mark.core
@pytest.mark.parametrize("spec", ALONE)
def test_the_device_holds_the_budget_and_the_host_the_rest(spec):
    model, budget = llama(num_hidden_layers=2), 64
    cache = kvkeep.Cache(model, spec, budget)
    model(IDS[:, :250], past_key_values=cache)
    for t in range(250, 300):
        assert model(IDS[:, t : t + 1], past_key_values=cache).logits.isfinite().all()
        report = cache.report()
        held = [n for layer in report.tokens for row in layer for n in row]
        mean = sum(held) / len(held)
        assert mean <= budget and (spec == "actqkv" or max(held) <= budget), (t, held)
    each = report.full_bytes // 300  # of one token, all layers and heads
    states = [rows[0] for rows in cache.backend.states.values()]
    near = sum(s.num_near + s.sinks[0].shape[1] for s in states) * each // len(states)
    assert report.host_bytes + near == report.full_bytes  # everything, exactly once
    assert "offloaded" in str(report) and cache.get_seq_length() == 300


@pytest.mark.core
@pytest.mark.parametrize("spec", ["actqkv:density=False", "actqkv"])
def test_every_decode_step_of_actqkv_retrieves_46_chunks_within_the_budget(spec):
    """At the paper's sizes: 64 sinks, 512 local tokens and 46 chunks of 32 are 2,048; layers share by density."""
    layers = 2
    model = llama(num_hidden_layers=layers, hidden_size=16, num_attention_heads=2, num_key_value_heads=1)
    ids = torch.randint(512, (1, 2800), generator=torch.Generator().manual_seed(0))
    cache, near = kvkeep.Cache(model, spec, 2048), []
    model(ids[:, :2700], past_key_values=cache)
    for t in range(2700, 2800):
        model(ids[:, t : t + 1], past_key_values=cache)
        states = [rows[0] for rows in cache.backend.states.values()]
        chunks = [state.retrieved.index.shape[1] // 32 for state in states]
        assert sum(chunks) == 46 * layers and (spec == "actqkv" or set(chunks) == {46})
        attended = [len(set(head)) for layer in range(layers) for head in cache.kept(layer)[0]]
        assert sum(attended) <= 2048 * layers and (spec == "actqkv" or max(attended) <= 2048)
        assert all(t in head for layer in range(layers) for head in cache.kept(layer)[0])
        near.append(states[0].num_near)
    assert near[:33] == [*range(near[0], 513), *range(481, near[0] + 1)] and set(near) == {*range(481, 513)}


@pytest.mark.core
@pytest.mark.parametrize("spec", [*ALONE, "actqkv:chunk=16:local=8", "infllm:block=24:local=5", "quest:page=8:local=3"])
def test_a_decoded_token_is_within_the_budget(spec):
    """Also while other tokens wait for their chunk to fill, and if a chunk is longer than the near window."""
    model, budget = llama(num_hidden_layers=2), 64
    method = parse(spec)
    cache = kvkeep.Cache(model, replace(method, retrieval=replace(method.retrieval, density=False)), budget)
    model(IDS[:, :150], past_key_values=cache)
    for t in range(150, 200):
        model(IDS[:, t : t + 1], past_key_values=cache)
        assert max(len(head) for layer in (0, 1) for head in cache.kept(layer)[0]) <= budget


def tokens_in_memory(state):
    """Tokens per KV head that the device really holds, by the storages of all keys a state refers to."""
    keys = [state.near[0], *(pair[0] for pair in (state.sinks, state.retrieved and state.retrieved.pair) if pair)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in keys if t.numel()}
    return sum(storages.values()) // keys[0][:, :1].nbytes


@pytest.mark.core
@pytest.mark.parametrize("budget", [64, 160])
@pytest.mark.parametrize("spec", RETRIEVING)
def test_the_device_holds_the_budget_after_every_prompt(spec, budget):
    """Not only once decoding goes on: whole, in pieces, and of any length."""
    model = llama(num_hidden_layers=2)
    for pieces in ((budget + 1,), (250,), (400,), (150, 2, 90, 40, 33)):
        cache = kvkeep.Cache(model, spec, budget)
        if cache.backend.config.needs:
            cache.backend.set_token_marks(0, (torch.arange(400) % 7 == 6).float())
        start = 0
        for piece in pieces:
            model(IDS[:, start : start + piece], past_key_values=cache)
            start += piece
            for (state,) in cache.backend.states.values():
                sinks = state.sinks[0].shape[1] if state.sinks else 0
                held = tokens_in_memory(state)
                assert held <= budget + sinks  # those fetched lie behind a copy of the sinks
                assert state.device_tokens <= min(budget, start) and state.host.tokens >= start - budget
                assert all(len(set(head)) == len(head) == state.device_tokens for head in state.positions())


@pytest.mark.core
@pytest.mark.parametrize("spec", ALONE)
def test_pieces_forks_and_rows(spec):
    model = llama(num_hidden_layers=2)
    alone = kvkeep.Cache(model, spec, 64, **({"window": 16} if parse(spec).retrieval.window else {}))
    want = model(IDS[:, :200], past_key_values=alone).logits[:, -1]
    after = model(IDS[:, 200:201], past_key_values=alone.fork()).logits
    again = model(IDS[:, 200:201], past_key_values=alone).logits
    assert after.equal(again)  # a copy answers as the original does, and leaves it as it was
    if parse(spec).retrieval.window:  # windows lie where they lay, whatever the pieces
        pieces = kvkeep.Cache(model, spec, 64, window=16)
        for start in range(0, 192, 48):
            model(IDS[:, start : start + 48], past_key_values=pieces)
        got = model(IDS[:, 192:200], past_key_values=pieces).logits[:, -1]
        assert (got - want).abs().max() < 1e-4
    padding = torch.ones(2, 230, dtype=torch.long)
    padding[0, :30] = 0
    batch = torch.cat([torch.cat([torch.zeros(1, 30, dtype=torch.long), IDS[:, :200]], 1), IDS[:, 100:330]])
    together = kvkeep.Cache(model, spec, 64, **({"window": 16} if parse(spec).retrieval.window else {}))
    places = (padding.cumsum(1) - 1).clamp_min(0)
    got = model(batch, attention_mask=padding, position_ids=places, past_key_values=together).logits[0, -1]
    assert (got - want[0]).abs().max() < 1e-4


@pytest.mark.core
def test_a_pass_cut_short_leaves_the_cache_as_it_was():
    model = llama(num_hidden_layers=3)
    cache, twin = (kvkeep.Cache(model, "actqkv", 64) for _ in range(2))
    for each in (cache, twin):
        model(IDS[:, :200], past_key_values=each)

    def stop(*_):
        raise KeyboardInterrupt

    hook = model.model.layers[2].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        model(IDS[:, 200:240], past_key_values=cache)
    hook.remove()
    got, want = (model(IDS[:, 200:240], past_key_values=each).logits for each in (cache, twin))
    assert got.equal(want)


def test_layers_share_what_they_fetch_and_never_more():
    model = llama(num_hidden_layers=4)
    cache = kvkeep.Cache(model, "actqkv", 64, chunk=2, sinks=2, local=10)
    model(IDS[:, :300], past_key_values=cache)
    seen = set()
    for t in range(300, 340):
        model(IDS[:, t : t + 1], past_key_values=cache)
        fetched = tuple(rows[0].retrieved.index.shape[1] for rows in cache.backend.states.values())
        assert sum(fetched) == 4 * 52
        seen.add(fetched)
    assert len(seen) > 1 and any(len(set(each)) > 1 for each in seen)  # some layers do get more than others


@pytest.mark.parametrize("reverse", [False, True])
def test_shares_follow_density_or_its_reverse(reverse, monkeypatch):
    """ActQKV, appendix D.3: with 1 / density the layers of lowest density fetch most."""
    before, now = [9.0, 1.5, 3.0, 1.0], [2.0, 2.5, 0.5, 4.0]  # the first layer asks what the later ones had at the end
    known = iter([1 / x if reverse else x for x in (*before, *now)])
    for module in (retrieval, retrieval_units):
        monkeypatch.setattr(module, "density", lambda scores, reverse: torch.tensor(next(known)))
    model = llama(num_hidden_layers=4)
    cache = kvkeep.Cache(model, "actqkv", 64, chunk=2, sinks=2, local=10, reverse=reverse)
    model(IDS[:, :300], past_key_values=cache)
    model(IDS[:, 300:301], past_key_values=cache)
    shares = [rows[0].retrieved.index.shape[1] for rows in cache.backend.states.values()]
    turned = [[1 / x for x in each] if reverse else each for each in (now, before)]
    assert shares == reading.density_shares(turned[:1], turned[1], 4 * 52, 2)[0]
    assert shares[0] == (40 if reverse else 54)  # 1/2 : 1/2 + 2/3 + 1/3 + 1, 2 : 2 + 1.5 + 3 + 1, of 208


@pytest.mark.parametrize("spec", ["clusterkv", "squeezed", "sentencekv"])
def test_what_the_first_written_token_fetched_stays(spec):
    """ProtoKV's table 3, prefilling: chosen once after a prompt, then neither retrieved nor offloaded."""
    model, budget, prompt, total = llama(num_hidden_layers=1), 48, 200, 270
    options = {} if spec == "sentencekv" else {"tokens": 4}
    cache = kvkeep.Cache(model, spec, budget, once=True, **options)
    if spec == "sentencekv":
        cache.backend.set_token_marks(0, torch.arange(400) % 7 == 6)
    outputs(model, cache, (prompt, 1))
    state, first = cache.backend.states[0][0], cache.kept(0)[0]
    assert prompt in first[0] and state.device_tokens <= budget and state.retrieved.index.shape[1] > 0
    noted = []
    hook = model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda _, args: noted.append(args[0][0]))
    for t in range(prompt + 1, total):
        model(IDS[:, t : t + 1], past_key_values=cache)
        assert cache.kept(0)[0] == [[*row, *range(prompt + 1, t + 1)] for row in first]
        assert cache.backend.states[0][0].retrieved.index is state.retrieved.index
    hook.remove()
    q, k, v = seen_by(model, IDS[:, :total])
    for h, head in enumerate(torch.cat(noted)[-1].view(8, -1).double().numpy()):
        tokens = [*first[h // 2], *range(prompt + 1, total)]
        weights = np.exp(k[h // 2][tokens] @ q[h][total - 1] * model.model.layers[0].self_attn.scaling)
        assert np.abs(weights @ v[h // 2][tokens] / weights.sum() - head).max() < 1e-4
    model(IDS[:, total : total + 20], past_key_values=cache)  # another prompt: all of it is read, then chosen anew
    model(IDS[:, total + 20 : total + 21], past_key_values=cache)
    again = cache.backend.states[0][0]
    assert again.device_tokens <= budget and again.retrieved.index is not state.retrieved.index


def test_tokenselect_asks_again_only_for_another_question():
    model = llama(num_hidden_layers=1)
    counts = {}
    for similar in (-1.0, None):
        cache = kvkeep.Cache(model, "tokenselect", 64, similar=similar, window=16)
        model(IDS[:, :200], past_key_values=cache)
        first = cache.backend.states[0][0].retrieved
        for t in range(200, 205):
            model(IDS[:, t : t + 1], past_key_values=cache)
        counts[similar] = cache.backend.states[0][0].retrieved.index is first.index
    assert counts == {-1.0: True, None: False}


def test_what_only_the_text_can_tell():
    model = llama()
    for spec, what in (("emllm", "surprise"), ("sentencekv", "sentences")):
        with pytest.raises(CacheMisuse, match=f"chunks text by {what}.*kvkeep.Engine"):
            model.generate(IDS[:, :200], past_key_values=kvkeep.Cache(model, spec, 64), max_new_tokens=2)


def test_sizes_that_cannot_be():
    model = llama()
    with pytest.raises(BudgetTooSmall, match="budget of 88 or more"):
        kvkeep.Cache(model, "actqkv", 64, local=56, sinks=16, chunk=16)
    with pytest.raises(BadParameter, match="evicts nothing"):
        kvkeep.Cache(model, "actqkv+adakv", 64)
    with pytest.raises(BadParameter, match="no clusters"):
        kvkeep.Cache(model, "snapkv+recall", 64)
    with pytest.raises(BadParameter, match="probe='max'"):
        kvkeep.Cache(model, "actqkv", 64, probe="max")
    with pytest.raises(BadParameter, match="needs a budget"):
        kvkeep.Cache(model, "infllm")
    with pytest.raises(CacheMisuse, match="cannot be saved yet"):
        kvkeep.Cache(model, "infllm", 64).save("nowhere")


@pytest.mark.core
@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.full])
@pytest.mark.parametrize("number, spec", [*enumerate(["actqkv", "tokenselect", "quest", "clusterkv"])])
def test_every_family_fetches(name, number, spec):
    """With each of the family's attention implementations, methods taking turns."""
    kinds = FAMILIES[name].kinds
    model, ids = build(name, kinds[(number + list(FAMILIES).index(name)) % len(kinds)]), prompt(90)
    try:
        cache = kvkeep.Cache(model, spec, 32, **({"window": 16} if parse(spec).retrieval.window else {}))
    except UnsupportedModel:
        assert parse(spec).retrieval.moves_keys  # keys of this family cannot be turned
        return
    for piece in (ids[:, :60], ids[:, 60:61], ids[:, 61:]):
        assert model(piece, past_key_values=cache).logits.isfinite().all()
    for t in range(3):
        assert model(ids[:, t : t + 1], past_key_values=cache).logits.isfinite().all()
    assert cache.report().kept_per_head <= 32 and cache.report().host_bytes > 0
    method = parse(spec)
    exact = replace(method, retrieval=replace(method.retrieval, far_positions="original"))
    cache = kvkeep.Cache(model, exact, 1000)
    model(ids[:, :60], past_key_values=cache)
    offload_everything(cache, 32)
    got = model(ids[:, 60:61], past_key_values=cache).logits[0, -1]
    assert (got - model(ids[:, :61]).logits[0, -1]).abs().max() < 1e-3 and cache.report().host_bytes > 0


@pytest.mark.core
def test_copies_on_the_device_change_nothing():
    """What a GPU keeps of the blocks fetched last, tried without one."""
    model = llama(num_hidden_layers=2)
    want, got = (kvkeep.Cache(model, "infllm", 64, window=16) for _ in range(2))
    empty = got.backend._empty

    def with_copies(new):
        state = empty(new)
        state.host.device_lru = DeviceLRU(torch.device("cpu"))
        return state

    got.backend._empty = with_copies
    for each in (want, got):
        model(IDS[:, :200], past_key_values=each)
    twin = got.fork()
    assert model(IDS[:, 200:240], past_key_values=twin).logits.equal(
        model(IDS[:, 200:240], past_key_values=want.fork()).logits
    )
    for t in range(250, 300):  # another continuation: what the copy fetched must not be taken for it
        logits = [model(IDS[:, t : t + 1], past_key_values=each).logits for each in (want, got)]
        assert logits[0].equal(logits[1])
    device_lru = got.backend.states[0][0].host.device_lru
    fetched = got.backend.states[0][0].retrieved.index.shape[1] // 8
    assert 0 < len(device_lru.held) <= 2 * fetched and got.nbytes > want.nbytes


def test_what_was_said_of_a_pass_that_was_cut_short_is_forgotten():
    model, words = tiny_chat.model(), tiny_chat.tokenizer()
    text = words("A. Bb c. Ddd ee. " * 20, return_tensors="pt").input_ids[0]
    engine, other = (kvkeep.Engine(model, words, "sentencekv", 64) for _ in range(2))
    for one in (engine, other):
        one.prefill(text[:200])
    attend = engine.cache.backend.attend

    def interrupted(index, *how):
        if index == 1:
            raise KeyboardInterrupt
        return attend(index, *how)

    engine.cache.backend.attend = interrupted
    with pytest.raises(KeyboardInterrupt):
        engine.extend(text[200:209])
    engine.cache.backend.attend = attend
    for one in (engine, other):
        one.extend(text[200:240])
    assert engine.cache.backend.marks[0].equal(other.cache.backend.marks[0])
    assert [engine.cache.kept(layer) for layer in (0, 1)] == [other.cache.kept(layer) for layer in (0, 1)]


def test_surprise_needs_a_budget_in_tokens():
    with pytest.raises(BadParameter, match="'emllm' prefills in chunks of the near window.* in tokens, not 0.3"):
        kvkeep.Cache(llama(), "emllm", 0.3)


@pytest.mark.core
@pytest.mark.parametrize("spec", ["quest", "clusterkv", "infllm", "actqkv", "tokenselect"])
def test_a_row_with_one_token_writes_whatever_the_others_bring(spec):
    model, ids = make_llama(), torch.randint(0, 128, (2, 96), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 96, dtype=torch.long)
    mask[0, 90:95] = 0  # the first row brings one token, the second six
    settings = {} if spec in ("quest", "clusterkv") else {"window": 16}
    together, alone = (kvkeep.Cache(model, spec, 40, **settings) for _ in range(2))
    model(ids[:, :90], past_key_values=together)
    places = (mask.cumsum(1) - 1)[:, 90:]
    got = model(ids[:, 90:], attention_mask=mask, position_ids=places, past_key_values=together).logits[0, -1]
    model(ids[:1, :90], past_key_values=alone)
    want = model(ids[:1, 95:], past_key_values=alone).logits[0, -1]
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    assert together.report().tokens[0][0] == alone.report().tokens[0][0]
