"""What an engine owes whoever uses it: streams that do not mix, memory given back, the same rules for one and many."""

import contextlib
import dataclasses
import gc
import itertools
import re
import signal
import weakref

import pytest
import tiny_chat
import torch
from conftest import EVICTING, RETRIEVING, make_llama
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

import kvkeep
from kvkeep.compress.parse import parse
from kvkeep.engine import batch_generate
from kvkeep.engine.detokenizer import IncrementalDetokenizer
from kvkeep.engine.pooled_batch import CAPTURE_AFTER, PooledBatch
from kvkeep.errors import BadParameter, BudgetTooSmall

TEXT = "".join(chr(97 + i * i % 23) + (". " if i % 29 == 0 else "") for i in range(300))
OTHER = "".join(chr(97 + i * 7 % 19) + ("! " if i % 17 == 0 else "") for i in range(280))
SHORT = [{"role": "user", "content": "Hello, how are you today?"}]


@pytest.fixture(scope="module")
def chat():
    return tiny_chat.sharp()


def turns(text, answer, more):
    roles = ("user", "assistant", "user")
    return [{"role": role, "content": each} for role, each in zip(roles, (text, answer, more), strict=True)]


# streams


@pytest.mark.parametrize("spec", ["snapkv", "h2o", "infllm", "emllm"])
def test_streams_taken_in_turns_do_not_mix(chat, spec):
    one = kvkeep.Engine(*chat, spec, 64, prefill_chunk_size=64)
    alone = [one.generate(text, max_new_tokens=12) for text in (TEXT, OTHER)]
    both = [one.stream(text, max_new_tokens=12) for text in (TEXT, OTHER)]
    pieces = list(itertools.zip_longest(*both, fillvalue=""))
    assert ["".join(each) for each in zip(*pieces, strict=True)] == alone
    assert one.answer.text in alone


def test_a_chat_between_two_pieces_leaves_the_stream_alone(chat):
    one, fresh = (kvkeep.Engine(*chat, "snapkv", 4000) for _ in range(2))
    alone = fresh.generate(TEXT, max_new_tokens=12)
    stream = one.stream(TEXT, max_new_tokens=12)
    begun = next(stream)
    asked = turns(TEXT, begun, "And?")  # goes on with what the stream has read
    said = one.chat(asked, max_new_tokens=3)
    mine = one.cache
    assert begun + "".join(stream) == alone
    assert said == fresh.chat(asked, max_new_tokens=3)
    assert one.cache is mine and mine.seen == len(one.token_ids)


def test_a_stream_that_is_over_can_be_gone_on_with(chat):
    one = kvkeep.Engine(*chat, "snapkv", 4000)
    stream = one.stream(TEXT, max_new_tokens=12)
    next(stream)
    assert one.cache.seen and one.answer.prompt_tokens == one.length(TEXT)
    stream.close()
    assert len(one.token_ids) == one.cache.seen


@pytest.mark.parametrize("part", ["lm_head", "model.norm"])
def test_a_chat_that_failed_is_read_again(chat, part):
    """The cache has counted a pass that never came back, so the turn would be fed twice."""
    model, _ = chat
    one, fresh = (kvkeep.Engine(*chat, "snapkv", 4000) for _ in range(2))
    asked = turns(TEXT, one.chat([{"role": "user", "content": TEXT}], max_new_tokens=1), "And?")

    def fail(*_):
        raise torch.OutOfMemoryError("no room")

    hook = model.get_submodule(part).register_forward_pre_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        one.chat(asked, max_new_tokens=4)
    hook.remove()
    assert one.chat(asked, max_new_tokens=4) == fresh.chat(asked, max_new_tokens=4)
    assert one.cache.seen == len(one.token_ids)


# many prompts


@pytest.mark.parametrize("spec", ["cake", "snapkv+cake", "snapkv+entropy", "snapkv+cake+adakv", "pyramidkv"])
@pytest.mark.parametrize("storage", [None, "int8"])
def test_a_layer_may_get_far_more_than_its_share(spec, storage):
    model = make_llama(vocab_size=258, num_hidden_layers=8, eos_token_id=1)
    for layer in model.model.layers[1:]:
        layer.self_attn.q_proj.weight.data /= 5
    one = kvkeep.Engine(model, tiny_chat.tokenizer(), spec, 40, storage=storage)
    alone = [one.generate(text, max_new_tokens=4) for text in (TEXT, OTHER)]
    if spec == "cake":
        assert max(max(heads[0]) for heads in one.cache.report().tokens) > 2 * 40 + 4
    assert one.generate([TEXT, OTHER, TEXT], max_new_tokens=4) == [*alone, alone[0]]


