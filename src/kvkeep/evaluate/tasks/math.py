"""MATH-500 and AIME: a short problem, a long answer that ends in a box."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvkeep.errors import BadInput
from kvkeep.evaluate.metrics.math import last_box
from kvkeep.evaluate.sample import Sample
from kvkeep.evaluate.tasks.build import identity, samples, text

ASK = "\n\nReason step by step, and put the final answer in \\boxed{}."
MAX_NEW_TOKENS = 2048  # for the reasoning, too


def math500(path: str | Path) -> list[Sample]:
    """Lines with `problem` or `question`, and `answer` or a worked `solution`."""
    return _samples(path, "math500", "math", _final)


def aime(path: str | Path) -> list[Sample]:
    """Lines with `problem` or `question`, and an integer `answer`. The task is the file's name, so years stay apart."""
    return _samples(path, Path(path).stem, "aime", _integer)


def _samples(path: str | Path, task: str, metric: str, answer: Callable[[dict[str, Any], str], str]) -> list[Sample]:
    def make(record: dict[str, Any], where: str, number: int) -> Sample:
        name, asked = identity(record, number, "id", "unique_id"), text(record, where, "problem", "question") + ASK
        return Sample(task, name, asked, (answer(record, where),), metric, max_new_tokens=MAX_NEW_TOKENS, long=True)

    return samples(path, make, "problems")


def _final(record: dict[str, Any], where: str) -> str:
    """The answer alone: what is boxed in a worked solution, else what follows its last "The answer is:"."""
    full = text(record, where, "answer", "solution")
    return last_box(full) or full.rpartition("The answer is:")[2].strip()


def _integer(record: dict[str, Any], where: str) -> str:
    answer = text(record, where, "answer")
    if not answer.strip().isdecimal():
        raise BadInput(f"{where}: the answer {answer!r} is not a whole number, as AIME's are.")
    return answer.strip()
