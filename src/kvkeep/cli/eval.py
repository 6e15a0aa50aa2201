"""`kvkeep eval`: options of the command and of a config file -> a grid, and its run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from kvkeep.cli.options import LOCAL, METHODS
from kvkeep.compress.defaults import DOCUMENT_BUDGET
from kvkeep.errors import BadInput

NAMES = ("tasks", "methods", "via", "history")
LISTS = (*NAMES, "budget", "length")
MINIMUM = {"limit": 1, "seed": 0, "max_length": 1}
FLAGS = ("share", "beyond_window")
SCHEDULES = ("prompt", "own")


@dataclass(frozen=True)
class EvalOptions:
    """Every option of the command, with its default; a config file has the same names."""

    tasks: tuple[str, ...]
    out: str
    methods: tuple[str, ...] = METHODS
    budget: tuple[int | float | str, ...] = (DOCUMENT_BUDGET,)
    protocol: str = "both"
    via: tuple[str, ...] = ("submit",)
    history: tuple[str, ...] = ("host",)
    model: str = "default"
    length: tuple[int, ...] = (4096,)
    limit: int | None = None
    seed: int = 42
    max_length: int | None = None
    beyond_window: bool = False
    schedule: str = "prompt"  # of eviction: once, after the prompt; or "own": as each method does while decoding
    yarn: float | None = None
    share: bool = True
    ray: str | None = None
    data: str | None = None
    haystack: str | None = None
    squad: str | None = None
    hotpotqa: str | None = None
    device: str | None = None
    dtype: str | None = None


def eval_options(config: Path | None, given: dict[str, Any]) -> EvalOptions:
    """Options beat the file, the file beats the defaults."""
    values = {
        name: value
        for source in (_file(config) if config else {}, given)
        for name, value in source.items()
        if value is not None
    }
    for name in ("tasks", "out"):
        if not values.get(name):
            raise BadInput(f"--{name} is missing; give it as an option or in a --config file.")
    return EvalOptions(**{name: shaped(name, value) for name, value in values.items()})


def _file(path: Path) -> dict[str, Any]:
    import yaml

    from kvkeep.evaluate.tasks.build import read_text

    try:
        values = yaml.safe_load(read_text(path, option="--config "))
    except yaml.YAMLError as error:
        raise BadInput(f"--config {str(path)!r} is not YAML: {error}") from None
    known = [field.name for field in fields(EvalOptions)]
    if not isinstance(values, dict):
        raise BadInput(f"--config {str(path)!r} should map names to values; known names: {', '.join(known)}.")
    if strange := [str(name) for name in values if name not in known]:
        raise BadInput(f"--config {str(path)!r} has unknown keys {', '.join(strange)}; known: {', '.join(known)}.")
    return values


def shaped(name: str, value: Any) -> Any:
    """Lists from commas or YAML lists; numbers where numbers are meant."""
    if name not in LISTS:
        return _single(name, value)
    parts = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    parts = parts if isinstance(parts, list | tuple) else [parts]
    if name in NAMES:
        return tuple(str(part) for part in parts)
    try:
        return tuple(_budget(part) if name == "budget" else int(part) for part in parts)
    except (TypeError, ValueError):
        raise BadInput(f"--{name} {value!r} are not numbers; write for example 128,512.") from None


def _budget(part: Any) -> int | float | str:
    return part if part == "auto" else float(part) if "." in str(part) else int(part)


def _single(name: str, value: Any) -> Any:
    if name in MINIMUM:
        if type(value) is not int or value < MINIMUM[name]:
            raise BadInput(f"--{name.replace('_', '-')} {value!r} is not a whole number from {MINIMUM[name]} on.")
        return value
    if name == "yarn":
        return _factor(value)
    if name == "ray" and isinstance(value, bool):
        return LOCAL if value else None
    if isinstance(value, list | dict) or (name in FLAGS) != isinstance(value, bool):
        raise BadInput(f"{name}: {value!r} should be {'true or false' if name in FLAGS else 'a text'}.")
    return value if name in FLAGS else str(value)


def _factor(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 1:
        raise BadInput(f"--yarn {value!r} is not a number from 1 on; write for example 4.")
    return float(value)


def check(options: EvalOptions) -> tuple[Any, Any]:
    """Refuse wrong files, names, budgets, packages and devices before anything is loaded.

    -> the grid, and the sources of its samples
    """
    from kvkeep.evaluate import suite
    from kvkeep.evaluate.grid import Grid
    from kvkeep.evaluate.prompt import PROTOCOLS
    from kvkeep.model.load import check_device

    places = {name: _path(getattr(options, name), name) for name in ("data", "haystack", "squad", "hotpotqa")}
    protocols = PROTOCOLS if options.protocol == "both" else (options.protocol,)
    if options.schedule not in SCHEDULES:
        raise BadInput(f"--schedule {options.schedule!r} is not known; use {' or '.join(SCHEDULES)}.")
    talks = dict.fromkeys(f"{via}-{history}" for via, history in product(options.via, options.history))
    grid = Grid(options.methods, options.budget, protocols, tuple(talks))
    if "http" in options.via:
        from kvkeep.cli.serve import check_packages

        check_packages("--via http")
    if options.ray:  # the device is that of its actors
        from kvkeep.evaluate.ray_pool import check_ray

        check_ray()
    else:
        check_device(options.device, options.dtype)
    sources = suite.Sources(**places, lengths=options.length, limit=options.limit, seed=options.seed)
    suite.check(options.tasks, sources)
    return grid, sources


def run(options: EvalOptions, say: Any) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """-> all rows, and the tasks left out with their reasons"""
    from kvkeep.evaluate import suite
    from kvkeep.evaluate.grid import run as run_grid
    from kvkeep.evaluate.prompt import answerable
    from kvkeep.evaluate.results import exclusive_lock
    from kvkeep.evaluate.summary import write_csv
    from kvkeep.model.load import load_context_length, load_tokenizer, quiet_transformers

    grid, sources = check(options)
    with exclusive_lock(options.out):  # refused before a model is loaded, if another run holds it
        pass
    quiet_transformers()
    tokenizer = load_tokenizer(options.model, say)
    say("making samples")
    samples, skipped = suite.load(options.tasks, tokenizer, sources, say)
    samples, too_long = answerable(samples, load_context_length(options.model, options.yarn))
    skipped |= too_long
    make = partial(load_worker, options, tuple(grid.configs))
    worker = _ray_workers(options, make, say) if options.ray else make(say)
    rows = run_grid(worker, samples, grid, options.out, say.count, about(options))
    write_csv(rows, Path(options.out) / "results.csv")
    return rows, skipped


def about(options: EvalOptions) -> dict[str, Any]:
    """What decides rows beside their samples; a folder holds rows of one such choice."""
    named = {name: getattr(options, name) for name in ("model", "max_length", "beyond_window", "yarn")}
    return {**named, "dtype_asked": options.dtype, "schedule_asked": options.schedule}


def load_worker(options: EvalOptions, configs: Sequence[Any], say: Any = None) -> Any:
    """Load the model in this process, here or in a Ray actor."""
    from kvkeep.evaluate.worker import Worker
    from kvkeep.model.load import load, quiet_transformers

    quiet_transformers()
    device, dtype = options.device, options.dtype
    model, tokenizer = load(options.model, device=device, dtype=dtype, progress=say, yarn=options.yarn)
    own = options.schedule == "own"
    return Worker(model, tokenizer, configs, options.share, options.max_length, options.beyond_window, own)


def _ray_workers(options: EvalOptions, make: Any, say: Any) -> Any:
    from kvkeep.evaluate.ray_pool import map_on_ray

    address = None if options.ray == LOCAL else options.ray
    return lambda items: map_on_ray(address, partial(_as_lists, make), items, say=say)


def _as_lists(make: Any) -> Any:
    """A worker whose results can be pickled: a list for each item, no generator."""
    worker = make()
    return lambda item: list(worker(item))


def _path(given: str | None, name: str) -> Path | None:
    if given is not None and not Path(given).exists():
        raise BadInput(f"--{name} {given!r} is not there; check the path.")
    return Path(given) if given is not None else None
