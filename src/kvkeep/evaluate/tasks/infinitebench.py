"""InfiniteBench (arXiv:2402.13718): 12 tasks from the official files, and three that need none.

infinitebench.json holds the official templates for local models (its "yarn_mistral"), cut into context, question and
the beginning of the answer, and the limits (OpenBMB/InfiniteBench, MIT). They are asked without a chat template.
math_find says what is wanted, and code_run names the function, before the text, so in a context that is compressed.
"""

from __future__ import annotations

import json
import random
import re
import sys
import uuid
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from kvkeep.errors import BadInput, BadParameter
from kvkeep.evaluate.prompt import build_prompt
from kvkeep.evaluate.sample import Sample
from kvkeep.evaluate.tasks.build import fill, identity, samples, text, texts
from kvkeep.registry import did_you_mean

TEMPLATES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
PROBED = 10  # lines or pairs by which the tokens of one are judged
LETTERS = "ABCD"
OF_OPTIONS = {"longbook_choice_eng", "code_debug"}


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


OF_NUMBERS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "math_find": ("a number", lambda value: _whole(value) or isinstance(value, float)),
    "math_calc": (
        "a list of whole numbers",
        lambda value: isinstance(value, list) and value != [] and all(map(_whole, value)),
    ),
    "code_run": ("a whole number", _whole),
}


def infinitebench(path: str | Path, task: str | None = None) -> list[Sample]:
    """Lines with `context`, `input`, `answer` and, for two tasks, `options`; the task is given or the file's name.

    References are texts: a number as it is written, math_calc's values as one JSON list.
    """
    name = task or Path(path).stem
    if name not in TEMPLATES:
        raise BadInput(f"{str(path)!r}: no InfiniteBench task is called '{name}'.{did_you_mean(name, TEMPLATES)}")
    return samples(path, partial(_sample, task=name))


def _sample(record: dict[str, Any], where: str, number: int, task: str) -> Sample:
    fields = {"context": text(record, where, "context", "content")} | _asked(record, where, task)
    return _filled(task, identity(record, number, "id", "_id"), fields, _references(record, where, task))


def _filled(task: str, name: str, fields: dict[str, str], references: tuple[str, ...]) -> Sample:
    template = TEMPLATES[task]
    return Sample(
        task,
        name,
        fill(template["question"], fields),
        references,
        "infinitebench",
        context=fill(template["context"], fields),
        prefix=fill(template["prefix"], fields),
        max_new_tokens=template["max_new_tokens"],
        chat=False,
        margin=template["max_new_tokens"],
        extra={"dataset": task},
    )


def _asked(record: dict[str, Any], where: str, task: str) -> dict[str, str]:
    """What a template asks for beside the context."""
    template = TEMPLATES[task]["context"] + TEMPLATES[task]["question"]
    asked = text(record, where, "input", "question") if re.search(r"\{(input|question|func)\}", template) else ""
    fields = {"input": asked, "question": asked}
    if task in OF_OPTIONS:
        fields |= {f"OPTION_{letter}": option for letter, option in zip(LETTERS, _options(record, where), strict=True)}
    if task == "math_find":
        fields["prefix"] = f"What is {_found('The .+ of', asked, where)[:-3].lower()} in the following list?"
    if task == "code_run":
        fields["func_call"] = _found(r"func_[0-9]+\(-?[0-9]+\)", asked, where)
        fields["func"] = fields["func_call"].partition("(")[0]
    return fields


def _found(pattern: str, asked: str, where: str) -> str:
    found = re.search(pattern, asked)
    if not found:
        raise BadInput(f"{where}: the input {asked[:80]!r} does not say what is asked ('{pattern}').")
    return found[0]


def _options(record: dict[str, Any], where: str) -> tuple[str, ...]:
    options = texts(record, where, "options")
    if len(options) != len(LETTERS):
        raise BadInput(f"{where} has {len(options)} options; four are asked, A to D.")
    return options


def _references(record: dict[str, Any], where: str, task: str) -> tuple[str, ...]:
    """Older files have the label itself, newer ones a list with it."""
    answer = record.get("answer")
    if task in OF_NUMBERS:
        return (_number(answer, where, task),)
    references = texts(record, where, "answer") if isinstance(answer, list) else (text(record, where, "answer"),)
    if task in OF_OPTIONS:
        return _with_letter(references, _options(record, where), where)
    return references


