"""Parse a method's name, parameters and modifiers, "snapkv:window=32+adakv", into a Method."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, get_args

from kvkeep.arguments import check_value, hints
from kvkeep.compress.budget.heads import Threshold
from kvkeep.compress.budget.layers import EqualLayers
from kvkeep.compress.method import Method, Preset
from kvkeep.compress.presets import METHODS, MODIFIERS, keep_needed
from kvkeep.compress.protocols import Clustering, ScorerTraits
from kvkeep.errors import BadParameter
from kvkeep.registry import did_you_mean

MOST = 0.5  # of the tokens seen: the upper bound of an automatic budget


def parse(spec: str | Method, /, **parameters: Any) -> Method:
    """The method "snapkv", or one with modifiers such as "snapkv:window=32+adakv", with these parameters."""
    if "compression_ratio" in parameters:
        raise BadParameter(_ratio(parameters["compression_ratio"]))
    if isinstance(spec, Method):
        if parameters:
            raise BadParameter(
                f"parameters {sorted(parameters)} cannot change a Method value; use dataclasses.replace."
            )
        return spec
    if not isinstance(spec, str):
        raise BadParameter(f"method={spec!r} is neither a name such as 'snapkv+adakv' nor a Method.")
    pieces = [part.split(":") for part in spec.split("+")]
    base, *modifiers = names = [name for name, *_ in pieces]
    written = [dict(setting(each) for each in settings) for _, *settings in pieces]
    if twice := [name for name in modifiers if modifiers.count(name) > 1]:
        raise BadParameter(f"'{spec}' has +{twice[0]} more than once; write it once.")
    parts = [METHODS[base], *(MODIFIERS[name] for name in modifiers)]
    for name, part, settings in zip(names, parts, written, strict=True):
        _check_names([name], [part], settings, spec)
    _check_names(names, parts, parameters, spec)
    labels = [base, *(f"+{name}" for name in modifiers)]
    given = []  # what is written is for its part alone; a keyword is for every part that has it, and said last
    for name, label, part, settings in zip(names, labels, parts, written, strict=True):
        with _named(label):
            given.append(_part_parameters(name, part, {**settings, **parameters}))
    with _named(base):
        method = replace(parts[0].build(**given[0]), name=spec)
    for name, label, part, values in zip(modifiers, labels[1:], parts[1:], given[1:], strict=True):
        with _named(label):
            method = _apply_modifier(method, name, part.build(**values), base)
    keeps, deviates = (
        "; ".join(filter(None, text)) for text in zip(*((p.keeps, p.deviates) for p in parts), strict=True)
    )
    return replace(
        method, name=spec, paper=parts[0].paper, keeps=keeps, deviates=deviates, parameters=_record(names, given)
    )


def parse_budget(
    spec: str | Method, budget: int | float | str | None, /, **parameters: Any
) -> tuple[Method, int | float]:
    """A method with its budget. "auto": the method +auto, within `max_budget`, by default half of the tokens seen."""
    if budget == "auto":
        budget, known = parameters.pop("max_budget", MOST), parse(spec)
        if known.needed is None and (known.scorer or known.retrieval):
            auto = replace(known, **keep_needed()(known))  # or it is refused by its own name
            spec = f"{spec}+auto" if isinstance(spec, str) else auto
    method = parse(spec, **parameters)
    return method, method.check(budget)


def _ratio(value: Any) -> str:
    """kvpress gives the fraction evicted, kvkeep the fraction kept."""
    evicted = value if isinstance(value, float) and 0 < value < 1 else 0.75
    return (
        f"compression_ratio={value!r}: kvkeep takes budget=: tokens per KV head, or a fraction kept; "
        f"compression_ratio={evicted:g} in kvpress is budget={1 - evicted:g}."
    )


def setting(text: str) -> tuple[str, Any]:
    """ "window=32" as a name and a value: an int, float or bool if it reads as one, else text."""
    name, _, value = text.partition("=")
    if not (name.isidentifier() and value):
        raise BadParameter(f"'{text}' is not name=value; write for example window=32.")
    if "," in value:
        raise BadParameter(f"'{text}': several parameters are written with colons: {text.replace(',', ':')}.")
    if value.lower() in ("true", "false"):
        return name, value.lower() == "true"
    for kind in (int, float):
        try:
            return name, kind(value)
        except ValueError:
            continue
    return name, value


def _check_names(names: Sequence[str], parts: list[Preset], parameters: Mapping[str, Any], spec: str) -> None:
    """Raise for a parameter that no part has."""
    known = [key for part in parts for key in part.defaults]
    recorded = {f"{name}:{key}" for name, part in zip(names, parts, strict=True) for key in part.defaults}
    for name in parameters:
        if name == "compression_ratio" and name not in known:
            raise BadParameter(_ratio(parameters[name]))
        if name not in known and name not in recorded:
            have = f"it has {', '.join(known)}" if known else "it has none"
            raise BadParameter(f"'{spec}' has no parameter '{name}'; {have}.{did_you_mean(name, known)}")


def _part_parameters(name: str, part: Preset, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """All of one part: as recorded for it alone ("prototypes:gamma"), else as given, else by default."""
    given = {key: parameters.get(key, default) for key, default in part.defaults.items()}
    given |= {key: parameters[own] for key in given if (own := f"{name}:{key}") in parameters}
    return {key: _convert(part, key, value) for key, value in given.items()}


def _record(names: Sequence[str], given: list[dict[str, Any]]) -> dict[str, Any]:
    """The parameters that make a method again: "gamma" and, where a later part has another, "prototypes:gamma"."""
    used: dict[str, Any] = {}
    for name, values in zip(names, given, strict=True):
        for key, value in values.items():
            same = key not in used or (type(used[key]), used[key]) == (type(value), value)
            used[key if same else f"{name}:{key}"] = value
    return used


def _convert(part: Preset, name: str, value: Any) -> Any:
    """The value, if the parameter may have it; integers pass as floats."""
    default = part.defaults[name]
    if value is default:
        return value
    hint = hints(part.build).get(name) or type(value if default is None else default)
    check_value(name, value, hint)
    is_float = isinstance(default, float) or float in get_args(hint)
    return float(value) if is_float and value is not None else value


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Errors name the part of the method that they are about."""
    try:
        yield
    except BadParameter as error:
        raise error if str(error).startswith("'") else BadParameter(f"'{name}': {error}") from None


