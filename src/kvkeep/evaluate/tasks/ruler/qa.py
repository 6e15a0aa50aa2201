"""Question answering: the paragraphs of a question, one in SQuAD and ten in HotpotQA, among those of others."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvkeep.errors import BadInput, BadParameter
from kvkeep.evaluate.tasks.ruler.frame import Drawn, Frame, Prompt

RULE = "Answer the question based on the given documents. Only give me the answer and do not output any other words."
CONTEXT = RULE + "\n\nThe following are given documents.\n\n{context}\n\n"
QUESTION = RULE + "\n\nQuestion: {query}"
PREFIX = " Answer:"
STEP = 10


@dataclass(frozen=True)
class Question:
    text: str
    answers: tuple[str, ...]
    own: tuple[int, ...]  # documents it is about
    near: tuple[int, ...] = ()  # others of the same article, which fill up first


@dataclass(frozen=True)
class Corpus:
    documents: list[str]
    questions: list[Question]


def documents(read: Callable[[Path], Corpus], frame: Frame, file: Path) -> Iterator[Drawn]:
    """Sample i asks the file's i-th question. Deviation: never fewer documents than the question's own."""
    corpus = read(file)
    rng = random.Random(frame.seed)
    if frame.samples > len(corpus.questions):
        raise BadParameter(
            f"samples={frame.samples}, but {file} has {len(corpus.questions)} questions that can be answered."
        )

    def draw(index: int, units: int) -> Prompt:
        question = corpus.questions[index]
        chosen = [corpus.documents[n] for n in chosen_documents(corpus, question, rng, units)]
        random.Random(frame.seed).shuffle(chosen)
        context = "\n\n".join(f"Document {number}:\n{text}" for number, text in enumerate(chosen, 1))
        return Prompt(CONTEXT.format(context=context), QUESTION.format(query=question.text), PREFIX, question.answers)

    units = frame.units(partial(draw, 0), STEP)
    for index in range(frame.samples):
        yield frame.fitting(partial(draw, index), units, STEP)


def chosen_documents(corpus: Corpus, question: Question, rng: random.Random, units: int) -> list[int]:
    total = len(corpus.documents)
    if units >= total:
        return [n % total for n in range(units)]
    own, near = list(question.own), list(question.near)
    wanted = max(0, units - len(own))
    if wanted <= len(near):
        return own + rng.sample(near, wanted)
    known = {*own, *near}
    others = [n for n in range(total) if n not in known]
    return own + near + rng.sample(others, wanted - len(near))


def squad(path: Path) -> Corpus:
    """SQuAD v2's file: questions that cannot be answered are left out."""
    articles = []
    for a, article in enumerate(_field(_load(path), "data", list, path.name)):
        where = f"{path.name}, article {a}"
        parts = [(part, f"{where}, paragraph {p}") for p, part in enumerate(_field(article, "paragraphs", list, where))]
        articles.append([(_field(part, "context", str, name), list(_answerable(part, name))) for part, name in parts])
    number = _numbered(text for article in articles for text, _ in article)
    questions = []
    for article in articles:
        for text, asked in article:
            near = tuple(number[other] for other, _ in article if other != text)
            questions += [Question(question, answers, (number[text],), near) for question, answers in asked]
    return _corpus(path, number, questions)


def _answerable(paragraph: Any, where: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    for q, entry in enumerate(_field(paragraph, "qas", list, where)):
        name = f"{where}, question {q}"
        asked = _field(entry, "question", str, name)
        if not entry.get("is_impossible", False):
            answers = tuple(_field(answer, "text", str, name) for answer in _field(entry, "answers", list, name))
            if not answers:
                raise BadInput(f"{name} has no answers and is not marked is_impossible.")
            yield asked, answers


def hotpotqa(path: Path) -> Corpus:
    """HotpotQA's file, or the hub's form of it with titles and sentences apart."""
    entries = _load(path)
    if not isinstance(entries, list):
        raise BadInput(f"{path.name} is not a list of questions, as HotpotQA's file is.")
    found = []
    for e, entry in enumerate(entries):
        where = f"{path.name}, entry {e}"
        asked, answer = _field(entry, "question", str, where), _field(entry, "answer", str, where)
        found.append((asked, answer, _paragraphs(entry, where)))
    number = _numbered(text for _, _, texts in found for text in texts)
    questions = [Question(asked, (answer,), tuple(number[text] for text in texts)) for asked, answer, texts in found]
    return _corpus(path, number, questions)


def _paragraphs(entry: Any, where: str) -> list[str]:
    context = entry.get("context")
    try:
        if isinstance(context, dict):
            context = list(zip(context["title"], context["sentences"], strict=True))
        found = [f"{title}\n{''.join(sentences)}" for title, sentences in context]
    except (TypeError, KeyError, ValueError):
        found = []
    if not found:
        raise BadInput(f"{where}: 'context' is not a list of [title, [sentence, …]].")
    return found


def _load(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise BadInput(f"{str(path)!r} cannot be read ({error.strerror}); give the data set's JSON file.") from None
    except ValueError as error:
        raise BadInput(f"{str(path)!r} is not JSON ({error}); give the data set's JSON file.") from None


def _field(record: Any, name: str, kind: type, where: str) -> Any:
    value = record.get(name) if isinstance(record, dict) else None
    if not isinstance(value, kind):
        has = f"it has {', '.join(sorted(record))}" if isinstance(record, dict) else f"it is a {type(record).__name__}"
        raise BadInput(f"{where} has no '{name}' that is a {kind.__name__}; {has}.")
    return value


def _numbered(texts: Iterator[str]) -> dict[str, int]:
    return {text: number for number, text in enumerate(sorted(set(texts)))}


def _corpus(path: Path, documents: Mapping[str, int], questions: list[Question]) -> Corpus:
    if not questions:
        raise BadInput(f"{str(path)!r} has no questions that can be answered.")
    return Corpus(list(documents), questions)
