"""budget="auto": as few of the best tokens as make up a share of all scores, within an upper bound.

What competes is covered together: the tokens of a key head, of a layer's heads (+adakv), of all layers (+shared).
Tokens that are kept whatever their score count neither as covered nor as missing. After a prefill alone: decode steps
keep to the upper bound. Where a prompt is evicted from chunk by chunk, each time the share is of the scores of what is
held and new: of the whole text, n chunks cover share**n or more, by the scores that its tokens had at the time.
"""

from __future__ import annotations

import torch
from torch import Tensor

COVERAGE = 0.99  # unless another share is given
CERTAIN = 1e6  # scores from here on are no amounts: they say that a token is evicted last


def amounts(scores: Tensor, free: Tensor | None = None) -> Tensor:
    """What each token adds to the sum of scores: nothing where it is kept anyway, or padding. float64"""
    each = scores.double().clamp_min(0.0).masked_fill(scores >= CERTAIN, 0.0)
    return each if free is None else each.masked_fill(~free, 0.0)


def covering(ordered: Tensor, share: float, whole: Tensor | None = None) -> Tensor:
    """How many of the first amounts make up this share of the whole: the fewest that do.

    ordered [.., n], best first; whole [..]: their sum, and that of others that are gone -> [..]
    """
    sums = ordered.cumsum(-1)
    whole = sums[..., -1] if whole is None else whole
    short = (sums < share * whole[..., None]).sum(-1)
    return (short + 1).clamp_max(ordered.shape[-1])


def covered(kept: Tensor, whole: Tensor) -> float:
    """The share that was reached."""
    return float(torch.where(whole > 0, kept / whole, 1.0))
