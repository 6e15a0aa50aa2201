"""What changes the logits of an answer before it is sampled: bias, penalties, and no end before `min_tokens`.

The tokens so far are counted on the device, so that steps can be launched ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvkeep.storage.upload import upload


@dataclass(frozen=True)
class Edit:
    """The options of one answer, some of which change its logits, and the tokens these look at."""

    how: Any  # the `Generation`
    prompt: Tensor  # [n] token ids
    answer: Sequence[int]  # token ids so far
    ends: Sequence[int]  # token ids that would end the answer
    vocabulary: int  # how many logits there are

    def tensors(self, device: torch.device) -> dict[str, Tensor]:
        """The same on the device, each [1, vocabulary or 1]."""

        def sums(tokens: Any, values: Any = 1.0) -> Tensor:
            """The sum of the values of each token [1, vocabulary]."""
            index = upload(torch.as_tensor(tokens, dtype=torch.int64), device)
            added = upload(torch.as_tensor(values, dtype=torch.float32).expand(len(index)), device)
            return torch.zeros(self.vocabulary, device=device).index_add(0, index, added)[None]

        how = self.how
        numbers = {
            "repetition": how.repetition_penalty,
            "frequency": how.frequency_penalty,
            "presence": how.presence_penalty,
            "min_tokens": 0 if how.constraint else how.min_tokens,
        }
        return {
            "bias": sums(list(how.logit_bias), list(how.logit_bias.values())),
            "in_prompt": sums(self.prompt) > 0,
            "counts": sums(list(self.answer)),
            "ends": sums(list(self.ends)) > 0,
            **{name: torch.full((1, 1), float(value), device=device) for name, value in numbers.items()},
        }


class LogitEdits:
    """The rows of a batch whose logits are edited, with one row of each tensor for every one of them."""

    def __init__(self, device: Any) -> None:
        self.device = torch.device(device)
        self.rows: list[int] = []  # of the batch
        self.tensors: dict[str, Tensor] = {}  # each [len(rows), vocabulary or 1]

    def set(self, row: int, edit: Edit | None) -> None:
        """Edit this row from now on. None: do not."""
        if row in self.rows:
            others = [at for at, other in enumerate(self.rows) if other != row]
            index = upload(torch.tensor(others, dtype=torch.int64), self.device)
            self.rows = [self.rows[at] for at in others]
            self.tensors = {name: each[index] for name, each in self.tensors.items()}
        if edit is not None:
            new = edit.tensors(self.device)
            self.tensors = {name: torch.cat([self.tensors[name], new[name]]) for name in new} if self.rows else new
            self.rows = [*self.rows, row]

    def apply(self, logits: Tensor) -> Tensor:
        """The logits of all rows, those of the edited ones changed [rows, vocabulary]

        As in vLLM: first the bias; then a logit of a token that the prompt or the answer has is divided by
        repetition_penalty if it is positive, else multiplied; then the answer's tokens lose frequency_penalty for each
        time they were said, and presence_penalty once.
        """
        if not self.rows:
            return logits
        each, counts = self.tensors, self.tensors["counts"]
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        index = upload(self.rows, self.device)
        found = wide[index] + each["bias"]
        penalized = torch.where(found > 0, found / each["repetition"], found * each["repetition"])
        found = torch.where(each["in_prompt"] | (counts > 0), penalized, found)
        found = found - each["frequency"] * counts - each["presence"] * (counts > 0)
        is_early = counts.sum(-1, keepdim=True) < each["min_tokens"]
        found = found.masked_fill(is_early & each["ends"], float("-inf"))
        return wide.index_copy(0, index, found.to(wide.dtype))

    def count(self, tokens: Tensor) -> None:
        """Count the tokens sampled in a step [rows]."""
        if self.rows:
            said = tokens[upload(self.rows, self.device), None]
            self.tensors["counts"].scatter_add_(1, said, torch.ones_like(said, dtype=torch.float32))
