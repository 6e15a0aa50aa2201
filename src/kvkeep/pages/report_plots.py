"""The charts of a report as PNG files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from kvkeep.cache.report import held_share
from kvkeep.evaluate.results import grouped
from kvkeep.evaluate.summary import Cell, mean
from kvkeep.pages.report_facts import NeedleCell, ReportFacts
from kvkeep.plots import COLOURS, RAMP, STYLE, save

MARKERS = "os^D"
COLUMNS = 3


def draw(facts: ReportFacts, folder: str | Path) -> list[str]:
    """Draw, for each protocol, scores by budget, scores against memory, needles. -> names of the files written"""
    found: dict[str, Any] = {}
    with plt.rc_context(STYLE):
        for protocol in dict.fromkeys(cell.protocol for cell in facts.cells):
            cells = [cell for cell in facts.cells if cell.protocol == protocol]
            found[f"budgets_{protocol}.png"] = budget_curves(cells)
            found[f"memory_{protocol}.png"] = memory_chart(cells)
            if needles := [cell for cell in facts.needles if cell.protocol == protocol]:
                found[f"needles_{protocol}.png"] = needle_maps(needles)
        return save(found, folder)


def budget_curves(cells: Sequence[Cell]) -> Any:
    """A panel for each task."""
    tasks, methods = (list(dict.fromkeys(getattr(cell, name) for cell in cells)) for name in ("task", "method"))
    figure, panels = _panels(len(tasks))
    for panel, task in zip(panels, tasks, strict=False):
        for method in methods:
            mine = [cell for cell in cells if (cell.task, cell.method) == (task, method)]
            _curve(panel, method, sorted(mine, key=lambda cell: cell.kept_per_head), methods)
        panel.set(title=task, xscale="log", ylim=(-3, 103), xlabel="tokens kept per KV head", ylabel="score (percent)")
    handles = {label: line for panel in panels for line, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=4, frameon=False)
    return figure


def _curve(panel: Any, method: str, cells: Sequence[Cell], methods: Sequence[str]) -> None:
    if method == "full" and cells:
        panel.axhline(cells[0].score, color="#555555", linestyle="--", label=method)
    elif cells:
        x, y = ([getattr(cell, name) for cell in cells] for name in ("kept_per_head", "score"))
        panel.plot(x, y, markersize=5, **_style(method, methods))


def memory_chart(cells: Sequence[Cell]) -> Any:
    """Mean score of all tasks against memory, of configs that have them all."""
    by_method, tasks = grouped((cell.method, cell) for cell in cells), {cell.task for cell in cells}
    figure, panel = plt.subplots(figsize=(7, 4.6), layout="constrained")
    for method, found in by_method.items():
        budgets = grouped((cell.budget, cell) for cell in found)
        whole = [mine for mine in budgets.values() if len(mine) == len(tasks)]
        points = sorted(
            (mean(100 * held_share(c.bytes, c.full_bytes) for c in mine), mean(c.score for c in mine)) for mine in whole
        )
        panel.plot([x for x, _ in points], [y for _, y in points], linewidth=1, **_style(method, list(by_method)))
    panel.set(
        xlabel="memory of keys and values (percent of a full cache)", ylabel="mean score (percent)", ylim=(-3, 103)
    )
    panel.legend(frameon=False, bbox_to_anchor=(1.0, 1.0), loc="upper left")
    return figure


def needle_maps(cells: Sequence[NeedleCell]) -> Any:
    """Share found by length and depth, a panel for each task, method and budget; 0 to 1 everywhere."""
    maps = grouped(((cell.method, cell.budget, cell.task), cell) for cell in cells)
    figure, panels = _panels(len(maps))
    for panel, ((method, budget, task), mine) in zip(panels, maps.items(), strict=False):
        lengths, depths = sorted({cell.length for cell in mine}), sorted({cell.depth for cell in mine})
        scores = {(cell.depth, cell.length): cell.score for cell in mine}
        rows = [[scores.get((depth, length), float("nan")) for length in lengths] for depth in depths]
        image = panel.imshow(rows, cmap=RAMP, vmin=0, vmax=1, aspect="auto")
        panel.set(
            title=f"{method} {'' if budget is None else budget}\n{task}", xlabel="tokens", ylabel="depth (percent)"
        )
        panel.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=45, fontsize=8)
        panel.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths], fontsize=8)
    figure.colorbar(image, ax=panels, label="share found", shrink=0.6)
    return figure


def _panels(count: int) -> tuple[Any, list[Any]]:
    rows = -(-count // COLUMNS)
    figure, panels = plt.subplots(
        rows, COLUMNS, figsize=(4.2 * COLUMNS, 3.2 * rows + 0.6), squeeze=False, layout="constrained"
    )
    for panel in panels.flat[count:]:
        panel.set_visible(False)
    return figure, list(panels.flat[:count])


def _style(method: str, methods: Sequence[str]) -> Any:
    place = methods.index(method)
    return {
        "color": "#555555" if method == "full" else COLOURS[place % len(COLOURS)],
        "marker": MARKERS[(place + place // len(COLOURS)) % len(MARKERS)],  # so that no two methods look alike
        "label": method,
    }
