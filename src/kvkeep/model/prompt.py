"""From text to the ids a model was trained to see, and the ids that end what it writes."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from torch import Tensor


def encode(tokenizer: Any, text: str | list[dict[str, str]]) -> Tensor:
    """A user's message, or a whole chat: ids [1, tokens], through the chat template where there is one, one BOS."""
    chat = [{"role": "user", "content": text}] if isinstance(text, str) else text
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    elif not isinstance(text, str):
        text = "\n\n".join(message["content"] for message in chat) + "\n\n"
    how = {"return_tensors": "pt", "add_special_tokens": not tokenizer.chat_template}
    return tokenizer(text, verbose=False, **how).input_ids  # verbose: warns of lengths that callers check, or allow


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
