"""Rouge as two packages compute it: `rouge` 1.0.1 (LongBench, kvpress) and `rouge_score` 0.1.2 (the others).

They agree on little: the first splits at ".", keeps case and punctuation and counts distinct words; the second splits
at line ends, keeps only [a-z0-9] and counts every word.
"""

from __future__ import annotations

import re
from collections import Counter

from kvkeep.errors import BadInput
from kvkeep.evaluate.metrics.lcs import way_back
from kvkeep.evaluate.metrics.stem import stem
from kvkeep.evaluate.metrics.words import f1

DEEPEST = 990  # steps back before `rouge`, which walks by recursion, hits Python's limit
_NOT_A_WORD = re.compile(r"[^a-z0-9]+")


def rouge_l(hypothesis: str, reference: str) -> float:
    """`rouge` 1.0.1, rouge-l f: distinct words in any longest common subsequence of two sentences.

    BadInput where that package raises: a side without a sentence, or a sentence too long for its recursion.
    """
    said, wanted = _sentences(hypothesis), _sentences(reference)
    if not said or not wanted:
        raise BadInput(
            f"nothing but dots in {hypothesis[:40]!r} or {reference[:40]!r}: rouge needs a sentence in each."
        )
    shared = set().union(*(_shared_words(x, y) for x in wanted for y in said))
    precision = len(shared) / len(set().union(*said))
    recall = len(shared) / len(set().union(*wanted))
    return 2 * precision * recall / (precision + recall + 1e-8)


def _sentences(text: str) -> list[list[str]]:
    """A piece of blanks alone is a sentence of one empty word."""
    return [" ".join(piece.split()).split(" ") for piece in text.split(".") if piece]


def _shared_words(reference: list[str], hypothesis: list[str]) -> set[str]:
    steps = list(way_back(reference, hypothesis))
    if len(steps) > DEEPEST:
        raise BadInput(f"a sentence of {len(hypothesis)} words against one of {len(reference)} is too long for rouge.")
    return {reference[i] for i, _, shared in steps if shared}


def rouge_1(prediction: str, reference: str) -> float:
    """`rouge_score`, rouge1 f-measure, with stemming."""
    return f1([stem(word) for word in _tokens(prediction)], [stem(word) for word in _tokens(reference)])


def rouge_l_sum(prediction: str, reference: str) -> float:
    """`rouge_score`, rougeLsum f-measure: each line of the reference against all lines of the prediction."""
    said = [_tokens(line) for line in prediction.split("\n")]
    wanted = [_tokens(line) for line in reference.split("\n")]
    left = Counter(word for line in said for word in line) & Counter(word for line in wanted for word in line)
    hits = 0
    for line in wanted:
        for word in _union(line, said):
            hits += left[word] > 0
            left[word] -= 1
    if not hits:
        return 0.0
    precision, recall = hits / sum(map(len, said)), hits / sum(map(len, wanted))
    return 2 * precision * recall / (precision + recall)


def _union(line: list[str], others: list[list[str]]) -> list[str]:
    """The words of a line that some other line shares with it."""
    places = {j for other in others for _, j, shared in way_back(other, line) if shared}
    return [line[place] for place in sorted(places)]


def _tokens(text: str) -> list[str]:
    return _NOT_A_WORD.sub(" ", text.lower()).split()
