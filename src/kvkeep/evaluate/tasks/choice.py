"""Short multiple-choice tasks as lm-eval asks them: every choice is a text that could follow, the likeliest is taken.

A score wants the log-likelihoods and the sample's extra: METRICS[sample.metric](loglikelihoods, **sample.extra).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from kvkeep.errors import BadInput, BadParameter
from kvkeep.evaluate.sample import Sample
from kvkeep.evaluate.tasks.build import identity, records, samples, text, texts

SHOT_SEED = 1234


class Asked(NamedTuple):
    """One record: what stands before each choice (one text for all, or one for each), the choices, the right one."""

    questions: tuple[str, ...]
    choices: tuple[str, ...]
    gold: int

    def shot(self) -> str:
        return self.questions[self.gold if len(self.questions) > 1 else 0] + " " + self.choices[self.gold] + "\n\n"


def arc_easy(path: str | Path, shots: int = 0, train: str | Path | None = None) -> list[Sample]:
    """Lines with `question`, `choices` (text, label) and `answerKey`."""
    return _read(path, "arc_easy", _arc, shots, train)


def openbookqa(path: str | Path, shots: int = 0, train: str | Path | None = None) -> list[Sample]:
    """Lines with `question_stem`, `choices` (text, label) and `answerKey`."""
    return _read(path, "openbookqa", _openbook, shots, train)


def wic(path: str | Path, shots: int = 0, train: str | Path | None = None) -> list[Sample]:
    """Lines with `sentence1`, `sentence2`, `start1`, `end1` and `label`."""
    return _read(path, "wic", _wic, shots, train)


def winogrande(path: str | Path, shots: int = 0, train: str | Path | None = None) -> list[Sample]:
    """Lines with `sentence`, `option1`, `option2` and `answer`.

    The options differ before the choice and not in it, so extra["questions"] has one question for each.
    """
    return _read(path, "winogrande", _winogrande, shots, train)


def pairs(sample: Sample) -> list[tuple[str, str]]:
    """(prompt, continuation to score) for every choice; blanks at the end of the first belong to the second."""
    questions = sample.extra.get("questions") or (sample.question,) * len(sample.choices)
    found = []
    for question, choice in zip(questions, sample.choices, strict=True):
        prompt = sample.context + question + sample.prefix
        found.append((prompt.rstrip(), prompt[len(prompt.rstrip()) :] + choice))
    return found


def _read(
    path: str | Path, task: str, ask: Callable[[dict[str, Any], str], Asked], shots: int, train: str | Path | None
) -> list[Sample]:
    """`shots` examples of the training file before every question, drawn anew for each, are its context."""
    known = _examples(train, ask, shots)
    source = random.Random(SHOT_SEED)

    def make(record: dict[str, Any], where: str, number: int) -> Sample:
        asked = ask(record, where)
        extra: dict[str, Any] = {"gold": asked.gold, "choices": asked.choices}
        if len(asked.questions) > 1:
            extra["questions"] = asked.questions
        continuations = tuple(" " + choice for choice in asked.choices)
        return Sample(
            task,
            identity(record, number, "id", "idx", "qID"),
            asked.questions[0],
            (continuations[asked.gold],),
            "lm_eval_multiple_choice",
            context="".join(source.sample(known, shots)),
            choices=continuations,
            chat=False,
            extra=extra,
        )

    return samples(path, make)


def _examples(train: str | Path | None, ask: Callable[[dict[str, Any], str], Asked], shots: int) -> list[str]:
    if not shots:
        return []
    if shots < 0 or train is None:
        raise BadParameter(f"shots={shots} are drawn from a training file: give train=, or shots=0.")
    known = [ask(record, where).shot() for where, record in records(train)]
    if len(known) < shots:
        raise BadInput(f"{str(train)!r} has {len(known)} examples, fewer than shots={shots}.")
    return known


def _arc(record: dict[str, Any], where: str) -> Asked:
    return _lettered(record, where, f"Question: {text(record, where, 'question')}\nAnswer:")


def _openbook(record: dict[str, Any], where: str) -> Asked:
    return _lettered(record, where, text(record, where, "question_stem"))


def _lettered(record: dict[str, Any], where: str, question: str) -> Asked:
    offered = record.get("choices")
    if not isinstance(offered, dict):
        raise BadInput(f"{where} has no choices with their text and label; it has {', '.join(sorted(record))}.")
    choices, labels = texts(offered, where, "text"), texts(offered, where, "label")
    answer = text(record, where, "answerKey").lstrip()
    if answer not in labels or len(labels) != len(choices):
        raise BadInput(f"{where}: the answer '{answer}' is none of {len(choices)} choices ({', '.join(labels)}).")
    return Asked((question,), choices, labels.index(answer))


def _wic(record: dict[str, Any], where: str) -> Asked:
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
    return Asked((question,), ("no", "yes"), _TRUTH[label])


_TRUTH = {"false": 0, "0": 0, "true": 1, "1": 1}


def _winogrande(record: dict[str, Any], where: str) -> Asked:
    before, blank, after = text(record, where, "sentence").partition("_")
    answer = text(record, where, "answer")
    if not blank or answer not in ("1", "2"):
        raise BadInput(f"{where} needs a sentence with a blank (_) and 1 or 2 for an answer, not {answer!r}.")
    options = (text(record, where, "option1"), text(record, where, "option2"))
    return Asked(tuple(before + option for option in options), (after.strip(),) * 2, int(answer) - 1)
