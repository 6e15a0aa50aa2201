"""From text to the ids a model was trained to see, and the ids that end what it writes."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor

from kvkeep.errors import BadInput, BadParameter

MARK = "\ue000"  # of the private use area: no tokenizer and no template means anything by it
LIKE = "What"  # how a question may begin


def encode(tokenizer: Any, text: str | list[dict[str, str]]) -> Tensor:
    """A user's message, or a whole chat: ids [1, tokens], through the chat template where there is one, one BOS."""
    chat = [{"role": "user", "content": text}] if isinstance(text, str) else text
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    elif not isinstance(text, str):
        text = "\n\n".join(message["content"] for message in chat) + "\n\n"
    how = {"return_tensors": "pt", "add_special_tokens": not tokenizer.chat_template}
    return tokenizer(text, verbose=False, **how).input_ids  # verbose: warns of lengths that callers check, or allow


def check_text(name: str, value: Any, empty: bool = False) -> None:
    """Refuse what there is nothing to read in. empty: a text of white space will do"""
    if not isinstance(value, str):
        raise BadParameter(f"{name}={reprlib.repr(value)} is a {type(value).__name__}; give a text.")
    if not (value.strip() or empty):
        raise BadInput(f"the {name} is empty; give the model something to read.")


def check_messages(messages: Any) -> None:
    """Refuse what is not a conversation to be gone on with."""
    if not isinstance(messages, list | tuple) or not all(isinstance(each, Mapping) for each in messages):
        raise BadParameter(f"messages={reprlib.repr(messages)}: give a list of {{'role': 'user', 'content': '…'}}.")
    if not messages or messages[-1].get("role") == "assistant":
        raise BadInput("a chat ends with a message to answer; give at least one, the last not the assistant's.")
    for number, each in enumerate(messages):
        if not isinstance(each.get("content"), str):
            raise BadParameter(f"message {number} has content {reprlib.repr(each.get('content'))}; give a text.")


def joined(text: str, question: str) -> str:
    """One message of a text and what is asked about it."""
    return f"{text}\n\n{question}"


def as_asked(prompt: str, question: str | None = None) -> str:
    """A prompt and, after a blank line, the question, if there is one."""
    check_text("prompt", prompt, empty=True)
    check_text("question", question or "", empty=True)
    text = joined(prompt, question) if question and question.strip() else prompt
    check_text("prompt", text)
    return text


def context_ids(tokenizer: Any, text: str) -> list[int]:
    """What a question behind a text cannot change: the ids of the template's beginning and of the text.

    Tokenizers join the end of a text to the blank line that follows (".\n\n" is one token of Llama 3's and Qwen's).
    A token that such a line changes is not the text's: it is left to the question, so that both together are the ids
    of the whole prompt.
    """
    alone, followed = (_opened(tokenizer, each)[1] for each in (text, joined(text, LIKE)))
    if not (ids := alone[: shared(alone, followed)]):
        raise BadInput(f"text={text!r} is too short to be read apart from a question; use Engine.generate.")
    return ids


def question_ids(tokenizer: Any, text: str, question: str, context: list[int]) -> list[int]:
    """What follows `context_ids(text)`: with these, the ids `encode` gives text and question together.

    Where a tokenizer joins the text to this very question, as it does to no other, no id can stand for the seam: then
    the rest of the text and the question are encoded apart, each character once.
    """
    whole = encode(tokenizer, joined(text, question))[0].tolist()
    if whole[: len(context)] == context:
        return whole[len(context) :]
    (before, alone), (asked, after) = _opened(tokenizer, text), around(tokenizer, joined(text, question))
    if alone[: len(context)] != context or not asked.startswith(before):
        raise BadInput("this chat template or tokenizer changes a text with what follows it; use Engine.generate.")
    return alone[len(context) :] + ids_of(tokenizer, asked.removeprefix(before) + after)


def _opened(tokenizer: Any, text: str) -> tuple[str, list[int]]:
    """A user's message that begins with a text, up to that text's end: as the template writes it, and its ids."""
    if tokenizer.chat_template:
        before = around(tokenizer, text)[0]
        return before, ids_of(tokenizer, before)
    ids = list(tokenizer(text).input_ids)
    closed = ids_of(tokenizer, text)[-1:] != ids[-1:]  # by an id that ends every text
    return text, ids[:-1] if closed else ids


def around(tokenizer: Any, text: str = "", **options: Any) -> tuple[str, str]:
    """The prompt of a user's message that begins with a text, up to that text's end, and what comes after the message.

    options: for the chat template
    """
    if not tokenizer.chat_template:
        return text, ""
    mark = MARK * (1 + max(map(len, re.findall(f"{MARK}+", text)), default=0))
    chat = [{"role": "user", "content": text + mark}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False, **options)
    before, _, after = prompt.rpartition(mark)
    return before, after


def beginning(tokenizer: Any) -> str:
    """What this tokenizer puts before every text, if it does."""
    ids = tokenizer("a").input_ids
    return tokenizer.bos_token if tokenizer.bos_token and ids[0] == tokenizer.bos_token_id else ""


def ids_of(tokenizer: Any, text: str) -> list[int]:
    """Of part of a prompt: nothing is put around it."""
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How much of their beginning two have in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def ends(model: Any, tokenizer: Any) -> set[int]:
    """Every token that ends an answer: the model's own, the tokenizer's, and what ends a turn of a chat."""
    found = model.generation_config.eos_token_id
    found = set(found) if isinstance(found, list | tuple) else {found}
    template = getattr(tokenizer, "chat_template", None)
    turn = end_of_turn(tokenizer, template) if isinstance(template, str) else None
    return {end for end in found | {getattr(tokenizer, "eos_token_id", None), turn} if end is not None}


@lru_cache(maxsize=8)
def end_of_turn(tokenizer: Any, template: str) -> int | None:
    """The first special token this template puts after an assistant's message."""
    from jinja2 import TemplateError

    mark = "#######"
    chat = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": mark}]
    try:
        text = tokenizer.apply_chat_template(chat, chat_template=template, tokenize=False)
    except TemplateError:  # one that is not for chats of this kind
        return None
    special = {id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
    special |= set(tokenizer.all_special_ids)
    after = tokenizer(text.partition(mark)[2], add_special_tokens=False).input_ids
    return next((id_ for id_ in after if id_ in special), None)
