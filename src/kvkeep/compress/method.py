"""A compression method as a value: one choice per axis."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Integral
from typing import Annotated, Any, Literal

from kvkeep.arguments import Amount, Checked, Count, Positive, Range, check_value
from kvkeep.compress.budget.coverage import Needed
from kvkeep.compress.budget.heads import EqualHeads, Threshold
from kvkeep.compress.budget.layers import EqualLayers
from kvkeep.compress.guard import Guard
from kvkeep.compress.protocols import (
    Chunking,
    Grouping,
    HeadAllocator,
    LayerAllocator,
    Placement,
    QuerySummary,
    ReplayMemory,
    Reranking,
    Scorer,
    ScorerTraits,
    StepMemory,
    StepScorer,
    TokenMemory,
    check_index,
    check_part,
)
from kvkeep.compress.retrieval.config import RetrievalConfig
from kvkeep.errors import BadParameter
from kvkeep.kernels.torch.quantization import GROUP_SIZE

PARTS = (  # field, what it has to be, and what if it has `step`
    ("scorer", Scorer, StepScorer),
    ("rerank", Reranking, Reranking),
    ("group", Grouping, Grouping),
    ("heads", HeadAllocator, HeadAllocator),
    ("layers", LayerAllocator, LayerAllocator),
    ("memory", TokenMemory, StepMemory),
    ("summary", QuerySummary, QuerySummary),
    ("placement", Placement, Placement),
)
WITHOUT = "use a method that evicts after the prompt, such as 'kvkeep' or 'snapkv'."
Coverage = Annotated[float, Range(above=0, most=1)] | None
STORAGE = {None: None, "int8": 8, "int4": 4}  # bits per number


@dataclass(frozen=True)
class Schedule(Checked):
    """When tokens are evicted: after every prefill and, optionally, while decoding.

    While decoding, evict as soon as a head holds budget + every tokens; None: never.

    1 keeps the cache at its budget at every step. A larger number is a buffer (ProtoKV, appendix O): the cache grows
    to budget + every - 1, and then the queries decoded meanwhile decide.
    """

    every: Positive | None = None

    def evict_now(self, held: int, budget: int) -> bool:
        return self.every is not None and held >= budget + self.every


SCHEDULES = {"prompt": Schedule(), "step": Schedule(1), "buffer": Schedule(128)}


def as_schedule(value: str | int | Schedule) -> Schedule:
    """One of "prompt", "step", "buffer" (128 tokens), a number of tokens, or a Schedule."""
    if isinstance(value, Schedule):
        return value
    if isinstance(value, str) and value in SCHEDULES:
        return SCHEDULES[value]
    check_value("schedule", value, Literal["prompt", "step", "buffer"] | Positive)
    return Schedule(int(value))


@dataclass(frozen=True)
class Draft(Checked):
    """Tokens decoded after a prompt from what another method keeps of it: the scorer sees their queries."""

    method: Method
    tokens: Positive = 8
    hold: Positive | None = None  # budgets its method keeps for the draft; None: one, and all tokens stay meanwhile
    predicting: bool = False  # seen are the queries that predict its tokens, up to an EOS; False: its tokens' own

    @property
    def steps(self) -> int:
        """Forward passes: the first of them is of the prompt's last token."""
        return self.tokens if self.predicting else 1 + self.tokens

    def kept(self, budget: int, seen: int) -> int:
        """Tokens per KV head that it is decoded from, of a prompt of `seen` tokens."""
        return min(seen, (self.hold or 1) * budget)