def test_the_pool_stays_within_the_devices_memory(chat, monkeypatch):
    """Room for a layer that gets everything is made only where there is some."""
    one = kvkeep.Engine(*chat, "cake", 40)
    requests = [
        batch_generate.Request(one.encode(text), IncrementalDetokenizer(one.tokenizer), 4) for text in (TEXT, OTHER)
    ]
    usual = batch_generate.row_bytes(one.model, 2 * 40 + 4)
    monkeypatch.setattr(batch_generate, "free_device_bytes", lambda _: int(usual / batch_generate.MEMORY_FRACTION) + 1)
    pool = batch_generate.make_scheduler(one.sequence, requests, 2).pool
    assert pool.rows == 1 and sum(room.nbytes for room in pool.buffers.values()) <= usual


@pytest.fixture
def no_gc():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_the_pool_is_freed_when_generate_returns(chat, no_gc, monkeypatch):
    pools = []

    class Watched(batch_generate.RowPool):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            pools.append(weakref.ref(self))

    monkeypatch.setattr(batch_generate, "RowPool", Watched)
    kvkeep.Engine(*chat, "snapkv", 64).generate([TEXT, OTHER], max_new_tokens=4)
    assert len(pools) == 1 and pools[0]() is None


@pytest.mark.parametrize("steps", [0, 1, CAPTURE_AFTER + 1])
def test_rows_decoded_together_are_freed_at_once(chat, no_gc, steps):
    model, words = chat
    cache = kvkeep.Cache(model, "snapkv", 32)
    model(words(TEXT, return_tensors="pt").input_ids, past_key_values=cache)
    rows = PooledBatch(model, [cache, cache], CAPTURE_AFTER + 1)
    for _ in range(steps):
        rows.extend(torch.ones(2, 1, dtype=torch.int64))
    gone = weakref.ref(rows)
    del rows
    assert gone() is None


# words


