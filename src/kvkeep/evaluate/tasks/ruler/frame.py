"""How a RULER task finds its size: draw, count tokens, bisect; then draw every sample, smaller where it must be.

Every probe is a draw and moves the random generator on: the order of draws is that of NVIDIA/RULER at c3f5e3b.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from kvkeep.errors import BadParameter

REDRAWS = 100  # at the smallest size; the official code would go on for ever


class Prompt(NamedTuple):
    context: str
    question: str
    prefix: str
    answers: tuple[str, ...]
    extra: Mapping[str, Any] = {}

    @property
    def text(self) -> str:
        return self.context + self.question + self.prefix


class Drawn(NamedTuple):
    prompt: Prompt
    length: int  # tokens of the prompt, plus those kept for the answer


Draw = Callable[[int], Prompt]  # by the number of units: words, lines, documents


@dataclass(frozen=True)
class Frame:
    task: str
    asked: int  # the length in tokens: chat template, prompt and answer
    reserve: int  # of these, for the chat template
    answer: int  # of these, for the answer
    samples: int
    seed: int
    count: Callable[[str], int]  # tokens of a text

    @property
    def room(self) -> int:
        """Tokens of prompt and answer."""
        return self.asked - self.reserve

    @property
    def short(self) -> bool:
        """Below its official lengths, RULER takes smaller steps and repeats words less."""
        return self.asked < 4096

    def length(self, prompt: Prompt) -> int:
        return self.count(prompt.text) + self.answer

    def units(self, draw: Draw, step: int, extra: int = 0) -> int:
        """How many units fit, judged by a few draws. extra: tokens that every sample has besides."""
        each = self.count(draw(step).text) / step
        most = max(int(self.room / each * 3), step * 2)
        return largest(lambda units: self.length(draw(units)) + extra <= self.room, step, most)

    def fitting(self, draw: Draw, units: int, step: int) -> Drawn:
        """A draw that is short enough, each time a step smaller: so one sample may be much shorter than the next."""
        lengths: list[int] = []
        while len(lengths) < REDRAWS:
            prompt = draw(units)
            if (length := self.length(prompt)) <= self.room:
                return Drawn(prompt, length)
            if units > step:
                units -= step
            else:
                lengths.append(length)
        self.too_short(max(lengths))

    def drawn(self, draw: Draw, units: int, step: int) -> Iterator[Drawn]:
        for _ in range(self.samples):
            yield self.fitting(draw, units, step)

    def too_short(self, needed: int) -> NoReturn:
        raise BadParameter(
            f"length={self.asked} cannot hold {self.task}: its smallest prompt and answer take "
            f"{needed + self.reserve} tokens; give at least that, or 4096, RULER's shortest."
        )


def largest(fits: Callable[[int], bool], low: int, high: int) -> int:
    """Bisect for the largest that fits; the lowest where none does."""
    best = low
    while low <= high:
        middle = (low + high) // 2
        if fits(middle):
            best, low = middle, middle + 1
        else:
            high = middle - 1
    return best


def counter(tokenizer: Any) -> Callable[[str], int]:
    """Tokens of a text, without those a tokenizer puts around it."""
    if isinstance(tokenizer, str) or not hasattr(tokenizer, "encode"):
        raise BadParameter(f"{type(tokenizer).__name__} cannot count tokens; give a tokenizer with encode(text).")
    if callable(tokenizer):  # one of transformers', which would warn of texts beyond its model's context length
        return lambda text: len(tokenizer.encode(text, add_special_tokens=False, verbose=False))
    return lambda text: len(tokenizer.encode(text))
