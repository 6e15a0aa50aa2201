"""Tasks by name, from files or made on the spot; what cannot be had is named with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvkeep.errors import KvkeepError, NoData, UnknownName
from kvkeep.evaluate import datasets
from kvkeep.evaluate.datasets import SOURCES, fetch
from kvkeep.evaluate.metrics.longbench import CHINESE
from kvkeep.evaluate.reasoning import ASK
from kvkeep.evaluate.sample import Sample
from kvkeep.evaluate.tasks import choice, infinitebench, longbench, math
from kvkeep.evaluate.tasks.needle import DEPTHS, needle
from kvkeep.evaluate.tasks.ruler import TASKS as RULER
from kvkeep.evaluate.tasks.ruler import available, ruler
from kvkeep.registry import did_you_mean

SHORT = ("arc_easy", "openbookqa", "wic", "winogrande")
READ = {
    **{name: getattr(choice, name) for name in SHORT},
    "math500": math.math500,
    **dict.fromkeys(("aime", "aime24", "aime25"), math.aime),
}
PROBLEMS = [name for name in READ if name not in SHORT]
NEEDLES = {"needle": "sandwich", "needle_number": "number"}
MADE = (*NEEDLES, *infinitebench.MADE)  # passkey is made, infinitebench/passkey read from a file
RULER_SAMPLES = 100  # of each task and length, where none are asked for; officially 500
FOLDERS = {"longbench": longbench.longbench, "infinitebench": infinitebench.infinitebench}


@dataclass(frozen=True)
class Sources:
    """Where samples come from, and how many."""

    data: Path | None = None  # a folder of official files: longbench/qasper.jsonl, short/wic.jsonl …; None: the hub
    haystack: Path | None = None
    squad: Path | None = None
    hotpotqa: Path | None = None
    lengths: tuple[int, ...] = (4096,)  # of tasks that are made
    limit: int | None = None  # samples of each task, and of each length of one that is made
    seed: int = 42


def names() -> list[str]:
    """What can be asked for by name; longbench/… and infinitebench/… take the name of a file."""
    return ["ruler", "niah", *RULER, *MADE, "short", *READ, *FOLDERS]


def load(
    wanted: Iterable[str], tokenizer: Any, sources: Sources, say: Callable[[str], None] | None = None
) -> tuple[list[Sample], dict[str, str]]:
    """Samples of these tasks, and which could not be had, and why; NoData where that is all of them.

    A file that is there but damaged is an error.
    """
    samples: list[Sample] = []
    skipped: dict[str, str] = {}
    for name in _every(wanted, sources):
        try:
            path = _located(name, sources, say)
        except Unavailable as reason:
            skipped[name] = str(reason)
        else:
            samples += _task(name, path, tokenizer, sources)
    if not samples:
        raise _nothing(skipped)
    return samples, skipped


def check(wanted: Iterable[str], sources: Sources) -> None:
    """Refuse names nobody knows, and tasks of which none can be had, before anything is loaded or fetched."""
    why = {name: lacks(name, sources) for name in _every(wanted, sources)}
    if all(why.values()):
        raise _nothing(why)


def lacks(name: str, sources: Sources) -> str:
    """Why a task cannot be had, as far as files and packages tell; "" where nothing speaks against it."""
    if name in RULER or name in MADE:
        return available(sources.haystack, sources.squad, sources.hotpotqa)[1].get(name, "")
    _reader(name)
    if name.startswith("longbench/") and _stem(name) in CHINESE and find_spec("jieba") is None:
        return "is scored with jieba, which is missing (pip install 'kvkeep[eval]')"
    if sources.data is None:
        return datasets.lacks(name)
    there = _file(name, sources.data)
    return "" if there else f"has no file {_stem(name)}.jsonl in {str(sources.data)!r} or its folders"


def _every(wanted: Iterable[str], sources: Sources) -> list[str]:
    return list(dict.fromkeys(part for each in wanted for part in _parts(each, sources)))


def _nothing(skipped: dict[str, str]) -> NoData:
    return NoData(f"none of these tasks can be had: {'; '.join(f'{name} {why}' for name, why in skipped.items())}.")


class Unavailable(Exception):
    """Why a task cannot be had."""


def _located(name: str, sources: Sources, say: Callable[[str], None] | None) -> Path | None:
    """The file a task is read from, None for one that is made."""
    if why := lacks(name, sources):
        raise Unavailable(why)
    if name in RULER or name in MADE:
        return None
    if sources.data is not None:
        return _file(name, sources.data)
    try:
        return fetch(name, say=say)
    except KvkeepError as error:
        raise Unavailable(f"is not here: {error}") from error


def _parts(name: str, sources: Sources) -> list[str]:
    """A group's tasks."""
    groups: dict[str, Callable[[], list[str]]] = {
        "ruler": lambda: list(RULER),
        "niah": lambda: [task for task in RULER if task.startswith("niah")],
        "short": lambda: list(SHORT),
        **{folder: lambda folder=folder: _files(folder, sources) for folder in FOLDERS},
    }
    return groups[name]() if name in groups else [name]


