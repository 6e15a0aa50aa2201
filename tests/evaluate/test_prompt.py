"""Where context, question and answer meet: the same ids whoever cuts them, and cuts that are the authors'."""

import functools
from dataclasses import replace

import pytest
import tiny_chat
import torch
from test_ruler import FILES, TASKS, essay, need_words  # noqa: F401
from test_tasks import ARC, OPENBOOK, WIC, WINOGRANDE, book, row, written
from tokenizers import normalizers

from kvkeep.errors import BadInput
from kvkeep.evaluate.prompt import AGAIN, HALVES, build_prompt
from kvkeep.evaluate.sample import Sample
from kvkeep.evaluate.tasks import choice, infinitebench, longbench, math
from kvkeep.evaluate.tasks.needle import needle
from kvkeep.evaluate.tasks.ruler import ruler
from kvkeep.evaluate.worker import choice_prompts
from kvkeep.model import chat
from kvkeep.model.chat import eos_token_ids
from kvkeep.model.load import load_tokenizer

WINDOW = 2**20
CONTEXT = "".join(chr(97 + i * i % 23) for i in range(3000))


@functools.cache
def smollm():
    return load_tokenizer("default")


def sample(**changes):
    made = Sample("toy", "0", " What is it?", ("x",), "longbench_qa_f1", CONTEXT, " It is", margin=500)
    return replace(made, **{"max_new_tokens": 6, **changes})


def text(tokenizer, made):
    return tokenizer.decode(torch.cat([made.context, made.question]))


# one prompt under both protocols


def one_prompt(made):
    """-> how many tokens of the context come with the question"""
    assert not made.context.endswith((" ", "\t", "\xa0")), "a blank that the question's first word would have taken"
    agnostic, aware = (build_prompt(smollm(), made, protocol, WINDOW) for protocol in ("agnostic", "aware"))
    assert torch.cat([agnostic.context, agnostic.question]).equal(aware.context) and not len(aware.question)
    plain = replace(made, chat=False)
    read, alone = (
        build_prompt(smollm(), each, "agnostic", WINDOW) for each in (plain, replace(plain, question="", prefix=""))
    )
    return len(alone.context) - len(read.context)


@pytest.mark.real
@pytest.mark.parametrize("task", TASKS)
def test_ruler_has_no_seam(task, essay):  # noqa: F811
    need_words(task)
    for made in ruler(task, 2048, smollm(), 2, haystack=essay, **FILES):
        assert one_prompt(made) <= 1


@pytest.mark.real
@pytest.mark.parametrize("kind", ["sandwich", "number"])
def test_needles_have_no_seam(kind):
    for made in needle(smollm(), (600,), (0, 44, 100), kind=kind):
        assert made.context.endswith(" </book>.\n") and made.question.startswith(" Based on the content of the book, ")
        assert one_prompt(made) == 1  # the line break


@pytest.mark.real
@pytest.mark.parametrize("task", longbench.TEMPLATES)
def test_longbench_has_no_seam(task, tmp_path):
    (made,) = longbench.longbench(written(tmp_path / f"{task}.jsonl", row(task)))
    assert one_prompt(made) <= 1  # its line breaks


@pytest.mark.real
@pytest.mark.parametrize("task", infinitebench.TEMPLATES)
def test_infinitebench_has_no_seam(task, tmp_path):
    (made,) = infinitebench.infinitebench(written(tmp_path / f"{task}.jsonl", book(task, context="1 + 2")))
    assert one_prompt(made) <= 1


@pytest.mark.real
@pytest.mark.parametrize("name", ["arc_easy", "openbookqa", "wic", "winogrande"])
def test_choices_have_no_seam(name, tmp_path):
    record = {"arc_easy": ARC, "openbookqa": {**OPENBOOK, "answerKey": "B"}, "wic": WIC, "winogrande": WINOGRANDE}[name]
    (made,) = getattr(choice, name)(written(tmp_path / f"{name}.jsonl", record))
    both = (choice_prompts(smollm(), made, protocol, WINDOW) for protocol in ("agnostic", "aware"))
    for (agnostic, _), (aware, _) in zip(*both, strict=True):
        assert torch.cat([agnostic.context, agnostic.question]).equal(aware.context)
        assert not len(agnostic.question)


@pytest.mark.real
def test_problems_have_no_seam(tmp_path):
    record = {"problem": "What is 1 + 1?", "answer": "2", "unique_id": "a"}
    (made,) = math.math500(written(tmp_path / "math500.jsonl", record))
    one_prompt(made)


# thinking, and the end of a turn

THINKING = (
    "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}{% if add_generation_prompt %}<s>"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)


@pytest.mark.parametrize("protocol", ["agnostic", "aware"])
def test_nobody_thinks_aloud_before_an_answer(protocol):
    words = tiny_chat.tokenizer(THINKING)
    made = build_prompt(words, sample(context="A text."), protocol, 1024)
    assert text(words, made) == "<s>A text. What is it?</s><s><think></think> It is"


