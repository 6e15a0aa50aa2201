"""RULER (arXiv:2404.06654): thirteen tasks made for any length, with the texts the official generators write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvkeep.errors import BadInput, BadParameter
from kvkeep.evaluate.sample import Sample
from kvkeep.evaluate.tasks.ruler import niah, qa, vocabulary
from kvkeep.evaluate.tasks.ruler.frame import Drawn, Frame, counter
from kvkeep.evaluate.tasks.ruler.tracking import chains
from kvkeep.evaluate.tasks.ruler.words import common_words, frequent_words
from kvkeep.registry import Registry

VERSION = "NVIDIA/RULER c3f5e3b"
FILES = {
    "haystack": "essays: a text file, a folder of *.txt, or PaulGrahamEssays.json",
    "squad": "SQuAD v2's dev-v2.0.json",
    "hotpotqa": "HotpotQA's hotpot_dev_distractor_v1.json",
}


@dataclass(frozen=True)
class Task:
    draw: Callable[[Frame, Any], Iterator[Drawn]]  # of a file, where it needs one
    max_new_tokens: int
    metric: str = "ruler_string_match_all"
    needs: str = ""  # the option that gives its file
    needs_words: bool = False


def _needles(haystack: str = "essay", keys: str = "words", **what: Any) -> Task:
    draw = partial(niah.needles, haystack=haystack, keys=keys, **what)
    return Task(draw, 128, needs="haystack" if haystack == "essay" else "", needs_words=keys == "words")


def _documents(read: Callable[[Path], qa.Corpus]) -> Task:
    return Task(partial(qa.documents, read), 32, "ruler_string_match_part", read.__name__)


TASKS: Registry = Registry(
    "RULER task",
    {
        "niah_single_1": _needles("noise"),
        "niah_single_2": _needles(),
        "niah_single_3": _needles(values="uuids"),
        "niah_multikey_1": _needles(n_keys=4),
        "niah_multikey_2": _needles("needles"),
        "niah_multikey_3": _needles("needles", keys="uuids", values="uuids"),
        "niah_multivalue": _needles(n_values=4),
        "niah_multiquery": _needles(n_asked=4),
        "vt": Task(chains, 30),
        "cwe": Task(common_words, 120, needs_words=True),
        "fwe": Task(frequent_words, 50),
        "qa_1": _documents(qa.squad),
        "qa_2": _documents(qa.hotpotqa),
    },
)
GROUPS = {"ruler": list(TASKS), "niah": [task for task in TASKS if task.startswith("niah")]}


def ruler(
    task: str,
    length: int,
    tokenizer: Any,
    samples: int,
    seed: int = 42,
    reserve: int = 0,
    **files: str | Path | None,
) -> list[Sample]:
    """Samples whose prompt and answer take at most `length` tokens.

    reserve: of these, tokens for the chat template; files: haystack, squad, hotpotqa
    """
    spec = TASKS[task]
    if samples < 1:
        raise BadParameter(f"samples={samples} makes no sample; give 1 or more (RULER: 500).")
    if length - reserve <= spec.max_new_tokens:
        raise BadParameter(f"length={length} leaves no room beside {spec.max_new_tokens + reserve} tokens; give 4096.")
    file = files.get(spec.needs)
    if spec.needs and file is None:
        raise BadInput(f"{task} {_reads(spec)}.")
    frame = Frame(task, length, reserve, spec.max_new_tokens, samples, seed, counter(tokenizer))
    drawn = spec.draw(frame, Path(file) if file else None)
    return [_sample(spec, frame, number, *each) for number, each in enumerate(drawn)]


def unavailable(**files: str | Path | None) -> dict[str, str]:
    """Why tasks cannot be made with these files; the others can. files: haystack, squad, hotpotqa"""
    skipped = {name: _reads(task) for name, task in TASKS.items() if task.needs and files.get(task.needs) is None}
    if not vocabulary.installed():
        wordy = [name for name, task in TASKS.items() if task.needs_words and name not in skipped]
        skipped |= {name: f"needs wonderwords ({vocabulary.INSTALL})" for name in wordy}
    return skipped


def _reads(task: Task) -> str:
    return f"reads a file that was not given: {task.needs}=, or --{task.needs} ({FILES[task.needs]})"


def _sample(spec: Task, frame: Frame, number: int, prompt: Any, length: int) -> Sample:
    extra = {"version": VERSION, "asked": frame.asked, "seed": frame.seed, "length": length, **prompt.extra}
    if spec.needs_words:
        extra["words"] = vocabulary.version()
    return Sample(
        task=frame.task,
        id=f"{frame.asked}-{number}",
        context=prompt.context,
        question=prompt.question,
        prefix=prompt.prefix,
        references=prompt.answers,
        metric=spec.metric,
        max_new_tokens=spec.max_new_tokens,
        extra=extra,
    )
