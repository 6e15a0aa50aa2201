"""InfiniteBench (arXiv:2402.13718): 12 tasks from the official files, and three that need none.

infinitebench.json holds the official templates for local models (its "yarn_mistral"), cut into context, question and
the beginning of the answer, and the limits (OpenBMB/InfiniteBench, MIT). They are asked without a chat template.
math_find says what is wanted, and code_run names the function, before the text: a compressed context has read it.
"""

from __future__ import annotations

import json
import random
import re
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from kvkeep.errors import BadInput, BadParameter
from kvkeep.evaluate.sample import Sample
from kvkeep.evaluate.tasks.build import fill, identity, samples, texts
from kvkeep.evaluate.tasks.lines import text
from kvkeep.registry import did_you_mean

TEMPLATES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
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


def passkey(lines: int = 5220, places: int = 59, repeats: int = 5, seed: int = 0) -> list[Sample]:
    """A number of five digits in `lines` lines of noise (5,220 are about 128K tokens), at evenly spaced places."""
    hidden = "The pass key is {key}. Remember it. {key} is the pass key.\n"
    return _in_noise("passkey", hidden, "What is the pass key?", _five_digits, (lines, places, repeats), seed)


def number_string(lines: int = 5220, places: int = 59, repeats: int = 10, seed: int = 0) -> list[Sample]:
    """The same with ten digits, half of them repetitions of the digit beside them."""
    hidden = "The sequence of digits is {key}. Remember it. {key} is the sequence of digits.\n"
    question = "What is the sequence of digits?"
    return _in_noise("number_string", hidden, question, _ten_digits, (lines, places, repeats), seed)


def _in_noise(
    task: str, hidden: str, question: str, draw: Callable[[random.Random], str], size: tuple[int, int, int], seed: int
) -> list[Sample]:
    lines, places, repeats = size
    if min(size) < 1:
        raise BadParameter(f"lines={lines}, places={places} and repeats={repeats} are each at least 1.")
    source = random.Random(seed)
    made: list[Sample] = []
    for place in range(places):
        before = place * lines // max(places - 1, 1)
        for _ in range(repeats):
            key = draw(source)
            context = NOISE * before + hidden.replace("{key}", key) + NOISE * (lines - before)
            made.append(_filled(task, str(len(made)), {"context": context, "input": question}, (key,)))
    return made


def _five_digits(source: random.Random) -> str:
    return "".join(str(source.randint(0, 9)) for _ in range(5))


def _ten_digits(source: random.Random) -> str:
    digits = list(_five_digits(source))
    while len(digits) < 10:
        place = source.randrange(len(digits))
        digits.insert(place, digits[place])
    return "".join(digits)


def kv_retrieval(pairs: int = 1855, count: int = 500, seed: int = 0) -> list[Sample]:
    """One value out of `pairs` random pairs (1,855 are about 128K tokens).

    Deviation: keys are asked for evenly over the whole object, officially over its first quarter.
    """
    if min(pairs, count) < 1:
        raise BadParameter(f"pairs={pairs} and count={count} are each at least 1.")
    source = random.Random(seed)
    made: list[Sample] = []
    for number in range(count):
        drawn = [(_uuid(source), _uuid(source)) for _ in range(pairs)]
        key, value = drawn[number * pairs // count]
        context = "JSON data:\n{" + ", ".join(f'"{k}": "{v}"' for k, v in drawn) + "}"
        asked = f'Key: "{key}"\nThe value associated with the specified key is: '
        made.append(_filled("kv_retrieval", str(number), {"context": context, "input": asked}, (value,)))
    return made


def _uuid(source: random.Random) -> str:
    return str(uuid.UUID(int=source.getrandbits(128), version=4))
