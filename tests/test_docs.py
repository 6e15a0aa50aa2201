"""The pages keep their word: their code runs, their commands parse, their links lead somewhere, their errors exist."""

import ast
import inspect
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import serving
import tiny_chat
import torch
import typer
import yaml
from browser import Page, open_browser

import kvkeep
from kvkeep.cli import app
from kvkeep.cli.eval import EvalOptions
from kvkeep.compress.defaults import PROMPT_METHODS
from kvkeep.compress.presets import METHODS
from kvkeep.evaluate import suite
from kvkeep.evaluate.datasets import SOURCES, Source
from kvkeep.evaluate.results import KEY

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
name = {"ids": lambda page: str(page.relative_to(ROOT))}


def blocks(page, language):
    return [code for kind, code in FENCED.findall(page.read_text()) if kind == language]


def commands(page):
    """Every `kvkeep …` of a page's blocks of commands, fenced or indented, as words."""
    text = page.read_text().replace("\\\n", " ")
    fenced = "\n".join(code for kind, code in FENCED.findall(text) if not kind)
    said = re.findall(r"^(?:\$ )?kvkeep (.+)$", fenced, re.M) + re.findall(r"^ {4}kvkeep (.+)$", text, re.M)
    return [shlex.split(line, comments=True) for line in said]


def anchor(title):
    """As GitHub and mkdocs make it of a heading."""
    return re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", title.strip().lower()))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the examples and, in the place of the default model, one that takes no time."""
    kept = [(each, dict(each)) for each in (METHODS, suite.READ, SOURCES)]
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "rows.jsonl").write_text(json.dumps(dict.fromkeys(KEY, "any") | {"score": 1.0}))
    monkeypatch.chdir(tmp_path)
    model = tiny_chat.sharp()[0]
    model.config.max_position_embeddings = 8192
    monkeypatch.setattr(kvkeep, "load", lambda *_, **__: (model, tiny_chat.tokenizer()))
    yield tmp_path
    for each, before in kept:
        each.clear()
        each.update(before)


def run(codes, page, **known):
    for code in codes:
        with torch.enable_grad():  # as in a session of one's own
            exec(compile(code, str(page), "exec"), known)  # the same names in all blocks of a page
    return known


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "CONTRIBUTING.md" and blocks(page, "python")], **name
)
def test_code_of_a_page_runs(page, folder):
    codes = blocks(page, "python")
    if "127.0.0.1:8000" not in "".join(codes):
        run(codes, page)
        return
    with serving.thread(serving.engine(prefix_cache=2**26)) as served:
        run([code.replace("http://127.0.0.1:8000", served.url) for code in codes], page)


def test_code_for_contributors_runs(folder):
    run(blocks(ROOT / "CONTRIBUTING.md", "python"), "CONTRIBUTING.md", kvkeep=kvkeep, Source=Source)


@pytest.mark.real
def test_the_first_code_finds_the_number(monkeypatch):
    monkeypatch.chdir(ROOT)
    known = run(blocks(DOCS / "index.md", "python")[:2], "index.md")
    assert "4827163" in known["answer"] and known["report"].kept["prompt"] == 512
    plain = known["tokenizer"].decode(known["out"][0, known["inputs"]["input_ids"].shape[1] :])
    assert "4827163" in plain and known["cache"].report().kept["prompt"] == 512


def test_the_table_of_defaults_is_that_of_the_commands():
    table = (DOCS / "index.md").read_text().split("## Defaults")[1].split("## ")[0]
    said = {
        command: (method, int(budget))
        for names, method, budget in re.findall(r"^\| (.+?) \| `(.+?)` \| (\d+) \|", table, re.M)
        for command in re.findall(r"`(?:kvkeep[ .])(\w+)`", names)
    }
    evaluated = EvalOptions(("any",), "any")
    found = {"eval": (",".join(evaluated.methods), *evaluated.budget)}
    found["Engine"] = (PROMPT_METHODS[0], inspect.signature(kvkeep.Engine).parameters["budget"].default)
    for command in ("run", "inspect", "chat", "serve", "bench"):
        given = {each.name: each.default for each in typer.main.get_command(app).commands[command].params}
        found[command] = (given.get("methods") or given["method"] or PROMPT_METHODS[0], int(given["budget"]))
    assert said == found


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], **name)
def test_commands_of_a_page_parse(page):
    group = typer.main.get_command(app)
    for words in commands(page):
        whole = group.make_context("kvkeep", list(words))
        called, command, rest = group.resolve_command(whole, [*whole._protected_args, *whole.args])
        command.make_context(called, rest, parent=whole)  # raises for what it does not know


