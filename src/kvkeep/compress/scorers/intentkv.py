"""Find where in the window the question begins, and score by the question's attention (IntentKV).

`boundary="first"` is the paper's rule (section 5.2): every smoothed row is compared with the first, and the question
begins before the biggest growth of that distance. The first growth, a whole step from 0, mostly wins.
`boundary="subsequent"` is a variant of ours: every smoothed row is compared with the next, and the question begins
before the biggest step; rows smoothed with fewer successors than others do not count.
Deviations: the mean over the question's rows instead of the sum, so that each query head of a group counts equally;
where attention never jumps, the whole window is the question.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvkeep.arguments import Checked, Positive
from kvkeep.compress.attention import attention_received
from kvkeep.kernels.dispatch import column_mass, js_distance
from kvkeep.kernels.torch.scoring import row_js_distance
from kvkeep.types import Observation

NO_JUMP = 1e-6  # smaller ones are rounding errors


@dataclass(frozen=True)
class IntentKVScorer(Checked):
    window: Positive = 64
    smooth: Positive = 8
    intention: bool = True  # False: the whole window counts (the paper's ablation)
    boundary: Literal["first", "subsequent"] = "first"

    def cache_key(self, budget: int) -> int:
        return self.window

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        queries = seen.queries[:, -self.window :]
        if not self.intention:
            return attention_received(seen, self.window) / queries.shape[1]
        given = queries, seen.keys, seen.token_positions, seen.seq_len
        softmax = seen.scale, seen.softcap, seen.sink_logits
        distances = js_distance(*given, self.smooth, *softmax, self._stepwise)
        return column_mass(*given, *softmax, question_weights(self._jumps(distances)))

    @property
    def _stepwise(self) -> bool:
        return self.boundary == "subsequent"

    def weights(self, rows: Tensor) -> Tensor:
        """Equal weights for the rows of each head's question, 0 for those before. [heads, w, n] -> [heads, w]"""
        return question_weights(self._jumps(row_js_distance(rows, self.smooth, self._stepwise)))

    def _jumps(self, distances: Tensor) -> Tensor:
        """How far attention moves after each row; 0 where it does not count. [heads, w] -> [heads, w]"""
        if not self._stepwise:
            return pad(distances.diff(dim=1), (0, 1))
        whole = max(1, distances.shape[1] - self.smooth + 1)  # rows smoothed with all of their successors
        return pad(distances[:, 1:whole], (0, distances.shape[1] - whole + 1))


def question_weights(jumps: Tensor) -> Tensor:
    """Equal weights for the rows from the one before the biggest jump on, for all where there is none. [heads, w]"""
    highest, where = jumps.max(1)
    first = torch.where(highest > NO_JUMP, where, 0)
    in_question = torch.arange(jumps.shape[1], device=jumps.device) >= first[:, None]
    return in_question / in_question.sum(1, keepdim=True)
