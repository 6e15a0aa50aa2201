"""Conversations about a text: prose with twelve facts in it, six of which are asked, one after the other.

The texts are ours; that questions come in turn, or share a text, is SCBench's point (arXiv:2412.10319). A length counts
the tokens of the whole conversation with its longest answers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvkeep.errors import BadParameter
from kvkeep.evaluate.sample import Turn
from kvkeep.model.chat import encode
from kvkeep.model.user_text import ids_of
from kvkeep.registry import Registry

FACTS, ASKED = 12, 6
MAX_NEW_TOKENS = 32
TEXTS = 20  # of each task and length without --limit
BEFORE = "Questions about the following text will be asked.\n\n"
FACT = "The {what} of the {thing} is {number}."
QUESTION = "What is the {what} of the {thing}? Answer with the number only."
SENTENCE = "{when}, the {who} {did} {where}."

KINDS = ("registration number", "locker number", "telephone number", "serial number", "account number", "key number")
THINGS = (
    "blue ferry", "old lighthouse", "town library", "glass workshop", "harbour crane", "night train", "stone mill",
    "music school", "weather station", "red tram", "fish market", "water tower", "paper factory", "grand hotel",
    "rowing club", "botanical garden", "clock museum", "village bakery", "cable car", "salt warehouse",
)  # fmt: skip
WHEN = (
    "In the early morning", "After the rain", "On the last day of March", "Before the bells rang", "Shortly after noon",
    "During the fair", "While the others slept", "When the fog had lifted", "At the end of the week", "As every autumn",
    "In a cold winter", "Without much noise", "To everybody's surprise", "Once the guests had left", "Late at night",
)  # fmt: skip
WHO = (
    "miller", "ferryman", "teacher", "baker", "postman", "gardener", "librarian", "captain", "widow", "apprentice",
    "doctor", "blacksmith", "fiddler", "shepherd", "mayor", "carpenter", "innkeeper", "painter", "beekeeper", "tailor",
)  # fmt: skip
DID = (
    "mended a torn net", "carried two sacks of flour", "painted a wooden door", "looked for a lost dog", "sang a song",
    "waited for a letter", "sold a basket of pears", "told a long story", "planted a row of beans", "bought a lamp",
    "repaired the fence", "watched the geese", "wrote down a recipe", "argued about the weather", "polished a bell",
    "counted the boats", "cooked a pot of soup", "drew a map", "cut some firewood", "played a game of chess",
)  # fmt: skip
WHERE = (
    "behind the church", "near the bridge", "at the edge of the forest", "on the market square", "by the river",
    "in front of the school", "next to the well", "beside the railway", "under the chestnut trees", "in the old barn",
    "on the way to the coast", "at the foot of the hill", "between two empty houses", "in the schoolyard",
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """Where the text stands, and how many conversations are about it."""

    place: str
    conversations: int = 1


TALKS = Registry(
    "conversation",
    {"talk/user": Shape("user"), "talk/system": Shape("system"), "talk/shared": Shape("system", 3)},
)


@dataclass(frozen=True)
class Fact:
    what: str
    thing: str
    number: str

    def put_into(self, template: str) -> str:
        return template.format(**vars(self))


def sized(task: str, length: int, tokenizer: Any, count: int, seed: int = 42) -> list[Turn]:
    """All questions about `count` texts, in the order in which they are asked.

    The three tasks ask about the same facts. Where several conversations share a text, they take turns.
    """
    if count < 1:
        raise BadParameter(f"count={count} makes no text; give 1 or more.")
    return [turn for number in range(count) for turn in _turns(task, length, tokenizer, number, seed)]


def _turns(task: str, length: int, tokenizer: Any, number: int, seed: int) -> list[Turn]:
    """Draw one text, and ask about it."""
    source = random.Random(f"{seed} {length} {number}")
    facts = _facts(source)
    asked = source.sample(facts, ASKED)
    extra = {"length": length, "seed": seed}

    def ask(prose: list[str]) -> list[Turn]:
        text = BEFORE + _text(facts, prose)
        return [_turn(task, f"{length}-{number}", text, fact, place, extra) for place, fact in enumerate(asked)]

    taken = _tokens(tokenizer, ask([]))
    if taken > length:
        raise BadParameter(f"length={length} cannot hold {task}: it takes {taken} tokens or more.")
    return ask(list(_prose(source, tokenizer, length - taken)))


def _facts(source: random.Random) -> list[Fact]:
    """Draw facts about different things."""
    numbers = map(str, source.sample(range(10_000, 100_000), FACTS))
    things = source.sample(THINGS, FACTS)
    return [Fact(source.choice(KINDS), thing, number) for thing, number in zip(things, numbers, strict=True)]


def _prose(source: random.Random, tokenizer: Any, room: int) -> Iterator[str]:
    """Draw sentences until they have so many tokens."""
    while True:
        when, who, did, where = (source.choice(parts) for parts in (WHEN, WHO, DID, WHERE))
        sentence = SENTENCE.format(when=when, who=who, did=did, where=where)
        room -= len(ids_of(tokenizer, " " + sentence))
        if room < 0:
            return
        yield sentence


def _text(facts: list[Fact], prose: list[str]) -> str:
    """Put each fact into the middle of its equal part of the prose."""
    found = list(prose)
    for number, fact in reversed(list(enumerate(facts))):
        found.insert((2 * number + 1) * len(prose) // (2 * len(facts)), fact.put_into(FACT))
    return " ".join(found)


def _turn(task: str, text_id: str, text: str, fact: Fact, place: int, extra: dict[str, Any]) -> Turn:
    """place: of the question, among all about the text"""
    shape = TALKS[task]
    turn, talk = divmod(place, shape.conversations)
    return Turn(
        task,
        f"{text_id}-{talk}-{turn + 1}",
        fact.put_into(QUESTION),
        (fact.number,),
        "ruler_string_match_all",
        context=text,
        max_new_tokens=MAX_NEW_TOKENS,
        extra=extra,
        talk=talk,
        turn=turn + 1,
        place=shape.place,
    )


def _tokens(tokenizer: Any, turns: list[Turn]) -> int:
    """Count the tokens of the longest conversation, with answers of the greatest length."""
    messages: list[dict[str, str]] = []
    mine = [turn for turn in turns if turn.talk == 0]
    for turn in mine:
        messages = [*turn.messages(messages), {"role": "assistant", "content": ""}]
    return len(encode(tokenizer, messages)[0]) + len(mine) * MAX_NEW_TOKENS
