"""What the model looks at when it repeats the text (KVzip, arXiv:2505.23416), or would. No question is needed.

`Replay` (kvzip): after a prompt, the model is told to repeat it, and fed the repetition, part by part, over the whole
cache. A token's score is the most attention that any query of the instruction and the repetition pays to it, in one
softmax over the text's first tokens, the part that is repeated, and what was fed so far.

`Repetition` (echo): the queries of a chunk, as they were in the prefill, are moved to where a repetition of the chunk
would stand. There they attend to the first tokens, to the chunk, and, as if it were the part repeated so far, to the
chunk up to themselves. A token's score is the most attention that any of them, or any of those `near` it, pays to it as
a part of the text: to be repeated, a token is looked up where its own turn comes; far queries that happen to look at it
only blur that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvkeep.arguments import Checked, Count, Positive
from kvkeep.compress.attention import PromptScores, new_chunks
from kvkeep.compress.budget.coverage import CERTAIN
from kvkeep.kernels.dispatch import repeated_attention
from kvkeep.types import Observation, Replayed, ReplayPass

FIRST = "\n\nRepeat the previous context exactly."
LATER = "\n\nRepeat the part of the previous context exactly, starting with"
LEAD = 8  # tokens
WORDS = 32  # tokens of an instruction and the end of a message, about
LEAST = 64  # tokens of a part, however little room the model's context length leaves
LEAST_NORM = 0.01  # of the median: a token with an embedding near 0 must not have a score beyond all bounds
TAU, TAU_OF_NORMS = 0.003, 0.01  # budget="auto": what scores above it is needed; a norm is more than the most
PARTS = 64  # at most because of that: a text as long as the model's context length is not fed word by word


@dataclass(frozen=True)
class RepetitionScorer:
    """Scores by the token state of `Repetition`, or of another memory that scores a prompt's tokens once."""

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        score = seen.token_state[..., 0]
        return torch.where(score > 0, score, CERTAIN)  # generated tokens are not scored


@dataclass(frozen=True)
class Repetition(PromptScores):
    """token_state [kv_heads, n, 1]: scores by the queries of a prompt, computed once in the pass that brings them."""

    chunk: Positive = 2048
    sinks: Count = 4
    gap: Count = 20  # tokens between the text and its repetition: an instruction to repeat it
    near: Count | None = None  # queries of tokens at most so far from a token score it; None: all of its chunk
    rotates = True

    def scores(self, seen: Observation) -> Tensor:
        parts = []
        for first, _, queries, keys in new_chunks(seen, self.chunk):
            by = torch.full((keys.shape[1],), seen.expected + self.gap - first, device=keys.device)
            sinks = seen.keys[:, : min(self.sinks, first)]
            softmax = seen.scale, seen.softcap, seen.sink_logits
            moved = seen.rotate(queries, by)
            parts.append(repeated_attention(moved, keys, sinks, queries, keys, *softmax, self.near))
        return torch.cat(parts, 1)


@dataclass(frozen=True)
class Replay(Checked):
    """token_state [kv_heads, n, 1]: a prompt's tokens' scores, computed once, after the passes that bring them.

    by_output: KVzip+, attention × ‖W_O v‖ / ‖h‖: what the token adds to the hidden state h of the one that repeats.
    """

    size: Positive = 2048  # tokens of a part
    sinks: Count = 4
    by_output: bool = False
    near: Count | None = None  # queries of tokens at most so far from a token score it; None: all of its part
    local: bool = False  # what is fed attends to the first tokens, its part and itself alone
    norm: Literal[0, 1, 2] = 0  # of all queries' attention to a token: 1 or 2; 0: the most counts
    width, sees_all, prompt_only = 1, False, True

    @property
    def tau(self) -> float:
        return TAU_OF_NORMS if self.norm else TAU

    @property
    def needs_output(self) -> bool:
        return self.by_output

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        return seen.token_state

    def passes(self, tokens: int, room: int) -> Iterator[ReplayPass]:
        size = min(self.size, max(room - LEAD - WORDS, LEAST, -(-tokens // PARTS)))
        for start in range(0, tokens, size):
            end = min(start + size, tokens)
            yield ReplayPass(LATER, min(LEAD, start), start, end) if start else ReplayPass(FIRST, 0, 0, end)

    def score(self, seen: Replayed) -> Tensor:
        fed = seen.queries, seen.keys, seen.sinks, seen.queries, seen.own_keys
        softmax = seen.scale, seen.softcap, seen.sink_logits
        weights = self._output_weights(seen) if self.by_output else (None, None)
        return repeated_attention(*fed, *softmax, self.near, *weights, self.norm).clamp_min(1e-30)

    def _output_weights(self, seen: Replayed) -> tuple[Tensor, Tensor]:
        """‖W_O v‖ of each key, 1 / ‖h‖ of each query."""
        assert seen.output_gram is not None and seen.hidden_norms is not None
        hidden = seen.hidden_norms.float()
        hidden = hidden.maximum(LEAST_NORM * hidden.median()).clamp_min(1e-12)
        return output_norms(seen.values, seen.output_gram), 1 / hidden


def output_norms(values: Tensor, gram: Tensor) -> Tensor:
    """‖W_O v‖ of each query head: its square is v (WᵀW) v. values [kv_heads, m, dim], gram as below -> [heads, m]"""
    grouped = values.float().repeat_interleave(len(gram) // len(values), 0)
    return torch.linalg.vecdot(grouped @ gram, grouped).clamp_min(0).sqrt()


def output_gram(output_weight: Tensor) -> Tensor:
    """WᵀW of each query head's part of the output projection. [heads, hidden, dim] -> [heads, dim, dim]"""
    weight = output_weight.float()
    return weight.transpose(1, 2) @ weight
