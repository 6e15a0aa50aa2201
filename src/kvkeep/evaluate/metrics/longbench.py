"""LongBench (arXiv:2308.14508): one score per answer, the best over its references, and the score of a task."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from difflib import SequenceMatcher
from functools import wraps
from math import inf
from statistics import fmean as mean

from kvkeep.errors import BadInput
from kvkeep.evaluate.metrics.rouge import rouge_l
from kvkeep.evaluate.metrics.words import as_list, chinese_words, english_words, f1, lengths, segment
from kvkeep.registry import Registry


def first_line_of_code(text: str) -> str:
    """The first line without a backtick, '#' or '//'; blank lines count, leading line ends do not."""
    for line in text.lstrip("\n").split("\n"):
        if not any(sign in line for sign in ("`", "#", "//")):
            return line
    return ""


def levenshtein_ratio(one: str, two: str) -> float:
    """The share of characters in a longest common subsequence: python-Levenshtein, thefuzz, rapidfuzz."""
    return 2 * lengths(one, two)[-1][-1] / (len(one) + len(two))


def likeness(one: str, two: str, ratio: Callable[[str, str], float] | None = None) -> float:
    """How alike two lines of code are, in whole percents, as fuzzywuzzy 0.18 says it over either of its back ends."""
    if one == two:
        return 1.0
    if not one or not two:
        return 0.0
    found = ratio(one, two) if ratio else SequenceMatcher(None, one, two).ratio()
    return round(100 * found) / 100


FIRST_LINE_ONLY = {"trec", "triviaqa", "samsum", "lsht"}
CATEGORIES = {  # of the 16 English tasks
    "single-document": ("narrativeqa", "qasper", "multifieldqa_en"),
    "multi-document": ("hotpotqa", "2wikimqa", "musique"),
    "summary": ("gov_report", "qmsum", "multi_news"),
    "few-shot": ("trec", "triviaqa", "samsum"),
    "synthetic": ("passage_count", "passage_retrieval_en"),
    "code": ("lcc", "repobench-p"),
}
RANGES = {"0-4k": 4000, "4-8k": 8000, "8k+": inf}  # LongBench-E's: a document has fewer words than this


def best_of_references(metric: Callable[..., float]) -> Callable[..., float]:
    """A metric against one reference becomes one against several, never below 0."""

    @wraps(metric)
    def best(prediction: str, references: str | Sequence[str], **fields) -> float:
        return max([0.0, *(metric(prediction, reference, **fields) for reference in as_list(references))])

    return best


@best_of_references
def qa_f1(prediction: str, reference: str, **_) -> float:
    return f1(english_words(prediction), english_words(reference))


@best_of_references
def qa_f1_zh(prediction: str, reference: str, **_) -> float:
    return f1(chinese_words(prediction), chinese_words(reference))


@best_of_references
def rouge(prediction: str, reference: str, **_) -> float:
    """Rouge-L of `rouge` 1.0.1; what that package cannot score is 0."""
    try:
        return rouge_l(prediction, reference)
    except BadInput:
        return 0.0


def rouge_zh(prediction: str, references: str | Sequence[str], **_) -> float:
    return rouge(" ".join(segment(prediction)), [" ".join(segment(text)) for text in as_list(references)])


@best_of_references
def classification(prediction: str, reference: str, all_classes: Sequence[str] | None = None, **_) -> float:
    """One over the number of classes named, if the right one is among them.

    A name inside the right one's name does not count, but the official loop removes while it iterates, so the name
    after a removed one is never looked at. Kept.
    """
    if not all_classes:
        raise BadInput("trec and lsht are scored among all classes of the task: give all_classes.")
    named = [name for name in all_classes if name in prediction]
    place = 0
    while place < len(named):
        if named[place] in reference and named[place] != reference:
            del named[place]
        place += 1
    return 1 / len(named) if reference in named else 0.0


@best_of_references
def count(prediction: str, reference: str, **_) -> float:
    """The share of all numbers in the answer that are the right one."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(str(reference)) / len(numbers) if numbers else 0.0


def _retrieval(label: str) -> Callable[..., float]:
    @best_of_references
    def retrieval(prediction: str, reference: str, **_) -> float:
        found = re.search(label + r"(\d+)", reference)
        if not found:
            raise BadInput(f"the reference {reference[:80]!r} names no '{label.strip()}' and number.")
        return count(prediction, found[1])

    return retrieval


retrieval = _retrieval("Paragraph ")
retrieval_zh = _retrieval("段落")


@best_of_references
def code_sim(prediction: str, reference: str, **_) -> float:
    """The first line of code, over difflib: the back end of LongBench's own requirements, and kvpress'."""
    return likeness(first_line_of_code(prediction), reference)


@best_of_references
def code_sim_levenshtein(prediction: str, reference: str, **_) -> float:
    """The same with python-Levenshtein installed, as KVCache-Factory asks; never lower, by up to 0.21 higher."""
    return likeness(first_line_of_code(prediction), reference, levenshtein_ratio)


TASKS = Registry(
    "LongBench task",
    dict.fromkeys(["narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "triviaqa"], qa_f1)
    | dict.fromkeys(["gov_report", "qmsum", "multi_news", "samsum"], rouge)
    | dict.fromkeys(["dureader", "vcsum"], rouge_zh)
    | dict.fromkeys(["trec", "lsht"], classification)
    | dict.fromkeys(["lcc", "repobench-p"], code_sim)
    | {
        "multifieldqa_zh": qa_f1_zh,
        "passage_count": count,
        "passage_retrieval_en": retrieval,
        "passage_retrieval_zh": retrieval_zh,
    },
)
CHINESE = {name for name, metric in TASKS.items() if metric in (qa_f1_zh, rouge_zh)}  # words are cut by jieba


def score_answer(prediction: str, references: Sequence[str], dataset: str, all_classes=None, **_) -> float:
    """One answer to one task, 0..1, cut to its first line where the task wants that."""
    if dataset in FIRST_LINE_ONLY:
        prediction = prediction.lstrip("\n").split("\n")[0]
    return TASKS[dataset](prediction, references, all_classes=all_classes)


def scorer(predictions: Sequence[str], references: Sequence[Sequence[str]], dataset: str, **fields) -> float:
    """A task: 100 x mean, two decimals."""
    scores = [score_answer(p, r, dataset, **fields) for p, r in zip(predictions, references, strict=True)]
    return round(100 * sum(scores) / len(scores), 2)


def length_range(words: int) -> str:
    return next(name for name, end in RANGES.items() if words < end)


def averages(scores: Mapping[str, float]) -> dict[str, float]:
    """Both averages in use, of the English tasks among these, under names that say of how many; of one task, none.

    KV papers take the mean of 16 tasks, LongBench's README that of six categories' means. Tasks of LongBench-E, whose
    names end in _e, are averaged apart, and so is each range of lengths, which follows the name.
    """
    found: dict[str, float] = {}
    ranges = [(f"LongBench-E {name}", f"_e {name}") for name in RANGES]
    for name, end in (("LongBench", ""), ("LongBench-E", "_e"), *ranges):
        groups = [[scores[task + end] for task in tasks if task + end in scores] for tasks in CATEGORIES.values()]
        groups = [group for group in groups if group]
        tasks = [score for group in groups for score in group]
        if len(tasks) > 1:
            found[f"{name}, mean of {len(tasks)} tasks"] = mean(tasks)
            found[f"{name}, mean of {len(groups)} categories"] = mean(map(mean, groups))
    return found
