"""Every method on one model, the default one if none is named: the tables of docs/RESULTS.md.

python benchmarks/default_model.py niah --out results/niah --haystack DIR           # RULER's needle tasks
python benchmarks/default_model.py needle --out results/needle --haystack DIR       # a grid of lengths and depths
python benchmarks/default_model.py longbench --out results/longbench --data DIR
python benchmarks/default_model.py ruler --out results/ruler --haystack DIR --squad FILE --hotpotqa FILE  # all 13 tasks
python benchmarks/default_model.py kv_retrieval --out results/kv_retrieval          # one of some 75 and 140 pairs
python benchmarks/default_model.py niah_retrieval --out results/niah_retrieval …    # retrieval methods
python benchmarks/default_model.py needle_retrieval --out results/needle_retrieval …
python benchmarks/default_model.py table --out results                              # from all rows that are there
python benchmarks/default_model.py paired --out results     # `kvkeep` and all others, on what its search did not see
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from process_pool import map_in_processes
from search import FOLDERS, LONGBENCH, NIAH, budgets_of

import kvkeep
from kvkeep.cli.eval import EvalOptions, about, load_worker
from kvkeep.compress.parse import parse
from kvkeep.errors import KvkeepError
from kvkeep.evaluate import suite
from kvkeep.evaluate.grid import Grid, run
from kvkeep.evaluate.prompt import PROTOCOLS
from kvkeep.evaluate.results import Results
from kvkeep.evaluate.sample import Sample
from kvkeep.evaluate.summary import Z_95, interval, normalized_score, write_csv
from kvkeep.model.load import load_tokenizer

EVICTION = [name for name, method in kvkeep.methods.items() if method.retrieval is None and method.scorer]
MODIFIED = ["snapkv+adakv", "protokv:votes=softmax+adakv", "intentkv+adakv"]
AGNOSTIC = ["expected_attention+adakv", "compactor+adakv", "echo+shared"]  # as published beside the others
RETRIEVAL = [name for name, method in kvkeep.methods.items() if method.retrieval]
BUDGETS, LENGTHS = (64, 128, 256, 512, 1024), (2048, 4096)
SHARES = (0.75, 0.5, 0.25, 0.125, 0.1)  # of the tokens, kept
PARTS = {
    "niah": (["niah"], ["full", *EVICTION, *MODIFIED], BUDGETS, LENGTHS),
    "needle": (["needle_number"], ["full", *EVICTION, *MODIFIED], BUDGETS, LENGTHS),
    "longbench": (["longbench"], ["full", *EVICTION, *MODIFIED], (128, 512, 1024), ()),
    "ruler": (["ruler"], ["full", *EVICTION, *MODIFIED, *AGNOSTIC], SHARES, (4096,)),
    "kv_retrieval": (["kv_retrieval"], ["full", *EVICTION, *MODIFIED, *AGNOSTIC], SHARES, (4096, 7680)),
    "niah_retrieval": (["niah"], ["full", *RETRIEVAL], BUDGETS, LENGTHS),
    "needle_retrieval": (["needle_number"], ["full", *RETRIEVAL], BUDGETS, LENGTHS),
}


def main() -> None:
    options = _options()
    if options.part in REPORTS:
        return REPORTS[options.part](Path(options.out))
    tasks, methods, budgets, lengths = PARTS[options.part]
    tasks = options.tasks or tasks
    budgets, lengths = tuple(options.budget or budgets), tuple(options.length or lengths)
    eval_options = EvalOptions(
        tuple(tasks), options.out, (*(options.methods or methods), *options.also), budgets, model=options.model,
        device=options.device, dtype=options.dtype, length=lengths or (4096,),
    )  # fmt: skip
    methods = tuple(name for name in eval_options.methods if _allowed(name, budgets))
    grid = Grid(methods, budgets, tuple(options.protocols))
    places = {name: Path(value) if (value := getattr(options, name)) else None for name in FOLDERS}
    sources = suite.Sources(**places, lengths=eval_options.length, limit=options.limit, seed=options.seed)
    samples, skipped = suite.load(tasks, load_tokenizer(options.model), sources)
    samples = _interleaved(samples)
    print(f"{len(samples)} samples, {len(grid.configs)} configs; left out: {skipped}", flush=True)
    make = partial(load_worker, eval_options, tuple(grid.configs))
    show = partial(print, flush=True)  # rows done, rows in all
    rows = run(map_in_processes(make, options.workers), samples, grid, options.out, show, about(eval_options))
    write_csv(rows, Path(options.out) / "results.csv")


def _interleaved(samples: Sequence[Sample]) -> list[Sample]:
    """The first sample of every task, then the second: a run that is stopped has some of all."""
    number, place = Counter[str](), {}
    for sample in samples:
        place[sample.task, sample.id] = number[sample.task]
        number[sample.task] += 1
    return sorted(samples, key=lambda sample: place[sample.task, sample.id])


def _allowed(name: str, budgets: Iterable[int | float]) -> bool:
    """Whether every budget is enough for the method."""
    try:
        for budget in budgets:
            parse(name).check(budget)
    except KvkeepError as error:
        print(f"left out: {error}", file=sys.stderr)
        return False
    return True


def table(out: Path) -> None:
    """Markdown, one table for each part and protocol: means over all samples with their intervals."""
    for part in PARTS:
        path = out / part / "rows.jsonl"
        if not path.is_file():
            continue
        groups: dict[tuple, dict[tuple, list[float]]] = defaultdict(lambda: defaultdict(list))
        for row in Results(path).rows:
            kind = (part, _kind(part, row), row["protocol"])
            groups[kind][row["method"], row["budget"]].append(100 * normalized_score(row))
        for kind, scores in sorted(groups.items()):
            _print(" · ".join(kind), scores)


def paired(out: Path) -> None:
    """Means on the half of the tasks that the search of `kvkeep` did not use, and its paired lead over the others."""
    for parts, tasks in (("niah", "needle"), NIAH[1]), (("longbench",), LONGBENCH[1]):
        paths = [path for part in parts if (path := out / part / "rows.jsonl").is_file()]
        rows = [row for path in paths for row in Results(path).rows if row["task"].startswith(tasks)]
        for protocol in sorted({row["protocol"] for row in rows}):
            scores: dict[str, dict[tuple, list[float]]] = defaultdict(lambda: defaultdict(list))
            for row in rows:
                if row["protocol"] == protocol:
                    scores[row["method"]][row["task"], row["id"]].append(100 * normalized_score(row))
            _compare(
                f"{' and '.join(parts)}, other half · {protocol}", {name: _means(of) for name, of in scores.items()}
            )


def _means(samples: dict[tuple, list[float]]) -> dict[tuple, float]:
    """Of each sample over its budgets."""
    return {sample: fmean(scores) for sample, scores in samples.items()}


def _compare(title: str, methods: dict[str, dict[tuple, float]], mine: str = "kvkeep") -> None:
    own = methods[mine]
    print(f"\n### {title} (n = {len(own)})\n\n| method | mean | {mine} ahead by |\n|---|---|---|")
    for name, scores in sorted(methods.items(), key=lambda pair: -sum(pair[1].values())):
        ahead = [own[sample] - score for sample, score in scores.items()]
        shown = f"{fmean(ahead):.1f} ± {Z_95 * stdev(ahead) / len(ahead) ** 0.5:.1f}"
        print(f"| {name} | {fmean(scores.values()):.1f} | {'' if name in (mine, 'full') else shown} |")


def _kind(part: str, row: dict[str, Any]) -> str:
    """Generated tasks by length, but for the needle grid; LongBench as a whole."""
    length = row["task"].rpartition("_")[2]
    if part.startswith(("needle", "longbench")) or not length.isdigit():
        return "LongBench" if part == "longbench" else "needle grid"
    return f"{part}, {length} tokens"


def _print(title: str, scores: dict[tuple, list[float]]) -> None:
    budgets = sorted({budget for _, budget in scores if budget is not None})
    print(f"\n### {title} (n = {len(next(iter(scores.values())))})\n")
    print("| method | " + " | ".join(map(str, budgets)) + " |\n|---|" + "---|" * len(budgets))
    methods = dict.fromkeys(method for method, _ in scores)
    for method in sorted(methods, key=lambda name: -_mean(name, scores)):
        shown = [scores.get((method, budget), scores.get((method, None), [])) for budget in budgets]
        print(f"| {method} | " + " | ".join(map(_cell, shown)) + " |")


def _mean(method: str, scores: dict[tuple, list[float]]) -> float:
    mine = [score for (name, _), values in scores.items() if name == method for score in values]
    return fmean(mine)


def _cell(values: list[float]) -> str:
    if not values:
        return "–"
    low, high = (100 * bound for bound in interval([value / 100 for value in values]))
    return f"{fmean(values):.1f} [{low:.0f}, {high:.0f}]"


REPORTS = {"table": table, "paired": paired}


def integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _options() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=[*PARTS, *REPORTS])
    parser.add_argument("--out", required=True)
    for name in FOLDERS:
        parser.add_argument(f"--{name}")
    parser.add_argument("--model", default="default")
    parser.add_argument("--device")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--budget", type=budgets_of, help="by commas, in place of the part's own")
    parser.add_argument("--length", type=integers, help="of generated prompts, in place of the part's own")
    parser.add_argument("--limit", type=int, help="samples of each task")
    parser.add_argument("--seed", type=int, default=suite.Sources.seed, help="of generated samples")
    parser.add_argument("--tasks", nargs="+", help="in place of the part's own")
    parser.add_argument("--methods", nargs="+", help="in place of the part's own")
    parser.add_argument("--also", nargs="*", default=[], help="methods beside the part's own")
    parser.add_argument("--protocols", nargs="+", default=list(PROTOCOLS))
    parser.add_argument("--workers", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
