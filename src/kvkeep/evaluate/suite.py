"""Tasks by name, from files or generated; tasks that are unavailable are listed with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from kvkeep.errors import BadInput, KvkeepError, NoData, UnknownName
from kvkeep.evaluate import datasets
from kvkeep.evaluate.datasets import SOURCES, Source, fetch
from kvkeep.evaluate.metrics import METRICS
from kvkeep.evaluate.metrics.longbench import CHINESE
from kvkeep.evaluate.sample import Sample
from kvkeep.evaluate.tasks import choice, infinitebench, longbench, math, talk
from kvkeep.evaluate.tasks.needle import DEPTHS, needle
from kvkeep.evaluate.tasks.ruler import GROUPS, ruler, unavailable
from kvkeep.evaluate.tasks.ruler import TASKS as RULER
from kvkeep.model.chat import split_template
from kvkeep.model.user_text import ids_of
from kvkeep.registry import check_new, did_you_mean, load_plugins

SHORT = ("arc_easy", "openbookqa", "wic", "winogrande")
READ = {
    **{name: getattr(choice, name) for name in SHORT},
    "math500": math.math500,
    **dict.fromkeys(("aime", "aime24", "aime25"), math.aime),
}
NEEDLES = {"needle": "sandwich", "needle_number": "number"}
MADE = (*NEEDLES, *infinitebench.MADE, *talk.TALKS)  # passkey is generated, infinitebench/passkey comes from a file
RULER_SAMPLES = 100  # of each task and length without --limit; officially 500
PLUGINS = "kvkeep.tasks"
Read = TypeVar("Read", bound=Callable[[Path], list[Sample]])
FOLDERS = {"longbench": longbench.longbench, "infinitebench": infinitebench.infinitebench}


def register_task(name: str, source: Source | None = None) -> Callable[[Read], Read]:
    """Make a task known by name: a decorator for a function from a file of JSON lines to its samples.

    source: the dataset on the hub that the file is made of; without one, `--data DIR` has to hold NAME.jsonl.
    """
    check_new("task", name, _known())

    def register(read: Read) -> Read:
        READ[name] = read
        if source is not None:
            SOURCES[name] = source
        return read

    return register


@dataclass(frozen=True)
class Sources:
    """Where samples come from, and how many."""

    data: Path | None = None  # a folder of official files: longbench/qasper.jsonl, short/wic.jsonl …; None: the hub
    haystack: Path | None = None
    squad: Path | None = None
    hotpotqa: Path | None = None
    lengths: tuple[int, ...] = (4096,)  # of generated tasks
    limit: int | None = None  # samples of each task, and of each length of a generated one
    seed: int = 42

    @property
    def files(self) -> dict[str, Path | None]:
        """What generated tasks read."""
        return {"haystack": self.haystack, "squad": self.squad, "hotpotqa": self.hotpotqa}


def names() -> list[str]:
    """Tasks and groups; longbench/… and infinitebench/… take the name of a file."""
    load_plugins(PLUGINS)
    return _known()


def _known() -> list[str]:
    return ["ruler", "niah", *RULER, *MADE, "talk", "short", *READ, *FOLDERS]


def load(
    tasks: Iterable[str], tokenizer: Any, sources: Sources, say: Callable[[str], None] | None = None
) -> tuple[list[Sample], dict[str, str]]:
    """Samples of these tasks, and the unavailable ones with the reason; NoData if all are.

    A file that exists but is damaged is an error.
    """
    samples: list[Sample] = []
    skipped: dict[str, str] = {}
    for name in _expanded(tasks, sources):
        if why := why_unavailable(name, sources):
            skipped[name] = why
            continue
        try:
            path = None if _is_made(name) else _file(name, sources.data) if sources.data else fetch(name, say=say)
        except KvkeepError as error:
            skipped[name] = f"is not here: {error}"
        else:
            samples += _task(name, path, tokenizer, sources)
    if not samples:
        raise _no_data(skipped)
    return samples, skipped


def check(tasks: Iterable[str], sources: Sources) -> None:
    """Refuse unknown names, and tasks that are all unavailable, before anything is loaded or downloaded."""
    why = {name: why_unavailable(name, sources) for name in _expanded(tasks, sources)}
    if all(why.values()):
        raise _no_data(why)


def why_unavailable(name: str, sources: Sources) -> str:
    """Say why, by the files and packages that are there; "" if the task is available."""
    if _is_made(name):
        return unavailable(**sources.files).get(name, "")
    _reader(name)
    if name.startswith("longbench/") and _stem(name) in CHINESE and find_spec("jieba") is None:
        return "is scored with jieba, which is missing (pip install 'kvkeep[eval]')"
    if sources.data is None:
        return datasets.why_unavailable(name)
    path = _file(name, sources.data)
    return "" if path else f"has no file {_stem(name)}.jsonl in {str(sources.data)!r} or its folders"


def _expanded(tasks: Iterable[str], sources: Sources) -> list[str]:
    """The tasks of groups, and tasks themselves, each once."""
    groups = {**GROUPS, "short": list(SHORT), "talk": list(talk.TALKS)}
    found = (_files(name, sources) if name in FOLDERS else groups.get(name, [name]) for name in tasks)
    return list(dict.fromkeys(task for some in found for task in some))


def _no_data(skipped: dict[str, str]) -> NoData:
    return NoData(f"none of these tasks can be had: {'; '.join(f'{name} {why}' for name, why in skipped.items())}.")


def _is_made(name: str) -> bool:
    """Whether a task is generated, not read from a file."""
    return name in RULER or name in MADE


def _files(folder: str, sources: Sources) -> list[str]:
    if sources.data is None:
        return [name for name in SOURCES if name.startswith(f"{folder}/") and not name.endswith("_e")]
    found = sorted((sources.data / folder).glob("*.jsonl"))
    return [f"{folder}/{path.stem}" for path in found] or [f"{folder}/*"]


def _task(name: str, path: Path | None, tokenizer: Any, sources: Sources) -> list[Sample]:
    if name in NEEDLES:
        depths = _spread(DEPTHS, sources.limit)
        return needle(tokenizer, sources.lengths, depths, sources.haystack, NEEDLES[name], seed=sources.seed)
    if _is_made(name):
        return [sample for length in sources.lengths for sample in _sized(name, length, tokenizer, sources)]
    return _checked(name, _reader(name)(path))[: sources.limit]


def _checked(name: str, read: Any) -> list[Sample]:
    """What a reader returned, refused before a model is loaded if it cannot be asked or scored."""
    if not isinstance(read, list) or not all(isinstance(sample, Sample) for sample in read):
        raise BadInput(f"the reader of the task '{name}' should return a list of Sample, not {read!r:.80}.")
    for metric in {sample.metric for sample in read}:
        METRICS[metric]  # raises for an unknown one
    return read


def _spread(values: Sequence[int], count: int | None) -> list[int]:
    """`count` of the values, each from the middle of an equal part."""
    count = min(count or len(values), len(values))
    return [values[(2 * number + 1) * len(values) // (2 * count)] for number in range(count)]


def _reader(name: str) -> Callable:
    folder, _, file = name.partition("/")
    if folder in FOLDERS and file:
        return FOLDERS[folder]
    if name not in READ:
        load_plugins(PLUGINS)
    if name not in READ:
        raise UnknownName(f"there is no task '{name}'.{did_you_mean(name, names())} Known: {', '.join(names())}.")
    return READ[name]


def _sized(name: str, length: int, tokenizer: Any, sources: Sources) -> list[Sample]:
    """Samples of a generated task that fill this length."""
    made: Sequence[Sample]
    if name in RULER:
        count, files = sources.limit or RULER_SAMPLES, sources.files
        reserve = len(ids_of(tokenizer, "".join(split_template(tokenizer, enable_thinking=False))))
        made = ruler(name, length, tokenizer, count, sources.seed, reserve, **files)
    elif name in talk.TALKS:
        made = talk.sized(name, length, tokenizer, sources.limit or talk.TEXTS, sources.seed)
    else:
        made = infinitebench.sized(name, length, tokenizer, sources.limit or len(DEPTHS), sources.seed)
    return [replace(sample, task=f"{name}_{length}") for sample in made]


def _file(name: str, data: Path) -> Path | None:
    places = [data / name.partition("/")[0], data, data / "short", data / "math"]
    return next((path for place in places if (path := place / f"{_stem(name)}.jsonl").is_file()), None)


def _stem(name: str) -> str:
    return name.rpartition("/")[2]
