"""Needles in a haystack: magic numbers for keys, some of which are asked for.

They are hidden in one line of noise over and over, or in essays cut into sentences.

Deviation: RULER puts the model's chat template in the singular, too ("You is a helpful assistant").
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import random
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvkeep.errors import BadInput
from kvkeep.evaluate.tasks.build import read_text
from kvkeep.evaluate.tasks.ruler import vocabulary
from kvkeep.evaluate.tasks.ruler.frame import Drawn, Frame, Prompt

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
CONTEXT = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\n"
)
QUESTION = "What are all the special magic {kind} for {query} mentioned in the provided text?"
PREFIX = " The special magic {kind} for {query} mentioned in the provided text are"
SINGULAR = {"Some": "A", "are all": "is", "are": "is"}
DEPTHS = [round(100 * i / 39) for i in range(40)]  # percent
ABBREVIATED = re.compile(r"(?:\b(?:Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|vs|etc|e\.g|i\.e|cf|No|Inc|Co|Corp)|\b[A-Z])\.$")
BOUNDARY = re.compile(r"""(?<=[.!?])(["')\]]*) +(?=["'(\[]*[A-Z0-9])""")

Splitter = Callable[[str], Sequence[str]]

FRESH: dict[str, Callable[[random.Random], str]] = {
    "numbers": lambda rng: str(rng.randint(10**6, 10**7 - 1)),
    "words": lambda rng: rng.choice(vocabulary.pairs()),
    "uuids": lambda rng: str(uuid.UUID(int=rng.getrandbits(128), version=4)),
}


@dataclass(frozen=True)
class Needles:
    """What is hidden in what, and the draws of one run."""

    rng: random.Random
    seed: int
    essays: Essays | None
    haystack: str = "essay"  # or noise, or needles
    keys: str = "words"
    values: str = "numbers"
    n_keys: int = 1
    n_values: int = 1  # of every key
    n_asked: int = 1  # keys

    def draw(self, units: int) -> Prompt:
        needles = [(self._fresh(self.keys), self._values()) for _ in range(max(self.n_keys, self.n_asked))]
        lines = [self._line(key, value) for key, values in needles for value in values]
        random.Random(self.seed).shuffle(lines)  # always the same order
        context = self._in_essays(lines, units) if self.essays else self._in_lines(lines, units)
        asked = self.rng.sample(needles, self.n_asked)
        return self._prompt(context, [key for key, _ in asked], [value for _, values in asked for value in values])

    def _fresh(self, kind: str) -> str:
        return FRESH[kind](self.rng)

    def _values(self) -> list[str]:
        return [self._fresh(self.values) for _ in range(self.n_values)]

    def _line(self, key: str, value: str) -> str:
        return NEEDLE.format(kind=self.values, key=key, value=value)

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
        lines = [NOISE] * count
        if self.haystack == "needles":
            lines = [self._line(self._fresh(self.keys), self._fresh(self.values)) for _ in range(count)]
        places = sorted(self.rng.sample(range(count), len(needles)), reverse=True)
        for place, needle in zip(places, needles, strict=True):
            lines.insert(place, needle)
        return "\n".join(lines)

    def _prompt(self, context: str, keys: list[str], answers: list[str]) -> Prompt:
        templates, kind = [CONTEXT, QUESTION, PREFIX], self.values
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


def needles(frame: Frame, file: Path | None, **what: Any) -> Iterator[Drawn]:
    hidden = Needles(random.Random(frame.seed), frame.seed, Essays(file) if file else None, **what)
    step = 500 if hidden.essays else 5 if frame.short else 25
    return frame.drawn(hidden.draw, frame.units(hidden.draw, step), step)


class Essays:
    """Words of a text file, of a folder's *.txt in order, or of RULER's own PaulGrahamEssays.json."""

    def __init__(self, path: str | Path):
        self.words = re.sub(r"\s+", " ", _read(Path(path))).split(" ")
        if not any(self.words):
            raise BadInput(f"haystack={str(path)!r} has no text in it.")
        self.splitter, self._split = splitter()
        self._sentences: dict[int, Sequence[str]] = {}

    def sentences(self, words: int) -> Sequence[str]:
        """The first so many words, from the beginning again where the text is too short."""
        if words not in self._sentences:
            text = " ".join(itertools.islice(itertools.cycle(self.words), words))
            self._sentences[words] = self._split(text.strip())
        return self._sentences[words]


def splitter() -> tuple[str, Splitter]:
    """NLTK's, as RULER uses, where it and its punkt_tab data are installed; else our own, which is named in samples."""
    if importlib.util.find_spec("nltk") is not None:
        import nltk

        try:
            nltk.data.find("tokenizers/punkt_tab/english/")
            return "nltk punkt_tab", nltk.tokenize.sent_tokenize
        except LookupError:
            pass
    return "plain", sentences


def sentences(text: str) -> list[str]:
    """Cut after . ! ? where a capital or a number follows, but not after an initial or a common abbreviation."""
    found, start = [], 0
    for match in BOUNDARY.finditer(text):
        if not ABBREVIATED.search(text, max(start, match.start() - 8), match.start()):
            found.append(text[start : match.end(1)])
            start = match.end()
    return [*found, text[start:]]


def _read(path: Path) -> str:
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    if not files:
        raise BadInput(f"haystack={str(path)!r} has no *.txt in it.")
    text = "".join(read_text(file, "; give a text or a folder", "haystack=") for file in files)
    try:
        return str(json.loads(text)["text"]) if path.suffix == ".json" else text
    except (ValueError, TypeError, KeyError):
        raise BadInput(f'haystack={str(path)!r} is not {{"text": "…"}}, as RULER\'s essay file is.') from None
