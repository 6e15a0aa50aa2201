"""`kvkeep eval`: what is asked for, in the shape of a grid; from options, from a file, or both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from kvkeep.errors import BadInput

LOCAL = "local"  # a Ray of its own on this machine
LISTS = ("tasks", "methods", "budgets", "length")
LEAST = {"limit": 1, "seed": 0, "max_length": 1}
FLAGS = ("share", "beyond_window")


@dataclass(frozen=True)
class Wanted:
    """Every option of the command, with its default; a config file has the same names."""

    tasks: tuple[str, ...]
    out: str
    methods: tuple[str, ...] = ("full", "kvkeep")
    budgets: tuple[int | float, ...] = (512,)
    protocol: str = "both"
    model: str = "default"
    length: tuple[int, ...] = (4096,)
    limit: int | None = None
    seed: int = 42
    max_length: int | None = None
    beyond_window: bool = False
    share: bool = True
    ray: str | None = None
    data: str | None = None
    haystack: str | None = None
    squad: str | None = None
    hotpotqa: str | None = None
    device: str | None = None
    dtype: str | None = None


def wanted(config: Path | None, given: dict[str, Any]) -> Wanted:
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
    return Wanted(**{name: shaped(name, value) for name, value in values.items()})


def _file(path: Path) -> dict[str, Any]:
    import yaml

    try:
        values = yaml.safe_load(path.read_text())
    except OSError as error:
        raise BadInput(f"--config {str(path)!r} cannot be read ({error.strerror}).") from None
    except UnicodeDecodeError as error:
        raise BadInput(f"--config {str(path)!r} is not UTF-8 (byte {error.start}); convert it first.") from None
    except yaml.YAMLError as error:
        raise BadInput(f"--config {str(path)!r} is not YAML: {error}") from None
    known = [field.name for field in fields(Wanted)]
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
    if name in ("tasks", "methods"):
        return tuple(str(part) for part in parts)
    try:
        return tuple(float(part) if name == "budgets" and "." in str(part) else int(part) for part in parts)
    except (TypeError, ValueError):
        raise BadInput(f"--{name} {value!r} are not numbers; write for example 128,512.") from None


def _single(name: str, value: Any) -> Any:
    if name in LEAST:
        if type(value) is not int or value < LEAST[name]:
            raise BadInput(f"--{name.replace('_', '-')} {value!r} is not a whole number from {LEAST[name]} on.")
        return value
    if name == "ray" and isinstance(value, bool):
        return LOCAL if value else None
    if isinstance(value, list | dict) or (name in FLAGS) != isinstance(value, bool):
        raise BadInput(f"{name}: {value!r} should be {'true or false' if name in FLAGS else 'a text'}.")
    return value if name in FLAGS else str(value)


def check(options: Wanted) -> tuple[Any, Any]:
    """Refuse what is known to be wrong before anything is loaded: files, names, budgets, packages, the device.

    -> the grid, and where samples come from
    """
    from kvkeep.evaluate import suite
    from kvkeep.evaluate.grid import Grid
    from kvkeep.evaluate.prompt import PROTOCOLS
    from kvkeep.model.load import check_place

    places = {name: _path(getattr(options, name), name) for name in ("data", "haystack", "squad", "hotpotqa")}
    protocols = PROTOCOLS if options.protocol == "both" else (options.protocol,)
    grid = Grid(options.methods, options.budgets, protocols)
    if options.ray:  # the device is its workers'
        from kvkeep.evaluate.ray_pool import check_ray

        check_ray()
    else:
        check_place(options.device, options.dtype)
    sources = suite.Sources(**places, lengths=options.length, limit=options.limit, seed=options.seed)
    suite.check(options.tasks, sources)
    return grid, sources


def run(options: Wanted, say: Any, note: Any) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """-> all rows, and the tasks left out with their reasons"""
    from kvkeep.evaluate import suite
    from kvkeep.evaluate.grid import run as answer
    from kvkeep.evaluate.prompt import answerable
    from kvkeep.evaluate.results import alone
    from kvkeep.evaluate.summary import write_csv
    from kvkeep.model.load import hush, load_tokenizer, load_window

    grid, sources = check(options)
    with alone(options.out):  # refused before a model is loaded, if another run has it
        pass
    hush()
    tokenizer = load_tokenizer(options.model, say)
    say("making samples")
    samples, skipped = suite.load(options.tasks, tokenizer, sources, say)
    samples, too_long = answerable(samples, load_window(options.model))
    skipped |= too_long
    make = partial(answerer, options, tuple(grid.cells))
    answers = _workers(options, make, say) if options.ray else make(say)
    rows = answer(answers, samples, grid, options.out, note, about(options))
    write_csv(rows, Path(options.out) / "results.csv")
    return rows, skipped


def about(options: Wanted) -> dict[str, Any]:
    """What decides rows beside their samples: a folder holds rows of one such choice."""
    named = {name: getattr(options, name) for name in ("model", "max_length", "beyond_window")}
    return {**named, "dtype_asked": options.dtype}


def answerer(options: Wanted, cells: Sequence[Any], say: Any = None) -> Any:
    """The model, loaded here, ready to answer; a worker of Ray calls it there."""
    from kvkeep.evaluate.worker import Answerer
    from kvkeep.model.load import hush, load

    hush()
    model, tokenizer = load(options.model, device=options.device, dtype=options.dtype, progress=say)
    return Answerer(model, tokenizer, cells, options.share, options.max_length, options.beyond_window)


def _workers(options: Wanted, make: Any, say: Any) -> Any:
    from kvkeep.evaluate.ray_pool import on_ray

    address = None if options.ray == LOCAL else options.ray
    return lambda items: on_ray(address, partial(_whole, make), items, say=say)


def _whole(make: Any) -> Any:
    """An answerer whose answers travel: all of an item at once."""
    answer = make()
    return lambda item: list(answer(item))


def _path(given: str | None, name: str) -> Path | None:
    if given is not None and not Path(given).exists():
        raise BadInput(f"--{name} {given!r} is not there; check the path.")
    return Path(given) if given is not None else None
