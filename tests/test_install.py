"""What is installed for what: running takes little, testing adds the rest, and CI begins where a newcomer does."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info < (3, 11):
    pytest.skip("reads pyproject.toml with tomllib", allow_module_level=True)
import tomllib

import kvkeep

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = re.compile(r"\.\[\w+\]")


def would_do(target: str, folder: Path) -> list[str]:
    """The commands of a target in a fresh clone."""
    for name in ("Makefile", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    done = subprocess.run(["make", "-n", target], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
@pytest.mark.parametrize("target", ["run", "first-run"])
def test_running_installs_no_extra_and_torch_first(target, tmp_path):
    installs = [line for line in would_do(target, tmp_path) if "pip install" in line]
    assert "'^torch=='" in installs[0] and installs[-1].endswith(" .")
    assert not any(EXTRAS.search(line) for line in installs)


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_testing_adds_the_extras_to_what_running_has(tmp_path):
    run, test = (would_do(target, tmp_path) for target in ("run", "test"))
    ready = run[: run.index("touch .venv/.ready") + 1]
    assert test[: len(ready)] == ready and EXTRAS.search(test[len(ready)])


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_ci_begins_as_a_newcomer_does(tmp_path):
    called = re.findall(r"make ([\w-]+)", (ROOT / ".ci" / "run").read_text())
    assert called == ["first-run", "test-all", "clients"]
    asks = next(line for line in would_do("first-run", tmp_path) if "kvkeep run" in line)
    assert "KVKEEP_HOME=" in asks and "examples/lighthouse.txt" in asks


def test_one_version_everywhere():
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    changed = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert cited and changed and cited[1] == changed[1] == kvkeep.__version__


def test_the_core_imports_what_it_depends_on():
    """Modules of other distributions, at the top of a file or in a function, outside what extras are for."""
    brought = {"safetensors", "tokenizers", "huggingface_hub", "jinja2", "yaml", "tqdm"}  # by transformers
    own = {re.split(r"[<>=\[;]", each)[0] for each in PROJECT["dependencies"]}
    optional = {"ray", "matplotlib", "datasets", "jieba", "wonderwords", "lm_eval", "nltk", "triton", "kvkeep"}
    optional |= {"fastapi", "starlette", "uvicorn", "pydantic", "pydantic_core", "prometheus_client", "llguidance"}
    optional |= {"h11"}  # by uvicorn
    found = {
        name
        for path in (ROOT / "src").rglob("*.py")
        for name in re.findall(r"^\s*(?:from|import) (\w+)", _code(path), re.MULTILINE)
    }
    assert found - set(sys.stdlib_module_names) - {"__future__"} - own - brought - optional == set()


def _code(path: Path) -> str:
    """Without its docstrings, whose lines may begin with from."""
    return re.sub(r'""".*?"""', "", path.read_text(), flags=re.DOTALL)
