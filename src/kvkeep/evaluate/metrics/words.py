"""Texts as words, how far two lists of words overlap, and their longest common subsequence."""

from __future__ import annotations

import re
import string
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from kvkeep.errors import MissingExtra

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_ASCII = str.maketrans("", "", string.punctuation)
_CHINESE = str.maketrans(
    "",
    "",
    string.punctuation
    + "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、"
    + "〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏.",
)


def english_words(text: str) -> list[str]:
    """The words in lower case, without punctuation or articles, as SQuAD does it."""
    return _ARTICLES.sub(" ", text.lower().translate(_ASCII)).split()


def chinese_text(text: str) -> str:
    """The text in lower case, without punctuation or blanks. The list of signs is LongBench's, which forgets 《."""
    return "".join(text.lower().translate(_CHINESE).split())


def chinese_words(text: str) -> list[str]:
    """jieba's words of the raw text, each cleaned; what cleaning leaves empty is dropped."""
    return [word for word in map(chinese_text, segment(text)) if word]


def segment(text: str) -> list[str]:
    """jieba's words: default dictionary, accurate mode."""
    return _jieba().lcut(text)


def _jieba() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # jieba is of 2020, and newer Pythons warn about its source
            import jieba
    except ImportError as error:
        raise MissingExtra(
            "Chinese metrics cut words with jieba, which is missing: pip install kvkeep[eval]"
        ) from error
    jieba.setLogLevel("WARNING")
    return jieba


def f1(predicted: Sequence[str], expected: Sequence[str]) -> float:
    """Harmonic mean of precision and recall over words, repetitions counted; 0 where nothing is shared."""
    shared = sum((Counter(predicted) & Counter(expected)).values())
    if not shared:
        return 0.0
    precision, recall = shared / len(predicted), shared / len(expected)
    return 2 * precision * recall / (precision + recall)


def replaced(text: str, *unwanted: str) -> str:
    """The text with a blank in place of every unwanted piece, one after the other."""
    for piece in unwanted:
        text = text.replace(piece, " ")
    return text


def as_list(references: str | int | Iterable[str]) -> list[Any]:
    """One reference or several, as a list."""
    return [references] if isinstance(references, str | int) else list(references)


def lengths(x: Sequence[str], y: Sequence[str]) -> list[list[int]]:
    """[len(x) + 1][len(y) + 1]: how much the first i of x and the first j of y share."""
    table = [[0] * (len(y) + 1)]
    for a in x:
        above, row = table[-1], [0]
        for j, b in enumerate(y):
            row.append(above[j] + 1 if a == b else max(above[j + 1], row[j]))
        table.append(row)
    return table


def way_back(x: Sequence[str], y: Sequence[str]) -> Iterator[tuple[int, int, bool]]:
    """Walk from both ends: a shared word moves both; else x, but only if that strictly keeps more; else y.

    Yields every step as (place in x, place in y, whether the two words are shared).
    """
    table = lengths(x, y)
    i, j = len(x), len(y)
    while i and j:
        shared = x[i - 1] == y[j - 1]
        yield i - 1, j - 1, shared
        back_in_x = shared or table[i - 1][j] > table[i][j - 1]
        back_in_y = shared or not back_in_x
        i, j = i - back_in_x, j - back_in_y
