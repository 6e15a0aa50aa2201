"""What `kvkeep report` shows: the rows of an evaluation, summarized."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvkeep.errors import BadInput
from kvkeep.evaluate.summary import Cell, interval, mean, means, normalized_score, summarize

Row = dict[str, Any]
Budget = int | float | str | None
Config = tuple[str, str, Budget]  # protocol, method, budget


@dataclass(frozen=True)
class Average:
    """The average over the tasks of a benchmark, as it defines it."""

    name: str
    protocol: str
    method: str
    budget: Budget
    score: float  # percent


@dataclass(frozen=True)
class NeedleCell:
    """All needles at one depth of texts of one length."""

    task: str
    protocol: str
    method: str
    budget: Budget
    length: int  # tokens
    depth: float  # percent
    n: int
    score: float  # 0 to 1
    low: float
    high: float


@dataclass(frozen=True)
class Speed:
    """The speed of one method and budget, on average over all its answers."""

    protocol: str
    method: str
    budget: Budget
    n: int
    first_token_s: float
    tokens_per_s: float | None
    together: int  # configs that were decoded in one batch; 1: this one alone


@dataclass(frozen=True)
class ReportFacts:
    name: str
    version: str  # of the package that made the rows, where they say so
    models: list[str]
    rows: int
    cells: list[Cell]
    averages: list[Average]
    needles: list[NeedleCell]
    speeds: list[Speed]


def report_facts(folder: str | Path) -> ReportFacts:
    """Collect the facts of the folder that `kvkeep eval --out` wrote."""
    rows, times = read_rows(Path(folder) / "rows.jsonl"), Path(folder) / "times.jsonl"
    cells = summarize(rows)
    return ReportFacts(
        name=Path(folder).absolute().name,
        version=", ".join(sorted({str(made) for row in rows if (made := row.get("packages", {}).get("kvkeep"))})),
        models=sorted({str(row["model"]) for row in rows if row.get("model")}),
        rows=len(rows),
        cells=cells,
        averages=averages(cells),
        needles=needle_cells(rows),
        speeds=speeds(read_rows(times)) if times.exists() else [],
    )


def read_rows(path: Path) -> list[Row]:
    """Complete lines of a file that may still be written to."""
    try:
        lines = path.read_bytes().splitlines(keepends=True)
        rows = [json.loads(line) for line in lines if line.endswith(b"\n")]
    except FileNotFoundError:
        raise BadInput(
            f"there is no {path.name} in {str(path.parent)!r}; give the folder of `kvkeep eval --out`."
        ) from None
    except OSError as error:
        raise BadInput(f"{str(path)!r} cannot be read ({error.strerror}).") from None
    except ValueError as error:
        raise BadInput(f"{str(path)!r} is damaged ({error}).") from None
    if not rows:
        raise BadInput(f"{str(path)!r} has no complete row yet; wait for the first.")
    return rows


def averages(cells: Iterable[Cell]) -> list[Average]:
    places: dict[Config, dict[str, float]] = {}
    for cell in cells:
        places.setdefault((cell.protocol, cell.method, cell.budget), {})[cell.task] = cell.score
    return [Average(name, *place, score) for place, scores in places.items() for name, score in means(scores).items()]


def needle_cells(rows: Iterable[Row]) -> list[NeedleCell]:
    """Summarize tasks that hide something at a depth of a text."""
    groups: dict[tuple[str, str, str, Budget, int, float], list[float]] = {}
    for row in rows:
        made = row.get("made", {})
        if isinstance(made.get("depth"), int | float) and "length" in made:
            place = row["task"], row["protocol"], row["method"], row["budget"], made["length"], made["depth"]
            groups.setdefault(place, []).append(normalized_score(row))
    return [NeedleCell(*place, len(scores), mean(scores), *interval(scores)) for place, scores in groups.items()]


def speeds(times: Iterable[Row]) -> list[Speed]:
    groups: dict[Config, list[Row]] = {}
    for row in times:
        if "first_token_s" in row:
            groups.setdefault((row["protocol"], row["method"], row["budget"]), []).append(row)
    return [_speed(place, mine) for place, mine in groups.items()]


def _speed(place: Config, rows: Sequence[Row]) -> Speed:
    rates = [row["tokens_per_s"] for row in rows if row.get("tokens_per_s")]
    together = max(row.get("decode_configs", 1) for row in rows)
    first = mean([row["first_token_s"] for row in rows])
    return Speed(*place, len(rows), first, mean(rates) if rates else None, together)
