"""kvkeep.Engine: prompts of any length in, text out."""

import pytest
import tiny_chat
import torch
from conftest import EVICTING, RETRIEVING

import kvkeep
from kvkeep.cache.decode.row_pool import RowPool
from kvkeep.compress.parse import parse
from kvkeep.engine.detokenizer import Answer, SentenceBoundaries
from kvkeep.engine.sequence import check_length
from kvkeep.errors import BadInput, BadParameter, StoreFull

TEXT = "".join(chr(97 + i * i % 23) + (". " if i % 29 == 0 else "") for i in range(600))


@pytest.fixture(scope="module")
def chat():
    return tiny_chat.sharp()


def engine(chat, method="snapkv", budget=100, **options):
    return kvkeep.Engine(*chat, method, budget, **options)


@pytest.mark.core
@pytest.mark.parametrize("spec", [*EVICTING, *RETRIEVING])
def test_an_answer_is_generates_answer(chat, spec):
    """Where everything is read at once, the engine is model.generate with our cache."""
    model, words = chat
    one = engine(chat, spec, 4000)
    ids = words(f"<s>{TEXT}</s><s>", return_tensors="pt", add_special_tokens=False).input_ids
    want = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert one.generate(TEXT, max_new_tokens=12) == words.decode(want, skip_special_tokens=True)
    assert one.answer.prompt_tokens == ids.shape[1]


@pytest.mark.parametrize("spec", [name for name in [*EVICTING, *RETRIEVING] if name != "full"])
def test_every_method_reads_in_pieces_within_its_budget(chat, spec):
    one = engine(chat, spec, 100, prefill_chunk_size=64)
    assert isinstance(one.generate(TEXT, question="Which?", max_new_tokens=5), str)
    held = one.cache.report().kept_per_head
    assert held <= 100 + (4 if parse(spec).schedule.every != 1 and not parse(spec).retrieval else 0)
    assert one.cache.get_seq_length() == one.answer.prompt_tokens + len(one.answer.ids) - 1


@pytest.mark.parametrize(
    "spec", ["actqkv", "infllm", "qllm", "tokenselect", "emllm", "intelllm", "streamingllm", "lm_infinite"]
)
@pytest.mark.slow
def test_far_beyond_the_window_in_constant_memory(chat, spec):
    sizes, one = [], engine(chat, spec, 128, prefill_chunk_size=64)
    one.generate(TEXT * 6, max_new_tokens=2, progress=lambda _: sizes.append(one.cache.nbytes))
    assert one.answer.prompt_tokens > 3 * chat[0].config.max_position_embeddings
    full = one.cache.report().full_bytes // one.cache.get_seq_length() * (128 + 64)
    assert max(sizes) <= full


def test_what_cannot_be_read_is_refused_before_reading(chat):
    with pytest.raises(BadInput, match="context length is 1024 and 'snapkv' keeps token positions: shorten.*actqkv"):
        engine(chat).generate(TEXT * 2)
    for empty in ("", "  \n"):
        with pytest.raises(BadInput, match="empty"):
            engine(chat).generate(empty)
    assert isinstance(engine(chat, "actqkv").generate("a", max_new_tokens=2), str)
    with pytest.raises(BadParameter, match="prefill_chunk_size=1.*is a decode step"):
        engine(chat, prefill_chunk_size=1)  # which would evict nothing
    with pytest.raises(BadParameter, match="max_new_tokens=0"):
        engine(chat).generate("a", max_new_tokens=0)


def test_progress_counts_every_token_once(chat):
    seen = []
    one = engine(chat, "infllm", prefill_chunk_size=100)
    one.generate(TEXT, max_new_tokens=1, progress=seen.append)
    assert [p.done for p in seen][-1] == seen[-1].total == one.answer.prompt_tokens
    assert all(a.done < b.done and a.seconds <= b.seconds for a, b in zip(seen, seen[1:], strict=False))
    assert seen[0].left > 0 and seen[-1].left == 0 and seen[0].rate > 0


def test_a_question_known_before_changes_what_is_fetched(chat):
    kept = {}
    for spec in ("qllm", "infllm"):
        for question in ("Why?", "zzzz qqqq"):
            one = engine(chat, spec, 64, prefill_chunk_size=64)
            one.generate(TEXT, max_new_tokens=1)  # the same text and nothing else
            plain = one.cache.kept(1)
            again = one.config.new_sequence()
            again.set_question(question, 1024)
            again.prefill(one.encode(TEXT))
            kept[spec, question] = again.cache.kept(1) == plain
    assert kept == {("qllm", "Why?"): False, ("qllm", "zzzz qqqq"): False} | {
        ("infllm", question): True for question in ("Why?", "zzzz qqqq")
    }


def test_a_stream_is_the_answer_in_pieces(chat):
    pieces = list(engine(chat).stream(TEXT, max_new_tokens=20))
    assert "".join(pieces) == engine(chat).generate(TEXT, max_new_tokens=20) and len(pieces) > 1


def test_an_answer_is_copied_from_the_pool_when_its_cache_is_asked_for(chat, monkeypatch):
    copied, complete = [], RowPool.complete
    monkeypatch.setattr(RowPool, "complete", lambda *given: copied.append(given[3]) or complete(*given))
    mine = engine(chat)
    for prompt in (TEXT, TEXT + " again"):
        mine.generate(prompt, max_new_tokens=6)
    assert not copied  # the first was replaced before anybody asked
    assert mine.cache.seen == mine.length(TEXT + " again") + 5 == len(mine.token_ids) and copied == [5]


