"""Chat templates: from text to input ids, and the ids that end an answer."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kvkeep.errors import BadInput, BadParameter
from kvkeep.model.hf_cache import vocabulary_size
from kvkeep.model.user_text import UserText, ids_of

MARK = "\ue000"  # private use area: no tokenizer or template gives it a meaning
EXAMPLE_QUESTION = "What"  # stands for any question


def encode(
    tokenizer: Any,
    text: str | list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    allow_special_tokens: bool = False,
) -> Tensor:
    """A user's message, or a whole chat: ids [1, tokens], through the chat template where there is one, one BOS.

    tools: functions the model may call, as JSON schemas, for the template
    allow_special_tokens: what looks like a control token in messages or tools is one; by default it is text
    """
    chat = [{"role": "user", "content": text}] if isinstance(text, str) else text
    user = UserText(tokenizer, chat, tools, allow_special_tokens=allow_special_tokens)
    if tokenizer.chat_template:
        return torch.tensor([user.ids(_apply_template(tokenizer, user.hide(chat), user.hide(tools)))])
    if tools:
        raise BadParameter("tools= need a chat template, and this tokenizer has none; use a model for chats.")
    if not isinstance(text, str):
        text = "\n\n".join(message.get("content") or "" for message in chat) + "\n\n"
    return torch.tensor([_with_bos(user, user.hide(text))])


def _with_bos(user: UserText, text: str) -> list[int]:
    """Ids of a hidden text with the BOS and EOS that the tokenizer adds to every text."""
    if not user.hidden:
        return list(user.tokenizer(text, verbose=False).input_ids)
    around, letter = list(user.tokenizer("a").input_ids), ids_of(user.tokenizer, "a")
    start = next(i for i in range(len(around)) if around[i : i + len(letter)] == letter)
    return around[:start] + user.ids(text) + around[start + len(letter) :]


def _apply_template(tokenizer: Any, chat: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False, tools=tools)
    except (TemplateError, TypeError, ValueError) as error:
        raise BadInput(f"the model's chat template refuses these messages: {error}") from error


def check_text(name: str, value: Any, empty: bool = False) -> None:
    """Refuse what is not a text, or empty. empty: white space is allowed"""
    if not isinstance(value, str):
        raise BadParameter(f"{name}={reprlib.repr(value)} is a {type(value).__name__}; give a text.")
    if not (value.strip() or empty):
        raise BadInput(f"the {name} is empty; give the model something to read.")


def check_messages(messages: Any) -> None:
    """Refuse what is not a conversation that ends with a message to answer."""
    if not isinstance(messages, list | tuple) or not all(isinstance(each, Mapping) for each in messages):
        raise BadParameter(f"messages={reprlib.repr(messages)}: give a list of {{'role': 'user', 'content': '…'}}.")
    if not messages or messages[-1].get("role") == "assistant":
        raise BadInput("a chat ends with a message to answer; give at least one, the last not the assistant's.")
    for number, each in enumerate(messages):
        check_text(f"role of message {number}", each.get("role"))
        if not isinstance(each.get("content"), str) and not (each.get("content") is None and each.get("tool_calls")):
            raise BadParameter(f"message {number} has content {reprlib.repr(each.get('content'))}; give a text.")


def check_tools(tools: Any) -> None:
    """Refuse what are not functions a model may call."""
    if tools is not None and not (isinstance(tools, list | tuple) and all(isinstance(each, Mapping) for each in tools)):
        raise BadParameter(f"tools={reprlib.repr(tools)}: give a list of JSON schemas of functions.")


def check_tokenizer(tokenizer: Any) -> None:
    """Refuse what cannot encode and decode a text."""
    if not all(hasattr(tokenizer, name) for name in ("__call__", "decode", "chat_template", "eos_token_id")):
        raise BadParameter(f"tokenizer={reprlib.repr(tokenizer)} is a {type(tokenizer).__name__}; give the model's.")


def check_ids(model: Any, ids: Any, name: str = "prompt") -> Tensor:
    """Refuse what are not token ids of this model. -> [n]"""
    try:
        found = torch.as_tensor(ids).cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        kinds = "a text, messages, or token ids" if name == "prompt" else "token ids"
        raise BadParameter(f"{name}={reprlib.repr(ids)}: give {kinds} ({error}).") from None
    size = vocabulary_size(model)
    if found.dim() != 1 or found.dtype.is_floating_point or found.dtype == torch.bool or not len(found):
        raise BadParameter(f"{name} has shape {list(found.shape)} of {found.dtype}; give a list of token ids.")
    if not 0 <= int(found.min()) <= int(found.max()) < size:
        least, most = int(found.min()), int(found.max())
        raise BadParameter(f"{name}: token ids are {least} to {most}; this model's are 0 to {size - 1}.")
    return found.long()


def join_question(text: str, question: str) -> str:
    """One message of a text and a question about it."""
    return f"{text}\n\n{question}"


def with_question(prompt: str, question: str | None = None) -> str:
    """A prompt and, after a blank line, the question, if there is one."""
    check_text("prompt", prompt, empty=True)
    check_text("question", "" if question is None else question, empty=True)
    text = join_question(prompt, question) if question and question.strip() else prompt
    check_text("prompt", text)
    return text


def context_ids(tokenizer: Any, text: str, allow_special_tokens: bool = False) -> list[int]:
    """The ids of the template's beginning and of the text that no question after the text can change.

    Tokenizers join the end of a text to the blank line that follows (".\n\n" is one token of Llama 3's and Qwen's).
    A token that such a line changes is left to the question, so that both together are the ids of the whole prompt.
    """
    user = UserText(tokenizer, text, allow_special_tokens=allow_special_tokens)
    alone, followed = (_up_to_text(user, each)[1] for each in (text, join_question(text, EXAMPLE_QUESTION)))
    if not (ids := alone[: common_prefix_length(alone, followed)]):
        raise BadInput(f"text={text!r} is too short to be prefilled without a question; use Engine.generate.")
    return ids


def question_ids(
    tokenizer: Any, text: str, question: str, context: list[int], allow_special_tokens: bool = False
) -> list[int]:
    """The ids after `context_ids(text)`: together, those of `encode` for text and question.

    Where a tokenizer joins the text to this question, but not to others, no ids have both as a prefix: then the rest of
    the text and the question are encoded separately, each character once.
    """
    both = join_question(text, question)
    whole = encode(tokenizer, both, allow_special_tokens=allow_special_tokens)[0].tolist()
    if whole[: len(context)] == context:
        return whole[len(context) :]
    user = UserText(tokenizer, both, allow_special_tokens=allow_special_tokens)
    before, alone = _up_to_text(user, text)
    asked, after = split_template(tokenizer, user.hide(both))
    if alone[: len(context)] != context or not asked.startswith(before):
        raise BadInput("this chat template or tokenizer changes a text depending on what follows; use Engine.generate.")
    return alone[len(context) :] + user.ids(asked.removeprefix(before) + after)


def _up_to_text(user: UserText, text: str) -> tuple[str, list[int]]:
    """The prompt of a user's message that begins with a text, up to the text's end: as a string, and its ids."""
    text = user.hide(text)
    if user.tokenizer.chat_template:
        text = split_template(user.tokenizer, text)[0]
        return text, user.ids(text)
    ids = _with_bos(user, text)
    has_eos = user.ids(text)[-1:] != ids[-1:]  # the tokenizer appends one to every text
    return text, ids[:-1] if has_eos else ids


def split_template(tokenizer: Any, text: str = "", **options: Any) -> tuple[str, str]:
    """The prompt of a user's message that begins with a text, up to the text's end, and what follows the message.

    options: for the chat template
    """
    if not tokenizer.chat_template:
        return text, ""
    mark = MARK * (1 + max(map(len, re.findall(f"{MARK}+", text)), default=0))
    chat = [{"role": "user", "content": text + mark}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False, **options)
    before, _, after = prompt.rpartition(mark)
    return before, after


def start_of_message(tokenizer: Any) -> list[int]:
    """Ids of what the template puts before a user's first message."""
    return ids_of(tokenizer, split_template(tokenizer)[0])


