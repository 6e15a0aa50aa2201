"""Tool calls in text, whatever pieces it comes in."""

import json

import pytest

from kvkeep.serve.tools import HERMES, LLAMA, ToolParser, tool_format

CALL = {"name": "weather", "arguments": {"place": "Øst <b>"}}
ARGUMENTS = json.dumps(CALL["arguments"], ensure_ascii=False)
TAGGED = f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>"


def parse(form, text, size):
    """Fed in pieces of so many characters. -> text shown, calls, and the pieces in which text was shown"""
    parser, shown, calls = ToolParser(form), [], []
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    for number, piece in enumerate(pieces or [""]):
        new, found = parser.feed(piece, number == len(pieces) - 1)
        shown.append(new)
        calls += found
    return "".join(shown), [(call.name, call.arguments) for call in calls], shown


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize(
    ("text", "shown", "calls"),
    [
        ("Just text < tool", "Just text < tool", 0),
        (TAGGED, "", 1),
        (f"Let me see. {TAGGED}", "Let me see. ", 1),
        (f"{TAGGED}\n{TAGGED}", "", 2),
        ("<tool_call>{broken</tool_call> on", "<tool_call>{broken</tool_call> on", 0),
        ("It is cut <tool_call>\n{", "It is cut <tool_call>\n{", 0),
        ("An end of <tool_c", "An end of <tool_c", 0),
        (
            '<tool_call>{"name": "x", "arguments": 3}</tool_call>',
            '<tool_call>{"name": "x", "arguments": 3}</tool_call>',
            0,
        ),
    ],
)
def test_hermes(text, shown, calls, size):
    found, called, _ = parse(HERMES, text, size)
    assert found.strip() == shown.strip() and called == [("weather", ARGUMENTS)] * calls


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_llama(size):
    text = json.dumps({"name": "weather", "parameters": CALL["arguments"]})
    assert parse(LLAMA, text, size)[:2] == ("", [("weather", ARGUMENTS)])
    assert parse(LLAMA, '{"other": 1}', size)[:2] == ('{"other": 1}', [])
    assert parse(LLAMA, "Well, {}", size)[:2] == ("Well, {}", [])


def test_all_but_the_first_call_are_left_out():
    text = f"So: {TAGGED}\n{TAGGED} Done."
    for size in (1, 7, 1000):
        parser, shown, calls = ToolParser(HERMES, parallel=False), "", []
        for at in range(0, len(text), size):
            new, found = parser.feed(text[at : at + size], at + size >= len(text))
            shown, calls = shown + new, calls + found
        assert len(calls) == parser.called == 1 and shown.split() == ["So:", "Done."]


def test_text_is_not_held_back():
    """Only what may be the beginning of a call is."""
    assert parse(HERMES, "abc <b>", 1)[2] == ["a", "b", "c", " ", "", "<b", ">"]
    assert parse(LLAMA, " ab", 1)[2] == ["", " a", "b"]


def test_the_format_is_the_templates():
    assert tool_format("{{ tools }} in <tool_call>") is HERMES and tool_format("{{ tools }}") is LLAMA
    assert tool_format("{{ messages }}") is tool_format(None) is None
