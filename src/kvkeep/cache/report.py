"""What a cache holds, in numbers measured on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from kvkeep.storage.offload.layer_state import Shelf
from kvkeep.storage.ragged import LayerCache


@dataclass(frozen=True)
class Report:
    method: str
    budget: int | float
    tokens_seen: list[int]  # per row, padding excluded
    kept_per_head: float  # mean over rows, layers and key heads
    bytes: int  # keys and values, measured on their storages
    peak_bytes: int  # the most of them at once, counting the layer being read, which is whole until it is decided
    full_bytes: int  # what keys and values of every token seen would take
    index_bytes: (
        int  # beside them: where kept tokens stood, what is noted of them, queries a prompt in pieces still needs
    )
    host_bytes: int  # keys and values put away in host memory or on disk, by methods that drop nothing
    layers: int  # compressed layers; sliding-window and linear ones are not counted
    kv_heads: int
    tokens: list[list[list[int]]]  # [layer][row][key head]
    kept: dict[str, float] = field(default_factory=dict)  # kept_per_head, of the prompt and generated since; or of a
    # context, of the question about it and generated. Tokens that came one by one count as generated.

    @classmethod
    def of(
        cls,
        method: str,
        budget: int | float,
        tokens_seen: Sequence[int],
        layers: Sequence[LayerCache],
        queries: int,
        peak: int,
    ) -> Report:
        held = sum(layer.nbytes for layer in layers)
        tokens = [[layer.row_lengths(row) for row in range(layer.rows)] for layer in layers]
        counts = [n for layer in tokens for row in layer for n in row]
        each = [layer.token_nbytes * layer.kv_heads for layer in layers]
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
    def recalled(
        cls,
        method: str,
        budget: int | float,
        tokens_seen: Sequence[int],
        shelves: Mapping[int, Sequence[Shelf]],
        peak: int,
    ) -> Report:
        """Of a cache that drops nothing: what is kept is what it last attended to."""
        flat = [shelf for rows in shelves.values() for shelf in rows]
        tokens = [[[shelf.device_tokens] * len(shelf.near[0]) for shelf in rows] for rows in shelves.values()]
        return cls(
            method=method,
            budget=budget,
            tokens_seen=list(tokens_seen),
            kept_per_head=sum(shelf.device_tokens for shelf in flat) / max(1, len(flat)),
            bytes=sum(shelf.nbytes for shelf in flat),
            peak_bytes=max(peak, sum(shelf.nbytes for shelf in flat)),
            full_bytes=sum(sum(t[:, :1].nbytes for t in shelf.near) * shelf.seen for shelf in flat),
            index_bytes=sum(shelf.index_nbytes for shelf in flat),
            host_bytes=sum(shelf.host.nbytes for shelf in flat),
            layers=len(shelves),
            kv_heads=max((len(shelf.near[0]) for shelf in flat), default=0),
            tokens=tokens,
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        seen = "+".join(map(str, self.tokens_seen)) or "0"
        most = human(self.peak_bytes)
        share = f"{self.bytes / self.full_bytes:.1%}" if self.full_bytes else "–"
        away = [f"  put away          {human(self.host_bytes)}"] if self.host_bytes else []
        return "\n".join([
            f"{self.method}, budget {self.budget}",
            f"  tokens seen       {seen}",
            f"  kept per key head {told(self.kept)} ({self.layers} layers × {self.kv_heads} heads, on average)",
            f"  keys and values   {human(self.bytes)} of {human(self.full_bytes)} ({share}), at most {most}",
            *away,
        ])  # fmt: skip


def by_part(
    parts: Mapping[str, Sequence[int]], kept: float, layers: Sequence[Sequence[Sequence[Tensor]]]
) -> dict[str, float]:
    """Tokens per key head of each part of the text, on average.

    parts: where each ends, per row; kept: of all parts; layers: [layer][row][key head] -> positions, none if all that
    is kept is of the first part
    """
    first, *others = parts
    if not layers:
        return {first: kept} | dict.fromkeys(others, 0.0)
    ends = zip(*parts.values(), strict=True)  # of each row
    held = [(head, end) for row, end in enumerate(ends) for layer in layers for head in layer[row]]
    upto = [sum(int((head < end[part]).sum()) for head, end in held) for part in range(len(parts))]
    return {name: (now - before) / len(held) for name, now, before in zip(parts, upto, [0, *upto], strict=False)}


def told(kept: Mapping[str, float]) -> str:
    """512 of the prompt + 18 generated"""
    shown = [name for number, name in enumerate(kept) if not number or kept[name]]
    return " + ".join(f"{_short(kept[name])} {'' if name == 'generated' else 'of the '}{name}" for name in shown)


def _short(number: float) -> str:
    return f"{number:,.0f}" if number == round(number) else f"{number:,.1f}"


def human(size: float) -> str:
    """Bytes for people: 23.5 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError
