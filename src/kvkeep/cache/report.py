"""What a cache holds: tokens and bytes, measured, and the text shaded by what is held of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any

from torch import Tensor

from kvkeep.storage.offload.layer_state import LayerState
from kvkeep.storage.ragged import RaggedLayer

MOST_SHOWN = 20_000  # tokens that are shown
SIGNS = " ·░▒▓█"  # in a terminal: none, few, …, all


@dataclass(frozen=True)
class Report:
    method: str
    budget: int | float
    tokens_seen: list[int]  # per row, padding excluded
    kept_per_head: float  # mean over rows, layers and KV heads
    bytes: int  # keys and values, measured on their storages
    peak_bytes: int  # the most of them at once, counting layers not evicted from yet
    full_bytes: int  # what keys and values of every token seen would take
    index_bytes: int  # beside them: positions and state of kept tokens, queries of the observation window
    host_bytes: int  # keys and values offloaded to host memory or disk, by retrieval methods
    layers: int  # compressed layers; sliding-window and linear ones are not counted
    kv_heads: int
    tokens: list[list[list[int]]]  # [layer][row][KV head]
    kept: dict[str, float] = field(default_factory=dict)  # kept_per_head, of the prompt and generated since; or of a
    # context, of the question about it and generated. Tokens prefilled one by one count as generated.
    coverage: float | None = None  # share of the scores that was kept of the last prefill, if it decides: on average

    @classmethod
    def of(
        cls,
        method: str,
        budget: int | float,
        tokens_seen: Sequence[int],
        layers: Sequence[RaggedLayer],
        queries: int,
        peak: int,
    ) -> Report:
        held = sum(layer.nbytes for layer in layers)
        tokens = [[layer.row_lengths(row) for row in range(layer.rows)] for layer in layers]
        counts = [n for layer in tokens for row in layer for n in row]
        each = [layer.kind.slot_bytes * layer.kv_heads for layer in layers]
        return cls(
            method=method,
            budget=budget,
            tokens_seen=list(tokens_seen),
            kept_per_head=sum(counts) / max(1, len(counts)),
            bytes=held,
            peak_bytes=max(held, peak),
            full_bytes=sum(each) * sum(tokens_seen),
            index_bytes=sum(layer.index_nbytes for layer in layers) + queries,
            host_bytes=0,
            layers=len(layers),
            kv_heads=max((layer.kv_heads for layer in layers), default=0),
            tokens=tokens,
        )

    @classmethod
    def of_retrieval(
        cls,
        method: str,
        budget: int | float,
        tokens_seen: Sequence[int],
        states: Mapping[int, Sequence[LayerState]],
        peak: int,
    ) -> Report:
        """Report a retrieval method: the tokens kept are those last attended to."""
        flat = [state for rows in states.values() for state in rows]
        tokens = [[[state.device_tokens] * len(state.near[0]) for state in rows] for rows in states.values()]
        return cls(
            method=method,
            budget=budget,
            tokens_seen=list(tokens_seen),
            kept_per_head=sum(state.device_tokens for state in flat) / max(1, len(flat)),
            bytes=sum(state.nbytes for state in flat),
            peak_bytes=max(peak, sum(state.nbytes for state in flat)),
            full_bytes=sum(sum(t[:, :1].nbytes for t in state.near) * state.seen for state in flat),
            index_bytes=sum(state.index_nbytes for state in flat),
            host_bytes=sum(state.host.nbytes for state in flat),
            layers=len(states),
            kv_heads=max((len(state.near[0]) for state in flat), default=0),
            tokens=tokens,
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        seen = "+".join(map(str, self.tokens_seen)) or "0"
        held, full, most = map(format_bytes, (self.bytes, self.full_bytes, self.peak_bytes))
        fraction = f"{held_share(self.bytes, self.full_bytes):.1%}" if self.full_bytes else "–"
        covered = [] if self.coverage is None else [f"  scores covered    {self.coverage:.1%}, of what was scored last"]
        offloaded = [f"  offloaded         {format_bytes(self.host_bytes)}"] if self.host_bytes else []
        return "\n".join([
            f"{self.method}, budget {'–' if self.method == 'full' else self.budget}",
            f"  tokens seen       {seen}",
            f"  kept per KV head {format_kept(self.kept)} ({self.layers} layers × {self.kv_heads} heads, on average)",
            *covered,
            f"  keys and values   {held} of {full} ({fraction}), at most {most}",
            *offloaded,
        ])  # fmt: skip


def kept_by_part(
    parts: Mapping[str, Sequence[int]], kept: float, layers: Sequence[Sequence[Sequence[Tensor]]]
) -> dict[str, float]:
    """Tokens per KV head of each part of the text, on average.

    parts: where each ends, per row; kept: of all parts; layers: [layer][row][KV head] -> token positions, empty if all
    kept tokens are of the first part
    """
    first, *others = parts
    if not layers:
        return {first: kept} | dict.fromkeys(others, 0.0)
    ends = zip(*parts.values(), strict=True)  # of each row
    heads = [(head, end) for row, end in enumerate(ends) for layer in layers for head in layer[row]]
    up_to = [sum(int((head < end[part]).sum()) for head, end in heads) for part in range(len(parts))]
    return {name: (now - before) / len(heads) for name, now, before in zip(parts, up_to, [0, *up_to], strict=False)}


def held_share(held: float, full: float) -> float:
    """Share of a full cache's bytes that is held; room for tokens to come does not make it more than all."""
    return min(1.0, held / full)


