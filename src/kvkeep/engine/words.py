"""Between tokens and text: pieces as they come, and where sentences end."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ENDS = (".", "!", "?", "…", "。", "！", "？")
CLOSING = " \t\r\n\"'”’)]}»」』*_`"


class Unfolding:
    """The text of tokens one by one. Half a character waits for the rest."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.text = ""

    def add(self, token: int) -> str:
        """-> what this token adds"""
        self.ids.append(token)
        text = self.tokenizer.decode(self.ids, skip_special_tokens=True)
        return "" if text.endswith("\N{REPLACEMENT CHARACTER}") else self._grown(text)

    def end(self) -> str:
        """-> what was still waiting"""
        return self._grown(self.tokenizer.decode(self.ids, skip_special_tokens=True))

    def _grown(self, text: str) -> str:
        new, self.text = text[len(self.text) :], text
        return new


class Sentences:
    """Which tokens end a sentence, told by their own text."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.known: dict[int, bool] = {}

    def ends(self, ids: Tensor) -> Tensor:
        """ids [n] -> [n] float, 1 for an end"""
        return torch.tensor([float(self._ends(token)) for token in ids.tolist()])

    def _ends(self, token: int) -> bool:
        if token not in self.known:
            text = self.tokenizer.decode([token])
            self.known[token] = "\n\n" in text or text.rstrip(CLOSING).endswith(ENDS)
        return self.known[token]
