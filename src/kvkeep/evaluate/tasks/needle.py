"""Needle in a haystack: a sentence at some depth of a text of some length (rules of gkamradt's test, MIT).

A length counts tokens, of which 200 are left to the words around the text and to the answer. Deviation: essays follow
each other by name, as in KVCache-Factory, and not as the disk has them, so a grid is the same everywhere.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvkeep.errors import BadInput, BadParameter
from kvkeep.evaluate.metrics.short_answers import EXPECTED
from kvkeep.evaluate.sample import Sample
from kvkeep.evaluate.tasks.infinitebench import NOISE
from kvkeep.model.user_text import ids_of
from kvkeep.registry import Registry

DEPTHS = (0, 11, 22, 33, 44, 56, 67, 78, 89, 100)  # percent
SEED = 42  # the command's; numbers are drawn by the distance to it, and so the same as before there was a choice
BUFFER = 200
BEFORE, AFTER = "This is a very long story book: <book> ", " </book>.\n"
ASK = " Based on the content of the book, Question: {question}\nAnswer:"


@dataclass(frozen=True)
class Needle:
    """What is hidden, what is asked, what must be said; {number} has seven digits, drawn for every cell."""

    hidden: str
    question: str
    expected: str
    metric: str


NEEDLES = Registry(
    "needle",
    sandwich=Needle(
        f"\nThe best thing to do in San Francisco is {EXPECTED}\n",
        "What is the best thing to do in San Francisco?",
        EXPECTED,
        "niah_kvcachefactory_heatmap",
    ),
    number=Needle(
        "\nThe special magic number for the lighthouse is {number}. Remember it.\n",
        "What is the special magic number for the lighthouse? Answer with the number only.",
        "{number}",
        "longbench_count",  # the share of the numbers in the answer that are the right one
    ),
)


def needle(
    tokenizer: Any,
    lengths: Iterable[int],
    depths: Iterable[float] = DEPTHS,
    folder: str | Path | None = None,
    kind: str = "sandwich",
    seed: int = SEED,
) -> list[Sample]:
    """One sample for every length and depth (percent), in the essays (*.txt) of a folder or, without one, in noise.

    seed: of numbers; a sandwich is always the same.
    """
    lengths, depths = tuple(lengths), tuple(depths)
    _check(lengths, depths)
    straw = _Straw(tokenizer, _haystack(folder), max(lengths))
    return [_sample(straw, kind, length, depth, seed) for length in lengths for depth in depths]


def _check(lengths: tuple[int, ...], depths: tuple[float, ...]) -> None:
    for name, values in (("lengths", lengths), ("depths", depths)):
        if not values or len(set(values)) < len(values):
            raise BadParameter(f"{name}={list(values)}: give one or more, each once.")
    if min(depths) < 0 or max(depths) > 100:
        raise BadParameter(f"depths={list(depths)} are percent, 0 to 100.")


def _sample(straw: _Straw, kind: str, length: int, depth: float, seed: int) -> Sample:
    what = NEEDLES[kind]
    number = str(random.Random(f"{seed - SEED} {length} {depth:g}").randint(1_000_000, 9_999_999))
    drawn = {"seed": seed} if "{number}" in what.hidden else {}
    expected = what.expected.replace("{number}", number)
    text = straw.with_needle(what.hidden.replace("{number}", number), length, depth)
    return Sample(
        f"needle_{kind}",
        f"{length}-{depth:g}",
        ASK.replace("{question}", what.question),
        (expected,),
        what.metric,
        context=BEFORE + text + AFTER,
        max_new_tokens=64,
        extra={"length": length, "depth": depth, "expected_answer": expected, **drawn},
    )


def _haystack(folder: str | Path | None) -> str:
    if folder is None:
        return NOISE
    files = sorted(Path(folder).glob("*.txt"))
    try:
        text = "".join(file.read_text(encoding="utf-8") for file in files)
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"an essay in {str(folder)!r} cannot be read as UTF-8 text ({error}).") from None
    if not text.strip():
        raise BadInput(f"{str(folder)!r} has no text in *.txt files; give a folder of essays, or none for noise.")
    return text


class _Straw:
    """A haystack in tokens, at least as long as asked for; a short one is repeated."""

    def __init__(self, tokenizer: Any, text: str, longest: int):
        self.tokenizer = tokenizer
        while len(ids := ids_of(tokenizer, text)) < longest:
            text += text
        self.ids = ids[:longest]
        self.periods = set(ids_of(tokenizer, "."))

    def with_needle(self, hidden: str, length: int, depth: float) -> str:
        """The first tokens of the haystack, and the needle where the sentence before its depth ends."""
        needle = ids_of(self.tokenizer, hidden)
        room = length - BUFFER - len(needle)
        if room < 1:
            raise BadParameter(f"length={length} has no room for a needle of {len(needle)} tokens and {BUFFER} free.")
        straw = ids_of(self.tokenizer, self._decode(self.ids[:length]))[:room]
        end = len(straw)
        if depth < 100:
            end = int(len(straw) * (depth / 100))
            while end and straw[end - 1] not in self.periods:
                end -= 1
        return self._decode([*straw[:end], *needle, *straw[end:]])

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)
