"""What `kvkeep inspect` shows: which tokens of a prompt each method kept, and whether the answer needed them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from kvkeep.cache.cache import Cache
from kvkeep.pages.html import Packed

BINS = 64  # of positions, in histograms
TOP = 32  # tokens that a head's answer attended to most
LETTERS = 4  # of a word of the answer that is looked for in the text; numbers may be shorter

Table = list[list[float]]  # [layer][KV head], or [layer][bin]


@dataclass(frozen=True)
class TokenValues:
    """A number for each token of a stretch of the prompt."""

    name: str
    about: str
    values: Packed  # [layers or 1, KV heads or 1, tokens]; 1: the mean of all
    first: int = 0  # position of the stretch


@dataclass(frozen=True)
class Windows:
    """What a retrieval method attended to while it prefilled."""

    size: int  # tokens of a window
    retrieved: Packed  # [layers, windows, bins] share of the tokens of each bin, over the KV heads


@dataclass(frozen=True)
class Cost:
    """What one answer cost, measured."""

    kept_per_head: float  # of the prompt
    bytes: int
    full_bytes: int
    host_bytes: int
    first_token_s: float
    tokens_per_s: float | None
    new_tokens: int


@dataclass(frozen=True)
class MethodFacts:
    """What one method kept, when its answer was complete: of a retrieval method, what the last token attended to."""

    name: str
    budget: int | float | str | None
    about: str
    retrieves: bool = False
    answer: str = ""
    differs: bool = False  # whether the answer has other words than that of `full`
    error: str = ""  # why there is no answer; then all that follows is missing
    cost: Cost | None = None
    kept: Packed | None = None  # [layers, KV heads, tokens] bits; None: all
    counts: list[list[int]] | None = None  # [layer][KV head] tokens kept
    histogram: list[list[int]] | None = None  # [layer][bin] tokens kept of all heads
    found: Table | None = None  # [layer][KV head] share of the answer's TOP tokens that were kept
    mass: Table | None = None  # [layer][KV head] share of the answer's attention to the prompt that they got
    answer_kept: float | None = None  # share of heads that kept a token of `answer_tokens`, on average
    values: tuple[TokenValues, ...] = ()
    windows: Windows | None = None


@dataclass(frozen=True)
class Inspection:
    model: str
    version: str
    protocol: str
    question: str
    tokens: list[str]  # texts
    parts: dict[str, tuple[int, int]]  # where document and question begin and end; the rest is the template's
    layers: list[int]  # numbers of the compressed ones
    kv_heads: int
    top: int
    methods: list[MethodFacts]  # the first is `full`
    compared: list[str]  # methods that kept some of the tokens
    agreement: Table  # [compared][compared] mean Jaccard index of what their heads kept
    answer_tokens: list[int]  # of the document: words of the answer that the question does not have
    attended: list[int]  # of the document: tokens that some head of the answer attended to most
    attention: TokenValues | None  # of the answer
    note: str = ""


def kept_mask(cache: Cache, tokens: int) -> Tensor:
    """Which of a prompt's tokens a cache holds. [layers, kv_heads, tokens] bool"""
    layers = [cache.kept(layer)[0] for layer in cache.compressed_layers]
    mask = torch.zeros(len(layers), max(map(len, layers)), tokens, dtype=torch.bool)
    for layer, heads in enumerate(layers):
        for head, positions in enumerate(heads):
            mask[layer, head, [position for position in positions if position < tokens]] = True
    return mask


def histogram(mask: Tensor, bins: int = BINS) -> list[list[int]]:
    """Kept tokens of all heads by position. mask [layers, kv_heads, n] -> [layer][bin], token i in bin i * bins // n"""
    return binned(mask.sum(1), bins).long().tolist()


def binned(counts: Tensor, bins: int = BINS) -> Tensor:
    """Sums of neighbours. [rows, n] -> [rows, at most bins], token i in bin i * bins // n"""
    rows, n = counts.shape
    bins = min(bins, n)
    return torch.zeros(rows, bins).index_add_(1, torch.arange(n) * bins // n, counts.float())


def jaccard(one: Tensor, other: Tensor) -> float:
    """How far what two methods keep overlaps, on average over layers and heads. [layers, kv_heads, n] bool"""
    return float(((one & other).sum(-1) / (one | other).sum(-1).clamp_min(1)).mean())


def agreement(masks: Sequence[Tensor]) -> Table:
    return [[round(jaccard(one, other), 4) for other in masks] for one in masks]


def found_of(mask: Tensor, attention: Tensor, top: int) -> Table:
    """Share of each head's `top` most attended tokens that it kept. Both [layers, kv_heads, n] -> [layer][head]"""
    best = attention.topk(min(top, attention.shape[-1]), -1).indices
    return _rounded(mask.gather(-1, best).float().mean(-1))


def mass_of(mask: Tensor, attention: Tensor) -> Table:
    """Share of each head's attention to the prompt that its kept tokens got. Both [layers, kv_heads, n]"""
    return _rounded((attention * mask).sum(-1) / attention.sum(-1).clamp_min(1e-30))


def most_attended(attention: Tensor, part: tuple[int, int], top: int) -> list[int]:
    """Tokens of a part to which some head pays the largest shares of its attention to the part.

    Means over heads would show little but the words that all heads rest on. attention [layers, kv_heads, n]
    """
    inside = attention[..., part[0] : part[1]]
    largest = (inside / inside.sum(-1, keepdim=True).clamp_min(1e-30)).amax((0, 1))
    return sorted(part[0] + index for index in largest.topk(min(top, len(largest))).indices.tolist())


def answer_words(texts: Sequence[str], part: tuple[int, int], question: str, answer: str) -> list[int]:
    """Tokens of a part of the text with words of the answer that the question does not have."""
    asked = set(_words(question))
    wanted = {word for word in _words(answer) if (len(word) >= LETTERS or word.isdigit()) and word not in asked}
    if not wanted:
        return []
    text = "".join(texts[part[0] : part[1]]).lower()
    pattern = rf"\b(?:{'|'.join(map(re.escape, sorted(wanted, key=len, reverse=True)))})\b"
    marks = re.sub(pattern, lambda match: "\0" * len(match[0]), text)
    ends = accumulate((len(each.lower()) for each in texts[part[0] : part[1]]), initial=0)
    return [number for number, (start, end) in enumerate(pairwise(ends), part[0]) if "\0" in marks[start:end]]


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _rounded(values: Tensor) -> Table:
    return [[round(value, 4) for value in row] for row in values.tolist()]
