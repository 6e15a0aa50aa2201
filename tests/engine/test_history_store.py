"""Conversations that lose nothing: every turn sees the whole history, whatever earlier turns evicted."""

import gc
import warnings
from dataclasses import replace

import pytest
import tiny_chat
import torch
from conftest import EVICTING, RETRIEVING, make_llama
from late_copies import read_late
from talk import SHORT, TALK, answered, say, turns

import kvkeep
from kvkeep.compress.parse import parse
from kvkeep.compress.presets import METHODS, MODIFIERS
from kvkeep.engine.history_store import sequence_after
from kvkeep.engine.memory import row_bytes
from kvkeep.engine.packed_forward import PackedForward
from kvkeep.engine.sampling import Generation
from kvkeep.engine.store import Store
from kvkeep.errors import BadCacheFile, BadInput, BadParameter, KvkeepError, StoreFull
from kvkeep.storage import history
from kvkeep.storage.history import History, HostPool
from kvkeep.storage.history_folder import BlockFolder

SPECS = [*EVICTING, *(f"{name}+{modifier}" for name in ("snapkv", "h2o") for modifier in MODIFIERS)]


def works(spec):
    try:
        return not parse(spec).retrieval
    except KvkeepError:
        return False


SPECS = [spec for spec in SPECS if works(spec)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(history, "BLOCK", 32)


@pytest.fixture(scope="module")
def chat():
    return tiny_chat.retrieving()


def engine(chat, method="snapkv", budget=64, **options):
    return kvkeep.Engine(*chat, method, budget, **options)


@pytest.mark.core
@pytest.mark.parametrize("spec", SPECS)
def test_logits_of_every_turn_are_those_of_the_whole_model(spec):
    """In chunks of 50, in float64; and what a window's queries keep is what they keep of a prompt prefilled whole."""
    model, words = tiny_chat.sharp()
    model, ids = model.double(), torch.randint(3, 250, (300,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        whole = model(ids[None]).logits[0]
    one, known = engine((model, words), spec, 40), History(HostPool(model.device))
    chunked = replace(one.config, prefill_chunk_size=50)
    for end, seen in ((150, 0), (220, 150), (260, 192), (300, 224)):
        sequence = sequence_after(known.until(seen), chunked, ids[:end], end - 36)
        known = sequence.history
        method = parse(spec)
        reused = 0 if method.scores_own_tokens else min(seen, end - 36) if method.sums_queries else seen
        assert sequence.defer_eviction(end) and known.tokens in (reused, reused // 32 * 32)
        logits = sequence.prefill(ids[:end])
        assert (logits - whole[end - 1]).abs().max() < 1e-12 and known.tokens == end
        assert sequence.cache.report().kept_per_head < 45 or spec == "full"
        fresh = one.config.new_sequence()
        fresh.defer_eviction(end)
        fresh.prefill(ids[:end])
        if not (method.sums_queries or method.scores_own_tokens or "random" in spec):
            assert [sequence.cache.kept(i) for i in range(2)] == [fresh.cache.kept(i) for i in range(2)]


@pytest.mark.parametrize("spec", [*SPECS, "snapkv", "kvkeep_lookahead+adakv"])
@pytest.mark.parametrize("storage", [None, "int8"])
def test_an_answer_is_the_same_whether_its_beginning_was_stored(chat, spec, storage):
    if storage and parse(spec).schedule.every is not None:
        pytest.skip("decode steps that evict regroup codes")
    with engine(chat, spec, storage=storage) as one:
        warm = turns(one)
    for number, (said, request) in enumerate(warm):
        cold = answered(engine(chat, spec, storage=storage), say(*said))
        assert cold.num_cached == 0 and cold.answer.ids == request.answer.ids and request.answer.ids
        assert (cold.kept_tokens, cold.selection) == (request.kept_tokens, request.selection)
        assert request.num_cached % 32 == 0 and (request.num_cached > 0) == bool(
            number and not parse(spec).scores_own_tokens
        )


@pytest.mark.parametrize("spec", ["snapkv", "kvkeep_lookahead", "h2o", "kvzip", "snapkv+adakv"])
def test_chat_submit_and_a_context_say_what_a_prompt_says(chat, spec):
    one = engine(chat, spec)
    for said, request in turns(one):
        assert engine(chat, spec).chat(say(*said), **SHORT) == request.text.strip()
        assert one.chat(say(*said), **SHORT) == request.text.strip()
    if not parse(spec).sums_queries:  # a context's question is the newest message
        context = one.read(TALK[3])
        for question in ("What?", "Who is it, and why?", "What?"):
            assert context.ask(question, **SHORT) == one.generate(TALK[3], question=question, **SHORT)
        assert context.report().kept_per_head < 75


def test_turns_of_different_length_are_prefilled_together(chat):
    with engine(chat) as one:
        conversations = [say(*TALK[:2], text) for text in TALK] + [say(text) for text in TALK[1:]]
        want = [answered(engine(chat), messages).answer.ids for messages in conversations]
        for _ in range(2):
            handles = [one.submit(messages, **SHORT) for messages in conversations]
            assert [handle.result() and handle.request.answer.ids for handle in handles] == want
        assert all(handle.request.num_cached for handle in handles)


def test_retrieving_methods_keep_what_they_offloaded(chat):
    for spec in RETRIEVING[:2]:
        with engine(chat, spec, 96, prefix_cache=10**8) as one:
            assert [bool(request.num_cached) for _, request in turns(one)] == [False, True, True]
            assert not one.store.histories.blocks


def test_owners_do_not_see_each_other(chat):
    with engine(chat) as one:
        first = answered(one, say(*TALK[:3]), owner="a")
        assert answered(one, say(*TALK[:3]), owner="b").num_cached == 0 == answered(one, say(*TALK[:3])).num_cached
        again = answered(one, say(*TALK[:3]), owner="a")
        assert again.num_cached > 200 and again.answer.ids == first.answer.ids
        assert answered(one, say(*TALK[:3]), owner="a", method="tova", budget=50).num_cached > 200  # whatever evicts


def test_without_room_a_turn_is_prefilled_whole(chat):
    want = [request.answer.ids for _, request in turns(engine(chat))]
    for size in (1, 100_000, 200_000):
        with engine(chat, host_memory=size) as one:
            found = turns(one)
            assert [request.answer.ids for _, request in found] == want
            assert one.store.histories.nbytes <= size and (size > 1) == any(request.num_cached for _, request in found)


@pytest.mark.parametrize("storage", [None, "int8"])
def test_many_questions_about_one_text_read_it_once_a_pass(chat, storage, monkeypatch):
    """Of two texts, each; and the answers are those of questions asked one by one."""
    passes, reads, forward, read = [], [], PackedForward._forward, HostPool.read
    one = engine(chat, "tova", 48, history_storage=storage)
    texts = [one.read(text) for text in (TALK[3] + TALK[2], TALK[2] + TALK[1])]
    questions = [f"{chr(97 + n) * (3 + 5 * n)}?" for n in range(6)]
    want = [text.ask(question, **SHORT) for question in questions for text in texts]

    def passed(self, chunks, shown):
        passes.append(len(chunks))
        return forward(self, chunks, shown)

    def count(self, index, blocks, targets):
        reads.append((index, len(blocks)))
        read(self, index, blocks, targets)

    one._driver.scheduler.pace.tokens = 10**6
    monkeypatch.setattr(PackedForward, "_forward", passed)
    monkeypatch.setattr(HostPool, "read", count)
    with one._driver.lock:  # so that no pass begins before all have come
        handles = [text.submit(question, **SHORT) for question in questions for text in texts]
    assert [handle.result() for handle in handles] == want
    assert passes == [12]
    sizes = [len(text.sequence.history.blocks) for text in texts]
    assert sorted(reads) == sorted((layer, size) for layer in range(2) for size in sizes)


@pytest.mark.parametrize("spec", ["snapkv", "kvzip", "kvkeep_lookahead", "cake", "h2o+adakv"])
@pytest.mark.parametrize("storage", [None, "int8"])
def test_layers_may_be_copied_ahead(spec, storage):
    """Of one conversation, of several in one pass, of a text that is read again, and after a request was cancelled."""
    found = []
    for is_late in (False, True):
        chat = tiny_chat.model(layers=5).double(), tiny_chat.tokenizer()
        with engine(chat, spec, prefix_cache=10**6, history_storage=storage) as one:
            copies = read_late(one.store.histories.pool) if is_late else None
            said = [turns(one, TALK[k : k + 2])[-1] for k in range(3)]
            with one._driver.lock:
                each = [one.submit(say(*said[k][0], said[k][1].text, "so?"), **SHORT) for k in range(3)]
                each[0].cancel()
                each += [one.submit("why", context=one.pin(TALK[3], method="kvzip"), **SHORT)]
            answers = [handle.result() for handle in each[1:]]
            found.append(([request.answer.ids for _, request in said], answers))
    assert found[0] == found[1] and not copies.left and copies.num_ahead > copies.num_now / 2


def test_conversations_that_part_read_what_they_share_together(chat, monkeypatch):
    """Of different length, and beside one that shares nothing; blocks of its own each reads for itself."""
    reads, read = [], HostPool.read
    talks = [[TALK[3], "a", end * 90, "b", "and?"] for end in "xyz"] + [[TALK[2], "a", "z" * 70, "b", "?"]]
    with engine(chat) as one:
        for talk in talks:
            answered(one, say(*talk[:-2]))
        want = [answered(engine(chat), say(*talk)).answer.ids for talk in talks]
        one._driver.scheduler.pace.tokens = 10**6
        monkeypatch.setattr(HostPool, "read", lambda *args: reads.append(args[1:]) or read(*args))
        with one._driver.lock:
            handles = [one.submit(say(*talk), **SHORT) for talk in talks]
        assert [handle.result() and handle.request.answer.ids for handle in handles] == want
    sizes = sorted(len(blocks) for index, blocks, _ in reads if index == 0)
    assert sizes == [2, 2, 2, 5, 5]  # ends of three, their beginning, and the fourth


@pytest.mark.parametrize("spec", ["snapkv", "kvkeep_context", "lookahead", "snapkv+cake"])
def test_what_the_host_has_takes_no_memory_of_the_device(spec):
    """A prompt that fits memory= only as one layer after the other; without room on the host it does not."""
    model, words = make_llama(num_hidden_layers=12, vocab_size=258).double(), tiny_chat.tokenizer()
    texts = ["".join(chr(97 + i * i * (k + 2) % 23) for i in range(600)) for k in range(3)]
    want = [answered(engine((model, words), spec), say(text)).answer.ids for text in texts]
    cap = row_bytes(model, 400)
    with engine((model, words), spec, memory=cap) as one:
        held = tiny_chat.held_after_steps(one)
        handles = [one.submit(say(text), **SHORT) for text in texts]
        if "cake" in spec:  # it compares whole layers before it evicts
            with pytest.raises(BadInput, match="of this prompt take .* in prefill"):
                handles[0].result()
            return
        assert [handle.result() and handle.request.answer.ids for handle in handles] == want
        assert 0.2 * cap < max(held) <= cap
    with engine((model, words), spec, memory=cap, host_memory=1) as one:
        with pytest.raises(BadInput, match="of this prompt take .* in prefill"):
            answered(one, say(texts[0]))
        assert answered(one, say(texts[0][:200])).text
    with engine((model, words), spec, memory=2 * row_bytes(model, 700), host_memory=1) as one:
        handles = [one.submit(say(text), **SHORT) for text in texts]
        assert [handle.result() and handle.request.answer.ids for handle in handles] == want


def test_the_least_recently_used_conversation_goes_first(chat):
    """Its end before its beginning."""
    with engine(chat) as one:
        said, size = turns(one, TALK[2:])[-1][0], one.store.histories.nbytes
    with engine(chat, host_memory=5 * size // 2) as one:
        for owner in "ab":
            turns(one, TALK[2:], owner=owner)
        whole = answered(one, say(*said), owner="a").num_cached
        turns(one, TALK[2:], owner="c")
        assert one.store.histories.nbytes <= 5 * size // 2
        assert answered(one, say(*said), owner="a").num_cached == whole > 200
        assert 0 < answered(one, say(*said), owner="b").num_cached < whole


def test_nothing_is_held_when_nobody_stores_it(chat):
    one = engine(chat)
    context = one.read(TALK[3])
    assert one.store.histories.nbytes == len(context.sequence.history.blocks) * one.store.histories.block_bytes > 0
    context.ask("What?", **SHORT)
    cancelled = one.submit(say(*TALK[:3]), max_new_tokens=200)
    cancelled.cancel()
    cancelled.result()
    one.generate(TALK[:2], **SHORT)
    while one.store.histories.evict_oldest():
        pass
    del context, cancelled
    one._last = None
    gc.collect()
    assert one.store.histories.nbytes == 0


def test_a_question_takes_no_host_memory(chat):
    """Nobody goes on after it."""
    with engine(chat) as one:
        want, size = one.read(TALK[3]).ask("What? " * 40, **SHORT), one.store.histories.nbytes
    with engine(chat, host_memory=size) as one:
        assert one.read(TALK[3]).ask("What? " * 40, **SHORT) == want and one.store.histories.nbytes == size


def test_a_pass_that_is_cut_short_is_made_again(chat):
    config, ids = engine(chat, "snapkv", 40).config, torch.arange(3, 203)
    want, known = config.new_sequence().prefill(ids), History(HostPool(config.device))
    sequence = config.new_sequence()
    sequence.continue_from(known, [], 0)
    sequence.defer_eviction(200)
    sequence.forward(ids[:77])
    layer, attend = config.model.model.layers[1].self_attn, config.model.model.layers[1].self_attn.forward
    for start, end in ((77, 130), (77, 200)):
        layer.forward = lambda *args, **kwargs: 1 / 0
        with pytest.raises(ZeroDivisionError):
            sequence.forward(ids[start:end])
        layer.forward = attend
        assert known.tokens == 77
    del layer.forward
    assert (sequence.forward(ids[77:200])[-1] - want).abs().max() < 1e-12 and known.tokens == 200
    assert sequence.cache.report().kept_per_head == 40


@pytest.mark.parametrize("wrong", ["hosts", 3, True])
def test_what_is_no_history(chat, wrong):
    with pytest.raises(BadParameter, match="history="):
        engine(chat, history=wrong)


def test_sampling_and_generation_options_are_those_of_any_answer(chat):
    how = {"temperature": 1.0, "seed": 3, "max_new_tokens": 12}
    one = engine(chat)
    for said, request in turns(one, **how):
        assert request.how == Generation.of(how)
        assert answered(engine(chat, history=None), say(*said), **how).answer.ids == request.answer.ids


def test_methods_are_all_there():
    assert set(METHODS) >= {spec for spec in SPECS if "+" not in spec} and len(SPECS) > 40


def test_a_context_is_saved_whole(chat, tmp_path):
    one = engine(chat)
    context = one.read(TALK[3])
    context.save(tmp_path / "c")
    for other in (engine(chat, "full"), engine(chat, history=None)):
        loaded = other.load_context(tmp_path / "c")
        assert loaded.text == TALK[3] and len(loaded) == len(context) and repr(loaded) == repr(context)
        assert loaded.report().host_bytes > 0
        for question in ("What?", "Who is it, and why?"):
            assert loaded.ask(question, **SHORT) == context.ask(question, **SHORT)
    with pytest.raises(BadCacheFile, match="another model"):
        engine((tiny_chat.model(512).double(), chat[1])).load_context(tmp_path / "c")


def test_a_context_says_what_it_is(chat):
    context = engine(chat).read(TALK[3])
    held = kvkeep.cache.report.format_bytes(context.report().host_bytes)
    assert context.report().host_bytes == context.sequence.history.nbytes > 0
    assert repr(context).endswith(f"{held} offloaded>") and context.report().bytes == 0
    size = context.report().full_bytes
    context.ask("What?", **SHORT)
    assert context.report().host_bytes >= size > 0  # of the text, and of the question
    one = engine(chat)
    one.chat(say(*TALK[:3]), **SHORT)
    assert one.cache.report().host_bytes > one.cache.report().bytes


def test_conversations_are_found_on_disk_after_a_restart(chat, tmp_path):
    store = lambda: Store(10**8, tmp_path)  # noqa: E731
    with engine(chat, prefix_cache=store()) as one:
        found = turns(one, owner="a")
        pinned = one.pin(TALK[3], owner="a")
        about = one.submit("What?", context=pinned, owner="a", **SHORT).result()
    with engine(chat, prefix_cache=store()) as two:
        said, last = found[-1]
        again = answered(two, say(*said), owner="a")
        assert again.num_cached >= last.num_cached and again.answer.ids == last.answer.ids
        assert answered(two, say(*said), owner="b").num_cached == 0
        assert two.submit("What?", context=pinned, owner="a", **SHORT).result() == about
        two.unpin(pinned, owner="a")
        assert not +two.store.histories.pinned
    files = sorted((tmp_path / "history").iterdir())
    assert len(files) > 10
    for n, damage in enumerate((b"", b"{", files[0].read_bytes()[:-1], b"{}\n" + bytes(4000))):
        files[n].write_bytes(damage)
    (tmp_path / "history" / f".{'a' * 64}-draft").write_text("of a process that was killed")
    with engine(chat, prefix_cache=store()) as three, warnings.catch_warnings(record=True) as said_so:
        warnings.simplefilter("always")
        for said, request in found:
            assert answered(three, say(*said), owner="a").answer.ids == request.answer.ids
        assert three.submit("What?", owner="a", **SHORT).result()
    assert not [*(tmp_path / "history").glob(".*")]
    assert all("damaged" in str(each.message) for each in said_so if "history" in str(each.message))


def test_a_folder_holds_no_more_than_it_may(tmp_path):
    pool, name = HostPool(torch.device("cpu")), "{:064x}".format
    known = History(pool)
    known.append(0, torch.randn(2, 320, 8), torch.randn(2, 320, 8))
    known.commit()
    folder = BlockFolder(tmp_path)
    folder.write(name(0), known.blocks[0])
    size = folder.nbytes
    folder = BlockFolder(tmp_path, 3 * size)
    for n in range(1, 4):
        folder.use(name(0))
        folder.write(name(n), known.blocks[n])
    assert sorted(folder.sizes) == [name(0), name(2), name(3)] and folder.nbytes == 3 * size
    assert sorted(each.stem for each in tmp_path.iterdir()) == sorted(folder.sizes)
    assert pool.block_of(*folder.read(name(2))).layer(0).equal(known.blocks[2].layer(0))
    assert folder.read(name(1)) is None
    assert set(BlockFolder(tmp_path, 2 * size).sizes) < set(folder.sizes)
    folder.write(name(9), known.blocks[9])
    other = HostPool(torch.device("cpu"), 8)
    later = History(other)
    later.append(0, torch.randn(2, 32, 8), torch.randn(2, 32, 8))
    later.commit()
    with pytest.raises(ValueError, match="of another model, dtype or storage"):
        other.block_of(*folder.read(name(9)))


@pytest.mark.parametrize("storage", ["int8", "int4"])
def test_quantized_histories_take_fewer_bytes(chat, storage):
    with engine(chat) as exact, engine(chat, history_storage=storage) as one:
        found, whole = turns(one), turns(exact)
        assert (
            one.store.histories.nbytes / len(one.store.histories.blocks)
            < exact.store.histories.nbytes / len(exact.store.histories.blocks) / 4
        )
        assert [bool(request.num_cached) for _, request in found] == [False, True, True]
        assert found[0][1].answer.ids == whole[0][1].answer.ids
    with pytest.raises(BadParameter, match="history_storage='int3'"):
        engine(chat, history_storage="int3")


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("part", ["self_attn", "mlp"])
@pytest.mark.parametrize("call", [1, 3])
def test_out_of_memory_anywhere_in_a_pass_stores_nothing_wrong(chat, layer, part, call):
    """Beside another answer a prompt begins again: its cache may have seen the pass that failed."""
    said = turns(engine(chat), max_new_tokens=6)[-1][0]
    with engine(chat, prefill_chunk_size=48) as one:

        def beside():
            stream = iter(one.submit("other", max_new_tokens=900, ignore_eos=True, temperature=1.0))
            next(stream)
            return stream  # dropped, it would cancel the answer

        module, passes = getattr(chat[0].model.layers[layer], part), []
        forward = module.forward

        def fails_once(*args, **kwargs):
            states = args[0] if args else kwargs["hidden_states"]
            passes.append(1) if states.shape[1] > 2 else None
            if len(passes) == call and states.shape[1] > 2:
                passes.append(1)
                raise torch.OutOfMemoryError("once")
            return forward(*args, **kwargs)

        with one._driver.lock:  # only this thread steps: the other answer does not end before
            other = beside()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(module, "forward", fails_once)
                context = one.read(TALK[3])
        assert len(passes) > call and context.sequence.history is not None
        passes.clear()
        with one._driver.lock:
            other = beside()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(module, "forward", fails_once)
                found = one.chat(say(*said), **SHORT)
        assert len(passes) > call
        assert found == engine(chat).chat(say(*said), **SHORT) == one.chat(say(*said), **SHORT)
        assert context.ask("What?", **SHORT) == engine(chat).generate(TALK[3], question="What?", **SHORT)
        other.close()


def test_a_last_pass_that_is_made_again_sees_its_queries_once(chat):
    one, ids = engine(chat, "snapkv", 40), torch.randint(3, 250, (200,), generator=torch.Generator().manual_seed(0))
    kept = []
    for fails in (False, True):
        sequence = sequence_after(History(HostPool(one.config.device)), one.config, ids, 0)
        sequence.defer_eviction(200)
        sequence.forward(ids[:190])
        layer = chat[0].model.layers[1].self_attn
        forward = layer.forward
        if fails:
            layer.forward = lambda *args, **kwargs: 1 / 0
            with pytest.raises(ZeroDivisionError):
                sequence.forward(ids[190:])
        layer.forward = forward
        sequence.forward(ids[190:])
        kept.append([sequence.cache.kept(i) for i in range(2)])
    assert kept[0] == kept[1]


def test_another_dtype_finds_nothing_in_a_folder(tmp_path):
    model, words = tiny_chat.sharp()
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        made = tiny_chat.model().to(dtype)
        made.load_state_dict(model.state_dict())
        with kvkeep.Engine(made, words, "snapkv", 64, prefix_cache=Store(10**8, tmp_path)) as one:
            found = turns(one)
            assert found[0][1].num_cached == 0 < found[1][1].num_cached


def test_a_prompt_that_cannot_fit_drops_nobody(chat):
    with engine(chat) as one:
        turns(one, TALK[:2])
        size = one.store.histories.nbytes
    with engine(chat, host_memory=size + 40_000, prefix_cache=10**8) as one:
        turns(one, TALK[:2])
        held = set(one.store.histories.blocks)
        answered(one, say(TALK[3] * 4))
        with pytest.raises(StoreFull, match="host_memory="):
            one.pin(TALK[3] * 4)
        assert set(one.store.histories.blocks) == held


def test_a_text_that_is_unpinned_is_dropped(chat, tmp_path):
    with engine(chat, prefix_cache=Store(10**8, tmp_path)) as one:
        ids = [one.pin(TALK[3], method=method) for method in ("snapkv", "tova")]
        one.unpin(ids[0])
        assert one.store.histories.nbytes > 0 and one.submit("What?", context=ids[1], **SHORT).result()
        one.unpin(ids[1])
        one.store.flush()
        gc.collect()
        assert one.store.histories.nbytes == 0 and not [*(tmp_path / "history").iterdir()]


def test_a_context_that_is_loaded_stays_within_the_hosts_memory(chat, tmp_path):
    with engine(chat) as one:
        one.read(TALK[3]).save(tmp_path / "c")
        want, size = one.read(TALK[3]).ask("What?", **SHORT), one.store.histories.nbytes
    with engine(chat, host_memory=size + 1) as one:
        contexts = [one.load_context(tmp_path / "c") for _ in range(3)]
        assert [context.ask("What?", **SHORT) for context in contexts] == [want] * 3
        assert one.store.histories.nbytes <= size
