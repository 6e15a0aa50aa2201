"""Pictures of a cache, for notebooks: `from kvkeep import plots`, then `plots.kept_map(cache)`, `plots.budgets(cache)`.

Needs matplotlib: pip install 'kvkeep[plots]'.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvkeep.cache.cache import Cache
from kvkeep.errors import CacheMisuse, MissingExtra

try:
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise MissingExtra("kvkeep.plots needs matplotlib; pip install 'kvkeep[plots]'.") from error

COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#882255", "#44aa99"]
RAMP = "Blues"  # one hue: safe for colour-blind readers
STYLE: dict[Any, Any] = {
    "font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#999999",
    "xtick.color": "#555555", "ytick.color": "#555555", "axes.labelcolor": "#333333", "figure.dpi": 125,
    "lines.linewidth": 1.8,
}  # fmt: skip


def kept_map(cache: Cache, row: int = 0, bins: int = 120) -> Any:
    """Where in the text each layer keeps tokens: the share of every stretch, over its KV heads. -> a figure"""
    layers, seen = _kept(cache, row), cache.tracker.seen[row]
    bins = min(bins, seen)
    edges = [-(-i * seen // bins) for i in range(bins + 1)]  # token i is in stretch i * bins // seen
    sizes = [end - start for start, end in pairwise(edges)]
    shares = []
    for heads in layers:
        counts = [0] * bins
        for position in (position for head in heads for position in head):
            counts[position * bins // seen] += 1
        shares.append([count / (size * len(heads)) for count, size in zip(counts, sizes, strict=True)])
    title = f"{cache.method.name}, budget {cache.budget}: tokens kept of {seen:,}"
    extent = (0, seen, len(layers) - 0.5, -0.5)
    return _heat(shares, cache, title, "position in the text (token)", "share kept by the layer's heads", 1.0, extent)


def budgets(cache: Cache, row: int = 0) -> Any:
    """How many tokens every KV head of every layer keeps. -> a figure"""
    counts = [[len(head) for head in heads] for heads in _kept(cache, row)]
    title = f"{cache.method.name}, budget {cache.budget}: tokens kept"
    return _heat(counts, cache, title, "KV head", "tokens kept", max(map(max, counts)))


def _kept(cache: Cache, row: int) -> list[list[list[int]]]:
    """[layer][KV head] -> token positions"""
    if not cache.seen:
        raise CacheMisuse("this cache is empty; show it after a forward pass.")
    return [cache.kept(layer)[row] for layer in cache.compressed_layers]


def _heat(rows: Any, cache: Cache, title: str, x: str, label: str, high: float, extent: Any = None) -> Any:
    with plt.rc_context(STYLE):
        figure, panel = plt.subplots(figsize=(7, 1.4 + 0.12 * len(rows)), layout="constrained")
        image = panel.imshow(rows, cmap=RAMP, vmin=0, vmax=high, aspect="auto", interpolation="nearest", extent=extent)
        panel.set_title(title, loc="left", fontsize=12)
        panel.set_xlabel(x)
        panel.set_ylabel("layer")
        every = max(1, len(rows) // 8)
        panel.set_yticks(range(0, len(rows), every), [str(i) for i in cache.compressed_layers[::every]])
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.colorbar(image, ax=panel, label=label)
    plt.close(figure)  # else a notebook shows it twice: as the value of a cell, and as a figure left open
    return figure


def save(figures: Mapping[str, Any], folder: str | Path) -> list[str]:
    """-> names of the files written"""
    for name, figure in figures.items():
        figure.savefig(Path(folder) / name, bbox_inches="tight", pad_inches=0.15)
        plt.close(figure)
    return list(figures)
