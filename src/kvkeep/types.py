"""Data types shared by all parts of the library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

Softmax = tuple[float, float | None, Tensor | None]  # of attention: scale, soft cap, sink logits
Rotate = Callable[..., Tensor]  # moves vectors [.., n, dim] by [.., n] positions, as RoPE does; a dtype may follow


def stay(vectors: Tensor, by: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Leave vectors as they are: a rotation of those without positions."""
    return vectors if dtype is None else vectors.to(dtype)


NOTHING = torch.empty(0)  # in place of a tensor that is not needed
PAD_POSITION = 2**31 - 1  # of padding where KV heads hold different numbers of tokens: later than any query


@dataclass(frozen=True)
class Budget:
    """Tokens per KV head: so many, or a fraction of the tokens seen, but no more than `most`."""

    value: int | float
    most: int = PAD_POSITION

    def __post_init__(self) -> None:
        if isinstance(self.value, int):
            object.__setattr__(self, "value", min(self.value, self.most))

    def tokens(self, seen: int) -> int:
        """The budget in tokens for a text of `seen` tokens."""
        return self.value if isinstance(self.value, int) else min(self.most, max(1, int(self.value * seen + 1e-9)))


@dataclass(frozen=True)
class Tokens:
    """Keys and values with per-token data: [n, …] for one KV head, [kv_heads, n, …] for several."""

    keys: Tensor
    values: Tensor
    token_positions: Tensor  # index of each token in the text
    rope_positions: Tensor | None = None  # position its key is rotated to, if the method has a placement
    token_state: Tensor | None = None  # [.., n, k] written by the method's memory, if it has one

    def map(self, change: Callable[[Tensor], Tensor]) -> Tokens:
        """Apply one function to every tensor."""
        return Tokens(**{name: change(part) for name, part in self.parts.items()})

    def __getitem__(self, where: Any) -> Tokens:
        """Every tensor indexed alike."""
        return self.map(lambda part: part[where])

    @property
    def parts(self) -> dict[str, Tensor]:
        """The tensors that there are, by name."""
        return {name: part for name, part in vars(self).items() if part is not None}


@dataclass(frozen=True)
class Observation:
    """One layer of one sequence as a scorer sees it: the newest queries and every key they attend to. Read-only.

    Queries are at positions `seq_len - w … seq_len - 1`. Tokens of a KV head are in ascending order of position;
    a head with fewer tokens than the longest is padded at the end with position PAD_POSITION.
    """

    queries: Tensor  # [heads, w, dim] as attention used them: after RoPE and any norm
    keys: Tensor  # [kv_heads, n, dim]
    values: Tensor  # [kv_heads, n, dim]
    token_positions: Tensor  # [kv_heads, n] index of each token in the text
    lengths: tuple[int, ...]  # tokens per KV head, padding excluded
    seq_len: int  # tokens of text so far
    new: int  # of them, those of this forward pass
    scale: float  # the model's softmax scale
    softcap: float | None = None
    sink_logits: Tensor | None = None  # [heads] learned extra logit of gpt-oss-like attention
    token_state: Tensor = NOTHING  # [kv_heads, n, k] of a method that has a memory
    layer: int = 0
    layers: int = 1
    lse: Tensor | None = None  # [heads, w] log-sum-exp of each query's logits, where the attention kernel returned it
    rotate: Rotate = stay
    whole: int = 0  # tokens of the prompt, where its end is known; 0: it is not
    memo: dict[Any, Tensor] | None = None  # results shared by methods that observe the same queries and keys
    shared: dict[Any, Tensor] | None = None  # masks and indices that are those of every layer of a forward pass
    output_weight: Tensor | None = None  # [heads, hidden, dim] of attention's output projection, if the method needs it

    def memoize(self, key: Any, compute: Callable[[], Tensor]) -> Tensor:
        """The result of an earlier call with this key, else compute it. Read-only; a key of None is never shared."""
        if self.memo is None or key is None:
            return compute()
        if key not in self.memo:
            self.memo[key] = compute()
        return self.memo[key]

    def once(self, key: Any, compute: Callable[[], Tensor]) -> Tensor:
        """What follows from the key and the number of tokens alone, while none is evicted: the same in all layers.

        Read-only.
        """
        if self.shared is None or set(self.lengths) != {self.seq_len}:
            return compute()
        key = key, self.new, self.queries.shape, self.keys.shape, self.keys.device
        if key not in self.shared:
            self.shared[key] = compute()
        return self.shared[key]

    @property
    def expected(self) -> int:
        """Tokens of text so far, or of the whole prompt if they are known to be more."""
        return max(self.whole, self.seq_len)

    @property
    def newest(self) -> Tensor:
        """Indices of this forward pass's tokens. [kv_heads, new]"""
        ends = torch.tensor(self.lengths, device=self.keys.device)[:, None]
        return ends - self.new + torch.arange(self.new, device=ends.device)

    @property
    def is_padded(self) -> bool:
        """Some KV heads hold fewer tokens than others."""
        return min(self.lengths) < self.tokens

    @property
    def is_step(self) -> bool:
        """Decoding: one token on top of earlier ones."""
        return self.new == 1 < self.seq_len

    @property
    def kv_heads(self) -> int:
        return self.keys.shape[0]

    @property
    def tokens(self) -> int:
        """Tokens of the longest KV head."""
        return self.keys.shape[1]


