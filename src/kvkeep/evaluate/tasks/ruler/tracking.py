"""Variable tracking: a chain of assignments among noise, after one solved example."""

from __future__ import annotations

import random
import string
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy

from kvkeep.errors import BadParameter
from kvkeep.evaluate.tasks.ruler.frame import Drawn, Frame, Prompt
from kvkeep.evaluate.tasks.ruler.niah import NOISE

CONTEXT = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
QUESTION = "Question: Find all variables that are assigned the value {value} in the text above."
PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, "
    "{many} variables are assigned the value {value}, they are: "
)
SIZE = 5  # variables of a chain: four hops
EXAMPLE_LENGTH, EXAMPLE_STEP, EXAMPLE_VALUE = 500, 5, "12345"


def chains(frame: Frame, file: Path | None) -> Iterator[Drawn]:
    drawn = Chains(random.Random(frame.seed), numpy.random.RandomState(frame.seed))
    example = drawn.example(frame)
    step = 5 if frame.short else 10
    units = frame.units(drawn.draw, step, extra=frame.count(example))
    return frame.drawn(lambda units: drawn.after(example, units), units, step)


@dataclass(frozen=True)
class Chains:
    """The draws of one run: names and places come from Python's generator, values from numpy's."""

    rng: random.Random
    values: numpy.random.RandomState

    def draw(self, units: int) -> Prompt:
        return self._prompt(self._names(5), self._value(), units)

    def draw_example(self, units: int) -> Prompt:
        return self._prompt(self._names(3), EXAMPLE_VALUE, units)

    def example(self, frame: Frame) -> str:
        """Draw a solved example in 500 tokens; or five lines, where a tokenizer makes more of them."""
        small = replace(frame, asked=EXAMPLE_LENGTH, answer=0)
        units = small.units(self.draw_example, EXAMPLE_STEP)
        try:
            prompt = small.fitting(self.draw_example, units, EXAMPLE_STEP).prompt
        except BadParameter:
            prompt = self.draw_example(EXAMPLE_STEP)
        return f"{prompt.text} {' '.join(prompt.answers)}\n"

    def after(self, example: str, units: int) -> Prompt:
        prompt = self.draw(units)
        return prompt._replace(context=f"{self._renamed(example)}\n{prompt.context}")

    def _renamed(self, example: str) -> str:
        """The example with other names and another value: one after the other, so a new name may be renamed again."""
        for name in example.split()[-SIZE:]:
            example = example.replace(name, self._name(len(name)))
        return example.replace(EXAMPLE_VALUE, self._value())

    def _prompt(self, names: list[str], value: str, units: int) -> Prompt:
        assigned = [f"VAR {names[0]} = {value}"]
        assigned += [f"VAR {name} = VAR {before} " for before, name in pairwise(names)]
        lines = [NOISE] * max(units, SIZE)
        for inserted, place in enumerate(sorted(self.rng.sample(range(len(lines)), SIZE))):
            lines.insert(place + inserted, assigned[inserted])
        context = CONTEXT.format(context="\n".join(lines))
        prefix = PREFIX.format(value=value, many=SIZE)
        return Prompt(context, QUESTION.format(value=value), prefix, tuple(names))

    def _names(self, letters: int) -> list[str]:
        names: list[str] = []
        while len(set(names)) < SIZE:
            names = [self._name(letters) for _ in range(SIZE)]
        return names

    def _name(self, letters: int) -> str:
        return "".join(self.rng.choices(string.ascii_uppercase, k=letters))

    def _value(self) -> str:
        return str(self.values.randint(10000, 99999))
