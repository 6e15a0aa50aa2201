"""A text, each token shaded by how many heads of a cache hold it: in a notebook as HTML, elsewhere as plain text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

MOST = 20_000  # tokens that are shown
SIGNS = " ·░▒▓█"  # in a terminal: none, few, …, all


@dataclass(frozen=True)
class ShadedText:
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
        spans = [self._span(text, count) for text, count in zip(self.texts[:MOST], self.counts, strict=False)]
        more = f"<p>… {len(self.texts) - MOST:,} tokens more</p>" if len(self.texts) > MOST else ""
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
        for text, count in zip(self.texts[:MOST], self.counts, strict=False):
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
