"""The parts a Method is made of, as any package may write them, and the check that a part is complete.

What a protocol lists is required. What a scorer may add is in `ScorerTraits`; a scorer or memory may also have `step`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from kvkeep.arguments import Checked, check_finite
from kvkeep.compress.positions import PlacementInput
from kvkeep.compress.retrieval.index import OffloadedTokens, RetrievalQuery, RowQueries
from kvkeep.errors import BadParameter
from kvkeep.kernels.torch.ranking import Units
from kvkeep.registry import did_you_mean
from kvkeep.types import Observation, Replayed, ReplayPass, Rotate, Step

NEEDS = ("mass", "mass_per_head", "moments", "sizes", "keys", "question")


class Scorer(Protocol):
    """Scores tokens; higher is kept first. -> [kv_heads, n] float32"""

    def __call__(self, observation: Observation, budget: int, /) -> Tensor: ...


@runtime_checkable
class StepScorer(Scorer, Protocol):
    """It also scores one decode step of all rows, so that one token is evicted in place. -> [rows, kv_heads, n]"""

    def step(self, step: Step, budget: int, /) -> Tensor: ...


class TokenMemory(Protocol):
    """Updates the token_state stored with each token, given new queries. -> [kv_heads, n, width] float32

    It may have `prompt_only = True`: decode steps change nothing; `rotates = True`: it needs `Observation.rotate`;
    `uses_lse = True`: it uses `Observation.lse`, where a kernel returns it; and `chunk`: tokens that it wants in one
    forward pass, counted from the first token.
    """

    @property
    def width(self) -> int: ...
    @property
    def sees_all(self) -> bool: ...  # every query of a prompt counts, not only the observation window
    def __call__(self, observation: Observation, budget: int, /) -> Tensor: ...


@runtime_checkable
class StepMemory(TokenMemory, Protocol):
    """It also updates one decode step of all rows. -> [rows, kv_heads, n, width]"""

    def step(self, step: Step, budget: int, /) -> Tensor: ...


@runtime_checkable
class ReplayMemory(TokenMemory, Protocol):
    """Wants a prompt fed to the model again before anything is evicted. Its `score` is the tokens' token_state.

    passes: of a prompt of so many tokens, the parts that are fed, one after the other; room: tokens that the model's
    context length leaves for each
    score: of a part's tokens, in one layer [kv_heads, m] float32
    local: what is fed attends to the prompt's first `sinks` tokens, its part and itself, not to the whole prompt
    needs_output: `Replayed` has output_gram and hidden_norms
    tau: with budget="auto" what scores above it is kept
    """

    @property
    def sinks(self) -> int: ...
    @property
    def local(self) -> bool: ...
    @property
    def tau(self) -> float: ...
    @property
    def needs_output(self) -> bool: ...
    def passes(self, tokens: int, room: int, /) -> Iterable[ReplayPass]: ...
    def score(self, seen: Replayed, /) -> Tensor: ...


class QuerySummary(Protocol):
    """What is held of all of a prompt's queries, and what the scorer sees in their place. -> [heads, rows, dim] float64

    Summaries of several passes are added. It may have `rotates = True`, as a memory may.
    """

    def rows(self, dim: int, /) -> int: ...
    def __call__(self, queries: Tensor, first: int, rotate: Rotate, /) -> Tensor: ...


class Reranking(Protocol):
    """Changes scores, given which tokens are kept anyway. -> [kv_heads, n]

    free [kv_heads, n]: the tokens that are not; left [kv_heads]: how many of them will be kept. `Observation` has its
    output_weight.
    """

    def __call__(self, observation: Observation, scores: Tensor, free: Tensor, left: Tensor, /) -> Tensor: ...


class Grouping(Protocol):
    """Groups tokens into units that are kept whole; free [kv_heads, n]: tokens that are not kept anyway."""

    def __call__(self, observation: Observation, scores: Tensor, free: Tensor, /) -> Units: ...


@runtime_checkable
class Clustering(Grouping, Protocol):
    """A grouping by keys alone, which can be offloaded and retrieved. members: the unit of each token, [kv_heads, n]"""

    def members(self, observation: Observation, /) -> Tensor: ...


class HeadAllocator(Protocol):
    """Tokens per KV head; arguments: budget/heads.py. `needs_scores = True` if it compares the scores of heads.

    `across_layers = True`, as `SharedBudget` has it: heads of all layers compete.
    """

    def __call__(
        self, scores: Tensor, forced: Tensor, lengths: Sequence[int], budget: int, units: Units | None, /
    ) -> list[int]: ...


LayerWeight = Callable[[Observation, int], Tensor]


class LayerAllocator(Protocol):
    """Tokens per KV head of each layer, whose total is layers * budget; arguments: budget/layers.py.

    layer_weight(observation, budget) makes it compare layers: it is then called with their weights, not their number.
    """

    @property
    def layer_weight(self) -> LayerWeight | None: ...
    @property
    def window(self) -> int: ...  # newest queries that layer_weight sees
    def __call__(self, budget: int, floor: int, tokens: int, layers: Any, /) -> list[int]: ...


class Placement(Protocol):
    """RoPE positions of kept keys. -> [.., m]"""

    def __call__(self, where: PlacementInput, /) -> Tensor: ...


class Chunking(Protocol):
    """Which tokens are offloaded as one unit; see retrieval/chunking.py."""

    @property
    def contiguous(self) -> bool: ...
    @property
    def uniform(self) -> bool: ...
    def size(self, budget: int, /) -> int: ...
    def uniform_size(self, budget: int, /) -> int: ...
    def num_ready(self, marks: Tensor, waiting: int, budget: int, /) -> int: ...
    def members(self, keys: Tensor, marks: Tensor, budget: int, /) -> Tensor: ...


class RetrievalIndex(Protocol):
    """Builds the index entries of offloaded units, and scores units for queries; see retrieval/index.py.

    needs, any of: "mass", the attention tokens got, "mass_per_head", of each query head; "moments" of all queries, from
    which one vector is made for a window (see `MomentsIndex`); "sizes" of the units, else None where all have one size;
    "keys": the offloaded keys are the index, and `build` returns None; "question": the queries of one that is known.
    """

    @property
    def needs(self) -> frozenset[str]: ...
    def build(self, tokens: OffloadedTokens, /) -> Tensor | None: ...
    def score(self, query: RetrievalQuery, unit_index: Any, sizes: Any, /) -> Tensor: ...


@runtime_checkable
class RowIndex(RetrievalIndex, Protocol):
    """An index that also scores units for one decoded token of each row of a pool. -> [rows, 1 or kv_heads, units]"""

    def score_rows(self, query: RowQueries, entries: Tensor, /) -> Tensor: ...


@runtime_checkable
class MomentsIndex(RetrievalIndex, Protocol):
    """An index that needs "moments"."""

    @property
    def question_in_window(self) -> bool: ...
    @property
    def reverse(self) -> bool: ...


@dataclass(frozen=True)
class ScorerTraits:
    """What a scorer may say of itself; the defaults hold where it says nothing, as a plain function does."""

    signed: bool = False  # scores may be negative
    one_scale: bool = True  # scores of different heads can be compared
    has_scores: bool = True  # False: it only orders tokens
    additive: bool = True  # scores are amounts, such as of attention: what several tokens are worth is their sum
    per_head: bool = False  # a head's scores do not depend on other heads
    needs_attention: bool = True  # False: `step` does not use logits and probs
    cache_key: Callable[[int], Hashable] = lambda budget: None  # all scores depend on of a budget, never 0; None: more

    @classmethod
    def of(cls, scorer: Any) -> ScorerTraits:
        return cls(**{f.name: cls.one(scorer, f.name) for f in fields(cls)})

    @classmethod
    def one(cls, scorer: Any, name: str) -> Any:
        """Return one trait of a scorer, where the others are not needed."""
        return getattr(scorer, name, getattr(cls, name))


def check_part(part: Any, protocol: type, role: str) -> None:
    """Raise for a part that lacks something the protocol lists."""
    if isinstance(part, type):
        raise BadParameter(f"the {role} {part.__name__} is a class, not a value; write {part.__name__}().")
    kind = getattr(part, "__name__", type(part).__name__)
    for name, wanted in _members(protocol).items():
        if not inspect.isfunction(wanted):
            if not hasattr(part, name):
                raise BadParameter(f"the {role} {kind} has no {name}.")
        elif not _takes(part if name == "__call__" else getattr(part, name, None), wanted):
            raise BadParameter(f"the {role} {kind} has no {name}({', '.join(_arguments(wanted))}).")
    if is_dataclass(part) and not isinstance(part, Checked):
        try:
            check_finite(part)
        except BadParameter as error:
            raise BadParameter(f"the {role} {kind}: {error}") from None


def check_index(index: Any) -> None:
    check_part(index, RetrievalIndex, "index")
    for need in index.needs:
        if need not in NEEDS:
            raise BadParameter(
                f"the index {type(index).__name__} needs '{need}', which is not known.{did_you_mean(need, NEEDS)} "
                f"Known: {', '.join(NEEDS)}."
            )
    if "moments" in index.needs:
        check_part(index, MomentsIndex, "index")


@cache
def _members(protocol: type) -> dict[str, Any]:
    """The methods and properties a protocol and its bases list."""
    return {
        name: value
        for kind in reversed(protocol.__mro__) if kind.__module__ == __name__
        for name, value in vars(kind).items()
        if isinstance(value, property) or inspect.isfunction(value) and value.__module__ == __name__
    }  # fmt: skip


@cache
def _arguments(function: Callable) -> list[str]:
    return list(inspect.signature(function).parameters)[1:]


def _takes(method: Any, wanted: Callable) -> bool:
    """Whether it can be called with as many arguments."""
    if not callable(method):
        return False
    try:
        inspect.signature(method).bind(*_arguments(wanted))
    except TypeError:
        return False
    except ValueError:  # built in: says nothing of its arguments
        return True
    return True
