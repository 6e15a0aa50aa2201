"""Texts as words, and how far two lists of words overlap."""

from __future__ import annotations

import re
import string
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
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
    """Lower case, without punctuation or articles, as SQuAD does it."""
    return _ARTICLES.sub(" ", text.lower().translate(_ASCII)).split()


def chinese_text(text: str) -> str:
    """Lower case, without punctuation or blanks. The list of signs is LongBench's, which forgets 《."""
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


def as_list(references: str | Iterable[str]) -> list[str]:
    """One reference or several, as a list."""
    return [references] if isinstance(references, str) else list(references)