@dataclass(frozen=True)
class Method(Checked):
    """A recipe: scorer × guard × grouping × head and layer budgets × memory × placement × schedule, or retrieval."""

    name: str = ""
    scorer: Scorer | None = None  # None: nothing is evicted
    guard: Guard = Guard()
    group: Grouping | None = None  # None: tokens are selected one by one
    heads: HeadAllocator = EqualHeads()
    layers: LayerAllocator = EqualLayers()
    memory: TokenMemory | None = None  # updates the token_state stored with each token, given new queries
    summary: QuerySummary | None = None  # the scorer sees it in the place of a prompt's queries
    placement: Placement | None = None  # RoPE positions of kept keys; None: their own
    observation_window: Count = 0  # number of newest queries the scorer sees; a memory with sees_all sees every query
    schedule: Schedule = Schedule()  # when to evict while decoding
    reuse: Positive = 1  # this many consecutive layers share the selection of the first
    retrieval: RetrievalConfig | None = None  # offload all tokens and retrieve some per query, instead of evicting
    draft: Draft | None = None  # the scorer sees the queries of tokens that follow the prompt
    rerank: Reranking | None = None  # changes the scores of tokens that are not kept anyway
    coverage: Coverage = None  # no more is kept than makes up this share of the scores (budget/coverage.py)
    tau: Amount | None = None  # or than scores above this
    paper: str = ""
    keeps: str = ""
    deviates: str = ""  # where this differs from the paper
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def extends_context(self) -> bool:
        """Queries never attend farther than the trained context, so texts may be longer than it."""
        return self.retrieval.moves_keys if self.retrieval else self.placement is not None

    @property
    def rotates(self) -> bool:
        """It moves keys or queries to other positions."""
        moves_keys = self.placement is not None or (self.retrieval is not None and self.retrieval.moves_keys)
        return moves_keys or any(getattr(part, "rotates", False) for part in (self.memory, self.summary))

    @property
    def replay(self) -> ReplayMemory | None:
        """What wants a prompt fed again before anything is evicted."""
        memory = self.memory if self.retrieval is None else None
        return memory if isinstance(memory, ReplayMemory) else None

    @property
    def sums_queries(self) -> bool:
        """It scores with a sum over all queries of a prompt, not with the last ones."""
        return self.summary is not None or bool(self.memory and self.memory.sees_all and not self.scores_own_tokens)

    @property
    def selects_by_queries(self) -> bool:
        """Whether any queries can decide what is kept, without those of the text."""
        asks = bool(self.observation_window or self.draft)
        return asks and not (self.memory or self.summary)

    @property
    def scores_own_tokens(self) -> bool:
        """It scores a prompt's tokens in the pass that brings them, and not again."""
        memory = self.memory
        return bool(memory and memory.sees_all and getattr(memory, "prompt_only", False))

    @property
    def needs_passes(self) -> bool:
        """The model runs again after a prompt, before anything is evicted."""
        return self.replay is not None or self.draft is not None

    @property
    def needed(self) -> Needed | None:
        """What decides how much is kept, within the budget; None: the budget alone."""
        return None if self.coverage is None and self.tau is None else Needed(self.coverage, self.tau)

    @property
    def needs_output(self) -> bool:
        """It weighs values by the projection of attention's output."""
        return self.rerank is not None or (self.replay is not None and self.replay.needs_output)

    @property
    def query_aware(self) -> bool:
        """What is evicted depends on the newest queries, so on a question at the end: the next may need the rest.

        False where all queries count alike (h2o) or none does, and where nothing is evicted (full, retrieval).
        """
        return self.retrieval is None and self.scorer is not None and self.observation_window > 0

    @property
    def per_head(self) -> bool:
        """What a KV head keeps or retrieves depends on its own queries, keys and values alone."""
        if self.retrieval is not None:
            return getattr(self.retrieval.index, "each_head", False)
        alone = isinstance(self.heads, EqualHeads) and self.layers.layer_weight is None
        group = self.group is None or getattr(self.group, "per_head", False)
        return alone and group and (self.scorer is None or ScorerTraits.of(self.scorer).per_head)

    @property
    def cannot_guess(self) -> str:
        """Why tokens that may be taken back cannot follow a prompt in the same forward pass; empty if they can."""
        if self.retrieval is not None:
            return f"it retrieves for every token, right or wrong; {WITHOUT}"
        if self.memory is not None:
            return f"every query changes what it knows of the tokens before; {WITHOUT}"
        if self.draft is not None:
            return f"it drafts an answer of its own before it evicts; {WITHOUT}"
        if self.schedule.every is not None:
            return f"it evicts in decode, and cannot restore what is evicted; use schedule='prompt', or {WITHOUT}"
        if self.layers.layer_weight is not None or self.across_layers:
            return f"it compares layers, so the first does not know yet what a guess will find in it; {WITHOUT}"
        return ""

    def __post_init__(self) -> None:
        try:
            super().__post_init__()
            self._check_parts()
        except BadParameter as error:
            named = f"'{self.name}': " if isinstance(self.name, str) and self.name else ""
            raise BadParameter(f"{named}{error}") from None
        if getattr(self.heads, "needs_scores", False) and not ScorerTraits.of(self.scorer).one_scale:
            raise BadParameter(
                f"{self._called} cannot work: scores of different heads are not on one scale (of protokv, "
                "they are with votes=softmax)."
            )

        if self.across_layers and (self.reuse > 1 or not isinstance(self.layers, EqualLayers)):
            why = (
                f"reuse={self.reuse} lets layers share a selection" if self.reuse > 1 else "layers have budgets already"
            )
            raise BadParameter(f"{self._called} cannot work: one budget is shared by all layers, and {why}.")

        if self.rerank and (reason := self._cannot_rerank):
            raise BadParameter(
                f"{self._called} cannot work: one part of the budget is spent by other scores, {reason}."
            )

        if self.needed is not None and (reason := self._cannot_cover):
            raise BadParameter(
                f"{self._called} cannot work with budget='auto': {reason}. Give a number of tokens (512) or a fraction "
                "(0.1), or use a method whose scores are amounts of attention: 'kvkeep_context', 'echo' or 'snapkv'."
            )

        if self.summary and self.observation_window:
            raise BadParameter(f"{self._called} cannot work: it needs the last queries, and has a summary of all.")

    @property
    def _cannot_rerank(self) -> str:
        if self.scorer is None or ScorerTraits.of(self.scorer).signed:
            return "which are products, and these may be negative"
        if self.group is not None:
            return "which are of tokens, and units are kept whole"
        return "and a threshold is for one kind" if isinstance(self.heads, Threshold) else ""

    @property
    def _cannot_cover(self) -> str:
        """Why a share of the scores cannot decide how many tokens are kept; empty if it can."""
        if self.tau is not None and self.coverage is not None:
            return f"tau={self.tau} takes the place of coverage="
        if self.retrieval:
            return "it retrieves for every token, and evicts nothing"
        traits = ScorerTraits.of(self.scorer)
        if traits.signed or not (traits.has_scores and traits.additive):
            return "'auto' keeps a share of the sum of all scores, and there is none that would mean anything"
        if self.rerank or isinstance(self.heads, Threshold):
            return "'auto' keeps a share of one kind of scores, and they are changed or cut off already"
        if self.across_layers and getattr(self.heads, "alpha", None) and not getattr(self.heads, "yields", False):
            return "floor= is a part of a budget that 'auto' does not know before"
        return ""

    @property
    def across_layers(self) -> bool:
        """KV heads of all layers compete for one budget."""
        return getattr(self.heads, "across_layers", False)

    def _check_parts(self) -> None:
        """Raise for a part that lacks something, before the first prefill or decode step needs it."""
        for role, protocol, with_step in PARTS:
            part = getattr(self, role)
            if part is not None:
                check_part(part, with_step if getattr(part, "step", None) else protocol, role)
        for role, kind in (("guard", Guard), ("schedule", Schedule), ("retrieval", RetrievalConfig), ("draft", Draft)):
            value = getattr(self, role)
            if not isinstance(value, kind) and (role in ("guard", "schedule") or value is not None):
                raise BadParameter(f"{role}={value!r} is not a {kind.__name__}.")
        if self.retrieval is not None:
            check_part(self.retrieval.chunking, Chunking, "chunking")
            check_index(self.retrieval.index)

    @property
    def _called(self) -> str:
        return f"'{self.name}'" if self.name else "this method"

    def check(self, budget: int | float | str | None) -> int | float:
        """Refuse a budget too small for what this method always keeps; methods that keep everything need none."""
        if budget is None and (self.scorer or self.retrieval):
            raise BadParameter(f"{self._called} needs a budget: tokens per KV head (512), a fraction (0.1) or 'auto'.")
        budget = check_budget(1.0 if budget is None else budget)
        if isinstance(budget, int):
            (self.retrieval or self.guard).check(budget, self.name)
        elif self.retrieval and self.retrieval.needs == "surprise":
            raise BadParameter(
                f"{self._called} prefills in chunks of the near window, so it needs a budget in tokens, not {budget}."
            )
        return budget

    def bits(self, storage: str | None) -> int | None:
        """Bits per number of a storage, None: the model's dtype; raises where the method cannot use it."""
        if not isinstance(storage, str | None) or storage not in STORAGE:
            raise BadParameter(f"storage={storage!r} is not known; use 'int8', 'int4', or None: as the model computes.")
        if storage is None:
            return None
        if self.retrieval is not None:
            raise BadParameter(
                f"storage='{storage}' cannot work with {self._called}, which offloads tokens and retrieves them: "
                "use storage=None, or an eviction method such as 'kvkeep' or 'snapkv'."
            )
        if self.schedule.every is not None and self.schedule.every < GROUP_SIZE:
            often = "at every step" if self.schedule.every == 1 else f"every {self.schedule.every} steps"
            raise BadParameter(
                f"storage='{storage}' quantizes {GROUP_SIZE} tokens together, but {self._called} evicts tokens "
                f"{often}; use schedule='prompt', or a buffer of {GROUP_SIZE} or more."
            )
        return STORAGE[storage]


@dataclass(frozen=True)
class Preset:
    """A function from parameters to a Method or, for a modifier, to the fields it changes."""

    build: Callable[..., Any]
    paper: str
    keeps: str
    deviates: str = ""

    @property
    def defaults(self) -> dict[str, Any]:
        return {name: p.default for name, p in inspect.signature(self.build).parameters.items()}


def check_budget(budget: int | float | str) -> int | float:
    """Check a positive number of tokens, or a fraction of the text."""
    if isinstance(budget, Integral) and not isinstance(budget, bool):
        budget = int(budget)
    if isinstance(budget, bool) or not isinstance(budget, int | float):
        raise BadParameter(f"budget={budget!r} is not a number; use tokens (512), a fraction (0.1) or 'auto'.")
    if isinstance(budget, int) and budget < 1:
        raise BadParameter(f"budget={budget} keeps nothing; use 1 token or more, or a fraction such as 0.1.")
    if isinstance(budget, float) and not 0 < budget <= 1:
        raise BadParameter(f"budget={budget} is not a fraction in (0, 1]; for a number of tokens pass an integer.")
    return budget
