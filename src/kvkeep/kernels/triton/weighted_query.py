"""One vector that asks for a window of queries, and the moments of all queries so far.

Two passes: the first goes channel by channel (moments, and what each channel adds to a query's surprise), the second
weighs queries by their surprise. Heads are averaged within their group and lie side by side: channels of one vector.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvkeep.kernels.triton.common import cdiv, power, quick

MOST, ROWS, CHANNELS = 256, 64, 32  # rows at a time in the first pass and in the second; channels


def surprised(
    queries: Tensor, kv_heads: int, count: int, mean: Tensor | None, variance: Tensor | None, question: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """As the reference's. queries: of any strides but the last, which is 1"""
    heads, w, dim = queries.shape
    width, blocks, more = kv_heads * dim, cdiv(dim, CHANNELS), 0 if question is None else len(question)
    window = torch.empty(w + more, width, dtype=torch.float32, device=queries.device)
    parts = torch.empty(kv_heads * blocks, w + more, dtype=torch.float32, device=queries.device)
    found = torch.empty(3, width, dtype=torch.float32, device=queries.device)
    asked, old = window if question is None else question.contiguous(), found if mean is None else mean
    _moments[kv_heads, blocks](
        queries, asked, old, found if variance is None else variance, window, parts, found, w, more, heads // kv_heads,
        dim, *queries.stride()[:2], count / (count + w), w / (count + w), mean is None,
        max(16, min(MOST, power(w))), CHANNELS, num_warps=8,
    )  # fmt: skip
    _weighed[cdiv(width, CHANNELS),](
        window, parts, found, w + more, width, kv_heads * blocks, power(kv_heads * blocks), ROWS, CHANNELS,
        num_warps=4,
    )  # fmt: skip
    return found.unbind()


@quick
@triton.jit(do_not_specialize=["w", "more", "before", "here"])
def _moments(
    queries, question, mean, variance, window, parts, found, w, more, group, dim, head_step, step, before, here,
    FRESH: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """before, here: the old queries' share of all, and the window's"""
    head, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    width = tl.num_programs(0) * dim
    mine = block * CHANNELS + tl.arange(0, CHANNELS)
    real, channels = mine < dim, head * dim + mine
    heads = queries + head * group * head_step + mine[None, :]
    total = tl.zeros([CHANNELS], tl.float32)
    for start in range(0, w, ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = (rows < w)[:, None] & real[None, :]
        joined = _joined(heads + rows[:, None] * step, inside, group, head_step, ROWS, CHANNELS)
        total += tl.sum(joined, 0)
        tl.store(window + rows[:, None] * width + channels[None, :], joined, mask=inside)
    middle = total / w
    total = tl.zeros([CHANNELS], tl.float32)
    for start in range(0, w, ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = (rows < w)[:, None] & real[None, :]
        joined = _joined(heads + rows[:, None] * step, inside, group, head_step, ROWS, CHANNELS)
        away = tl.where(inside, joined - middle[None, :], 0.0)
        total += tl.sum(away * away, 0)
    spread = total / w
    if not FRESH:
        was = tl.load(mean + channels, mask=real, other=0.0)
        apart = middle - was
        middle = was + apart * here
        spread = tl.load(variance + channels, mask=real, other=0.0) * before + spread * here
        spread += apart * apart * (before * here)
    tl.store(found + channels, middle, mask=real)
    tl.store(found + width + channels, spread, mask=real)
    still = spread <= 1e-12 * tl.maximum(middle * middle, 1e-30)  # never varied: counts for nothing
    spread = tl.where(still | (mine >= dim), float("inf"), spread)
    surprise = parts + (head * tl.num_programs(1) + block) * (w + more)
    for start in range(0, w, ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = (rows < w)[:, None] & real[None, :]
        joined = _joined(heads + rows[:, None] * step, inside, group, head_step, ROWS, CHANNELS)
        away = joined - middle[None, :]
        tl.store(surprise + rows, tl.sum(away * away / spread[None, :], 1), mask=rows < w)
    for start in range(0, more, ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = (rows < more)[:, None] & real[None, :]
        asked = tl.load(question + rows[:, None] * width + channels[None, :], mask=inside, other=0.0).to(tl.float32)
        away = asked - middle[None, :]
        tl.store(surprise + w + rows, tl.sum(away * away / spread[None, :], 1), mask=rows < more)
        tl.store(window + (w + rows[:, None]) * width + channels[None, :], asked, mask=inside)


@triton.jit
def _joined(heads, inside, group, head_step, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """The mean of a group's heads, in float32."""
    total = tl.zeros([ROWS, CHANNELS], tl.float32)
    for member in range(0, group):
        total += tl.load(heads + member * head_step, mask=inside, other=0.0).to(tl.float32)
    return total / group


@quick
@triton.jit(do_not_specialize=["rows"])
def _weighed(
    window, parts, found, rows, width, blocks, BLOCKS: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr
):
    each = tl.arange(0, BLOCKS)
    channels = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    plain, weighed = tl.zeros([CHANNELS], tl.float32), tl.zeros([CHANNELS], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for start in range(0, rows, ROWS):
        mine = start + tl.arange(0, ROWS)
        inside = (each < blocks)[:, None] & (mine < rows)[None, :]
        surprise = tl.sum(tl.load(parts + each[:, None] * rows + mine[None, :], mask=inside, other=0.0), 0)
        real = (mine < rows)[:, None] & (channels < width)[None, :]
        vectors = tl.load(window + mine[:, None] * width + channels[None, :], mask=real, other=0.0)
        total += surprise
        plain += tl.sum(vectors, 0)
        weighed += tl.sum(vectors * surprise[:, None], 0)
    all_of_it = tl.sum(total, 0)
    probe = tl.where(all_of_it > 0, weighed / tl.maximum(all_of_it, 1e-30), plain / rows)
    tl.store(found + 2 * width + channels, probe, mask=channels < width)