def format_kept(kept: Mapping[str, float]) -> str:
    """512 of the prompt + 18 generated"""
    shown = [name for number, name in enumerate(kept) if not number or kept[name]]
    return " + ".join(f"{_short(kept[name])} {'' if name == 'generated' else 'of the '}{name}" for name in shown)


def _short(number: float) -> str:
    return f"{number:,.0f}" if number == round(number) else f"{number:,.1f}"


def format_bytes(size: float) -> str:
    """23.5 MB"""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError


@dataclass(frozen=True)
class ShadedText:
    """A text, each token shaded by how many heads hold it: in a notebook as HTML, elsewhere as plain text."""

    title: str
    texts: Sequence[str]  # of the tokens
    counts: Sequence[int]  # heads that hold each token
    heads: int  # of all layers

    @classmethod
    def of(cls, title: str, texts: Sequence[str], layers: Sequence[Sequence[Sequence[int]]]) -> ShadedText:
        """layers: [layer][KV head] -> positions of the tokens it holds"""
        counts = Counter(position for heads in layers for head in heads for position in head)
        return cls(title, texts, [counts[position] for position in range(len(texts))], sum(map(len, layers)))

    def _repr_html_(self) -> str:
        spans = [self._span(text, count) for text, count in zip(self.texts[:MOST_SHOWN], self.counts, strict=False)]
        more = f"<p>… {len(self.texts) - MOST_SHOWN:,} tokens more</p>" if len(self.texts) > MOST_SHOWN else ""
        box = "max-height:32em;overflow:auto;white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.7"
        return f'<div><b>{escape(self.title)}</b><div dir="auto" style="{box}">{"".join(spans)}</div>{more}</div>'

    def _span(self, text: str, count: int) -> str:
        """Blue, the more heads the stronger; the text keeps the notebook's own colour."""
        shade = 0.75 * (count / self.heads) ** 0.5
        style = f' style="background:rgba(70,140,220,{shade:.2f})"' if count else ""
        return f'<span title="held by {count} of {self.heads} heads"{style}>{escape(text)}</span>'

    def __repr__(self) -> str:
        """The title, and the text with a line of shades under each of its lines."""
        lines, shades = [""], [""]
        for text, count in zip(self.texts[:MOST_SHOWN], self.counts, strict=False):
            sign = SIGNS[-(-count * (len(SIGNS) - 1) // self.heads)]
            for character in text:
                if character == "\n" or len(lines[-1]) >= 100:
                    lines.append("")
                    shades.append("")
                if character != "\n":
                    lines[-1] += character
                    shades[-1] += sign
        rows = (f"{line}\n{shade}".rstrip() for line, shade in zip(lines, shades, strict=True))
        return "\n".join([f"{self.title} (shades: {SIGNS.strip()}, the darker the more heads)", *rows])
