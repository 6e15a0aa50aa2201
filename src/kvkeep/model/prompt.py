"""From text to the ids a model was trained to see, and the ids that end what it writes."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def encode(tokenizer: Any, text: str | list[dict[str, str]]) -> Tensor:
    """A user's message, or a whole chat: ids [1, tokens], through the chat template where there is one, one BOS."""
    chat = [{"role": "user", "content": text}] if isinstance(text, str) else text
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    elif not isinstance(text, str):
        text = "\n\n".join(message["content"] for message in chat) + "\n\n"
    return tokenizer(text, return_tensors="pt", add_special_tokens=not tokenizer.chat_template).input_ids


def ends(model: Any, tokenizer: Any) -> set[int]:
    """Every token that ends an answer: the model's own, and the tokenizer's."""
    found = model.generation_config.eos_token_id
    found = set(found) if isinstance(found, list | tuple) else {found}
    return {end for end in found | {getattr(tokenizer, "eos_token_id", None)} if end is not None}
