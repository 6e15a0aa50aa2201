"""`kvkeep report`: rows of an evaluation as a page, tables and pictures."""

import csv
import json
from dataclasses import asdict

import browser
import pytest
import tiny_chat
from typer.testing import CliRunner

from kvkeep.cli import app
from kvkeep.evaluate.grid import Grid, run
from kvkeep.evaluate.tasks.needle import needle
from kvkeep.evaluate.worker import Worker
from kvkeep.pages.html import page as page_of
from kvkeep.pages.html import write_page
from kvkeep.pages.report_facts import report_facts


def row(task, id, protocol, method, budget, score, length=None, depth=None, **more):
    kept = budget or 400
    made = {} if length is None else {"length": length, "depth": depth}
    return {"task": task, "id": str(id), "protocol": protocol, "method": method, "budget": budget, "score": score,
            "metric": "qa_f1", "kept_per_head": kept, "bytes": 10 * kept, "full_bytes": 4000, "truncated": 0,
            "made": made, "model": "<b>tiny</b>", **more}  # fmt: skip


METHODS = {"full": [None], "snapkv": [32, 64], "a<i>b": [32, 64]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Known scores: of every config 4 needles and 2 others under each protocol."""
    folder, rows, times = tmp_path_factory.mktemp("runs"), [], []
    for protocol in ("agnostic", "aware"):
        for number, (method, budgets) in enumerate(METHODS.items()):
            for budget in budgets:
                config = protocol, method, budget
                rows += [row("needle_number", f"{n}-{d}", *config, [1, 0.5, 0.25][number] if d else 0, n, d)
                         for n in (256, 512) for d in (0, 50)]  # fmt: skip
                rows += [row("qasper", i, *config, (budget or 100) / 100 * i) for i in (0, 1)]
        times += [{**{k: r[k] for k in ("task", "id", "protocol", "method", "budget")}, "first_token_s": 2.0,
                   "tokens_per_s": (r["budget"] or 400) / 8, "decode_configs": 5} for r in rows]  # fmt: skip
    (folder / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows) + '{"task": "cut sho')
    (folder / "times.jsonl").write_text("".join(json.dumps(each) + "\n" for each in times))
    return folder


def test_facts_by_loops(folder):
    facts = report_facts(folder)
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()[:-1]]
    assert facts.rows == len(rows) and facts.models == ["<b>tiny</b>"]
    assert (folder / "rows.jsonl").read_text().endswith("cut sho")  # another process may be writing it
    for cell in facts.cells:
        mine = [
            each["score"]
            for each in rows
            if all(each[k] == getattr(cell, k) for k in ("task", "protocol", "method", "budget"))
        ]
        assert cell.n == len(mine) and cell.score == pytest.approx(100 * sum(mine) / len(mine))
    assert len(facts.cells) == 2 * 5 * 2 and len(facts.needles) == 2 * 5 * 4
    for cell in facts.needles:
        assert cell.n == 1 and cell.score == (
            0 if cell.depth == 0 else {"full": 1, "snapkv": 0.5, "a<i>b": 0.25}[cell.method]
        )
    for speed in facts.speeds:
        assert speed.tokens_per_s == (speed.budget or 400) / 8 and speed.first_token_s == 2 and speed.together == 5


def test_files_beside_the_page(folder):
    pytest.importorskip("matplotlib")
    done = CliRunner().invoke(app, ["report", str(folder)])
    assert done.exit_code == 0, done.output
    facts = report_facts(folder)
    with (folder / "scores.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [float(line["score"]) for line in lines] == [cell.score for cell in facts.cells]
    with (folder / "needles.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == len(facts.needles)
    for name in ("budgets", "memory", "needles"):
        for protocol in ("agnostic", "aware"):
            assert (folder / f"{name}_{protocol}.png").read_bytes().startswith(b"\x89PNG")
            assert f"{name}_{protocol}.png" in done.stdout
    html = (folder / "report.html").read_text(encoding="utf-8")
    start = html.index('id="facts">') + len('id="facts">')
    assert json.loads(html[start : html.index("</script>", start)]) == json.loads(json.dumps(asdict(facts)))
    assert "<b>tiny" not in html and "<i>b" not in html and html == page_of("report", facts)


def test_without_matplotlib_it_says_so(folder, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    done = CliRunner().invoke(app, ["report", str(folder)])
    assert done.exit_code == 0 and "kvkeep[plots]" in done.stderr and "scores.csv" in done.stdout


def test_mistakes(tmp_path):
    for content, says in ((None, "no rows.jsonl"), ("", "no complete row"), ("{nonsense}\n", "damaged")):
        if content is not None:
            (tmp_path / "rows.jsonl").write_text(content)
        done = CliRunner().invoke(app, ["report", str(tmp_path)])
        assert done.exit_code == 2 and says in done.stderr and done.stderr.count("\n") == 1


def test_rows_of_a_real_evaluation(tmp_path):
    model, tokenizer = tiny_chat.sharp()
    samples = needle(tokenizer, [700], [0, 100])
    worker = Worker(model, tokenizer, Grid(("full", "snapkv"), (64,), ("aware",)).configs)
    rows = run(worker, samples, Grid(("full", "snapkv"), (64,), ("aware",)), tmp_path, about={"model": "tiny"})
    facts = report_facts(tmp_path)
    assert facts.rows == len(rows) and {cell.depth for cell in facts.needles} == {0, 100} and facts.models == ["tiny"]
    assert {speed.method for speed in facts.speeds} == {"full", "snapkv"}


@pytest.fixture(scope="module")
def page(folder):
    driver = browser.open_browser()
    write_page(folder / "report.html", "report", report_facts(folder))
    yield browser.Page(driver, folder / "report.html")
    driver.quit()


def scores(page):
    """What the table says: config -> scores."""
    cells = "[...row.querySelectorAll('.score')].map((cell) => cell.dataset.score)"
    rows = page(f"[...document.querySelectorAll('#scores tbody tr')].map((row) => [row.dataset.config, ...{cells}])")
    return {name: [float(score) for score in each] for name, *each in rows}


def expected(folder, protocol, tasks=("needle_number", "qasper")):
    found = {}
    for cell in report_facts(folder).cells:
        if cell.protocol == protocol and cell.task in tasks:
            name = cell.method + ("" if cell.budget is None else f" {cell.budget}")
            found.setdefault(name, []).append(cell.score)
    return found


def test_the_page_in_a_browser(page, folder):
    """Numbers are those of the facts; filters change what is shown; nothing is asked for, nothing fails."""
    assert scores(page) == expected(folder, "agnostic")
    assert page("document.querySelectorAll('#setting b, #scores i').length") == 0
    assert len(page.texts("#curves figure")) == 2 and len(page.texts("#pareto figure")) == 2
    maps = page.texts("#needles figcaption")
    assert maps[0] == "full, needle_number: 0.50" and len(maps) == 5
    assert page.texts("#needles figure:first-child td") == ["0.00", "0.00", "1.00", "1.00"]
    assert "up to 5 configs" in page("$('pareto-about').textContent")
    page("document.querySelector('#filter-protocol input[value=aware]').click()")
    assert scores(page) == expected(folder, "aware")
    page("document.querySelector('#filter-task input[value=qasper]').click()")
    assert scores(page) == expected(folder, "aware", ["needle_number"]) and len(page.texts("#curves figure")) == 1
    page("document.querySelector('#filter-budget input[value=\"64\"]').click()")
    assert set(scores(page)) == {"full", "snapkv 32", "a<i>b 32"}
    page("document.querySelector('#filter-method input[value=full]').click()")
    assert set(scores(page)) == {"snapkv 32", "a<i>b 32"}
    for theme in ("dark", "light"):
        page("$('theme').click()")
        assert page("document.documentElement.dataset.theme") == theme
    page("document.querySelectorAll('#filter-task input').forEach((each) => each.checked && each.click())")
    assert page("$('scores').textContent") == "No rows are chosen."
    page("document.querySelectorAll('#filter-task input').forEach((each) => each.click())")
    assert page("document.documentElement.scrollWidth <= innerWidth")
    assert page.errors == [] and page.requests == []
