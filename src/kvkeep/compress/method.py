"""A method is a value: one choice per axis. Names and parameters are turned into one here."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any

from kvkeep.compress.allocate.heads import EqualHeads
from kvkeep.compress.allocate.layers import EqualLayers
from kvkeep.compress.recall.plan import Recall
from kvkeep.compress.schedule import Schedule
from kvkeep.compress.window import Guard
from kvkeep.errors import BadParameter
from kvkeep.kernels.packed import GROUP
from kvkeep.registry import Registry, did_you_mean

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

    def check(self, budget: int | float) -> int | float:
        """Refuse a budget that can never hold what this method always keeps."""
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


def parse(spec: str | Method, /, **parameters: Any) -> Method:
    """The method called "snapkv", or a crossing such as "snapkv:window=32+adakv", with these parameters."""
    if isinstance(spec, Method):
        if parameters:
            raise BadParameter(
                f"parameters {sorted(parameters)} cannot change a Method value; use dataclasses.replace."
            )
        return spec
    from kvkeep.compress.presets import CROSSINGS, METHODS

    if not isinstance(spec, str):
        raise BadParameter(f"method={spec!r} is neither a name such as 'snapkv+adakv' nor a Method.")
    (base, written), *more = (_settings(part) for part in spec.split("+"))
    crossings = [name for name, _ in more]
    parts = [METHODS[base], *(CROSSINGS[name] for name in crossings)]
    for part, settings in zip(parts, [written, *(settings for _, settings in more)], strict=True):
        _share_out([part], settings, spec)
        parameters = {**settings, **parameters}
    given = _share_out(parts, parameters, spec)
    method = parts[0].build(**given[0])
    for name, part, values in zip(crossings, parts[1:], given[1:], strict=True):
        method = _cross(method, name, part.build(**values), base)
    used = {k: v for part, values in zip(parts, given, strict=True) for k, v in {**part.defaults, **values}.items()}
    keeps, deviates = (
        "; ".join(filter(None, text)) for text in zip(*((p.keeps, p.deviates) for p in parts), strict=True)
    )
    return replace(method, name=spec, paper=parts[0].paper, keeps=keeps, deviates=deviates, parameters=used)


def _settings(part: str) -> tuple[str, dict[str, Any]]:
    """ "snapkv:window=32:pool=7" as its name and its parameters."""
    name, *settings = part.split(":")
    return name, dict(setting(each) for each in settings)


def setting(text: str) -> tuple[str, Any]:
    """ "window=32" as a name and a value: an int, float or bool if it reads as one, else text."""
    name, _, value = text.partition("=")
    if not (name.isidentifier() and value):
        raise BadParameter(f"'{text}' is not name=value; write for example window=32.")
    if value.lower() in ("true", "false"):
        return name, value.lower() == "true"
    for kind in (int, float):
        try:
            return name, kind(value)
        except ValueError:
            continue
    return name, value


def _share_out(parts: list[Named], parameters: Mapping[str, Any], spec: str) -> list[dict[str, Any]]:
    """Give each part the parameters it knows; refuse those none of them does."""
    known = [name for part in parts for name in part.defaults]
    for name in parameters:
        if name not in known:
            have = f"it has {', '.join(known)}" if known else "it has none"
            raise BadParameter(f"'{spec}' has no parameter '{name}'; {have}.{did_you_mean(name, known)}")
    return [{k: _like(k, parameters[k], d) for k, d in part.defaults.items() if k in parameters} for part in parts]


def _like(name: str, value: Any, default: Any) -> Any:
    """A parameter of the default's kind; whole floats pass as integers, integers as floats."""
    if default is None or isinstance(value, type(default)) and isinstance(value, bool) == isinstance(default, bool):
        return value
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    raise BadParameter(f"{name}={value!r} should be {type(default).__name__}, like its default {default!r}.")


def _cross(method: Method, crossing: str, change: Any, base: str) -> Method:
    """Make one change, or one that depends on what there is, unless it makes no sense."""
    spec = f"'{base}+{crossing}' cannot work"
    if method.recall is not None:
        raise BadParameter(f"{spec}: '{base}' drops nothing, so there is no budget to share.")
    if callable(change):
        if method.scorer is None:
            raise BadParameter(f"{spec}: '{base}' keeps everything, so there is nothing to choose.")
        if not getattr(method.scorer, "scores", True):
            raise BadParameter(f"{spec}: '{base}' orders tokens by age; there are no votes to change.")
        change = change(method)
    if "recall" in change:
        if not hasattr(method.group, "members"):
            raise BadParameter(f"{spec}: '{base}' has no clusters to put away; 'protokv+recall' does.")
        return replace(method, scorer=None, group=None, voters=0, recall=change["recall"](method))
    if method.scorer is None:
        raise BadParameter(f"{spec}: '{base}' keeps everything, so there is no budget to share.")
    if not getattr(method.scorer, "scores", True) and getattr(change.get("heads"), "needs_scores", False):
        raise BadParameter(f"{spec}: '{base}' orders tokens by age and has no scores to compare heads by.")
    if "layers" in change and not isinstance(method.layers, EqualLayers):
        raise BadParameter(f"{spec}: the budget is shared among layers already.")
    if "layers" in change and method.reuse > 1:
        raise BadParameter(
            f"{spec}: reuse={method.reuse} lets layers share one choice, '{crossing}' gives them different budgets; "
            "set reuse=1."
        )
    voters = max(method.voters, getattr(change.get("layers"), "window", 0))
    return replace(method, voters=voters, **change)


def catalogue() -> Registry:
    """Every named method with its default parameters."""
    from kvkeep.compress.presets import METHODS

    return Registry("method", {name: parse(name) for name in METHODS})