@pytest.mark.parametrize("page", PAGES, **name)
def test_scripts_a_page_names_are_there(page):
    named = set(re.findall(r"(?:benchmarks|examples|deploy)/[\w/.]+\.\w+", page.read_text()))
    assert not [each for each in named if not (ROOT / each).is_file()]


@pytest.mark.parametrize("page", PAGES, **name)
def test_links_resolve(page):
    for target, where in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", FENCED.sub("", page.read_text())):
        linked = (page.parent / target).resolve() if target else page
        assert linked.is_file(), f"{target} of {page.name}"
        if where:
            assert where in {anchor(title) for title in re.findall(r"^#+ (.+)$", linked.read_text(), re.M)}, where


def test_every_page_is_in_the_navigation():
    text = (ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r": ([\w/-]+\.md)$", text, re.M)
    examples = [f"examples/{path.stem}.md" for path in (ROOT / "examples").glob("*.ipynb")]  # docs/notebooks.py
    assert sorted(listed) == sorted([str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")] + examples)
    assert yaml.safe_load(text)["theme"]["font"] is False


def test_the_reference_has_every_public_name():
    assert set(re.findall(r"^::: kvkeep\.(\w+)$", (DOCS / "api.md").read_text(), re.M)) == {*kvkeep.__all__, "errors"}


def said_in_the_source():
    """Every text in the source; … stands for what is filled in."""
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_errors_of_the_page_are_those_of_the_code():
    quoted = re.findall(r"^\| `(.+?)` \|", (DOCS / "troubleshooting.md").read_text(), re.M)
    said = list(said_in_the_source())
    assert len(quoted) > 20 and not [each for each in quoted if not any(each in text for text in said)]


def test_the_chart_shows_the_results():
    made = runpy.run_path(str(ROOT / "benchmarks" / "method_chart.py"))["chart"]((DOCS / "RESULTS.md").read_text())
    assert (DOCS / "which_method.svg").read_text() == made, "run python benchmarks/method_chart.py"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """As `make docs` builds it."""
    pytest.importorskip("mkdocstrings", reason="the extra [docs] is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_a_built_page_names_nothing_on_a_network(site):
    fetched = re.compile(r"<(?:script|img|iframe)[^>]* src=\"?https?:|<link[^>]* href=\"?https?:")
    assert not [page for page in site.rglob("*.html") if fetched.search(page.read_text())]


def test_a_notebook_is_a_page_with_pictures(site):
    page = (site / "examples" / "see-it.html").read_text()
    assert "held by" in page and 'href="../guides/see-it.html"' in page
    assert (site / "examples" / "see-it-1.png").read_bytes().startswith(b"\x89PNG") and 'src="see-it-1.png"' in page
    guides = [(site / "guides" / name).read_text() for name in ("see-it.html", "serving.html")]
    assert 'href="../examples/see-it.html"' in guides[0] and 'href="../examples/serving.py"' in guides[1]


def test_the_reference_shows_docstrings(site):
    page = (site / "api.html").read_text()
    assert kvkeep.Engine.chat.__doc__.splitlines()[0].split("`")[0] in page  # the text before its first name of code
    assert "<li><strong>max_rows</strong>: answers decoded at a time" in re.sub(r"\s*</?p>\s*", "", page)
    assert "├── UnknownName" in page


def test_a_page_opens_from_disk_and_finds_words(site):
    driver = open_browser()
    try:
        page = Page(driver, site / "guides" / "chat.html", ready="document.querySelector('.md-search__input')")
        page.wait("document.querySelector('iframe')")  # the search has started
        driver.execute_script(
            "document.querySelector('#__search').click(); const box = document.querySelector('.md-search__input');"
            "box.focus(); box.value = 'quantize'; box.dispatchEvent(new Event('input'))"
        )
        page.wait("document.querySelector('.md-search-result__link[href*=\"glossary.html\"]')")
        assert page.errors == [] and page.requests == []
    finally:
        driver.quit()
