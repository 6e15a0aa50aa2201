"""Needles in a haystack: magic numbers for keys, some of which are asked for.

Deviation: RULER puts the model's chat template in the singular, too ("You is a helpful assistant").
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvkeep.evaluate.tasks.ruler import vocabulary
from kvkeep.evaluate.tasks.ruler.frame import Drawn, Frame, Prompt
from kvkeep.evaluate.tasks.ruler.haystack import NOISE, Essays

NEEDLE = "One of the special magic {kind} for {key} is: {value}."
CONTEXT = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\n"
)
QUESTION = "What are all the special magic {kind} for {query} mentioned in the provided text?"
PREFIX = " The special magic {kind} for {query} mentioned in the provided text are"
SINGULAR = {"Some": "A", "are all": "is", "are": "is"}
DEPTHS = [round(100 * i / 39) for i in range(40)]  # percent

FRESH: dict[str, Callable[[random.Random], str]] = {
    "numbers": lambda rng: str(rng.randint(10**6, 10**7 - 1)),
    "words": lambda rng: rng.choice(vocabulary.pairs()),
    "uuids": lambda rng: str(uuid.UUID(int=rng.getrandbits(128), version=4)),
}


@dataclass(frozen=True)
class Needles:
    haystack: str = "essay"  # or noise, or needles
    keys: str = "words"
    values: str = "numbers"
    n_keys: int = 1
    n_values: int = 1  # of every key
    n_asked: int = 1  # keys

    @property
    def needs_words(self) -> bool:
        return self.keys == "words"

    def __call__(self, frame: Frame, file: Path | None) -> Iterator[Drawn]:
        hidden = Hidden(self, random.Random(frame.seed), frame.seed, Essays(file) if file else None)
        step = 500 if hidden.essays else 5 if frame.short else 25
        return frame.drawn(hidden.draw, frame.units(hidden.draw, step), step)


@dataclass(frozen=True)
class Hidden:
    """The draws of one run."""

    spec: Needles
    rng: random.Random
    seed: int
    essays: Essays | None

    def draw(self, units: int) -> Prompt:
        spec = self.spec
        needles = [(self._fresh(spec.keys), self._values()) for _ in range(max(spec.n_keys, spec.n_asked))]
        lines = [self._line(key, value) for key, values in needles for value in values]
        random.Random(self.seed).shuffle(lines)  # always the same order
        context = self._in_essays(lines, units) if self.essays else self._in_lines(lines, units)
        asked = self.rng.sample(needles, spec.n_asked)
        return self._prompt(context, [key for key, _ in asked], [value for _, values in asked for value in values])

    def _fresh(self, kind: str) -> str:
        return FRESH[kind](self.rng)

    def _values(self) -> list[str]:
        return [self._fresh(self.spec.values) for _ in range(self.spec.n_values)]

    def _line(self, key: str, value: str) -> str:
        return NEEDLE.format(kind=self.spec.values, key=key, value=value)

    def _in_essays(self, needles: list[str], words: int) -> str:
        assert self.essays
        text = self.essays.sentences(words)
        places = sorted(int(len(text) * (depth / 100)) for depth in self.rng.sample(DEPTHS, len(needles)))
        pieces, last = [], 0
        for place, needle in zip(places, needles, strict=True):
            pieces += [" ".join(text[last:place]), needle]  # the piece may be empty, and leaves its blank
            last = place
        return " ".join([*pieces, " ".join(text[last:])])

    def _in_lines(self, needles: list[str], count: int) -> str:
        spec = self.spec
        lines = [NOISE] * count
        if spec.haystack == "needles":
            lines = [self._line(self._fresh(spec.keys), self._fresh(spec.values)) for _ in range(count)]
        places = sorted(self.rng.sample(range(count), len(needles)), reverse=True)
        for place, needle in zip(places, needles, strict=True):
            lines.insert(place, needle)
        return "\n".join(lines)

    def _prompt(self, context: str, keys: list[str], answers: list[str]) -> Prompt:
        templates, kind = [CONTEXT, QUESTION, PREFIX], self.spec.values
        if len(answers) == 1:
            for many, one in SINGULAR.items():
                templates = [template.replace(many, one) for template in templates]
            kind = kind.removesuffix("s")
        query = f"{', '.join(keys[:-1])}, and {keys[-1]}" if len(keys) > 1 else keys[0]
        text, question, prefix = (each.format(kind=kind, context=context, query=query) for each in templates)
        extra: dict[str, int | str] = {"offset": text.find(answers[0])}  # of the first answer, in characters
        if self.essays:
            extra["splitter"] = self.essays.splitter
        return Prompt(text, question, prefix, tuple(answers), extra)
