"""Choose mutants and their tests for `make mutate`, and count what became of them."""

import json
import random
import re
import sys
from collections import Counter
from pathlib import Path

FOLDERS = ("cache", "compress", "engine", "storage")
SECONDS = 20  # of tests for one mutant, the quickest first: what a mutant that survives costs
SIGNS = {"🎉": "killed", "🙁": "survived", "⏰": "timeout", "🫥": "no tests"}
STATS = Path("mutants/mutmut-stats.json")


def limit_tests() -> None:
    """Leave each function the quickest of the tests that reach it."""
    stats = json.loads(STATS.read_text())
    durations = stats["duration_by_test"]
    reached = stats["tests_by_mangled_function_name"]
    for function, tests in reached.items():
        reached[function] = quickest(sorted(tests, key=lambda test: (durations[test], test)), durations)
    STATS.write_text(json.dumps(stats))


def quickest(tests: list[str], durations: dict[str, float]) -> list[str]:
    """The first of these tests, which take at most `SECONDS` together; one at least."""
    spent = 0.0
    for count, test in enumerate(tests):
        spent += durations[test]
        if count and spent > SECONDS:
            return tests[:count]
    return tests


def draw(seed: int, count: int) -> list[str]:
    """Draw `count` mutants, as many of each folder."""
    drawn = []
    for folder in FOLDERS:
        files = Path("mutants/src/kvkeep", folder).rglob("*.meta")
        names = sorted(name for file in files for name in json.loads(file.read_text())["exit_code_by_key"])
        drawn += random.Random(seed).sample(names, count // len(FOLDERS))
    return drawn


def score(said: str) -> str:
    """Count the results that mutmut printed, by folder, and name the mutants that no test noticed."""
    results = re.findall(r"^(\S+) (kvkeep\.(\w+)\.\S+)$", said, re.MULTILINE)
    counts = Counter((folder, SIGNS.get(sign, sign)) for sign, _, folder in results)
    lines = [f"{SIGNS[sign]}: {name}" for sign, name, _ in results if sign in SIGNS and SIGNS[sign] != "killed"]
    for folder in FOLDERS:
        lines.append(folder + ", ".join(f" {counts[folder, result]} {result}" for result in SIGNS.values()))
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1] == "draw":
        limit_tests()
        print(*draw(int(sys.argv[2]), int(sys.argv[3])))
    else:
        print(score(sys.stdin.read()))