def _number(answer: Any, where: str, task: str) -> str:
    """The label as JSON; some files have numbers as texts."""
    wanted, fits = OF_NUMBERS[task]
    if isinstance(answer, list) and len(answer) == 1 and not fits(answer):
        answer = answer[0]
    try:
        value = json.loads(answer) if isinstance(answer, str) else answer
    except json.JSONDecodeError:
        value = None
    if not fits(value):
        raise BadInput(f"{where}: {task} has {wanted} for an answer, not {str(answer)[:80]!r}.")
    return json.dumps(value)


def _with_letter(references: tuple[str, ...], options: tuple[str, ...], where: str) -> tuple[str, ...]:
    """The right option and its letter, as both scores want it."""
    if len(references) == 2 and references[1] in LETTERS:
        return references
    if len(references) != 1 or references[0] not in options:
        raise BadInput(f"{where}: the answer {references[0][:80]!r} is none of the four options.")
    return references[0], LETTERS[options.index(references[0])]


IN_NOISE = {"passkey": ("pass key", 5), "number_string": ("sequence of digits", 10)}  # what is hidden, its digits
MADE = (*IN_NOISE, "kv_retrieval")


def _digits(source: random.Random, count: int) -> str:
    """Draw five digits; for more, repeat some of them where they are."""
    digits = [str(source.randint(0, 9)) for _ in range(5)]
    while len(digits) < count:
        place = source.randrange(len(digits))
        digits.insert(place, digits[place])
    return "".join(digits)


def _uuid(source: random.Random) -> str:
    return str(uuid.UUID(int=source.getrandbits(128), version=4))


def sized(task: str, length: int, tokenizer: Any, count: int, seed: int = 42) -> list[Sample]:
    """Samples of one of the three with so many lines or pairs that prompt and answer fill `length` tokens.

    What is asked for lies in the middle of each of `count` equal parts, so neither at the beginning nor at the end.
    """
    if count < 1:
        raise BadParameter(f"count={count} makes no sample; give 1 or more.")
    made: list[Sample] = []
    for number in range(count):
        share = (2 * number + 1) / (2 * count)
        draw = _drawing(task, f"{length}-{number}", share, random.Random(f"{seed} {task} {length} {number}"))
        sample = _longest(draw, tokenizer, length)
        facts = {"length": length, "depth": round(100 * share, 1), "seed": seed}
        made.append(replace(sample, extra={**sample.extra, **facts}))
    return made


def _drawing(task: str, name: str, share: float, source: random.Random) -> Callable[[int], Sample]:
    """-> one sample by its number of lines or pairs, the same random ones whatever the number"""
    pairs: list[tuple[str, str]] = []
    what, count = IN_NOISE.get(task, ("", 0))
    number = _digits(source, count) if count else ""

    def in_noise(lines: int) -> Sample:
        line, before = f"The {what} is {number}. Remember it. {number} is the {what}.\n", int(share * lines)
        context = NOISE * before + line + NOISE * (lines - before)
        return _filled(task, name, {"context": context, "input": f"What is the {what}?"}, (number,))

    def in_pairs(size: int) -> Sample:
        pairs.extend((_uuid(source), _uuid(source)) for _ in range(size - len(pairs)))
        key, value = pairs[int(share * size)]
        context = "JSON data:\n{" + ", ".join(f'"{k}": "{v}"' for k, v in pairs[:size]) + "}"
        asked = f'Key: "{key}"\nThe value associated with the specified key is: '
        return _filled(task, name, {"context": context, "input": asked}, (value,))

    return in_noise if number else in_pairs


def _longest(draw: Callable[[int], Sample], tokenizer: Any, length: int) -> Sample:
    """Stepped to by what a unit takes on average, so that few long texts have to be counted."""
    short = draw(1)
    taken = _tokens(tokenizer, short)
    apart = build_prompt(tokenizer, short, "agnostic", sys.maxsize).tokens + short.max_new_tokens
    room = length - max(0, apart - taken)  # a question tokenized by itself may have more tokens
    if taken > room:
        raise BadParameter(f"length={length} cannot hold {short.task}: it takes {max(taken, apart)} tokens or more.")
    each = (_tokens(tokenizer, draw(1 + PROBED)) - taken) / PROBED
    size, fits, over = 1, 1, room
    while over - fits > 1:
        size = min(max(size + int((room - taken) // each), fits + 1), over - 1)
        taken = _tokens(tokenizer, draw(size))
        fits, over = (size, over) if taken <= room else (fits, size)
    return draw(fits)


def _tokens(tokenizer: Any, sample: Sample) -> int:
    """Count the tokens of the prompt and the longest answer."""
    prompt = sample.context + sample.question + sample.prefix
    return len(tokenizer(prompt, verbose=False).input_ids) + sample.max_new_tokens
