"""`kvkeep bench`: time and memory, measured in one run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvkeep.cli.grid import shaped
from kvkeep.errors import BadInput


@dataclass(frozen=True)
class Options:
    """What is measured, on what."""

    methods: str
    budgets: str
    lengths: str
    batch: str
    steps: int
    piece: int | None
    shape: str | None
    model: str
    device: str | None
    dtype: str | None
    out: str | None


def run(options: Options, say: Any) -> list[Any]:
    """-> costs; also written to costs.json where a folder was given"""
    from kvkeep.evaluate.cost import Plan, costs

    sizes = [shaped(name, value) for name, value in (("budgets", options.budgets), ("length", options.lengths))]
    plan = Plan(
        shaped("methods", options.methods), *sizes, shaped("length", options.batch), options.steps, options.piece
    )
    found = list(costs(_model(options, say), plan, say))
    if options.out:
        Path(options.out).mkdir(parents=True, exist_ok=True)
        (Path(options.out) / "costs.json").write_text(json.dumps([cost.as_dict() for cost in found], indent=1))
    return found


def _model(options: Options, say: Any) -> Any:
    from kvkeep.model.load import DTYPES, hush, load

    hush()
    if not options.shape:
        return load(options.model, device=options.device, dtype=options.dtype, progress=say)[0]
    import torch

    from kvkeep.model.shapes import of_shape

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = options.dtype or ("bfloat16" if device.startswith("cuda") else "float32")
    if dtype not in DTYPES[:3]:
        raise BadInput(f"--dtype {dtype!r} is not one of {', '.join(DTYPES[:3])}.")
    say(f"making a random {options.shape}")
    return of_shape(options.shape, device, getattr(torch, dtype))


def table(found: list[Any]) -> tuple[list[str], list[list[str]]]:
    """Columns and lines."""
    from kvkeep.engine.report import human

    lines = []
    for cost in found:
        where = f"{cost.context:,}" + (f" × {cost.batch}" if cost.batch > 1 else "")
        method = cost.method if cost.budget is None else f"{cost.method} {cost.budget}"
        read, step = [f"{cost.prefill_s:.2f}", f"{cost.prefill_ratio:.2f}"], f"{1000 * cost.step_s:.1f}"
        held = human(cost.kv_bytes) + (f" ({human(cost.peak_bytes)})" if cost.peak_bytes else "")
        lines.append([where, method, *read, step, f"{cost.step_ratio:.2f}", f"{cost.tokens_per_s:,.0f}", held])
    return ["tokens", "method", "read s", "×", "step ms", "×", "tok/s", "held (peak)"], lines
