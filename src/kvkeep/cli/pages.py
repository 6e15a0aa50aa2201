"""`kvkeep inspect`, a page that shows which words several methods kept; `kvkeep report`, one about the rows of an
evaluation, with pictures and tables beside it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from kvkeep.cache.report import format_bytes
from kvkeep.cli.inputs import Plan
from kvkeep.cli.options import InspectOptions
from kvkeep.errors import BadInput
from kvkeep.evaluate.summary import Cell, write_lines
from kvkeep.model.load import check_device, load, quiet_transformers
from kvkeep.pages.html import write_page
from kvkeep.pages.inspector import FULL, Inspector, check_protocol
from kvkeep.pages.report_facts import NeedleCell, report_facts

LARGE = 10_000_000  # bytes of a page
REPORT = "report.html"


def check_writable(page: Path) -> None:
    """Refuse a page that cannot be written before there is anything to write."""
    if not page.parent.is_dir():
        raise BadInput(f"-o '{page}' is in a folder that is not there; make it first.")
    if page.is_dir() or not os.access(page if page.exists() else page.parent, os.W_OK):
        raise BadInput(f"-o '{page}' is a folder, or cannot be written; give the path of a file.")


def inspect(options: InspectOptions, text: str, question: str, plans: list[Plan], say: Any) -> str:
    """Write the page. -> what was written"""
    check_protocol(options.protocol)
    check_device(options.device, options.dtype)
    check_writable(Path(options.out).absolute())
    quiet_transformers()
    model, tokenizer = load(options.model, device=options.device, dtype=options.dtype, progress=say)
    with torch.inference_mode():  # the first forward pass is slower: it is not timed
        model(torch.zeros((1, 8), dtype=torch.long, device=model.device))
    inspector = Inspector(model, tokenizer, text, question, options.protocol, options.max_new_tokens)
    configs = [(plan.method, plan.budget) for plan in plans if plan.method and plan.method != FULL]
    found = inspector.inspect(configs, options.model, say)
    size = write_page(options.out, "inspect", found)
    if others := [each.name for each in found.methods if each.differs]:
        say.note(f"not the answer of the full cache: {', '.join(others)}")
    if size > LARGE:
        say.note(f"the page has {format_bytes(size)}; fewer methods or a smaller budget make it smaller")
    return f"{options.out}: {format_bytes(size)}"


def report(folder: str) -> tuple[str, str]:
    """Write the page and what belongs to it into the folder. -> what was written, and what is missing"""
    facts, place = report_facts(folder), Path(folder)
    size = write_page(place / REPORT, "report", facts)
    names, missing = ["scores.csv"], ""
    write_lines(Cell, facts.cells, place / "scores.csv")
    if facts.needles:
        names.append("needles.csv")
        write_lines(NeedleCell, facts.needles, place / "needles.csv")
    try:
        import matplotlib

        matplotlib.use("Agg")
        from kvkeep.pages.report_plots import draw

        names += draw(facts, place)
    except ImportError:
        missing = "there are no pictures: matplotlib is not installed (pip install 'kvkeep[plots]')"
    return f"{place / REPORT}: {format_bytes(size)}; beside it {', '.join(names)}", missing
