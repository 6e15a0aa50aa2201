"""Engine.read without a history: one text is compressed, many questions are asked."""

import warnings
from pathlib import Path

import families
import pytest
import tiny_chat
import torch
from conftest import EVICTING, RETRIEVING
from tokenizers import Tokenizer, decoders, models
from transformers import (
    JambaConfig,
    JambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
)

import kvkeep
from kvkeep.compress.parse import parse
from kvkeep.engine.sequence import Sequence
from kvkeep.errors import BadCacheFile, BadInput, BadParameter, CacheMisuse, QueryAwareWarning, UnsupportedModel
from kvkeep.model.chat import context_ids, encode, question_ids
from kvkeep.model.load import load

TEXT = "".join(chr(97 + i * i % 23) + (". " if i % 29 == 0 else "") for i in range(300))
QUESTIONS = ("What is my name?", "zzzz qqqq", "Why?")
SHORT = {"max_new_tokens": 6}


@pytest.fixture(scope="module")
def chat():
    return tiny_chat.sharp()


def engine(chat, method="full", budget=None, **options):
    return kvkeep.Engine(*chat, method, budget, **{"history": None, **options})


def quietly(context, question, **options):
    """Answered without the warning, which has tests of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", QueryAwareWarning)
        return context.ask(question, **{**SHORT, **options})


# what is asked


@pytest.mark.core
def test_a_context_answers_as_generate_does(chat):
    """Old: a fork of the engine started with nothing."""
    one = engine(chat)
    context = one.read(TEXT)
    for question in (*QUESTIONS, QUESTIONS[0]):
        assert context.ask(question, **SHORT) == one.generate(TEXT, question=question, **SHORT)
        assert context.answer.prompt_tokens == one.answer.prompt_tokens
        assert context.answer.ids == one.answer.ids
    hot = {"temperature": 1.5, "top_k": 40, "seed": 5, **SHORT}
    assert context.ask("Why?", **hot) == one.generate(TEXT, question="Why?", **hot)
    assert "".join(context.stream("Why?", **hot)) == context.ask("Why?", **hot)


def test_a_model_that_cannot_be_run_again_is_read_by_its_prefill_alone():
    """Its forward is somebody else's, as with accelerate: the cache is not told what it was given."""
    model, words = tiny_chat.sharp()
    own = type(model).forward
    model.forward = lambda *args, **kwargs: own(model, *args, **kwargs)
    engine = kvkeep.Engine(model, words, budget=100, history=None)
    context = engine.read(TEXT)
    assert engine.method.name == "kvkeep" and engine.generate(TEXT, **SHORT)
    assert context.sequence.cache.method.name == "echo:near=8+shared" and context.report().kept_per_head == 100
    assert context.ask("Why?", **SHORT)


def test_who_chooses_no_method_gets_one_that_needs_no_question(chat):
    one = kvkeep.Engine(*chat, budget=100, history=None)
    context, known = one.read(TEXT), one.read(TEXT, question="Why?")
    assert one.method.name == known.sequence.cache.method.name == "kvkeep_lookahead"
    assert context.sequence.cache.method.name == "kvkeep_context"
    with warnings.catch_warnings():
        warnings.simplefilter("error", QueryAwareWarning)
        assert context.ask("Why?", **SHORT) and known.ask("Why?", **SHORT) and one.generate(TEXT, **SHORT)
    for method in ("kvkeep", parse("kvkeep")):
        assert engine(chat, method, 100).read(TEXT).sequence.cache.method.name == "kvkeep"