def test_sampling_repeats_with_its_seed(chat):
    how = {"temperature": 1.5, "max_new_tokens": 20}
    one = engine(chat)
    assert one.generate(TEXT, seed=3, **how) == one.generate(TEXT, seed=3, **how) != one.generate(TEXT, seed=4, **how)
    for wrong in ({"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}, {"stop": [""]}, {"stop": [1]}):
        with pytest.raises(BadParameter):
            one.generate(TEXT, **wrong)


@pytest.mark.parametrize("spec", ["h2o", "snapkv", "actqkv"])
def test_a_chat_goes_on_where_it_was(chat, spec):
    one = engine(chat, spec, 4000)
    messages = [{"role": "user", "content": TEXT}]
    first = one.chat(messages, max_new_tokens=4)
    fed, cache = list(one.token_ids), one.cache
    fresh = engine(chat, spec, 4000)
    longer = [*messages, {"role": "assistant", "content": first}, {"role": "user", "content": "And?"}]
    second = one.chat(longer, max_new_tokens=4)
    assert second == fresh.chat(longer, max_new_tokens=4)
    assert (one.cache is cache) == (one.token_ids[: len(fed)] == fed)
    one.chat([{"role": "user", "content": "Another matter."}], max_new_tokens=2)
    assert one.cache is not cache
    for wrong in ([], [{"role": "assistant", "content": "I say."}]):
        with pytest.raises(BadInput, match="ends with a message to answer"):
            one.chat(wrong)


def test_no_room_is_said_before_anything_is_lost(chat, tmp_path):
    one = engine(chat, "infllm", 64, prefill_chunk_size=64, host_limit=20_000)
    with pytest.raises(StoreFull, match=r"host memory, and the limit is 20,000.*host_limit.*disk="):
        one.generate(TEXT, max_new_tokens=2)
    seen = one.cache.get_seq_length()
    report = one.cache.report()
    assert seen >= 64 and report.host_bytes <= 20_000  # what was read before is still there
    spilled = engine(chat, "infllm", 64, prefill_chunk_size=64, host_limit=20_000, disk=tmp_path)
    plain = engine(chat, "infllm", 64, prefill_chunk_size=64)
    assert spilled.generate(TEXT, max_new_tokens=8) == plain.generate(TEXT, max_new_tokens=8)
    assert spilled.cache.report().host_bytes == plain.cache.report().host_bytes > 20_000
    assert len(list(tmp_path.glob("kvkeep-*/*.safetensors"))) > 0


def test_a_fetch_that_fails_midway_leaves_the_cache_usable(chat, monkeypatch):
    one, twin = (engine(chat, "infllm", 64, prefill_chunk_size=64) for _ in range(2))
    for each in (one, twin):
        each.generate(TEXT[:400], max_new_tokens=1)
    host = kvkeep.storage.offload.host.HostStore
    gather, calls = host.gather, []

    def failing(self, *index):
        calls.append(1)
        if len(calls) == 2:  # the second layer
            raise OSError("the disk is gone")
        return gather(self, *index)

    monkeypatch.setattr(host, "gather", failing)
    with pytest.raises(OSError, match="gone"):
        one.extend(torch.arange(70) % 200 + 5)
    monkeypatch.undo()
    got, want = (each.extend(torch.arange(70) % 200 + 5) for each in (one, twin))
    assert got.equal(want)


def test_a_megabyte_without_a_sentence_end(chat):
    marks = SentenceBoundaries(chat[1]).mark_ends(torch.tensor(chat[1]("x" * 1_000_000).input_ids[-5000:]))
    assert marks.sum() == 0
    one = engine(chat, "sentencekv", 64)
    one.generate("x" * 900, max_new_tokens=3)
    units = torch.cat(one.cache.backend.states[0][0].unit_sizes, 1)
    assert units.max() <= 8 and one.cache.report().kept_per_head <= 64


def test_characters_of_several_tokens_and_sentence_ends():
    words = tiny_chat.tokenizer()
    text = Answer(words)
    assert [text.add(each) for each in words("aé").input_ids] == ["a", "", "é"]
    assert text.finish() == "" and text.text == "aé"
    text.add(words("é").input_ids[0])
    assert text.finish() == "\N{REPLACEMENT CHARACTER}"
    assert SentenceBoundaries(words).mark_ends(torch.tensor(words("Hi. No! (x?)a").input_ids)).tolist() == [
        0,
        0,
        1,
        0,
        0,
        0,
        1,
        0,
        0,
        0,
        1,
        0,
        0,
    ]


@pytest.mark.parametrize(("prompt", "new", "way_out"), [
    (2009, 64, "shorten the prompt by 1049 tokens, or use"),
    (900, 200, "shorten the prompt by 76 tokens, use max_new_tokens=124 or fewer, or use"),
    (548, 2000, "shorten the prompt, use max_new_tokens=476 or fewer, or use"),
])  # fmt: skip
def test_what_exceeds_the_context_length_says_what_to_change(prompt, new, way_out):
    with pytest.raises(BadInput, match=f"{prompt} tokens and the answer may take {new}, .* {way_out}"):
        check_length(parse("snapkv"), 1024, prompt, new)
