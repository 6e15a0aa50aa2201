"""A user's text in a prompt: what looks like a control token there is text, and the chat template's own tokens stay.

`token_texts`: the text of every token of a prompt.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

from kvkeep.errors import BadInput

HIDING = range(0xF0000, 0x10FFFE)  # private use: no tokenizer or template gives these characters a meaning
TAG = re.compile("<.+>")
MESSAGE = chr(0x10FFFE)  # in the place of a message, to see what the template puts around it


class UserText:
    """Texts of a user for one prompt.

    `hide` puts a private character in the place of each control token's string, the template renders what is hidden,
    and `ids` encodes the result. Where a text has no such string, both do nothing beyond what the tokenizer does.
    """

    def __init__(self, tokenizer: Any, *texts: Any, allow_special_tokens: bool = False) -> None:
        """texts: strings, or messages and tools that hold them; allow_special_tokens: control tokens may be in them"""
        self.tokenizer = tokenizer
        self.hidden: dict[str, str] = {}  # by control token
        strings = [] if allow_special_tokens else [_normalized(tokenizer, each) for each in _strings(texts)]
        if found := [token for token in control_tokens(tokenizer) if any(token in each for each in strings)]:
            taken = set[str]().union(*strings)
            free = (chr(code) for code in HIDING if chr(code) not in taken)
            self.hidden = dict(zip(found, free, strict=False))
            if len(self.hidden) < len(found):
                raise BadInput("the text has all private use characters, and control tokens; leave either out.")

    def hide(self, value: Any) -> Any:
        """The same value, its strings without control tokens."""
        if isinstance(value, str):
            value = _normalized(self.tokenizer, value) if self.hidden else value
            for token, mark in self.hidden.items():
                value = value.replace(token, mark)
            return value
        if isinstance(value, Mapping):
            return {self.hide(name): self.hide(part) for name, part in value.items()} if self.hidden else value
        return [self.hide(part) for part in value] if self.hidden and isinstance(value, list | tuple) else value

    def ids(self, prompt: str) -> list[int]:
        """Ids of a prompt made of hidden texts. Merges reach as far as they do in any prompt: to control tokens."""
        if not self.hidden:
            return ids_of(self.tokenizer, prompt)
        shown = {ord(mark): token for token, mark in self.hidden.items()}
        found, run = list[int](), ""
        for part in _pattern(self.tokenizer).split(prompt):  # every other one is a control token
            if (text := part.translate(shown)) == part:
                run += part
                continue
            found += ids_of(self.tokenizer, run) + _text_ids(self.tokenizer, text)
            run = ""
        return found + ids_of(self.tokenizer, run)


def ids_of(tokenizer: Any, text: str) -> list[int]:
    """Ids of part of a prompt; no BOS or EOS is added."""
    options = {"add_special_tokens": False, "verbose": False}  # verbose would warn of lengths, which callers check
    return list(tokenizer(text, **options).input_ids)


def control_tokens(tokenizer: Any) -> dict[str, int]:
    """Special tokens, and tokens the template puts around messages that are added or are tags; the longest first.

    None are known of a tokenizer that is not one of transformers.
    """
    if not hasattr(tokenizer, "added_tokens_decoder"):
        return {}
    return _control_tokens(tokenizer, str(getattr(tokenizer, "chat_template", None)), len(tokenizer))


@lru_cache(maxsize=8)
def _control_tokens(tokenizer: Any, template: str, size: int) -> dict[str, int]:
    """template, size: as they are now; either may change"""
    special = set(tokenizer.all_special_ids)
    around = "\n".join(_around_messages(tokenizer))
    words = {tokenizer.convert_ids_to_tokens(id_): id_ for id_ in ids_of(tokenizer, around)}
    tags = {name: id_ for name, id_ in words.items() if TAG.fullmatch(name)}
    added = {token.content: (id_, token.special) for id_, token in tokenizer.added_tokens_decoder.items()}
    found = {name: id_ for name, (id_, marked) in added.items() if marked or id_ in special or name in around} | tags
    return {name: found[name] for name in sorted(found, key=len, reverse=True) if name.strip()}


def _around_messages(tokenizer: Any) -> Iterator[str]:
    """What the template puts around messages; some templates take no system message.

    Of what comes before the first one only the last word: the rest may be prose, such as a default system prompt.
    """
    from jinja2 import TemplateError

    turns = ["user", "assistant", "user"]
    for roles in (turns[:1], turns, ["system", *turns]) if tokenizer.chat_template else ():
        with suppress(TemplateError):
            chat = [{"role": role, "content": MESSAGE} for role in roles]
            before, *others = tokenizer.apply_chat_template(chat, tokenize=False).split(MESSAGE)
            yield from [*before.split()[-1:], *others]


def _pattern(tokenizer: Any) -> re.Pattern[str]:
    return re.compile(f"({'|'.join(map(re.escape, control_tokens(tokenizer)))})")


def _text_ids(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text, none of them a control token's."""
    ids = list(_without_special(tokenizer, len(tokenizer))(text, add_special_tokens=False, verbose=False).input_ids)
    control = set(control_tokens(tokenizer).values()) - {tokenizer.unk_token_id}
    if control.isdisjoint(ids):
        return ids
    match = _pattern(tokenizer).search(text)  # not marked as special, or a word of the vocabulary
    if match is None or len(text) == 1:
        raise BadInput(f"the tokenizer has no token for {text!r} but a control token; leave it out of the text.")
    cut = min(match.start() + 1, len(text) - 1)
    return _text_ids(tokenizer, text[:cut]) + _text_ids(tokenizer, text[cut:])


def _normalized(tokenizer: Any, text: str) -> str:
    """A text as the tokenizer's normalizer makes it, if that has more control tokens: fullwidth letters may be some."""
    normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    if normalizer is None or (normal := normalizer.normalize_str(text)) == text:
        return text
    return normal if any(normal.count(token) > text.count(token) for token in control_tokens(tokenizer)) else text


@lru_cache(maxsize=8)
def _without_special(tokenizer: Any, size: int) -> Any:
    """A copy to which special tokens are text: other threads use the tokenizer, which keeps such a setting."""
    made = copy.deepcopy(tokenizer)
    made.split_special_tokens = True
    return made


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _strings([*value, *value.values()])
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _strings(part)


INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # of a character that has more tokens


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """What each token adds to the text; together, the text. Of a character in several tokens, the last one has it."""
    texts: list[str] = []
    first = shown = 0
    before = ""  # the text of ids[first:shown]
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[first:end], clean_up_tokenization_spaces=False)
        if text.endswith(INCOMPLETE) and end < len(ids) and end - shown < 8:
            texts.append("")
            continue
        texts.append(text[len(before) :])
        first, shown = shown, end
        before = tokenizer.decode(ids[first:shown], clean_up_tokenization_spaces=False)
    return texts
