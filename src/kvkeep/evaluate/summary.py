"""Result rows summarized: means with n and a 95 % interval, in percent of the metric's highest score."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from math import sqrt
from pathlib import Path
from typing import Any

from kvkeep.evaluate.metrics.longbench import averages, length_range
from kvkeep.evaluate.results import grouped, write_error
from kvkeep.evaluate.tasks.ruler import TASKS as RULER

Z_95 = 1.96  # standard errors of a 95 % interval
HIGHEST = {"ruler_string_match_all": 100, "ruler_string_match_part": 100, "niah_kvcachefactory_rouge1": 10}  # others: 1


@dataclass(frozen=True)
class Cell:
    """All samples of one task (in LongBench-E: of one range of lengths) under one protocol, method and budget."""

    task: str
    protocol: str
    method: str
    budget: int | float | str | None
    n: int
    score: float  # percent, as the interval
    low: float
    high: float
    kept_per_head: float
    bytes: float
    full_bytes: float
    truncated: int  # samples that lost their middle
    score_per_character: float | None = None  # percent; multiple choice, normalized by length (lm-eval's acc_norm)


def summarize(rows: Iterable[dict[str, Any]]) -> list[Cell]:
    """Summarize rows, in the order of the first of each cell; ranges of lengths from short to long, turns as asked."""
    groups = grouped(((row["task"], row["protocol"], row["method"], row["budget"]), row) for row in rows)
    return [
        _cell((f"{task} {part}".rstrip(), protocol, method, budget), mine)
        for (task, protocol, method, budget), found in groups.items()
        for part, mine in sorted(grouped((_part(row), row) for row in found).items())
    ]


def _part(row: Mapping[str, Any]) -> str:
    """The range of lengths a row of LongBench-E is reported in, or the turn of a conversation; nothing for others."""
    if "turn" in row:
        return f"turn {row['turn']}"
    words = row.get("made", {}).get("length")
    return length_range(words) if row["task"].endswith("_e") and words is not None else ""


def _cell(place: tuple[str, str, str, int | float | str | None], group: Sequence[dict[str, Any]]) -> Cell:
    scores = [normalized_score(row) for row in group]
    low, high = interval(scores)
    by_character = [row["score_per_character"] for row in group if "score_per_character" in row]
    return Cell(
        *place,
        n=len(group),
        score=100 * mean(scores),
        low=100 * low,
        high=100 * high,
        kept_per_head=mean([row["kept_per_head"] for row in group]),
        bytes=mean([row["bytes"] for row in group]),
        full_bytes=mean([row["full_bytes"] for row in group]),
        truncated=sum(row["truncated"] > 0 for row in group),
        score_per_character=100 * mean(by_character) if by_character else None,
    )


@dataclass(frozen=True)
class TurnScores:
    """Conversations of one task, held in one way, under one method and budget: percent right."""

    task: str
    protocol: str
    method: str
    budget: int | float | str | None
    n: int  # questions
    by_turn: dict[int, float]
    all: float  # of all turns


def by_turn(rows: Iterable[dict[str, Any]]) -> list[TurnScores]:
    """Summarize rows of conversations, in the order of the first of each."""
    groups = grouped(((row["task"], row["protocol"], row["method"], row["budget"]), row) for row in rows)
    return [_turn_scores(place, mine) for place, mine in groups.items()]


def _turn_scores(place: tuple[str, str, str, int | float | str | None], rows: Sequence[dict[str, Any]]) -> TurnScores:
    turns = grouped((row["turn"], 100 * normalized_score(row)) for row in rows)
    scores = {turn: mean(found) for turn, found in sorted(turns.items())}
    return TurnScores(*place, len(rows), scores, mean(score for found in turns.values() for score in found))


def normalized_score(row: Mapping[str, Any]) -> float:
    """0 to 1: the score divided by the metric's highest."""
    return float(row["score"]) / HIGHEST.get(row["metric"], 1)


def interval(scores: Sequence[float]) -> tuple[float, float]:
    """Wilson's, of the mean of scores from 0 to 1, as if each were 0 or 1; so too wide where they lie between."""
    n, share = len(scores), min(1.0, max(0.0, mean(scores)))
    middle = (share + Z_95**2 / (2 * n)) / (1 + Z_95**2 / n)
    half = Z_95 * sqrt(share * (1 - share) / n + Z_95**2 / (4 * n**2)) / (1 + Z_95**2 / n)
    return max(0.0, middle - half), min(1.0, middle + half)


def means(scores: Mapping[str, float]) -> dict[str, float]:
    """Averages of LongBench, and of RULER at each length, under names with the number of tasks; none of one task."""
    parts = ((name.rpartition("_"), score) for name, score in scores.items())
    lengths = grouped((length, score) for (task, _, length), score in parts if task in RULER)
    several = {length: found for length, found in lengths.items() if len(found) > 1}
    ruler = {f"RULER {length} ({len(found)} tasks)": mean(found) for length, found in several.items()}
    return averages(scores) | ruler


def write_csv(rows: Iterable[dict[str, Any]], path: str | Path) -> None:
    write_lines(Cell, summarize(rows), path)


def write_lines(kind: type, lines: Iterable[Any], path: str | Path) -> None:
    """A CSV of dataclasses of one kind."""
    try:
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(field.name for field in fields(kind))
            writer.writerows(vars(line).values() for line in lines)
    except OSError as error:
        raise write_error(path, error, "the rows it summarizes") from error


def mean(numbers: Iterable[float]) -> float:
    found = list(numbers)
    return sum(found) / len(found)
