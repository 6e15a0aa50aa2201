"""`kvkeep bench`: time and memory, measured in one run."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvkeep.cli.eval import shaped
from kvkeep.cli.options import BenchOptions
from kvkeep.errors import BadInput

HEADER = ["", "prefill s", "×", "step ms", "×", "roofline ms, by", "×", "tok/s", "cache", "peak"]
LEGEND = """\
prefill: one prompt; step: decode one token of every sequence; ×: ratio to transformers in this run
roofline: all linear layers once + the kept cache read once, measured here; by: the larger part;
its ×: step to roofline; cache: keys and values of one sequence"""
MAX_WIDTH = 100  # columns of a table
KVPRESS = (
    "kvpress wants transformers below 5.3 and kvkeep 5.10 or later: run benchmarks/kvpress_costs.py in an environment "
    "of its own on this machine, and give its file to --also."
)


def run(options: BenchOptions, say: Any) -> tuple[list[Any], str]:
    """-> costs, and the files written to --out; what is missing is reported before the model is loaded"""
    from kvkeep.bench.cost import Plan, costs
    from kvkeep.bench.timing import Roofline
    from kvkeep.evaluate.results import make_folder
    from kvkeep.model.load import check_device

    names = shaped("methods", options.baselines)
    plan = Plan(
        methods=shaped("methods", options.methods),
        budgets=shaped("budget", options.budget),
        contexts=shaped("length", options.length),
        batches=shaped("length", options.batch),
        steps=options.steps,
        prefill_chunk_size=options.prefill_chunk_size,
        prefill_repeats=options.prefill_repeats,
        storages=tuple(None if name == "model" else name for name in options.storage.split(",")),
        baselines=tuple(name for name in names if name != "kvpress"),
    )
    check_device(options.device, options.dtype)
    others = _others(options.also) if options.also else []
    draw = None
    if options.out:
        make_folder(options.out)  # before anything is measured
        try:
            from kvkeep.cli.bench_plots import draw as draw_plots

            draw = draw_plots
        except ImportError:
            say.note("there will be no plots: matplotlib is not installed (pip install 'kvkeep[plots]')")
    if "kvpress" in names and not others:
        say.note(KVPRESS)
    model = _model(options, say)
    say("measuring the machine")
    roofline = Roofline.measure(model, plan.batches)
    found = [*costs(model, plan, say, roofline), *(cost.with_roofline(roofline) for cost in others)]
    if not options.out:
        return found, ""
    folder = Path(options.out)
    (folder / "costs.json").write_text(json.dumps(list(map(asdict, found)), indent=1) + "\n")
    return found, f"{folder}: {', '.join(['costs.json', *(draw(found, folder) if draw else [])])}"


def _others(path: str) -> list[Any]:
    """Costs measured by another library's script."""
    from kvkeep.bench.cost import Cost

    try:
        return [Cost(**row) for row in json.loads(Path(path).read_text())]
    except OSError as error:
        raise BadInput(f"--also {path!r} cannot be read ({error.strerror}).") from None
    except (ValueError, TypeError) as error:
        raise BadInput(f"--also {path!r} is not a list of costs as in costs.json: {error}.") from None


def _model(options: BenchOptions, say: Any) -> Any:
    from kvkeep.model.load import DTYPES, load, quiet_transformers

    quiet_transformers()
    if not options.shape:
        return load(options.model, device=options.device, dtype=options.dtype, progress=say)[0]
    import torch

    from kvkeep.model.random_models import random_model

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = options.dtype or ("bfloat16" if device.startswith("cuda") else "float32")
    if dtype not in DTYPES[:3]:
        raise BadInput(f"--dtype {dtype!r} is not one of {', '.join(DTYPES[:3])}.")
    say(f"making a random {options.shape}")
    return random_model(options.shape, device, getattr(torch, dtype))


def table(found: list[Any]) -> str:
    """A block of lines for every length and batch, at most MAX_WIDTH wide."""
    blocks: dict[str, list[Any]] = {}
    for cost in found:
        where = f"{cost.context:,} tokens, {cost.batch} sequence" + ("s" if cost.batch > 1 else "")
        blocks.setdefault(where, []).append(cost)
    seen = len(HEADER) if any(cost.peak_bytes for cost in found) else len(HEADER) - 1
    cells = [HEADER[:seen], *(_cells(cost)[:seen] for cost in found)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    widths[0] = min(widths[0], MAX_WIDTH - sum(widths[1:]) - 2 * len(widths[1:]))
    lines = []
    for where, block in blocks.items():
        lines += [where, _line(HEADER[:seen], widths)]
        for cost in block:
            lines += [_line(_cells(cost)[:seen], widths), *([f"  ({cost.note})"] if cost.note else [])]
        lines.append("")
    return "\n".join([*lines, LEGEND])


def _cells(cost: Any) -> list[str]:
    from kvkeep.cache.report import format_bytes

    def number(value: float | None, digits: int, unit: float = 1) -> str:
        return "–" if value is None else f"{unit * value:,.{digits}f}"

    roofline = number(cost.roofline_s, 1, 1000) + f" {cost.bound_by or '':7}"
    rate = number(cost.tokens_per_s, 1 if (cost.tokens_per_s or 0) < 100 else 0)
    return [
        cost.label, number(cost.prefill_s, 2), number(cost.prefill_ratio, 2), number(cost.step_s, 1, 1000),
        number(cost.step_ratio, 2), roofline, number(cost.roofline_ratio, 1), rate,
        "–" if cost.kv_bytes is None else format_bytes(cost.kv_bytes),
        format_bytes(cost.peak_bytes) if cost.peak_bytes else "–",
    ]  # fmt: skip


def _line(cells: list[str], widths: list[int]) -> str:
    first = cells[0] if len(cells[0]) <= widths[0] else cells[0][: widths[0] - 1] + "…"
    rest = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
    return "  ".join([first.ljust(widths[0]), *rest]).rstrip()