@pytest.mark.trap(3)
def test_the_end_of_a_turn_ends_an_answer(monkeypatch):
    words, model = tiny_chat.tokenizer(), tiny_chat.model()
    words.eos_token = "a"
    model.generation_config.eos_token_id = [5, 7]
    assert eos_token_ids(model, words) == {5, 7, words.eos_token_id, words.convert_tokens_to_ids("</s>")}
    monkeypatch.setattr(words, "apply_chat_template", None)  # it is asked once
    assert eos_token_ids(model, words) == {5, 7, words.eos_token_id, 1}
    words.chat_template = None
    assert eos_token_ids(model, words) == {5, 7, words.eos_token_id}


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('no') }}", "{{ messages[-1]['content'] }}, he said.", "<s>{{ messages[0].x }}"],
)
def test_a_template_may_have_no_end_of_turn(template):
    words = tiny_chat.tokenizer(template)
    assert chat.end_of_turn(words, template) is None and eos_token_ids(tiny_chat.model(), words) == {1}


# cuts

LIMITS = {4096: 3500, 8192: 7500, 16384: 15500, 32768: 31500, 2048: 1548, 131072: 130572, 8000: 7500}


@pytest.mark.trap(21)
@pytest.mark.parametrize("window", LIMITS)
def test_the_limits_are_longbenchs(window, tmp_path):
    words = tiny_chat.tokenizer()
    (made,) = longbench.longbench(written(tmp_path / "trec.jsonl", row("trec", context="abcdefgh" * 20_000)))
    got = build_prompt(words, made, "aware", window)
    whole = made.context + made.question
    half = LIMITS[window] // 2
    assert text(words, got) == whole[:half] + whole[-half:] and got.rule == HALVES
    assert got.cut == len(whole.encode()) - LIMITS[window]


def test_what_is_asked_for_is_the_limit_of_the_prompt():
    words = tiny_chat.tokenizer()
    got = build_prompt(words, sample(chat=False), "aware", 2048, max_length=1500)
    assert got.tokens == 1500 and got.rule == HALVES
    assert build_prompt(words, sample(), "aware", 2048, max_length=1500).tokens == 1500 + 3  # and the template's
    assert build_prompt(words, sample(margin=None), "aware", 2048, max_length=1500).tokens == 1500
    for margin in (None, 500):
        full = build_prompt(words, sample(margin=margin, chat=False), "aware", 2048, max_length=9999)
        assert full.tokens == 2048 - 6


def test_a_prompt_is_cut_twice_only_if_the_window_has_no_room_for_it():
    words = tiny_chat.tokenizer()
    once = build_prompt(words, sample(max_new_tokens=497), "aware", 2048)
    assert (once.tokens, once.rule) == (1548 + 3, HALVES)
    twice = build_prompt(words, sample(max_new_tokens=498), "aware", 2048)
    assert (twice.tokens, twice.rule) == (1548 + 2, HALVES + AGAIN) and twice.cut == once.cut + 1


@pytest.mark.parametrize("protocol", ["agnostic", "aware"])
def test_a_tokenizer_may_write_the_question_its_own_way(protocol):
    words = tiny_chat.tokenizer()
    words.backend_tokenizer.normalizer = normalizers.NFC()
    got = build_prompt(words, sample(question=" Which cafe\u0301?", prefix=" E\u0301"), protocol, 1024)
    assert text(words, got).endswith(" Which caf\xe9?</s><s> \xc9") and got.cut > 0
    if protocol == "agnostic":
        assert words.decode(got.question) == " Which caf\xe9?</s><s> \xc9"
    words = tiny_chat.tokenizer()
    words.clean_up_tokenization_spaces = True
    assert text(words, build_prompt(words, sample(question=" Is he ?"), protocol, 1024)).count("Is he") == 1


@pytest.mark.parametrize("asked, context", [(CONTEXT, CONTEXT.upper()), (CONTEXT * 2, "SHORT.")])
def test_a_question_that_is_too_long_is_cut_as_the_rest(asked, context):
    words = tiny_chat.tokenizer()
    made = sample(question=asked, context=context)
    whole = context + asked + " It is"
    for protocol in ("agnostic", "aware"):
        got = build_prompt(words, made, protocol, 1024)
        want = (whole[:262] + whole[-262:]).removesuffix(" It is")
        assert text(words, got) == f"<s>{want}</s><s> It is"
        if protocol == "agnostic":
            assert words.decode(got.context) == "<s>" + context[:262]


def test_letters_of_several_tokens_are_not_cut_in_two_at_the_seam():
    words = tiny_chat.tokenizer()
    got = build_prompt(words, sample(context=CONTEXT + "日本", question="日本", chat=False), "agnostic", 1024)
    assert words.decode(got.context).endswith("日本") and words.decode(got.question) == "日本 It is"


@pytest.mark.parametrize("protocol", ["agnostic", "aware"])
@pytest.mark.parametrize("shots", ["", "Shots of another question. Answer: no\n\n"])
def test_a_choice_that_is_too_long_loses_its_beginning(protocol, shots):
    words = tiny_chat.tokenizer()
    made = sample(context=shots, question=CONTEXT[:100], prefix="", choices=(" yes", " maybe"))
    for (got, ids), said in zip(choice_prompts(words, made, protocol, 60), made.choices, strict=True):
        assert text(words, got) + words.decode(ids) == (CONTEXT[:100] + said)[-61:] and words.decode(ids) == said
        assert (got.cut, got.rule) == (len(shots) + 100 + len(said) - 61, "beginning of the prompt")
    (got, _), _ = choice_prompts(words, made, protocol, 130)
    assert text(words, got) == (shots + CONTEXT[:100])[-(131 - 4) :]
    assert bool(len(got.question)) == (protocol == "agnostic" and bool(shots))
    with pytest.raises(BadInput, match="toy '0': a choice has 6 tokens, the model's context length is 5"):
        choice_prompts(words, made, protocol, 5)
