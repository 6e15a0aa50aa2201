"""Counting words: the ten most common of a numbered list (cwe), the three most frequent of coded words (fwe)."""

from __future__ import annotations

import math
import random
import string
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvkeep.evaluate.tasks.ruler import vocabulary
from kvkeep.evaluate.tasks.ruler.frame import Drawn, Frame, Prompt, largest

LIST = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n{context}\n"
)
LIST_QUESTION = "Question: What are the 10 most common words in the above list?"
LIST_PREFIX = " Answer: The top 10 words that appear most often in the list are:"
CODED = (
    "Read the following coded text and track the frequency of each coded word. "
    "Find the three most frequently appeared coded words. {context}\n"
)
CODED_QUESTION = (
    "Question: Do not provide any explanation. Please ignore the dots '....'. "
    "What are the three most frequently appeared words in the above coded text?"
)
CODED_PREFIX = " Answer: According to the coded text above, the three most frequently appeared words are:"
LETTERS = 6  # of a coded word
ZETA = math.pi**2 / 6  # Riemann's, of 2: the sum of all 1 / rank^2


def common_words(frame: Frame, file: Path | None) -> Iterator[Drawn]:
    """Deviation: where RULER would go on with a longer list of words (near 128K), the list is the end (`capped`)."""
    words = sorted({word for kind in ("noun", "adjective", "verb") for word in vocabulary.words(kind)})
    random.Random(frame.seed).shuffle(words)
    rng, beyond = random.Random(frame.seed), list[int]()
    example, repeats = ((20, 3, 1), (6, 1)) if frame.short else ((40, 10, 3), (30, 3))

    def drawn(count: int, often: int, seldom: int) -> tuple[str, tuple[str, ...]]:
        some = rng.sample(words, max(count, 10))
        every = some[:10] * often + some[10:] * seldom
        random.Random(frame.seed).shuffle(every)
        return LIST.format(context=numbered(every)), tuple(some[:10])

    def draw(count: int) -> Prompt:
        shown, answers = drawn(*example)
        solved = f"{shown}{LIST_QUESTION}{LIST_PREFIX} {numbered(answers)}\n"
        context, answers = drawn(count, *repeats)
        return Prompt(solved + context, LIST_QUESTION, LIST_PREFIX, answers, {"capped": bool(beyond)})

    def fits(count: int) -> bool:
        if count > len(words):
            beyond.append(count)
            return False
        return frame.length(draw(count)) <= frame.room

    each = frame.count(draw(4096).text) / 4096
    return frame.drawn(draw, largest(fits, 10, max(int(frame.room // each) * 2, 20)), 10)


def numbered(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


def frequent_words(frame: Frame, file: Path | None) -> Iterator[Drawn]:
    """The word of a rank makes up n / (rank^2 ZETA) of n words. The first is dots, to be ignored."""
    rng = random.Random(frame.seed)
    space = frame.room - frame.answer
    if space < 4 * 50:
        frame.too_short(4 * 50 + frame.answer)
    step, count = space // 32, space // LETTERS
    words = _coded_words(rng, frame.seed, space // 50)
    while frame.length(_coded(words, frame.seed, count)) < frame.room:
        count += step
    for _ in range(frame.samples):
        yield _fitting(frame, _coded_words(rng, frame.seed, space // 50), count - step, step)


def _fitting(frame: Frame, words: list[str], count: int, step: int) -> Drawn:
    fewest = math.ceil(4**2 * ZETA)  # all that is asked for is there
    while count >= fewest:
        prompt = _coded(words, frame.seed, count)
        if (length := frame.length(prompt)) <= frame.room:
            return Drawn(prompt, length)
        count -= step
    frame.too_short(frame.length(_coded(words, frame.seed, fewest + step)))


def _coded_words(rng: random.Random, seed: int, size: int) -> list[str]:
    words: set[str] = set()
    while len(words) < size:
        words.add("".join(rng.choices(string.ascii_lowercase, k=LETTERS)))
    ranked = sorted(words)
    random.Random(seed).shuffle(ranked)
    return ["...", *ranked[1:]]


def _coded(words: list[str], seed: int, count: int) -> Prompt:
    times = [int(count * rank**-2.0 / ZETA) for rank in range(1, len(words) + 1)]
    every = [word for word, often in zip(words, times, strict=True) for _ in range(often)]
    random.Random(seed).shuffle(every)
    return Prompt(CODED.format(context=" ".join(every)), CODED_QUESTION, CODED_PREFIX, tuple(words[1:4]))
