"""Rows summed up: means with their number and a 95 % interval, in percent of the best a metric gives."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

WIDE = 1.96  # standard errors of a 95 % interval
BEST = {"ruler_string_match_all": 100, "ruler_string_match_part": 100, "niah_kvcachefactory_rouge1": 10}  # others: 1


@dataclass(frozen=True)
class Cell:
    """All samples of one task under one protocol, method and budget."""

    task: str
    protocol: str
    method: str
    budget: int | float | None
    n: int
    score: float  # percent, as the interval
    low: float
    high: float
    kept_per_head: float
    bytes: float
    full_bytes: float
    truncated: int  # samples that lost their middle


def cells(rows: Iterable[dict[str, Any]]) -> list[Cell]:
    """In the order they first come."""
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["task"], row["protocol"], row["method"], row["budget"]), []).append(row)
    return [_cell(place, group) for place, group in groups.items()]


def _cell(place: tuple, group: Sequence[dict[str, Any]]) -> Cell:
    scores = [float(row["score"]) / BEST.get(row["metric"], 1) for row in group]
    low, high = interval(scores)
    kept, held, full = (_mean([row[name] for row in group]) for name in ("kept_per_head", "bytes", "full_bytes"))
    cut = sum(row["truncated"] > 0 for row in group)
    return Cell(*place, len(group), 100 * _mean(scores), 100 * low, 100 * high, kept, held, full, cut)


def interval(scores: Sequence[float]) -> tuple[float, float]:
    """Of the mean of scores from 0 to 1: Wilson's, as if each were 0 or 1, and so too wide where they lie between."""
    n, mean = len(scores), min(1.0, max(0.0, _mean(scores)))
    middle = (mean + WIDE**2 / (2 * n)) / (1 + WIDE**2 / n)
    half = WIDE * sqrt(mean * (1 - mean) / n + WIDE**2 / (4 * n**2)) / (1 + WIDE**2 / n)
    return max(0.0, middle - half), min(1.0, middle + half)


def write_csv(rows: Iterable[dict[str, Any]], path: str | Path) -> None:
    with Path(path).open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Cell.__dataclass_fields__)
        writer.writerows(vars(cell).values() for cell in cells(rows))


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)
