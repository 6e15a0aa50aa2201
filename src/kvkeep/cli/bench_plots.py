"""Plots of `kvkeep bench`: the time of a decode step, and the memory of the cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from kvkeep.cache.report import format_bytes
from kvkeep.plots import COLOURS, STYLE, save

GREYS = {"transformers": "#333333", "static": "#8c8c8c"}
DOTS = (0, (1, 2))
APART = 14  # points between names


def draw(found: Sequence[Any], folder: Path) -> list[str]:
    """-> names of the files written"""
    with plt.rc_context(STYLE):
        shades = _shades(found)
        return save({"decode.png": _decode(found, shades), "memory.png": _memory(found, shades)}, folder)


def _shades(found: Sequence[Any]) -> dict[str, str]:
    """Grey for transformers, colours for the methods."""
    names = {cost.label: cost.by for cost in found}
    ours = [each for each, by in names.items() if by not in GREYS]
    return {each: GREYS.get(by) or COLOURS[ours.index(each) % len(COLOURS)] for each, by in names.items()}


def _decode(found: Sequence[Any], shades: dict[str, str]) -> Any:
    """A panel for each batch: lines over lengths, or bars where there is one length."""
    batches = sorted({cost.batch for cost in found})
    lengths = sorted({cost.context for cost in found})
    tall = 4.6 if len(lengths) > 1 else 0.8 + 0.38 * len(shades)
    size = 8, 0.4 + tall * len(batches)
    figure, panels = plt.subplots(len(batches), 1, figsize=size, squeeze=False, layout="constrained")
    for panel, batch in zip(panels[:, 0], batches, strict=True):
        costs = [cost for cost in found if cost.batch == batch]
        whose = f"each of {batch} sequences" if batch > 1 else "one sequence"
        panel.set_title(f"Time of a token for {whose}", loc="left", fontsize=12)
        _lines(panel, costs, lengths, shades) if len(lengths) > 1 else _times(panel, costs, shades)
    panels[-1, 0].set_xlabel("tokens of the prompt" if len(lengths) > 1 else "")
    figure.supxlabel("dotted: the roofline of this machine", x=0.99, ha="right", fontsize=9, color="#777777")
    figure.canvas.draw()  # fixes the positions the labels are placed by
    for panel in panels[:, 0]:
        _labels(panel)
    return figure


def _times(panel: Any, costs: Sequence[Any], shades: dict[str, str]) -> None:
    _bars(panel, costs, [cost.step_s for cost in costs], shades, lambda seconds: f"{1000 * seconds:,.1f} ms")
    for y, cost in enumerate(costs):
        if cost.roofline_s and cost.step_s:
            panel.plot([cost.roofline_s] * 2, [y - 0.32, y + 0.32], color="white", linestyle=DOTS)


def _lines(panel: Any, costs: Sequence[Any], lengths: list[int], shades: dict[str, str]) -> None:
    for each in dict.fromkeys(c.label for c in costs):
        mine = sorted((c for c in costs if c.label == each), key=lambda c: c.context)
        done = [c for c in mine if c.step_s is not None]
        then = ", then out of memory" if any("memory" in c.note for c in mine) else ""
        x = [c.context for c in done]
        panel.plot(x, [1000 * c.step_s for c in done], "o-", color=shades[each], markersize=4, label=each + then)
        if all(c.roofline_s for c in done):
            panel.plot(x, [1000 * c.roofline_s for c in done], color=shades[each], linewidth=1, linestyle=DOTS)
    if lengths[-1] > 4 * lengths[0]:
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.xaxis.set_minor_locator(NullLocator())
        panel.yaxis.set_minor_locator(NullLocator())
    else:
        panel.set_ylim(bottom=0)
    panel.set_xticks(lengths, [f"{n:,}" for n in lengths])
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    panel.set_ylabel("milliseconds")


def _labels(panel: Any) -> None:
    """Names at the ends of the lines, moved apart where they would overlap."""
    point = panel.figure.dpi / 72
    lines = [line for line in panel.lines if not line.get_label().startswith("_") and len(line.get_xdata())]
    lines.sort(key=lambda line: line.get_ydata()[-1])
    ends = [(line.get_xdata()[-1], line.get_ydata()[-1]) for line in lines]
    at = [panel.transData.transform(end)[1] / point for end in ends]
    to = _apart(at)
    for line, end, shift in zip(lines, ends, (b - a for a, b in zip(at, to, strict=True)), strict=True):
        panel.annotate(
            line.get_label(), end, xytext=(8, shift), textcoords="offset points", va="center",
            color=line.get_color(), fontsize=10, annotation_clip=False,
        )  # fmt: skip


def _apart(heights: list[float]) -> list[float]:
    """Ascending heights, neighbours moved apart until there is room for a name."""
    moved = list(heights)
    for _ in range(200):
        for i in range(len(moved) - 1):
            lack = APART - (moved[i + 1] - moved[i])
            if lack > 0:
                moved[i], moved[i + 1] = moved[i] - lack / 2, moved[i + 1] + lack / 2
    return moved


def _memory(found: Sequence[Any], shades: dict[str, str]) -> Any:
    """Draw the bytes of one sequence at the longest prompt; pale behind it the peak of prefill, where it is known."""
    longest = max(cost.context for cost in found)
    costs = list({c.label: c for c in found if c.context == longest and c.kv_bytes is not None}.values())
    figure, panel = plt.subplots(figsize=(8, 1.2 + 0.38 * len(costs)), layout="constrained")
    _bars(panel, costs, [cost.kv_bytes for cost in costs], shades, format_bytes)
    peaks = [cost.peak_bytes or 0 for cost in costs]
    if any(peaks):
        panel.barh(range(len(costs)), peaks, height=0.64, color=[shades[c.label] for c in costs], alpha=0.2)
        panel.set_xlim(0, 1.15 * max(*peaks, *(cost.kv_bytes for cost in costs)))
        panel.set_title("pale: peak of prefill", loc="right", fontsize=9, color="#777777")
    panel.set_title(f"Keys and values held of {longest:,} tokens", loc="left", fontsize=12)
    return figure


def _bars(panel: Any, costs: Sequence[Any], values: Sequence[Any], shades: dict[str, str], say: Any) -> None:
    """One bar for every cost; its note where there is no value."""
    names, sizes = [cost.label for cost in costs], [value or 0 for value in values]
    panel.barh(range(len(names)), sizes, height=0.64, color=[shades[each] for each in names])
    for y, (cost, value) in enumerate(zip(costs, values, strict=True)):
        said, shade = (cost.note, "#777777") if value is None else (say(value), "#333333")
        panel.annotate(said, (value or 0, y), xytext=(5, 0), textcoords="offset points", va="center", color=shade)
    panel.set_yticks(range(len(names)), names, color="#333333")
    panel.invert_yaxis()
    panel.set_xlim(0, 1.15 * max(sizes, default=0) or 1)
    panel.tick_params(left=False)
    panel.xaxis.set_ticks([])
    panel.spines[["bottom", "left"]].set_visible(False)