def end_of_message(tokenizer: Any) -> list[int]:
    """Ids of what the template puts between a user's message and the answer; without one, of a line's end."""
    return ids_of(tokenizer, split_template(tokenizer)[1] or "\n")


def bos_text(tokenizer: Any) -> str:
    """The BOS token, if this tokenizer puts one before every text."""
    ids = tokenizer("a").input_ids
    return tokenizer.bos_token if tokenizer.bos_token and ids[0] == tokenizer.bos_token_id else ""


def common_prefix_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Length of the longest common prefix."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def eos_token_ids(model: Any, tokenizer: Any) -> set[int]:
    """Every token that ends an answer: the model's EOS, the tokenizer's, and the template's end of turn."""
    found = model.generation_config.eos_token_id
    found = set(found) if isinstance(found, list | tuple) else {found}
    template = getattr(tokenizer, "chat_template", None)
    turn = end_of_turn(tokenizer, template) if isinstance(template, str) else None
    return {id_ for id_ in found | {getattr(tokenizer, "eos_token_id", None), turn} if id_ is not None}


@lru_cache(maxsize=8)
def end_of_turn(tokenizer: Any, template: str) -> int | None:
    """The first special token this template puts after an assistant's message."""
    from jinja2 import TemplateError

    mark = "#######"
    chat = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": mark}]
    try:
        text = tokenizer.apply_chat_template(chat, chat_template=template, tokenize=False)
    except TemplateError:  # a template for other chats
        return None
    special = {id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
    special |= set(tokenizer.all_special_ids)
    after = tokenizer(text.partition(mark)[2], add_special_tokens=False).input_ids
    return next((id_ for id_ in after if id_ in special), None)