def _apply_modifier(method: Method, modifier: str, change: Any, base: str) -> Method:
    """Change the method's fields, or raise where the combination makes no sense."""
    spec = f"'{base}+{modifier}' cannot work"
    if method.retrieval is not None:
        raise BadParameter(f"{spec}: '{base}' evicts nothing, so there is no budget to allocate.")
    if callable(change):
        if method.scorer is None:
            raise BadParameter(f"{spec}: '{base}' keeps everything, so there is nothing to select.")
        if not ScorerTraits.of(method.scorer).has_scores:
            raise BadParameter(f"{spec}: '{base}' orders tokens by age; there are no scores to change.")
        change = change(method)
    if "retrieval" in change:
        if not isinstance(method.group, Clustering):
            raise BadParameter(f"{spec}: '{base}' has no clusters to offload; 'protokv+recall' does.")
        return replace(method, scorer=None, group=None, observation_window=0, retrieval=change["retrieval"](method))
    if method.scorer is None:
        raise BadParameter(f"{spec}: '{base}' keeps everything, so there is no budget to allocate.")
    if not ScorerTraits.of(method.scorer).has_scores and getattr(change.get("heads"), "needs_scores", False):
        raise BadParameter(f"{spec}: '{base}' orders tokens by age and has no scores to compare heads by.")
    if "heads" in change and isinstance(method.heads, Threshold):
        raise BadParameter(f"{spec} after '+threshold'; write '+threshold' last.")
    if "layers" in change and not isinstance(method.layers, EqualLayers):
        raise BadParameter(f"{spec}: the budget is allocated among layers already.")
    if "layers" in change and method.reuse > 1:
        raise BadParameter(
            f"{spec}: reuse={method.reuse} lets layers share one selection, '{modifier}' gives them different budgets; "
            "set reuse=1."
        )
    window = max(method.observation_window, change["layers"].window if "layers" in change else 0)
    return replace(method, observation_window=window, **change)
