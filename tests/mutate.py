"""Do tests notice a fault? Plants small faults in the library, one at a time, and runs the tests of that file.

Not a test: `make mutate`, or `python tests/mutate.py 150 --seed 0 --only observer`. Every fault lives in a forked child
that has torch and transformers already, so that one costs the seconds of its tests and no file is ever changed.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path

HERE = Path(__file__).parent
SOURCE = HERE.parent / "src" / "kvkeep"
LIMIT = 60  # seconds for the tests of one fault; where they take longer, nothing is said of it
TESTS = {  # file or folder -> what pytest runs for it
    "engine/observer.py": ["tests/test_decoding.py", "-k", "along or padding_does_not and snapkv or turns"],
    "engine/stepper.py": ["tests/test_decoding.py", "-k", "without_its or streaming_step or killed or looking"],
    "engine/contest.py": ["tests/test_methods.py", "-k", "(cache_spends or share_a_choice or padded) and (kv or cake)"],
    "engine/arrival.py": ["tests/test_decoding.py", "tests/test_cache.py", "-k", "padd or along or mask or batch"],
    "engine/session.py": ["tests/test_cache.py", "tests/test_decoding.py", "-k", "not step and not padd and not binds"],
    "engine/recaller.py": ["tests/test_recall.py", "-k", "every_prompt or replay or fetching_everything"],
    "engine/turns.py": ["tests/test_recall.py", "-k", "replay"],
    "engine/saving.py": ["tests/test_cache.py", "tests/test_seams.py", "tests/test_decoding.py", "-k", "save or turns"],
    "engine/watch.py": ["tests/test_traps.py", "-k", "observe or nan or NaN or numbers or supported"],
    "engine/report.py": ["tests/test_cache.py", "tests/test_recall.py", "-k", "report or holds or memory"],
    "cache": ["tests/test_cache.py", "tests/test_storage.py", "tests/test_recall_parts.py", "tests/test_decoding.py"],
    "compress": ["tests/test_methods.py", "tests/test_against_oracles.py", "tests/test_oracles_compared.py"],
}
SWAPS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


def faults(tree: ast.AST) -> list[ast.AST]:
    """The nodes of function bodies that can be spoiled; words of errors and annotations are left alone."""
    found = []

    def walk(node: ast.AST, inside: bool) -> None:
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "exc") or isinstance(node, ast.JoinedStr):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    if inside and can_spoil(child):
                        found.append(child)
                    walk(child, inside or isinstance(node, ast.FunctionDef))

    walk(tree, False)
    return found


def can_spoil(node: ast.AST) -> bool:
    if isinstance(node, ast.Compare):
        return type(node.ops[0]) in SWAPS
    if isinstance(node, (ast.BinOp, ast.AugAssign, ast.BoolOp)):
        return type(node.op) in SWAPS
    return isinstance(node, (ast.IfExp, ast.If)) or (
        isinstance(node, ast.Constant) and type(node.value) in (int, bool, float)
    )


def spoil(node: ast.AST) -> None:
    if isinstance(node, ast.Compare):
        node.ops[0] = SWAPS[type(node.ops[0])]()
    elif isinstance(node, (ast.BinOp, ast.AugAssign, ast.BoolOp)):
        node.op = SWAPS[type(node.op)]()
    elif isinstance(node, (ast.IfExp, ast.If)):
        node.test = ast.copy_location(ast.UnaryOp(ast.Not(), node.test), node.test)
    else:
        node.value = not node.value if isinstance(node.value, bool) else node.value + 1


def planted(path: Path, number: int) -> tuple[ast.AST, str]:
    """The file with its fault of this number, and what that is."""
    tree = ast.parse(path.read_text())
    node = faults(tree)[number]
    before = ast.unparse(copy.deepcopy(node)).splitlines()[0]
    spoil(node)
    after = ast.unparse(node).splitlines()[0]
    return ast.fix_missing_locations(tree), f"{path.relative_to(SOURCE)}:{node.lineno}: {before}  ->  {after}"


def outcome(path: Path, tree: ast.AST | None, tests: list[str]) -> str:
    """"passed", "failed" or "late": what these tests say, in a child of this process."""
    child = os.fork()
    if not child:
        signal.alarm(LIMIT)
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1), os.dup2(nothing, 2)
        if tree is not None:
            usual = SourceFileLoader.get_code
            SourceFileLoader.get_code = lambda self, name: (
                compile(tree, self.path, "exec") if Path(self.path) == path else usual(self, name)
            )
        import pytest

        os._exit(int(pytest.main(["-x", "-q", "--assert=plain", "-p", "no:cacheprovider", *tests])))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return "passed" if code == 0 else "late" if code == -signal.SIGALRM else "failed"


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("count", type=int, nargs="?", default=150)
    ask.add_argument("--seed", type=int, default=0)
    ask.add_argument("--only", default="", help="part of a file's path")
    ask.add_argument("--minutes", type=float, default=60)
    how = ask.parse_args()
    sys.path[:0] = [str(SOURCE.parent), str(HERE)]
    os.chdir(HERE.parent)
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401  what every child needs and nobody changes

    torch.set_num_threads(1)
    files = {path: tests for path, tests in tested() if how.only in str(path.relative_to(SOURCE))}
    places = [(path, n) for path in files for n in range(len(faults(ast.parse(path.read_text()))))]
    random.Random(how.seed).shuffle(places)
    start, said, sound = time.time(), Counter(), {}
    for path, number in places[: how.count]:
        if time.time() - start > 60 * how.minutes:
            break
        tests = files[path]
        if str(tests) not in sound:  # what fails or is late without a fault shows nothing
            sound[str(tests)] = outcome(path, None, tests)
        tree, what = planted(path, number)
        word = outcome(path, tree, tests) if sound[str(tests)] == "passed" else "not tested"
        said[word] += 1
        if word != "failed":
            print(f"{word:10}  {what}", flush=True)
    print(f"noticed {said['failed']}, not noticed {said['passed']}, out of time {said['late']}, tests unfit "
          f"{said['not tested']}; of {len(places)} possible, seed {how.seed}, {time.time() - start:.0f} s")  # fmt: skip


def tested() -> Iterator[tuple[Path, list[str]]]:
    for where, tests in TESTS.items():
        for path in [SOURCE / where] if where.endswith(".py") else sorted((SOURCE / where).rglob("*.py")):
            yield path, tests


if __name__ == "__main__":
    main()