def test_models_that_cannot_be_read_with_the_usual_method_take_another_or_say_so(chat):
    """Without RoPE, `keydiff`; where no layer is ours, neither `read` nor the store forks a cache."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=258, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2)
    mamba = dict(num_experts=2, attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False)
    jamba = JambaForCausalLM(JambaConfig(**sizes, **mamba, num_hidden_layers=4, bos_token_id=0, eos_token_id=1)).eval()
    context = kvkeep.Engine(jamba, chat[1], budget=100).read(TEXT)
    assert context.sequence.cache.method.name == "keydiff" and context.report().kept["context"] == 100
    context.ask("Why?", **SHORT)
    sliding = MistralForCausalLM(MistralConfig(**sizes, num_hidden_layers=2, sliding_window=12, eos_token_id=1)).eval()
    talk = [{"role": "user", "content": each} for each in (TEXT, "Why?")]
    with kvkeep.Engine(sliding, chat[1], budget=100, prefix_cache=10**8) as one:
        for read in (one.read, one.pin):
            with pytest.raises(UnsupportedModel, match=r"sliding-window or linear layers only.*engine.generate"):
                read(TEXT)
        assert one.submit(talk, **SHORT).result() == kvkeep.Engine(sliding, chat[1]).submit(talk, **SHORT).result()


@pytest.mark.parametrize(
    ("method", "used"), [(None, "kvkeep_context"), ("kvkeep", "kvkeep_context"), ("knorm", "knorm"), ("full", "full")]
)
def test_what_is_pinned_is_compressed_by_a_method_that_needs_no_question(chat, method, used):
    """Nobody could warn who asks about it."""
    with kvkeep.Engine(*chat, method, 100, prefix_cache=10**8, history=None) as one:
        pinned = [one.pin(TEXT), one.pin(TEXT, budget=90)]
        assert [one.store.loaded("", id)[1].config.method.name for id in pinned] == [used, used]
        named = one.pin(TEXT, method="snapkv")
        assert one.store.loaded("", named)[1].config.method.name == "snapkv"


@pytest.mark.real
def test_the_default_model_answers_as_generate_does():
    one = kvkeep.Engine(*load(), "full", None)
    text = (Path(__file__).parents[2] / "examples" / "lighthouse.txt").read_text()[:800]
    context = one.read(text)
    for question in ("Where is the light?", "Who wrote this report?"):
        whole = one.encode(text, question)
        assert context.ask(question, max_new_tokens=8) == one.generate(text, question=question, max_new_tokens=8)
        assert context.sequence.token_ids == whole[: len(context)].tolist() and len(whole) - len(context) < 20


@pytest.mark.parametrize("spec", [*EVICTING, *RETRIEVING])
def test_questions_do_not_disturb_each_other(spec):
    """Asked again, asked of a fork, asked between two pieces of another answer: always the same.

    In float64: the text repeats itself, and rounding, which differs with the rows of a step, breaks ties in float32.
    """
    model, words = tiny_chat.sharp()
    context = kvkeep.Engine(model.double(), words, spec, 100, prefill_chunk_size=64, history=None).read(TEXT)
    first = [quietly(context, question) for question in QUESTIONS]
    held = context.sequence.cache.report()
    again = [quietly(context, question) for question in reversed(QUESTIONS)][::-1]
    twin = context.fork()
    assert first == again == [quietly(twin, question) for question in QUESTIONS]
    assert context.sequence.cache.report() == held and context.sequence.cache.seen == len(context)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", QueryAwareWarning)
        pieces = context.stream(QUESTIONS[0], **SHORT)
        begun = next(pieces, "")
        assert quietly(context, QUESTIONS[1]) == first[1]
        assert begun + "".join(pieces) == first[0]


PACKABLE = [spec for spec in EVICTING if parse(spec).schedule.every is None]


@pytest.mark.parametrize(
    ("spec", "storage"), [*((spec, None) for spec in EVICTING), *((spec, "int8") for spec in PACKABLE)]
)
def test_nothing_of_a_question_or_an_answer_is_dropped(chat, spec, storage):
    context = engine(chat, spec, 100, storage=storage).read(TEXT)
    before = context.report().kept
    assert before == pytest.approx({"context": context.report().kept_per_head, "question": 0, "generated": 0})
    asked = "What? " * 30  # longer than the budget
    quietly(context, asked, max_new_tokens=40, temperature=2.0, seed=1)
    kept, written = context.report().kept, len(context.answer.ids)
    assert kept["context"] == before["context"] and written > 1
    assert kept["question"] == context.answer.prompt_tokens - len(context) > 100
    assert kept["generated"] in (written - 1, written)  # the last is not read, unless an end followed
    assert f"{kept['question']:.0f} of the question + {kept['generated']:.0f} generated" in str(context.report())


def test_a_method_that_knows_the_question_is_told_it_when_asked(chat, monkeypatch):
    told, tell = [], Sequence.set_question
    monkeypatch.setattr(Sequence, "set_question", lambda self, *args: told.append(args) or tell(self, *args))
    context = engine(chat, "qllm", 64, prefill_chunk_size=64).read(TEXT)
    context.ask("Why?", **SHORT)
    assert told == [("Why?", len(context))]


# the seam between text and question


def merging(*pairs: str, template=None):
    """A tokenizer of letters that joins these: Llama 3's and Qwen's join a full stop to the blank line behind it."""
    merges = [tuple(pair.split("|")) for pair in pairs]
    letters = ["<s>", "</s>", *map(chr, range(32, 127)), "\n", "\ue000"]
    made = Tokenizer(models.BPE({each: i for i, each in enumerate([*letters, *map("".join, merges)])}, merges))
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", chat_template=template)


STOP = (".|\n", ".\n|\n", "\n|\n", "\n\n|\n")
TRIMMING = "{% for m in messages %}[{{ m['content'] | trim }}]{% endfor %}:"


@pytest.mark.parametrize("template", [None, tiny_chat.TEMPLATE, TRIMMING])
@pytest.mark.parametrize("text", ["A tale.", "A tale", " A tale. \n", "x", "\n\nOne.\n\nTwo.\n\n", "a\ue000b\ue000"])
@pytest.mark.parametrize("question", ["Who?", "\nWho? ", ". \n"])
def test_text_and_question_apart_are_the_ids_of_both_together(template, text, question):
    words = merging(*STOP, template=template)
    context = context_ids(words, text)
    assert context + question_ids(words, text, question, context) == encode(words, f"{text}\n\n{question}")[0].tolist()


def test_a_token_that_the_blank_line_changes_is_left_to_the_question():
    words = merging(*STOP)
    context = context_ids(words, "A tale.")
    assert words.decode(context) == "A tale" and words.decode(encode(words, "A tale.\n\nWho?")[0][6]) == ".\n\n"
    assert words.decode(question_ids(words, "A tale.", "Who?", context)) == ".\n\nWho?"
    with pytest.raises(BadInput, match="too short to be prefilled without"):
        context_ids(words, ".")


def test_a_merge_with_one_question_alone_still_says_every_character_once():
    words = merging("\n|\n", "\n\n|z", "c|\n\nz")
    context = context_ids(words, "abc")
    whole = encode(words, "abc\n\nzoo")[0].tolist()
    assert whole[: len(context)] != context  # no split at the text's end can be the whole's ids
    assert words.decode(context + question_ids(words, "abc", "zoo", context)) == "abc\n\nzoo"


def test_what_is_read_is_the_beginning_of_every_prompt(chat):
    one = engine(chat)
    context = one.read(TEXT)
    assert context.tokens == len(context) == len(TEXT) + 1  # with the template's <s>
    assert one.encode(TEXT, "Why?")[: len(context)].tolist() == context.sequence.token_ids


# questions known and unknown


def warned(context, question="Why?"):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        context.ask(question, max_new_tokens=1)
    return [str(each.message) for each in found if each.category is QueryAwareWarning]


@pytest.mark.parametrize("spec", [*EVICTING, *RETRIEVING])
def test_a_question_not_seen_is_warned_of_once_where_it_matters(chat, spec):
    aware = parse(spec).query_aware
    context = engine(chat, spec, 100).read(TEXT)
    assert [len(warned(context)) for _ in range(2)] == [aware, 0]
    assert len(warned(engine(chat, spec, 100).read(TEXT))) == aware  # another context
    assert not warned(engine(chat, spec, 4000).read(TEXT))  # nothing is dropped
    if aware:
        context = engine(chat, spec, 100).read(TEXT, question="Why?")
        assert not warned(context, " Why? ") and warned(context, "Who?")


def test_the_warning_names_what_was_kept_and_the_way_out(chat):
    (said,) = warned(engine(chat, "snapkv", 100).read(TEXT))
    assert f"'snapkv' kept 100 of {len(TEXT) + 1} tokens" in said and "question=" in said and "'tokenselect'" in said


def test_a_report_of_what_is_fetched_names_its_parts(chat):
    context = engine(chat, "infllm", 100, prefill_chunk_size=64).read(TEXT)
    assert context.report().kept["context"] == context.report().kept_per_head
    context.ask("Why?", max_new_tokens=8)
    kept = context.report().kept
    assert sum(kept.values()) == context.report().kept_per_head
    assert kept["question"] == context.answer.prompt_tokens - len(context) and kept["generated"] > 0


@pytest.mark.parametrize("spec", ["snapkv", "kvkeep", "snapkv+adakv", "snapkv+pyramid"])
@pytest.mark.parametrize("storage", [None, "int8"])
def test_a_question_known_before_decides_what_is_kept(chat, spec, storage):
    """The same of the text as where both are read together; the question is read again when it is asked."""
    one, question = engine(chat, spec, 100, storage=storage), QUESTIONS[0]
    context = one.read(TEXT, question=question)
    n, _ = len(context), one.generate(TEXT, question=question, **SHORT)
    for layer in context.sequence.cache.compressed_layers:
        (mine,), (theirs,) = context.sequence.cache.kept(layer), one.cache.kept(layer)
        assert mine == [[p for p in head if p < n] for head in theirs]
    assert context.ask(question, **SHORT) == context.ask(question, **SHORT)
    blind = one.read(TEXT).sequence.cache
    assert any(blind.kept(i) != context.sequence.cache.kept(i) for i in blind.compressed_layers)


def test_layers_that_cannot_take_a_question_back_are_named():
    one = kvkeep.Engine(families.build("gemma3_text"), merging(), "snapkv", 128)
    with pytest.raises(CacheMisuse, match=r"cannot remove a question again; use engine\.generate"):
        one.read(TEXT[:90], question="Why?")
    assert one.read(TEXT[:90]).ask("Why?", **SHORT)  # fits


# manners


def test_a_context_is_saved_and_loaded(chat, tmp_path):
    one = engine(chat, "snapkv", 100)
    context = one.read(TEXT, question="Why?")
    context.save(tmp_path / "c")
    other = engine(chat, "full")  # the context has its own method
    loaded = other.load_context(tmp_path / "c")
    assert [quietly(loaded, q) for q in QUESTIONS] == [quietly(context, q) for q in QUESTIONS]
    assert repr(loaded) == repr(context) and loaded.text == TEXT and len(loaded) == len(context)
    assert not warned(other.load_context(tmp_path / "c")) and warned(other.load_context(tmp_path / "c"), "Who?")
    assert loaded.report() == context.report()
    plain = kvkeep.Engine(chat[0], tiny_chat.tokenizer("{{ messages[0]['content'] }}"), "full")
    with pytest.raises(BadCacheFile, match="another tokenizer or chat template"):
        plain.load_context(tmp_path / "c")
    one.generate(TEXT, **SHORT)
    one.cache.save(tmp_path / "bare")
    with pytest.raises(BadCacheFile, match=r"cache without its text.*Cache\.load"):
        one.load_context(tmp_path / "bare")
    with pytest.raises(CacheMisuse, match="'infllm' cannot be saved"):
        engine(chat, "infllm", 64).read(TEXT).save(tmp_path / "far")


def test_a_context_says_what_it_is(chat):
    context = engine(chat, "snapkv", 100).read(TEXT)
    held = f"100 of the context kept per KV head, {kvkeep.cache.report.format_bytes(context.report().bytes)}"
    assert repr(context) == f"<kvkeep.Context snapkv, budget 100: {len(TEXT) + 1} tokens seen, {held}>"
    said = repr(context)
    quietly(context, "Why?")
    assert repr(context) == said
    assert repr(engine(chat, "infllm", 64).read(TEXT)).endswith(" kB offloaded>")


def test_an_engine_goes_on_beside_its_contexts(chat):
    one = engine(chat, "snapkv", 100)
    alone = one.generate(TEXT, **SHORT)
    context = one.read(TEXT[:100])
    quietly(context, "Why?")
    assert one.answer.text == alone and one.generate(TEXT, **SHORT) == alone


def test_what_was_prefilled_by_hand_is_not_dropped_silently(chat):
    """Old: fork(), documented as one text, many questions, whose answers began with an empty cache."""
    one = engine(chat)
    assert not hasattr(one, "fork")
    one.prefill(torch.arange(2, 78))
    for begin in (
        lambda: one.generate("Why?"),
        lambda: one.stream("Why?"),
        lambda: one.chat([{"role": "user", "content": "a"}]),
    ):
        with pytest.raises(CacheMisuse, match=r"prefilled 76 tokens.*engine\.read"):
            begin()
    assert one.cache.seen == 76


def test_far_beyond_the_window(chat):
    """Old: no way to ask twice."""
    context = engine(chat, "infllm", 128, prefill_chunk_size=64).read(TEXT * 8)
    assert len(context) > 2 * chat[0].config.max_position_embeddings
    assert [context.ask(q, **SHORT) for q in QUESTIONS] == [context.ask(q, **SHORT) for q in QUESTIONS]
    with pytest.raises(BadInput, match="context length is 1024"):
        engine(chat).read(TEXT * 8)
    almost = engine(chat).read(TEXT * 2)
    with pytest.raises(BadInput, match="context length is 1024"):
        almost.ask("Why?", max_new_tokens=1000)


@pytest.mark.parametrize("wrong", [None, 5, b"text", ["text"]])
def test_what_is_no_text(chat, wrong):
    one = engine(chat)
    with pytest.raises(BadParameter, match="text="):
        one.read(wrong)
    with pytest.raises(BadParameter, match="question="):
        one.read("text").ask(wrong)
    for empty in ("", " \n"):
        with pytest.raises(BadInput, match="text is empty"):
            one.read(empty)
        with pytest.raises(BadInput, match="question is empty"):
            one.read("text").ask(empty)
        with pytest.raises(BadInput, match="question is empty"):
            one.read("text", question=empty)
    with pytest.raises(BadParameter, match="max_new_tokens=0"):
        one.read("text").stream("Why?", max_new_tokens=0)
    with pytest.raises(BadParameter, match="'max_tokens' is not an option"):
        one.read("text").ask("Why?", max_tokens=3)


@pytest.mark.parametrize("method", ["snapkv", "kvkeep_context", "h2o", "actqkv", "quest"])
@pytest.mark.filterwarnings("ignore::kvkeep.errors.QueryAwareWarning")
def test_a_submitted_question_keeps_its_cache(chat, method):
    """The answer and the report are those of `ask`; the context itself stays as it was."""
    context = engine(chat, method, 64).read(TEXT)
    before = [context.sequence.cache.kept(layer) for layer in (0, 1)]
    said = quietly(context, QUESTIONS[0])
    handle = context.submit(QUESTIONS[0], **SHORT)
    assert handle.result() == said
    held, asked = handle.cache.report(), context.report()
    assert (held.tokens, held.kept, held.bytes, held.host_bytes) == (
        asked.tokens,
        asked.kept,
        asked.bytes,
        asked.host_bytes,
    )
    assert handle.cache is not context.sequence.cache and handle.cache.seen > context.tokens
    assert [context.sequence.cache.kept(layer) for layer in (0, 1)] == before
