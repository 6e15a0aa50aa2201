"""A method is a value: one choice per axis."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from kvkeep.compress.budget.heads import EqualHeads
from kvkeep.compress.budget.layers import EqualLayers
from kvkeep.compress.guard import Guard
from kvkeep.compress.retrieval.config import Recall
from kvkeep.compress.schedule import Schedule
from kvkeep.errors import BadParameter
from kvkeep.kernels.torch.quantization import GROUP

STORAGE = {None: None, "int8": 8, "int4": 4}  # bits a number takes


@dataclass(frozen=True)
class Method:
    """A recipe for what to keep: scorer × guard × unit × allocators × memory × placement × schedule."""

    name: str
    scorer: Callable | None  # None: nothing is ever dropped
    guard: Guard = Guard()
    group: Callable | None = None  # None: every token is its own unit
    heads: Callable = EqualHeads()
    layers: Callable = EqualLayers()
    memory: Callable | None = None  # notes kept beside each token and brought up to date by every query
    place: Callable | None = None  # None: keys stay where they stood
    voters: int = 0  # how many of the newest queries are looked at; a method with memory sees them all
    schedule: Schedule = Schedule()  # when tokens compete while decoding
    reuse: int = 1  # this many neighbouring layers share the first one's choice
    recall: Recall | None = None  # None: what is dropped is gone; else it is put away, and fetched when asked for
    paper: str = ""
    keeps: str = ""
    deviates: str = ""  # where this is not what the paper says
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def tokens(self, budget: int | float, seen: int) -> int:
        """The budget in tokens per key head once `seen` tokens are known."""
        return budget if isinstance(budget, int) else max(1, int(budget * seen + 1e-9))

    @property
    def endless(self) -> bool:
        """It never lets a query see further than a window the model was trained on."""
        return self.recall.moves if self.recall else self.place is not None

    @property
    def query_aware(self) -> bool:
        """What is dropped depends on the newest queries, so on a question at the end: the next one may want the rest.

        False where every query counts alike (h2o) or none does, and where nothing is dropped (full, retrieval).
        """
        return self.recall is None and self.scorer is not None and self.voters > 0

    def __post_init__(self) -> None:
        if self.reuse < 1:
            raise BadParameter(f"reuse={self.reuse} must be 1 (every layer chooses) or more.")
        if getattr(self.heads, "needs_scores", False) and getattr(self.scorer, "signed", False):
            raise BadParameter(
                f"'{self.name}' cannot work: raw logits of different heads are not on one scale; use votes=softmax."
            )

    def check(self, budget: int | float | None) -> int | float:
        """Refuse a budget that can never hold what this method always keeps; what keeps everything needs none."""
        if budget is None and (self.scorer or self.recall):
            raise BadParameter(f"'{self.name}' needs a budget: tokens per key head (512) or a fraction (0.1).")
        budget = 1.0 if budget is None else budget
        budget = check_budget(budget)
        if isinstance(budget, int):
            (self.recall or self.guard).check(budget, self.name)
        elif self.recall and self.recall.needs == "surprise":
            raise BadParameter(
                f"'{self.name}' reads as much at a time as stays near, so it needs a budget in tokens, not {budget}."
            )
        return budget

    def bits(self, storage: str | None) -> int | None:
        """Bits a number takes in a storage, None: as many as in the model; refused where it cannot work."""
        if storage not in STORAGE:
            raise BadParameter(f"storage={storage!r} is not known; use 'int8', 'int4', or None: as the model computes.")
        if storage is None:
            return None
        if self.recall is not None:
            raise BadParameter(
                f"storage='{storage}' cannot work with '{self.name}', which puts tokens away and fetches them: "
                "use storage=None, or a method that drops, such as 'kvkeep' or 'snapkv'."
            )
        if self.schedule.every is not None and self.schedule.every < GROUP:
            often = "at every step" if self.schedule.every == 1 else f"every {self.schedule.every} steps"
            raise BadParameter(
                f"storage='{storage}' packs {GROUP} tokens together, but '{self.name}' drops tokens {often}; "
                f"use schedule='prompt', or a buffer of {GROUP} or more."
            )
        return STORAGE[storage]


@dataclass(frozen=True)
class Named:
    """A function from parameters to a Method (or, for a crossing, to the change it makes to one)."""

    build: Callable[..., Any]
    paper: str
    keeps: str
    deviates: str = ""

    @property
    def defaults(self) -> dict[str, Any]:
        return {name: p.default for name, p in inspect.signature(self.build).parameters.items()}


def check_budget(budget: int | float) -> int | float:
    """A positive number of tokens, or a fraction of them."""
    if isinstance(budget, Integral) and not isinstance(budget, bool):
        budget = int(budget)
    if isinstance(budget, bool) or not isinstance(budget, int | float):
        raise BadParameter(f"budget={budget!r} is not a number; use tokens (512) or a fraction (0.1).")
    if isinstance(budget, int) and budget < 1:
        raise BadParameter(f"budget={budget} keeps nothing; use 1 token or more, or a fraction such as 0.1.")
    if isinstance(budget, float) and not 0 < budget <= 1:
        raise BadParameter(f"budget={budget} is not a fraction in (0, 1]; for a number of tokens pass an integer.")
    return budget