def sentencepiece():
    """Blanks lead, unknown characters are spelt in bytes, and a text loses its first blank: as Llama 2 has it."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁Hello", "▁world", "Hello", "ing", ".", "▁▁", "é", "日"]
    words = Tokenizer(models.BPE({each: i for i, each in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>"))
    words.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def wordpiece():
    words = Tokenizer(models.WordPiece({"[UNK]": 0, "[SEP]": 1, "play": 2, "##ing": 3, "it": 4, "é": 5}))
    words.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", eos_token="[SEP]")


KINDS = {"bytes": tiny_chat.tokenizer(), "sentencepiece": sentencepiece(), "wordpiece": wordpiece()}


def unfolded(tokenizer, ids):
    text = IncrementalDetokenizer(tokenizer)
    return [text.add(each) for each in ids] + [text.finish()], text.text


def in_bytes(text):
    """A text as byte tokens of the sentencepiece above."""
    return [3 + byte for byte in text.encode()]


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_make_up_the_text_decoded_at_once(kind):
    tokenizer, source = KINDS[kind], torch.Generator().manual_seed(0)
    for _ in range(200):
        ids = torch.randint(len(tokenizer), (30,), generator=source).tolist()
        if kind == "sentencepiece":  # whole characters: torn ones change the text before them, see below
            words = [[each] if each < 3 or each > 258 else in_bytes("é日🙂"[each % 3]) for each in ids]
            ids = [each for word in words for each in word]
        pieces, text = unfolded(tokenizer, ids)
        assert "".join(pieces) == text == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_in_the_end_is_the_one_decoded_at_once(kind):
    tokenizer, source = KINDS[kind], torch.Generator().manual_seed(1)
    for _ in range(200):
        ids = torch.randint(len(tokenizer), (30,), generator=source).tolist()
        assert unfolded(tokenizer, ids)[1] == tokenizer.decode(ids, skip_special_tokens=True)


def test_blanks_special_tokens_and_characters_in_parts():
    words = KINDS["sentencepiece"]
    known = words.convert_tokens_to_ids
    ids = [known(each) for each in ("▁Hello", "</s>", "▁world", "▁", "▁Hello", "ing")] + in_bytes("é")
    assert unfolded(words, ids)[0] == ["Hello", "", " world", " ", " Hello", "ing", "", "é", ""]


def test_a_token_costs_the_same_however_much_is_written():
    decoded = []

    class Counting:
        def decode(self, ids, **_):
            decoded.append(len(ids))
            return "".join(map(chr, ids))

    unfolded(Counting(), range(97, 1097))
    assert max(decoded[:-1]) <= 2 and sum(decoded) < 5000


# small budgets, wrong options


@pytest.mark.parametrize("spec", [name for name in EVICTING if name != "full"] + ["kvkeep+pyramid", "kvkeep+cake"])
@pytest.mark.parametrize("budget", [0.1, 0.03])
def test_a_fraction_of_a_short_text_keeps_what_it_can(chat, spec, budget):
    """A fraction means max(1, floor(r * n)) tokens, whatever a method would always keep."""
    one = kvkeep.Engine(*chat, spec, budget)
    assert isinstance(one.chat(SHORT, max_new_tokens=1), str)
    n = one.cache.seen
    assert one.cache.report().kept_per_head == max(1, int(budget * n))
    assert isinstance(one.generate(["Hello there.", TEXT], max_new_tokens=3)[0], str)


@pytest.mark.parametrize("spec", [name for name in RETRIEVING if name != "emllm"])
@pytest.mark.parametrize("budget", [0.5, 0.2])
def test_a_fraction_leaves_what_is_near_as_much_room_as_there_is(chat, spec, budget):
    method = parse(spec)
    method = dataclasses.replace(method, retrieval=dataclasses.replace(method.retrieval, sinks=64, near=512))
    one = kvkeep.Engine(*chat, method, budget, prefill_chunk_size=64)
    one.generate(TEXT, max_new_tokens=1)
    assert 0 < one.cache.report().kept_per_head <= budget * one.cache.seen
    with pytest.raises(BudgetTooSmall, match="budget=100 cannot hold the 64 sinks, 512 near tokens"):
        kvkeep.Engine(*chat, method, 100)


def test_a_budget_in_tokens_is_still_refused(chat):
    with pytest.raises(BudgetTooSmall, match="budget=2 cannot hold the 4 sinks"):
        kvkeep.Engine(*chat, "kvkeep", 2)


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"top_p": 0.0}, {"temperature": 1.0, "top_p": 1.5}])
def test_one_prompt_and_many_are_refused_alike(chat, wrong):
    for prompt in (TEXT, [TEXT, OTHER]):
        with pytest.raises(BadParameter, match="temperature=.*top_p="):
            kvkeep.Engine(*chat, "snapkv", 64).generate(prompt, max_new_tokens=2, **wrong)


def test_an_unknown_option_is_refused_everywhere(chat):
    one = kvkeep.Engine(*chat, "snapkv", 64)
    for ask in (one.generate, lambda _, **how: one.generate([TEXT], **how), lambda _, **how: one.chat(SHORT, **how)):
        with pytest.raises(BadParameter, match="max_tokens.*max_new_tokens="):
            ask(TEXT, max_tokens=3)


@pytest.mark.parametrize("spec", ["actqkv", "qllm", "snapkv"])
@pytest.mark.parametrize("question", ["", " \n"])
def test_an_empty_question_is_none(chat, spec, question):
    one = kvkeep.Engine(*chat, spec, 64, prefill_chunk_size=64)
    plain = one.generate(TEXT, max_new_tokens=3)
    assert one.generate(TEXT, question=question, max_new_tokens=3) == plain
    assert one.generate([TEXT], question=question, max_new_tokens=3) == [plain]


# what cannot be is refused before any work


@contextlib.contextmanager
def within(seconds):
    """What would go on for ever fails instead."""

    def over(*_):
        raise TimeoutError(f"still at work after {seconds} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def idle(chat, monkeypatch):
    """An engine whose model must not be run."""
    one = kvkeep.Engine(*chat, "snapkv", 64)
    monkeypatch.setattr(chat[0], "forward", lambda *_, **__: pytest.fail("the model was run"))
    return one


@pytest.mark.parametrize("rows", [0, -2, 1.5, "3", True, None])
@pytest.mark.parametrize("spec", ["snapkv", "infllm"])
def test_rows_that_cannot_be(chat, spec, rows):
    """Old: rows=0 waited for ever for somebody to leave."""
    with within(20), pytest.raises(BadParameter, match=f"rows={re.escape(repr(rows))}: at least one prompt"):
        kvkeep.Engine(*chat, spec, 64).generate([TEXT, OTHER], rows=rows, max_new_tokens=2)


@pytest.mark.parametrize("prompt", [None, 5, 1.5, b"text", [5, 6], [TEXT, None], [b"text"], {"a": "b"}, [["text"]]])
def test_prompts_that_are_no_texts(idle, prompt):
    with pytest.raises(BadParameter, match="prompt.*give a.*list of texts"):
        idle.generate(prompt)


def test_prompts_of_other_kinds_of_sequences(chat, idle):
    assert idle.generate([]) == idle.generate(()) == []
    for wrong in (None, 5, b"text", ["text"]):
        with pytest.raises(BadParameter, match=r"prompt=.* is a \w+; give a text"):
            idle.stream(wrong)
        with pytest.raises(BadParameter, match="messages=|content"):
            idle.chat(wrong)
        with pytest.raises(BadParameter, match="content"):
            idle.chat([{"role": "user", "content": wrong}])
    for wrong in (5, b"text", ["text"]):
        for prompt in (TEXT, [TEXT]):
            with pytest.raises(BadParameter, match=r"question=.* is a \w+; give a text"):
                idle.generate(prompt, question=wrong)


def test_prompts_may_come_from_anything_that_gives_them(chat):
    one, how = kvkeep.Engine(*chat, "snapkv", 64), {"max_new_tokens": 2}
    assert one.generate((text for text in (TEXT, OTHER)), **how) == one.generate([TEXT, OTHER], **how)


NAN = float("nan")
WRONG = [
    *(("max_new_tokens", value) for value in (0, -1, 1.5, "3", True, None, NAN)),
    *(("seed", value) for value in (-1, 2**70, 1.5, "3", True, None)),
    *(("temperature", value) for value in (NAN, float("inf"), "hot", None, True, -1)),
    *(("top_p", value) for value in (NAN, 0, 1.5, "0.5", None)),
    *(("top_k", value) for value in (-1, 1.5, "3", True, None)),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_options_that_cannot_be(idle, name, value):
    for ask in (
        lambda **how: idle.generate(TEXT, **how),
        lambda **how: idle.generate([TEXT, OTHER], **how),
        lambda **how: idle.stream(TEXT, **how),  # at once, not with the first piece
        lambda **how: idle.chat(SHORT, **how),
    ):
        with pytest.raises(BadParameter, match=f"{name}={re.escape(str(value))[:6]}|{name}={re.escape(repr(value))}"):
            ask(**{name: value})


def test_options_have_bounds_that_can_be_reached(chat):
    one = kvkeep.Engine(*chat, "snapkv", 64)
    for how in ({"seed": 2**63 - 1}, {"top_p": 1}, {"top_k": 10**6}, {"temperature": 2}):
        assert one.generate([TEXT, OTHER], **{"temperature": 1.0, "max_new_tokens": 2, **how})
        assert isinstance(one.generate(TEXT, **{"temperature": 1.0, "max_new_tokens": 2, **how}), str)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("max_new_token", "Did you mean 'max_new_tokens'"),
        ("do_sample", "sampled where temperature is above 0"),
        ("temprature", "Did you mean 'temperature'"),
        ("max_length", "max_new_tokens= counts the answer alone"),
        ("num_beams", "these are: max_new_tokens, temperature, top_p, top_k, seed"),
    ],
)
def test_an_option_that_is_called_otherwise(idle, name, says):
    """Old: Request.__init__() got an unexpected keyword argument."""
    for prompt in (TEXT, [TEXT]):
        with pytest.raises(BadParameter, match=f"'{name}' is not an option.*{says}"):
            idle.generate(prompt, **{name: 1})
    with pytest.raises(BadParameter, match=says):
        idle.chat(SHORT, **{name: 1})


def test_options_of_one_prompt_and_of_many(idle):
    with pytest.raises(BadParameter, match=r"'rows' is not.*list of prompts"):
        idle.generate(TEXT, rows=2)
    with pytest.raises(BadParameter, match=r"'progress' is not.*without it"):
        idle.generate([TEXT], progress=print)
