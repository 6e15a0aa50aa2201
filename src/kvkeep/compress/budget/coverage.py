"""budget="auto": as few of the best tokens as make up a share of all scores, or those above a score; to an upper bound.

A share takes no notice of how large scores are: of a text that says the same again and again every token gets a little
attention, and most of them are kept. Where scores are attention in a repetition of the text (kvzip and the like), what
is needed scores high, and a fixed score keeps less of such a text.

What competes is covered together: the tokens of a KV head, of a layer's heads (+adakv), of all layers (+shared).
Tokens that are kept whatever their score count neither as covered nor as missing. After a prefill alone: decode steps
keep to the upper bound. Where a prompt is evicted from chunk by chunk, each time the share is of the scores of what is
held and new: of the whole text, n chunks cover share**n or more, by the scores that its tokens had at the time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

COVERAGE = 0.99  # unless another share is given
CERTAIN = 1e6  # scores from here on are no amounts: they say that a token is evicted last


def amounts(scores: Tensor, free: Tensor | None = None) -> Tensor:
    """What each token adds to the sum of scores: nothing where it is kept anyway, or padding. float64"""
    each = scores.double().clamp_min(0.0).masked_fill(scores >= CERTAIN, 0.0)
    return each if free is None else each.masked_fill(~free, 0.0)


@dataclass(frozen=True)
class Needed:
    """How many of the first amounts are needed: the fewest that make up a share of the whole, or all above a score."""

    share: float | None = None
    tau: float | None = None

    def count(self, ordered: Tensor, whole: Tensor | None = None) -> Tensor:
        """ordered [.., n], best first; whole [..]: their sum, and that of others that are gone -> [..]"""
        n = ordered.shape[-1]
        if self.share is None:  # up to the last amount above tau
            places = torch.arange(1, n + 1, device=ordered.device)
            return torch.where(ordered > (self.tau or 0.0), places, 0).amax(-1)
        sums = ordered.cumsum(-1)
        whole = sums[..., -1] if whole is None else whole
        short = (sums < self.share * whole[..., None]).sum(-1)
        return (short + 1).clamp_max(n)


def covered(kept: Tensor, whole: Tensor) -> float:
    """The share that was reached."""
    return float(torch.where(whole > 0, kept / whole, 1.0))
