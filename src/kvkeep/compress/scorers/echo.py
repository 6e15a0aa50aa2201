"""What a model would look at if it had to repeat the text, without repeating it: KVzip's idea (arXiv:2505.23416).

The queries of a chunk, as they were in the prefill, are moved to where a repetition of the chunk would stand. There
they attend to the first tokens, to the chunk, and, as if it were the part repeated so far, to the chunk up to
themselves. A token's score is the most attention that any of them, or any of those `near` it, pays to it as a part of
the text: to be repeated, a token is looked up where its own turn comes; far queries that happen to look at it only blur
that. No question is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.arguments import Checked, Count, Positive
from kvkeep.compress.attention import new_chunks
from kvkeep.compress.budget.coverage import CERTAIN
from kvkeep.kernels.dispatch import column_maximum
from kvkeep.types import Observation


@dataclass(frozen=True)
class RepetitionScorer:
    """Scores by the token state of `Repetition`, or of another memory that scores a prompt's tokens once."""

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        score = seen.token_state[..., 0]
        return torch.where(score > 0, score, CERTAIN)  # generated tokens are not scored


@dataclass(frozen=True)
class Repetition(Checked):
    """token_state [kv_heads, n, 1]: a prompt's tokens' scores, computed once in the pass that brings them."""

    chunk: Positive = 2048
    sinks: Count = 4
    gap: Count = 20  # tokens between the text and its repetition: an instruction to repeat it
    near: Count | None = None  # queries of tokens at most so far from a token score it; None: all of its chunk
    width, sees_all, prompt_only, rotates = 1, True, True, True

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        if seen.is_step:
            return seen.token_state
        scores = seen.memoize(self, lambda: torch.cat(list(self._chunks(seen)), 1))
        return seen.token_state.scatter(1, seen.newest[..., None], scores.clamp_min(1e-30)[..., None])

    def _chunks(self, seen: Observation) -> Iterator[Tensor]:
        """Scores of the tokens of this pass, chunk by chunk. [kv_heads, m]"""
        for first, _, queries, keys in new_chunks(seen, self.chunk):
            by = torch.full((keys.shape[1],), seen.expected + self.gap - first, device=keys.device)
            sinks, softmax = seen.keys[:, : min(self.sinks, first)], (seen.scale, seen.softcap, seen.sink_logits)
            yield column_maximum(queries, seen.rotate(queries, by), keys, sinks, *softmax, self.near)
