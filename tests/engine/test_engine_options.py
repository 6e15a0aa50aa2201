"""The same rules for one prompt and for many: budgets, questions, options."""

import contextlib
import dataclasses
import re
import signal
import sys

import pytest
import tiny_chat
from conftest import EVICTING, RETRIEVING

import kvkeep
from kvkeep import terminal
from kvkeep.compress.parse import parse
from kvkeep.errors import BadParameter, BudgetTooSmall

TEXT = "".join(chr(97 + i * i % 23) + (". " if i % 29 == 0 else "") for i in range(300))
OTHER = "".join(chr(97 + i * 7 % 19) + ("! " if i % 17 == 0 else "") for i in range(280))
SHORT = [{"role": "user", "content": "Hello, how are you today?"}]


@pytest.fixture(scope="module")
def chat():
    return tiny_chat.sharp()


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


@pytest.mark.parametrize("rows", [0, -2, 1.5, "3", True])
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
    *(("stop", value) for value in (5, None, True, "", [5], ["a", ""])),
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


def test_an_engine_without_a_tokenizer_is_refused_when_made(chat):
    """Old: AttributeError, at the first request."""
    with pytest.raises(BadParameter, match=r"tokenizer=None: .* use kvkeep\.Cache"):
        kvkeep.Engine(chat[0], None, "snapkv", 64)


def test_options_of_one_prompt_and_of_many(idle):
    with pytest.raises(BadParameter, match=r"'rows' is not.*list of prompts"):
        idle.generate(TEXT, rows=2)
    with pytest.raises(BadParameter, match=r"'progress' is not.*without it"):
        idle.generate([TEXT], progress=print)


@pytest.mark.parametrize(
    ("is_terminal", "progress", "shown"),
    [(True, None, True), (True, False, False), (True, lambda _: None, False), (False, None, False)],
    ids=["terminal", "terminal, switched off", "terminal, a callback", "pipe"],
)
def test_a_long_prefill_shows_a_bar_on_a_terminal_alone(chat, is_terminal, progress, shown, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    monkeypatch.setattr(terminal, "DELAY_S", 0.0)
    one = kvkeep.Engine(*chat, "streamingllm", 64)
    context = one.read(TEXT, progress=progress)
    context.ask("And?", max_new_tokens=1, progress=progress)
    one.generate(TEXT, max_new_tokens=1, progress=progress)
    one.chat([{"role": "user", "content": TEXT}], max_new_tokens=1, progress=progress)
    said = capsys.readouterr()
    tokens = {"read": context.tokens, "generate": len(one.encode(TEXT))}
    assert said.out == "" and [f"prefill of {n:,} tokens" in said.err for n in tokens.values()] == [shown] * 2
    assert shown or said.err == ""
    with pytest.raises(BadParameter, match="progress='bar': use a function, or True or False, or None"):
        one.generate(TEXT, progress="bar")
