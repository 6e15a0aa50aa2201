"""What a prompt may be, its token ids, and where these may be cut."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from kvkeep.engine.sequence import SequenceConfig
from kvkeep.errors import BadParameter
from kvkeep.model.chat import check_ids, check_messages, check_tools, end_of_turn, with_question

Prompt = str | list[dict[str, Any]] | list[int] | Tensor  # a text, the messages of a chat, or token ids [n]
LEAST_PART = 32  # tokens: parts are not shorter, but for the last
LONGEST_PART = 1024  # of requests that share long texts


class ChatIds(list[int]):
    """Token ids of the messages of a chat, for several requests."""


def is_chat(prompt: Prompt) -> bool:
    return isinstance(prompt, ChatIds) or (isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict))


def prompt_ids(
    config: SequenceConfig, prompt: Prompt, question: str | None = None, tools: list[dict[str, Any]] | None = None
) -> Tensor:
    """Encode a prompt through the chat template; token ids stay as they are. -> [n]"""
    check_tools(tools)
    if isinstance(prompt, str) and not tools:
        return config.encode(with_question(prompt, question))
    if question is not None:
        raise BadParameter(f"question={question!r} follows a text; put it into the messages or token ids.")
    if not isinstance(prompt, str | list | tuple | Tensor):  # one message is none of these, either
        kind = type(prompt).__name__
        raise BadParameter(f"prompt={reprlib.repr(prompt)} is a {kind}; give a text, a list of messages, or token ids.")
    if isinstance(prompt, Tensor) or (prompt and isinstance(prompt[0], int)):
        return check_ids(config.model, prompt)
    messages: Any = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    check_messages(messages)
    return config.encode(messages, tools)


def only_text(prompt: Prompt) -> str:
    """A question about a context: a text, or the only message of a chat."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(message := prompt[0], dict):
        check_messages(prompt)
        return message["content"]
    if not isinstance(prompt, str):
        raise BadParameter("a question about a context is a text, or one message; put what was said before into it.")
    return prompt


def check_prompts(prompts: Any) -> list[str]:
    """Refuse what is not a list of texts."""
    if isinstance(prompts, bytes | Mapping | Tensor) or not isinstance(prompts, Iterable):
        kind = type(prompts).__name__
        raise BadParameter(f"prompt={reprlib.repr(prompts)} is a {kind}; give a text, or a list of texts.")
    found = list(prompts)
    for number, each in enumerate(found):
        if not isinstance(each, str):
            raise BadParameter(f"prompt {number} of {len(found)} is {reprlib.repr(each)}; give a list of texts.")
    return found


def end_of_message(config: SequenceConfig) -> int | None:
    """The token that ends a message."""
    template = config.tokenizer.chat_template
    return end_of_turn(config.tokenizer, template) if isinstance(template, str) else None


def newest_message(config: SequenceConfig, ids: Tensor) -> int:
    """Where the newest message of a chat begins."""
    end = end_of_message(config)
    ends = [] if end is None else (ids == end).nonzero()[:, 0].tolist()
    return ends[-2] + 1 if len(ends) > 1 else 0


def cuts_of(ids: Tensor, end_of_turn: int | None, long_texts: bool = False) -> tuple[int, ...]:
    """The ends of the parts of a prompt, but for the last: after messages; of long texts, every LONGEST_PART tokens."""
    cuts, ends = [0], (ids[:-1] == end_of_turn).nonzero()[:, 0].add(1).tolist() if end_of_turn is not None else []
    for end in [*ends, len(ids)]:
        while long_texts and end - cuts[-1] > LONGEST_PART:
            cuts.append(cuts[-1] + LONGEST_PART)
        if end < len(ids) and end - cuts[-1] >= LEAST_PART:
            cuts.append(end)
    return tuple(cuts[1:])
