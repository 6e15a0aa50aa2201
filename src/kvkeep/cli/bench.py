"""`kvkeep bench`: time and memory, measured in one run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvkeep.cli.eval import shaped
from kvkeep.errors import BadInput

HEADER = ["", "read s", "×", "step ms", "×", "floor ms, by", "×", "tok/s", "cache", "peak"]
LEGEND = """\
read: one prompt; step: one token for every sequence; ×: times what transformers takes in this run
floor: all linear layers once + the kept cache read once, as measured here; by: the larger part;
its ×: step to floor; cache: keys and values of one sequence"""
WIDEST = 100  # columns of a table
KVPRESS = (
    "kvpress wants transformers below 5.3 and kvkeep 5.10 or later: run benchmarks/kvpress_costs.py in an environment "
    "of its own on this machine, and give its file to --also."
)


@dataclass(frozen=True)
class Options:
    """What is measured, on what."""

    methods: str
    budgets: str
    lengths: str
    batch: str
    steps: int
    piece: int | None
    readings: int
    storage: str
    baselines: str
    also: str | None
    shape: str | None
    model: str
    device: str | None
    dtype: str | None
    out: str | None


def run(options: Options, say: Any) -> tuple[list[Any], str]:
    """-> costs, and what was written where a folder was given; what cannot be had is said before the model is loaded"""
    from kvkeep.bench.cost import Plan, costs
    from kvkeep.bench.roofline import Floors
    from kvkeep.evaluate.results import make_folder
    from kvkeep.model.load import check_place

    names = shaped("methods", options.baselines)
    plan = Plan(
        methods=shaped("methods", options.methods),
        budgets=shaped("budgets", options.budgets),
        contexts=shaped("length", options.lengths),
        batches=shaped("length", options.batch),
        steps=options.steps,
        piece=options.piece,
        readings=options.readings,
        storages=tuple(None if name == "model" else name for name in options.storage.split(",")),
        baselines=tuple(name for name in names if name != "kvpress"),
    )
    check_place(options.device, options.dtype)
    others = _others(options.also) if options.also else []
    draw = _pictures() if options.out else None
    if options.out:
        make_folder(options.out)  # before anything is measured
        if draw is None:
            say.note("there will be no pictures: matplotlib is not installed (pip install 'kvkeep[plots]')")
    if "kvpress" in names and not others:
        say.note(KVPRESS)
    model = _model(options, say)
    say("measuring the machine")
    floors = Floors.measured(model, plan.batches)
    found = [*costs(model, plan, say, floors), *(cost.above(floors) for cost in others)]
    return found, _write(found, Path(options.out), draw) if options.out else ""


def _others(path: str) -> list[Any]:
    """What another library's script has measured."""
    from kvkeep.bench.cost import Cost

    try:
        return [Cost(**row) for row in json.loads(Path(path).read_text())]
    except OSError as error:
        raise BadInput(f"--also {path!r} cannot be read ({error.strerror}).") from None
    except (ValueError, TypeError) as error:
        raise BadInput(f"--also {path!r} is not a list of costs as in costs.json: {error}.") from None


def _pictures() -> Any:
    """What draws them, None without matplotlib."""
    try:
        from kvkeep.cli.plots import draw
    except ImportError:
        return None
    return draw


def _write(found: list[Any], folder: Path, draw: Any) -> str:
    (folder / "costs.json").write_text(json.dumps([cost.as_dict() for cost in found], indent=1) + "\n")
    return f"{folder}: {', '.join(['costs.json', *(draw(found, folder) if draw else [])])}"


def _model(options: Options, say: Any) -> Any:
    from kvkeep.model.load import DTYPES, hush, load

    hush()
    if not options.shape:
        return load(options.model, device=options.device, dtype=options.dtype, progress=say)[0]
    import torch

    from kvkeep.model.random_models import of_shape

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = options.dtype or ("bfloat16" if device.startswith("cuda") else "float32")
    if dtype not in DTYPES[:3]:
        raise BadInput(f"--dtype {dtype!r} is not one of {', '.join(DTYPES[:3])}.")
    say(f"making a random {options.shape}")
    return of_shape(options.shape, device, getattr(torch, dtype))


def table(found: list[Any]) -> str:
    """A block of lines for every length and batch, no wider than a page."""
    blocks: dict[str, list[Any]] = {}
    for cost in found:
        where = f"{cost.context:,} tokens, {cost.batch} sequence" + ("s" if cost.batch > 1 else "")
        blocks.setdefault(where, []).append(cost)
    seen = len(HEADER) if any(cost.peak_bytes for cost in found) else len(HEADER) - 1
    cells = [HEADER[:seen], *(_cells(cost)[:seen] for cost in found)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    widths[0] = min(widths[0], WIDEST - sum(widths[1:]) - 2 * len(widths[1:]))
    lines = []
    for where, block in blocks.items():
        lines += [where, _line(HEADER[:seen], widths)]
        for cost in block:
            lines += [_line(_cells(cost)[:seen], widths), *([f"  ({cost.note})"] if cost.note else [])]
        lines.append("")
    return "\n".join([*lines, LEGEND])


def _cells(cost: Any) -> list[str]:
    from kvkeep.cache.report import human

    def number(value: float | None, digits: int, unit: float = 1) -> str:
        return "–" if value is None else f"{unit * value:,.{digits}f}"

    floor = number(cost.floor_s, 1, 1000) + f" {cost.floor_by or '':7}"
    rate = number(cost.tokens_per_s, 1 if (cost.tokens_per_s or 0) < 100 else 0)
    return [
        cost.label, number(cost.prefill_s, 2), number(cost.prefill_ratio, 2), number(cost.step_s, 1, 1000),
        number(cost.step_ratio, 2), floor, number(cost.floor_ratio, 1), rate,
        "–" if cost.kv_bytes is None else human(cost.kv_bytes), human(cost.peak_bytes) if cost.peak_bytes else "–",
    ]  # fmt: skip


def _line(cells: list[str], widths: list[int]) -> str:
    first = cells[0] if len(cells[0]) <= widths[0] else cells[0][: widths[0] - 1] + "…"
    rest = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
    return "  ".join([first.ljust(widths[0]), *rest]).rstrip()
