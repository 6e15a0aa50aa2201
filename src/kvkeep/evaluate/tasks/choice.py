"""Short multiple-choice tasks as lm-eval asks them: every choice is a text that could follow, the likeliest is taken.

A score wants the log-likelihoods and the sample's extra: METRICS[sample.metric](loglikelihoods, **sample.extra).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

from kvkeep.errors import BadInput
from kvkeep.evaluate.sample import Sample
from kvkeep.evaluate.tasks.build import identity, samples, text, texts

Asked = tuple[
    tuple[str, ...], tuple[str, ...], int
]  # what stands before each choice, or all; the choices; the right one
Ask = Callable[[dict[str, Any], str], Asked]


def _reader(ask: Ask) -> Callable[[str | Path], list[Sample]]:
    """Make the reader of a task from what its records ask."""

    @wraps(ask)
    def read(path: str | Path) -> list[Sample]:
        return samples(path, partial(_sample, ask))

    return read


def _sample(ask: Ask, record: dict[str, Any], where: str, number: int) -> Sample:
    questions, choices, gold = ask(record, where)
    continuations = tuple(" " + choice for choice in choices)
    return Sample(
        ask.__name__,
        identity(record, number, "id", "idx", "qID"),
        questions[0],
        (continuations[gold],),
        "lm_eval_multiple_choice",
        choices=continuations,
        chat=False,
        extra={"gold": gold, "choices": choices, **({"questions": questions} if len(questions) > 1 else {})},
    )


def pairs(sample: Sample) -> list[tuple[str, str]]:
    """(prompt, continuation to score) for every choice; blanks at the end of the first belong to the second."""
    questions = sample.extra.get("questions") or (sample.question,) * len(sample.choices)
    found = []
    for question, choice in zip(questions, sample.choices, strict=True):
        prompt = sample.context + question + sample.prefix
        found.append((prompt.rstrip(), prompt[len(prompt.rstrip()) :] + choice))
    return found


@_reader
def arc_easy(record: dict[str, Any], where: str) -> Asked:
    """Lines with `question`, `choices` (text, label) and `answerKey`."""
    return _lettered(record, where, f"Question: {text(record, where, 'question')}\nAnswer:")


@_reader
def openbookqa(record: dict[str, Any], where: str) -> Asked:
    """Lines with `question_stem`, `choices` (text, label) and `answerKey`."""
    return _lettered(record, where, text(record, where, "question_stem"))


def _lettered(record: dict[str, Any], where: str, question: str) -> Asked:
    offered = record.get("choices")
    if not isinstance(offered, dict):
        raise BadInput(f"{where} has no choices with their text and label; it has {', '.join(sorted(record))}.")
    choices, labels = texts(offered, where, "text"), texts(offered, where, "label")
    answer = text(record, where, "answerKey").lstrip()
    if answer not in labels or len(labels) != len(choices):
        raise BadInput(f"{where}: the answer '{answer}' is none of {len(choices)} choices ({', '.join(labels)}).")
    return (question,), choices, labels.index(answer)


@_reader
def wic(record: dict[str, Any], where: str) -> Asked:
    """Lines with `sentence1`, `sentence2`, `start1`, `end1` and `label`."""
    first, second = text(record, where, "sentence1"), text(record, where, "sentence2")
    start, end = record.get("start1"), record.get("end1")
    if not isinstance(start, int) or not isinstance(end, int) or not 0 <= start < end <= len(first):
        raise BadInput(f"{where}: start1={start} and end1={end} mark no word of sentence1.")
    label = str(record.get("label")).lower()
    if label not in _TRUTH:
        raise BadInput(f"{where}: the label {record.get('label')!r} is neither true nor false, 1 nor 0.")
    question = (
        f"Sentence 1: {first}\nSentence 2: {second}\nQuestion: Is the word '{first[start:end]}' used in the same way "
        "in the two sentences above?\nAnswer:"
    )
    return (question,), ("no", "yes"), _TRUTH[label]


_TRUTH = {"false": 0, "0": 0, "true": 1, "1": 1}


@_reader
def winogrande(record: dict[str, Any], where: str) -> Asked:
    """Lines with `sentence`, `option1`, `option2` and `answer`.

    The options differ before the choice and not in it, so extra["questions"] has one question for each.
    """
    before, blank, after = text(record, where, "sentence").partition("_")
    answer = text(record, where, "answer")
    if not blank or answer not in ("1", "2"):
        raise BadInput(f"{where} needs a sentence with a blank (_) and 1 or 2 for an answer, not {answer!r}.")
    options = (text(record, where, "option1"), text(record, where, "option2"))
    return tuple(before + option for option in options), (after.strip(),) * 2, int(answer) - 1
