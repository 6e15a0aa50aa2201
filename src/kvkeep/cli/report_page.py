"""`kvkeep report`: one page about the rows of `kvkeep eval`, with pictures and tables beside it."""

from __future__ import annotations

from pathlib import Path

from kvkeep.cache.report import format_bytes
from kvkeep.evaluate.summary import Cell, write_lines
from kvkeep.pages.html import write_page
from kvkeep.pages.report_facts import NeedleCell, report_facts

PAGE = "report.html"


def run(folder: str) -> tuple[str, str]:
    """Write the page and what belongs to it into the folder. -> what was written, and what is missing"""
    facts, place = report_facts(folder), Path(folder)
    size = write_page(place / PAGE, "report", facts)
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
    return f"{place / PAGE}: {format_bytes(size)}; beside it {', '.join(names)}", missing
