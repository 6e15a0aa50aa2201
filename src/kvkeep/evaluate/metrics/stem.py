"""Porter's stemmer (1980) with the departures of NLTK, which `rouge_score` stems with."""

from __future__ import annotations

import re

_IRREGULAR = {
    "skies": "sky",
    "dying": "die",
    "lying": "lie",
    "tying": "tie",
    "innings": "inning",
    "outings": "outing",
    "cannings": "canning",
}
_UNCHANGED = "sky news inning outing canning howe proceed exceed succeed"
_IRREGULAR |= {word: word for word in _UNCHANGED.split()}

_DOUBLE_ENDINGS = (
    "ational>ate tional>tion enci>ence anci>ance izer>ize bli>ble entli>ent eli>e ousli>ous ization>ize ation>ate "
    "ator>ate alism>al iveness>ive fulness>ful ousness>ous aliti>al iviti>ive biliti>ble fulli>ful"
)
_ENDINGS = "icate>ic ative> alize>al iciti>ic ical>ic ful> ness>"
_LAST_ENDINGS = "al ance ence er ic able ible ant ement ment ent ion ou ism ate iti ous ive ize"


def stem(word: str) -> str:
    """The stem of a lower-case word; words of three letters or fewer stay."""
    if len(word) <= 3:
        return word
    if word in _IRREGULAR:
        return _IRREGULAR[word]
    word = _y_to_i(_past(_plural(word)))
    word = _double_ending(word)
    word = _swap(word, _ENDINGS)
    return _final_l(_final_e(_last_ending(word)))


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


def _ends_double(word: str) -> bool:
    return len(word) > 1 and word[-1] == word[-2] and _shape(word)[-1] == "c"


def _ends_short(word: str) -> bool:
    """Consonant, vowel, consonant (but not w, x, y), or two letters, vowel and consonant."""
    shape = _shape(word)
    return (shape[-3:] == "cvc" and word[-1] not in "wxy") or shape == "vc"


def _swap(word: str, table: str) -> str:
    """The first ending that fits is replaced, if what stands before it has a measure."""
    for old, new in (entry.split(">") for entry in table.split()):
        if word.endswith(old):
            before = word.removesuffix(old)
            return before + new if _measure(before) else word
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
        return word[:-1] if _measure(word[:-3]) else word
    found = re.fullmatch("(.*?)(?:ed|ing)", word)
    if not found or "v" not in _shape(found[1]):
        return word
    return _mended(found[1])


def _mended(word: str) -> str:
    """What is left of hoping, hopping and conflated: hope, hop, conflate."""
    if word.endswith(("at", "bl", "iz")):
        return word + "e"
    if _ends_double(word):
        return word if word[-1] in "lsz" else word[:-1]
    return word + "e" if _measure(word) == 1 and _ends_short(word) else word


def _y_to_i(word: str) -> str:
    return word[:-1] + "i" if len(word) > 2 and word[-1] == "y" and _shape(word)[-2] == "c" else word


def _double_ending(word: str) -> str:
    if word.endswith("alli"):
        return _double_ending(word[:-2]) if _measure(word[:-4]) else word
    if word.endswith("logi"):
        return word[:-1] if _measure(word[:-3]) else word
    return _swap(word, _DOUBLE_ENDINGS)


def _last_ending(word: str) -> str:
    for ending in _LAST_ENDINGS.split():
        if word.endswith(ending):
            before = word.removesuffix(ending)
            fits = _measure(before) > 1 and (ending != "ion" or before[-1] in "st")
            return before if fits else word
    return word


def _final_e(word: str) -> str:
    before = word[:-1]
    dropped = word.endswith("e") and (_measure(before) > 1 or (_measure(before) == 1 and not _ends_short(before)))
    return before if dropped else word


def _final_l(word: str) -> str:
    return word[:-1] if word.endswith("ll") and _measure(word[:-1]) > 1 else word
