"""What people see of the package: dir, help and a type checker know its names."""

import os
import pydoc
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

import kvkeep

ROOT = Path(__file__).parents[1]
NAMES = {
    "Cache", "Context", "Engine", "Guard", "Method", "Selection", "load", "methods", "register_method", "register_task",
    "select",
}  # fmt: skip
SNIPPET = """
import kvkeep
@kvkeep.register_method("mine")
def mine(sinks: int = 4) -> kvkeep.Method:
    return kvkeep.Method(guard=kvkeep.Guard(sinks))
"""


def test_dir_and_help_know_the_names():
    assert set(kvkeep.__all__) == NAMES <= set(dir(kvkeep))
    shown = pydoc.plain(pydoc.render_doc(kvkeep))
    assert all(re.search(rf"\b{name}\b", shown) for name in NAMES)
    assert files(kvkeep).joinpath("py.typed").is_file()


def test_a_type_checker_knows_them(tmp_path):
    pytest.importorskip("mypy")
    used = {**{name: f"kvkeep.{name}" for name in sorted(NAMES)}, "one": 'kvkeep.methods["full"]', "made": "mine"}
    lines = [SNIPPET, *(f"reveal_type({what})" for what in used.values()), "kvkeep.Cahce"]
    (tmp_path / "snippet.py").write_text("\n".join(lines))
    command = [sys.executable, "-m", "mypy", str(tmp_path / "snippet.py")]  # settings and cache of `make lint`
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "MYPYPATH": "src"}, capture_output=True, text=True)
    revealed = dict(zip(used, re.findall(r'Revealed type is "(.*)"', done.stdout), strict=True))
    assert not {name: kind for name, kind in revealed.items() if re.match(r"Any|Overload.*Any\b", kind)}, revealed
    assert revealed["one"].endswith("Method") and revealed["made"].endswith("-> kvkeep.compress.method.Method")
    assert [line for line in done.stdout.splitlines() if ": error:" in line and "Cahce" not in line] == []
    assert 'Module has no attribute "Cahce"' in done.stdout
