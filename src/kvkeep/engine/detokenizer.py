"""Between tokens and text: pieces as they come, and where sentences end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ENDS = (".", "!", "?", "…", "。", "！", "？")
CLOSING = " \t\r\n\"'”’)]}»」』*_`"


class Unfolding:
    """The text of tokens one by one. Half a character waits for the rest.

    Only the newest tokens are decoded, behind those that showed last: what begins a text may lose its leading blank.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.text = ""
        self.first = self.shown = 0  # ids[:shown] are told
        self.known = ""  # the text of ids[first:shown], by themselves

    def add(self, token: int) -> str:
        """-> what this token adds"""
        self.ids.append(token)
        text = self._decoded(self.first)
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        if new := text[len(self.known) :]:
            self.first, self.shown = self.shown, len(self.ids)
            self.known = self._decoded(self.first)
            self.text += new
        return new

    def end(self) -> str:
        """-> what was still waiting"""
        text = self._decoded(0)
        new, self.text = text[len(self.text) :], text
        return new

    def _decoded(self, first: int) -> str:
        return self.tokenizer.decode(self.ids[first:], skip_special_tokens=True)


@dataclass(frozen=True)
class Answer:
    """What was written last."""

    words: Unfolding
    prompt_tokens: int

    @property
    def text(self) -> str:
        return self.words.text

    @property
    def ids(self) -> list[int]:
        return self.words.ids


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