@dataclass(frozen=True)
class ReplayPass:
    """A forward pass after a prompt, in which part of it is fed again.

    An instruction, ending with the tokens before the part, then the end of a user's message, then the part.
    """

    instruction: str
    lead: int  # tokens before the part
    start: int  # of the part, counted from the first token that is fed again, behind the template's beginning
    end: int


@dataclass(frozen=True)
class Replayed:
    """One layer of one sequence, while part of its text is fed to the model a second time. Read-only."""

    queries: Tensor  # [heads, q, dim] of all that is fed: an instruction, and the part
    own_keys: Tensor  # [kv_heads, q, dim] likewise
    keys: Tensor  # [kv_heads, m, dim] of the part, as it stands in the text
    values: Tensor  # [kv_heads, m, dim]
    sinks: Tensor  # [kv_heads, s, dim] keys of the text's first tokens, before the part
    scale: float
    softcap: float | None = None
    sink_logits: Tensor | None = None  # [heads]
    output_gram: Tensor | None = None  # [heads, dim, dim] W_OᵀW_O, if the method needs it
    hidden_norms: Tensor | None = None  # [q] of what the layer adds to, if the method needs it


@dataclass(frozen=True)
class Step:
    """One decode step of all rows (layers of one shape are further rows).

    Every KV head has n slots, with tokens in any order, the new one included. A slot without a token has the position
    PAD_POSITION and a logit of -inf. All is on the device: a step must not wait for the host.
    """

    token_positions: Tensor  # [rows, kv_heads, n] index of each token in the text
    token_state: Tensor  # [rows, kv_heads, n, k] of a method that has a memory
    newest: Tensor  # [rows, kv_heads] index of the new token
    logits: Tensor  # [rows, kv_heads, group, n] float32, input of the model's softmax; NOTHING if not needed
    value: Tensor  # [rows, kv_heads, dim] of the new token
    lengths: Tensor  # [rows] tokens of text so far
    scale: float
    softcap: float | None = None
    sink_logits: Tensor | None = None  # [rows, kv_heads, group]

    @cached_property
    def probs(self) -> Tensor:
        """Output of the model's softmax. [rows, kv_heads, group, n]"""
        return self.softmax(self.logits)

    def softmax(self, logits: Tensor) -> Tensor:
        """Softmax of logits like the step's, with its sink logits."""
        if self.sink_logits is None:
            return logits.softmax(-1)
        return torch.cat([logits, self.sink_logits[..., None].float()], -1).softmax(-1)[..., :-1]


@dataclass(frozen=True)
class Selection:
    """The tokens one layer of one sequence keeps: output of compress/, input of the cache."""

    index: Tensor  # [kv_heads, longest] token indices, ascending; padding beyond a head's length
    lengths: tuple[int, ...]  # tokens kept per KV head
    coverage: float | None = None  # share of the scores that they make up, where that decides how many they are

    def tolist(self) -> list[list[int]]:
        """Per KV head, the kept token indices in ascending order."""
        return [row[:length] for row, length in zip(self.index.tolist(), self.lengths, strict=True)]
