"""Rouge as two packages compute it: `rouge` 1.0.1 (LongBench, kvpress) and `rouge_score` 0.1.2 (the others).

They agree on little: the first splits at ".", keeps case and punctuation and counts distinct words; the second splits
at line ends, keeps only [a-z0-9], counts every word, and stems it: Porter's stemmer (1980), as NLTK changed it.
"""

from __future__ import annotations

import re
from collections import Counter

from kvkeep.errors import BadInput
from kvkeep.evaluate.metrics.words import f1, way_back

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


_STEMS = {
    "skies": "sky",
    "dying": "die",
    "lying": "lie",
    "tying": "tie",
    **dict.fromkeys(("inning", "innings"), "inning"),
    **dict.fromkeys(("outing", "outings"), "outing"),
    **dict.fromkeys(("canning", "cannings"), "canning"),
    **{word: word for word in ("sky", "news", "howe", "proceed", "exceed", "succeed")},
}
_DOUBLE_ENDINGS = (
    "ational>ate tional>tion enci>ence anci>ance izer>ize bli>ble entli>ent eli>e ousli>ous ization>ize ation>ate "
    "ator>ate alism>al iveness>ive fulness>ful ousness>ous aliti>al iviti>ive biliti>ble fulli>ful (?<=l)ogi>og"
)
_ENDINGS = "icate>ic ative> alize>al iciti>ic ical>ic ful> ness>"
_LAST_ENDINGS = (
    "al> ance> ence> er> ic> able> ible> ant> ement> ment> ent> (?<=[st])ion> ou> ism> ate> iti> ous> ive> ize>"
)


def stem(word: str) -> str:
    """The stem of a lower-case word; words of three letters or fewer stay."""
    if len(word) <= 3 or word in _STEMS:
        return _STEMS.get(word, word)
    word = _past(_plural(word))
    if len(word) > 2 and word[-1] == "y" and _shape(word)[-2] == "c":
        word = word[:-1] + "i"
    for endings in ("alli>al", _DOUBLE_ENDINGS, _ENDINGS):
        word = _swap(word, endings)
    return _swap(_final_e(_swap(word, _LAST_ENDINGS, 2)), "(?<=l)l>", 2)


def _shape(word: str) -> str:
    """'c' for each consonant, 'v' for each vowel; y is a vowel after a consonant."""
    shape = ""
    for place, letter in enumerate(word):
        vowel = letter in "aeiou" or (letter == "y" and place > 0 and shape[-1] == "c")
        shape += "v" if vowel else "c"
    return shape


def _measure(word: str) -> int:
    """How often a consonant follows a vowel: the m of Porter's [C](VC)^m[V]."""
    return _shape(word).count("vc")


def _ends_short(word: str) -> bool:
    """Consonant, vowel, consonant (but not w, x, y), or two letters, vowel and consonant."""
    shape = _shape(word)
    return (shape[-3:] == "cvc" and word[-1] not in "wxy") or shape == "vc"


def _swap(word: str, endings: str, least: int = 1) -> str:
    """The first ending that fits is replaced, if what stands before it has at least this measure."""
    for old, new in (entry.split(">") for entry in endings.split()):
        if found := re.search(f"{old}$", word):
            before = word[: found.start()]
            return before + new if _measure(before) >= least else word
    return word


def _plural(word: str) -> str:
    if word.endswith("ies"):
        return word[:-1] if len(word) == 4 else word[:-2]
    if word.endswith("sses"):
        return word[:-2]
    return word[:-1] if re.search("[^s]s$", word) else word


def _past(word: str) -> str:
    if word.endswith("ied"):
        return word[:-1] if len(word) == 4 else word[:-2]
    if word.endswith("eed"):
        return _swap(word, "eed>ee")
    found = re.fullmatch("(.*?)(?:ed|ing)", word)
    return _mended(found[1]) if found and "v" in _shape(found[1]) else word


def _mended(word: str) -> str:
    """What is left of hoping, hopping and conflated: hope, hop, conflate."""
    if word.endswith(("at", "bl", "iz")):
        return word + "e"
    if word[-2:-1] == word[-1] and _shape(word)[-1] == "c":
        return word if word[-1] in "lsz" else word[:-1]
    return word + "e" if _measure(word) == 1 and _ends_short(word) else word


def _final_e(word: str) -> str:
    before = word.removesuffix("e")
    measure = _measure(before)
    return before if measure > 1 or (measure == 1 and not _ends_short(before)) else word
