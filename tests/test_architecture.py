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
LOW = {"types", "errors", "arguments", "registry", "terminal"}
MAY_IMPORT = {
    "types": set(),
    "errors": set(),
    "arguments": {"errors"},
    "registry": {"errors"},
    "terminal": set(),
    "kernels": {"types"},
    "compress": LOW | {"kernels"},
    "storage": {"types", "errors", "arguments", "kernels"},
    "model": LOW | {"kernels", "storage"},
    "cache": LOW | {"kernels", "storage", "compress", "model"},
    "engine": LOW | {"kernels", "storage", "compress", "model", "cache"},
    "serve": LOW | {"compress", "model", "cache", "engine"},
    "bench": LOW | {"compress", "model", "cache", "engine"},
    "evaluate": LOW | {"compress", "model", "cache", "engine", "serve"},  # conversations are held over HTTP, too
    "plots": {"errors", "cache"},
    "pages": LOW | {"kernels", "compress", "model", "cache", "engine", "evaluate", "plots"},
    "cli": LOW
    | {"kernels", "storage", "compress", "model", "cache", "engine", "serve", "bench", "evaluate", "plots", "pages"},
    "__main__": {"cli"},
}


def part(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """All that a file imports, within functions, for type checkers and by `import_module` included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            found |= {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
    return found


FILES = [path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py"]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_point_down(path):
    ours = {name.split(".")[1] for name in imported(path) if re.match(r"kvkeep\.", name)}
    assert ours <= MAY_IMPORT[part(path)] | {part(path)}


def test_the_core_runs_without_evaluation_and_commands():
    core = {"cache", "compress", "engine", "kernels", "model", "storage", "serve"}
    beside = ("kvkeep.bench", "kvkeep.cli", "kvkeep.evaluate", "kvkeep.pages", "kvkeep.plots")
    users = {path for path in FILES if part(path) in core for name in imported(path) if str(name).startswith(beside)}
    assert not users, users


def test_only_model_touches_transformers():
    users = {part(path) for path in FILES if any(n.split(".")[0] == "transformers" for n in imported(path))}
    assert users == {"model"}


def test_only_serve_touches_the_web():
    """What the extra [serve] installs; `kvkeep serve` starts uvicorn."""
    web = {"fastapi", "starlette", "uvicorn", "pydantic", "pydantic_core", "prometheus_client", "llguidance"}
    users = {path.relative_to(SOURCE) for path in FILES if web & {name.split(".")[0] for name in imported(path)}}
    assert {path.parts[0] for path in users} <= {"serve", "cli"}
    assert {path for path in users if path.parts[0] == "cli"} == {Path("cli/serve.py")}


def test_no_scorer_knows_another():
    for path in (SOURCE / "compress" / "scorers").glob("*.py"):
        assert not [n for n in imported(path) if n.startswith("kvkeep.compress.scorers.")], path.name


def test_readme_shows_every_folder():
    shown = set(re.findall(r"^  (\w+)/ ", (ROOT / "README.md").read_text(), re.M))
    assert shown == {path.parent.name for path in SOURCE.glob("*/__init__.py")}


def imports_of_ours() -> dict[str, set[str]]:
    """Every module and the modules it imports."""
    name = {path: ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts) for path in FILES}
    modules = set(name.values())
    return {name[path]: (imported(path) & modules) - {name[path]} for path in FILES}


def test_no_import_circle():
    left = imports_of_ours()
    while bare := {module for module, needed in left.items() if not needed & left.keys()}:
        left = {module: needed for module, needed in left.items() if module not in bare}
    assert not left, f"these import each other, or what does: {sorted(left)}"


def test_triton_only_through_dispatch():
    users = {path.relative_to(SOURCE).as_posix() for path in FILES if any("triton" in name for name in imported(path))}
    assert {user for user in users if not user.startswith("kernels/triton/")} == {"kernels/dispatch.py"}


def test_one_table_of_kernels():
    makers = [path for path in FILES if re.search(r"\bKernel(Dispatch)?\(", path.read_text())]
    assert makers == [SOURCE / "kernels" / "dispatch.py"]


def test_docstrings_have_a_subject_or_a_verb():
    openings = [(path.name, line) for path in FILES for line in re.findall(r'"""(?:Of|As) .*', path.read_text())]
    assert not openings


def test_no_file_name_twice():
    names = Counter(path.name for path in FILES if not {"tasks", "metrics"} & set(path.parts))
    assert not [name for name, count in names.items() if count > 1 and name not in ("__init__.py", "__main__.py")]


def test_the_map_names_files_that_are_there():
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    folders = "|".join(path.parent.name for path in SOURCE.glob("*/__init__.py"))
    named = set(re.findall(rf"(?:{folders})/[\w/]*\.py", text))
    assert len(named) > 20 and not [name for name in named if not (SOURCE / name).is_file()]


def test_importing_costs_next_to_nothing():
    code = "import transformers, time; t = time.perf_counter(); import kvkeep; print(time.perf_counter() - t)"
    spent = min(float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(3))
    assert spent < 0.3


def test_nothing_heavy_is_imported_with_the_package():
    heavy = ("torch", "transformers", "typer", "rich", "numpy")
    code = f"import sys, kvkeep; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


@pytest.mark.xdist_group("architecture")
def test_tests_that_share_a_server_run_in_one_process(request):
    """Else every worker starts its own: pytest-xdist 3.8 ignores groups, and says nothing, with pytest 9.2."""
    if not request.config.getoption("loadgroup", False):
        pytest.skip("one process runs all tests")
    grouped = [item for item in request.session.items if item.get_closest_marker("xdist_group")]
    assert grouped and not [item.nodeid for item in grouped if "@" not in item.nodeid.rpartition("]")[2]]
