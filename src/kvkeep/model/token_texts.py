"""The text of every token of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # of a character that has more tokens


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """What each token adds to the text; together, the text. Of a character in several tokens, the last one has it."""
    texts, first, shown, before = [], 0, 0, ""  # `before` is the text of ids[first:shown]
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[first:end], clean_up_tokenization_spaces=False)
        if text.endswith(INCOMPLETE) and end < len(ids) and end - shown < 8:
            texts.append("")
            continue
        texts.append(text[len(before) :])
        first, shown = shown, end
        before = tokenizer.decode(ids[first:shown], clean_up_tokenization_spaces=False)
    return texts
