"""What needles are hidden in: one line of noise over and over, or essays cut into sentences."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from kvkeep.errors import BadInput

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
ABBREVIATED = re.compile(r"(?:\b(?:Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|vs|etc|e\.g|i\.e|cf|No|Inc|Co|Corp)|\b[A-Z])\.$")
BOUNDARY = re.compile(r"""(?<=[.!?])(["')\]]*) +(?=["'(\[]*[A-Z0-9])""")

Splitter = Callable[[str], Sequence[str]]


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
    text = "".join(_text(file) for file in files)
    return text if path.suffix != ".json" else _json(text, path)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise BadInput(f"haystack={str(path)!r} cannot be read ({error.strerror}); give a text or a folder.") from None
    except UnicodeDecodeError as error:
        raise BadInput(f"haystack={str(path)!r} is not UTF-8 (byte {error.start}); convert it first.") from None


def _json(text: str, path: Path) -> str:
    try:
        return str(json.loads(text)["text"])
    except (ValueError, TypeError, KeyError):
        raise BadInput(f'haystack={str(path)!r} is not {{"text": "…"}}, as RULER\'s essay file is.') from None
