"""The examples keep their word: notebooks, run again, say what is printed in them, and the script gets its answer."""

import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="the extra [dev] is not installed")
pytest.importorskip("nbclient", reason="the extra [dev] is not installed")

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
by_name = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@pytest.fixture(scope="module")
def execute(tmp_path_factory):
    """One Python for all notebooks, in a copy of the folder: torch is imported once."""
    folder = shutil.copytree(ROOT / "examples", tmp_path_factory.mktemp("copy") / "examples")
    with runpy.run_path(str(ROOT / "docs" / "execute.py"))["kernel"](folder) as execute:
        yield execute


def said(notebook):
    """What a reader goes by, of every cell: texts without timings, and that there is a picture."""
    return [[_said(each) for each in cell.get("outputs", ())] for cell in notebook.cells]


def _said(output):
    data = output.get("data", {"text/plain": output.get("text", "")})
    return "a picture" if "image/png" in data else re.sub(r"[\d.]+ s\b", "… s", data["text/plain"])


@pytest.mark.slow
@pytest.mark.real
@by_name
def test_a_notebook_says_what_is_printed_in_it(path, execute):
    printed = nbformat.read(path, as_version=4)
    assert said(execute(path)) == said(printed), f"or run docs/execute.py examples/{path.name}"


@by_name
def test_a_notebook_is_complete_and_of_no_machine(path):
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    outputs = [output for cell in code for output in cell.outputs]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert {output.output_type for output in outputs} <= {"stream", "execute_result", "display_data"}
    assert not [output for output in outputs if output.get("name") == "stderr"]
    assert set(notebook.metadata) == {"kernelspec"} and path.stat().st_size < 200_000
    assert not re.search(r"/(home|root|Users|tmp|usr|opt)/|site-packages", path.read_text())


def test_every_guide_has_an_example():
    guides = {path.stem for path in (ROOT / "docs" / "guides").glob("*.md")}
    assert {path.stem for path in NOTEBOOKS} | {"serving"} == guides
    for stem in guides:
        example = "serving.py" if stem == "serving" else f"{stem}.ipynb"
        assert f"(../../examples/{example})" in (ROOT / "docs" / "guides" / f"{stem}.md").read_text()


@pytest.mark.real
def test_the_script_starts_a_server_and_asks_it():
    script = str(ROOT / "examples" / "serving.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "4827163" in done.stdout and '"cached_tokens":128' in done.stdout, done.stderr
