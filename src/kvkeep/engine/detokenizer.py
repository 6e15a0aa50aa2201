"""Detokenizing an answer token by token, and which tokens end a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

ENDS = (".", "!", "?", "…", "。", "！", "？")
CLOSING = " \t\r\n\"'”’)]}»」』*_`"


def overlap(text: str, mark: str) -> int:
    """Characters at the end of a text that may be the beginning of a mark."""
    return next(size for size in range(min(len(text), len(mark) - 1), -1, -1) if text.endswith(mark[:size]))


@dataclass(eq=False)
class Answer:
    """The tokens of an answer one by one, and their text. An incomplete character is held back until it is complete.

    Only the newest tokens are decoded, after the last returned ones: a text's first token may lose its leading blank.
    """

    tokenizer: Any
    prompt_tokens: int = 0
    ids: list[int] = field(default_factory=list)
    text: str = ""
    first: int = 0
    returned: int = 0  # the text of ids[:returned] was returned
    prefix: str = ""  # the text of ids[first:returned], decoded alone

    def add(self, token: int) -> str:
        """Take a token. -> the text it adds"""
        self.ids.append(token)
        text = self._decode(self.first)
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        if new := text[len(self.prefix) :]:
            self.first, self.returned = self.returned, len(self.ids)
            self.prefix = self._decode(self.first)
            self.text += new
        return new

    def finish(self) -> str:
        """Decode all of it again. -> the text held back so far"""
        text = self._decode(0)
        new, self.text = text[len(self.text) :], text
        return new

    def has_stop(self, stops: Sequence[str], before: int) -> bool:
        """Whether one of these texts ends after the first `before` characters, which were searched before."""
        found = [stop for stop in stops if self.text.find(stop, max(0, before - len(stop) + 1)) >= 0]
        return bool(found) and any(stop in self.text.lstrip() for stop in found)

    def cut(self, stops: Sequence[str], before: int = 0) -> None:
        """End the text before the first of these texts; one at the very beginning does not count.

        before: as in `has_stop`
        """
        begin = len(self.text) - len(self.text.lstrip())
        found = [self.text.find(stop, max(begin, before - len(stop) + 1)) for stop in stops]
        self.text = self.text[: min(at for at in found if at >= 0)]

    def held_from(self, stops: Sequence[str]) -> int:
        """Find where the end of the text may begin a stop, and is not to be shown yet."""
        return len(self.text) - max((overlap(self.text, stop) for stop in stops), default=0)

    def _decode(self, first: int) -> str:
        return self.tokenizer.decode(self.ids[first:], skip_special_tokens=True)


@dataclass
class SentenceBoundaries:
    """Tell which tokens end a sentence, by their own text."""

    tokenizer: Any
    ends: dict[int, bool] = field(default_factory=dict)

    def mark_ends(self, ids: Tensor) -> Tensor:
        """Mark the tokens that end a sentence with 1. ids [n] -> [n] float"""
        return torch.tensor([float(self._is_end(token)) for token in ids.tolist()])

    def _is_end(self, token: int) -> bool:
        if token not in self.ends:
            text = self.tokenizer.decode([token])
            self.ends[token] = "\n\n" in text or text.rstrip(CLOSING).endswith(ENDS)
        return self.ends[token]