def _files(folder: str, sources: Sources) -> list[str]:
    if sources.data is None:
        return [name for name in SOURCES if name.startswith(f"{folder}/") and not name.endswith("_e")]
    found = sorted((sources.data / folder).glob("*.jsonl"))
    return [f"{folder}/{path.stem}" for path in found] or [f"{folder}/*"]


def _task(name: str, path: Path | None, tokenizer: Any, sources: Sources) -> list[Sample]:
    if name in RULER:
        return [sample for length in sources.lengths for sample in _ruler(name, length, tokenizer, sources)]
    if name in infinitebench.MADE:
        return [sample for length in sources.lengths for sample in _sized(name, length, tokenizer, sources)]
    if name in NEEDLES:
        depths = _spread(DEPTHS, sources.limit)
        return needle(tokenizer, sources.lengths, depths, sources.haystack, NEEDLES[name], seed=sources.seed)
    read = _reader(name)(path)[: sources.limit]
    return [_worked(sample) for sample in read] if name in PROBLEMS else read


def _spread(values: Sequence[int], count: int | None) -> list[int]:
    """So many of them, each from the middle of an equal part."""
    count = min(count or len(values), len(values))
    return [values[(2 * number + 1) * len(values) // (2 * count)] for number in range(count)]


def _worked(sample: Sample) -> Sample:
    """A problem asks for its working and a boxed answer, with room for both."""
    return replace(sample, question=ASK.format(question=sample.question), max_new_tokens=2048, long=True)


def _reader(name: str) -> Callable:
    folder, _, file = name.partition("/")
    if folder in FOLDERS and file:
        return FOLDERS[folder]
    if name not in READ:
        raise UnknownName(f"there is no task '{name}'.{did_you_mean(name, names())} Known: {', '.join(names())}.")
    return READ[name]


def _ruler(name: str, length: int, tokenizer: Any, sources: Sources) -> list[Sample]:
    files = (sources.haystack, sources.squad, sources.hotpotqa)
    count = sources.limit or RULER_SAMPLES
    made = ruler(name, length, tokenizer, count, sources.seed, *files, reserve=_template(tokenizer))
    return [replace(sample, task=f"{name}_{length}") for sample in made]


def _sized(name: str, length: int, tokenizer: Any, sources: Sources) -> list[Sample]:
    made = infinitebench.sized(name, length, tokenizer, sources.limit or len(DEPTHS), sources.seed)
    return [replace(sample, task=f"{name}_{length}") for sample in made]


def _template(tokenizer: Any) -> int:
    """Tokens the chat template puts around a message."""
    if not tokenizer.chat_template:
        return 0
    chat = [{"role": "user", "content": ""}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False, enable_thinking=False)
    return len(tokenizer(text, add_special_tokens=False).input_ids)


def _file(name: str, data: Path) -> Path | None:
    places = [data / name.partition("/")[0], data, data / "short", data / "math"]
    return next((path for place in places if (path := place / f"{_stem(name)}.jsonl").is_file()), None)


def _stem(name: str) -> str:
    return name.rpartition("/")[2]
