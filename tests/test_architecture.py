"""The shape of the tree is one of the tests."""

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "kvkeep"
LOW = {"types", "errors", "registry"}
MAY_IMPORT = {
    "types": set(),
    "errors": set(),
    "registry": {"errors"},
    "kernels": {"types"},
    "compress": LOW | {"kernels"},
    "cache": {"types", "errors", "kernels"},
    "model": LOW | {"kernels", "cache"},
    "engine": LOW | {"kernels", "cache", "compress", "model"},
    "evaluate": LOW | {"compress", "model", "engine"},
    "cli": LOW | {"kernels", "cache", "compress", "model", "engine", "evaluate"},
}


def part(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


FILES = [path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py"]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_point_down(path):
    ours = {name.split(".")[1] for name in imported(path) if re.match(r"kvkeep\.", name)}
    assert ours <= MAY_IMPORT[part(path)] | {part(path)}


def test_only_model_touches_transformers():
    users = {part(path) for path in FILES if any(n.split(".")[0] == "transformers" for n in imported(path))}
    assert users == {"model"}


def test_no_scorer_knows_another():
    for path in (SOURCE / "compress" / "score").glob("*.py"):
        assert not [n for n in imported(path) if n.startswith("kvkeep.compress.score.")], path.name


def test_readme_tree_is_the_real_tree():
    shown = Counter(re.findall(r"(\w+\.py)\s+#", (ROOT / "README.md").read_text()))
    real = Counter(p.name for p in SOURCE.rglob("*.py") if p.name != "__init__.py")
    assert shown == real, f"README tree is stale: missing {real - shown}, gone {shown - real}"


def test_importing_costs_next_to_nothing():
    code = "import transformers, time; t = time.perf_counter(); import kvkeep; print(time.perf_counter() - t)"
    spent = min(float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(3))
    assert spent < 0.3


def test_nothing_heavy_is_imported_with_the_package():
    heavy = ("torch", "transformers", "typer", "rich", "numpy")
    code = f"import sys, kvkeep; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
