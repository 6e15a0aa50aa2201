"""A tokenizer for models of random weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


class Characters:
    """A tokenizer of one token per character."""

    chat_template = eos_token_id = bos_token = bos_token_id = None

    def __call__(self, text: str, return_tensors: str | None = None, **_: Any) -> Any:
        ids = [ord(character) % 200 for character in text]
        return SimpleNamespace(input_ids=torch.tensor([ids]) if return_tensors else ids)

    def decode(self, ids: Any, **_: Any) -> str:
        return "x" * len(ids)

    def convert_ids_to_tokens(self, ids: Any) -> list[str]:
        return list(map(str, ids))
