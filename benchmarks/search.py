"""Search over unpublished combinations of methods and modifiers, on half of the tasks.

    python benchmarks/search.py --stage 1 --out found --data DIR --haystack DIR      # a random sample of all
    python benchmarks/search.py --stage 2 --out found --data DIR --haystack DIR      # the best, and their neighbours
    python benchmarks/search.py --stage 3 --out found --data DIR --haystack DIR      # the winner, on the other half
    … --space context --protocols agnostic                                          # where the question is unknown
    … --tasks ruler --squad FILE --hotpotqa FILE --length 4096 --budget 0.25,0.125  # RULER's 13 tasks, by share kept

A combination is ranked by its mean score over tasks, protocols and budgets. Stage 2 tries the best of stage 1, the one
with the best level of every axis, and all that differ from these on one axis; the best of stage 2 is the winner. Only
stage 3 uses the other half of the tasks.
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from process_pool import map_in_processes

from kvkeep.cli.eval import EvalOptions, load_worker
from kvkeep.compress.parse import parse
from kvkeep.errors import KvkeepError
from kvkeep.evaluate import suite
from kvkeep.evaluate.grid import Grid, run
from kvkeep.evaluate.results import Results
from kvkeep.evaluate.summary import summarize
from kvkeep.model.load import load_tokenizer

PUBLISHED = (
    "intentkv", "intelllm", "ahakv", "protokv", "satkv", "streamingllm", "lm_infinite", "h2o", "tova", "snapkv",
    "pyramidkv", "chunkkv", "nacl", "cake", "snapkv+adakv", "protokv:votes=softmax+adakv", "intentkv+adakv",
)  # fmt: skip
UNASKED = (
    "random", "knorm", "lagkv", "keydiff", "expected_attention", "expected_attention+adakv", "compactor",
    "compactor+adakv", "snapkv", "kvzip_plus",
)  # fmt: skip
PROMPT = {
    "votes": [
        *(f"snapkv:window={w}" for w in (8, 16, 32, 64)),
        *(f"snapkv:window={w}:pool=7:pooling=max" for w in (8, 16, 32)),
        "intentkv:recent=8", "intentkv:window=32:recent=8", "intentkv:intention=false:window=16:recent=8",
        "ahakv:recent=16", "ahakv", "lookahead", "lookahead:window=32:pool=7:pooling=max",
    ],
    "units": ["", "+blocks:block=8", "+blocks:block=16", "+blocks:block=32", "+prototypes"],
    "values": ["", "+values:power=0.5", "+values"],
    "first": ["", "+sinks"],
    "heads": ["", "+adakv", "+adakv:alpha=0.5"],
    "layers": ["", "+pyramid", "+cake", "+entropy"],
}  # fmt: skip
CONTEXT = {
    "scores": [
        "echo", *(f"echo:near={near}" for near in (1, 4, 8, 16, 32, 128)), "echo:near=8:chunk=1024",
        "echo:near=8:chunk=4096", "expected_attention", "keydiff", "compactor", "kvzip", "kvzip:local=true",
        "kvzip:near=8:local=true", "kvzip_plus:local=true", "kvzip_plus:near=8:local=true",
    ],
    "units": ["", "+blocks:block=4", "+blocks:block=8", "+blocks:block=16", "+prototypes"],
    "values": ["", "+values:power=0.5", "+values", "+critical"],
    "heads": ["+shared", "+shared:floor=0.1", "+shared:floor=0.25", "+adakv:alpha=0.0", "+adakv"],
}  # fmt: skip
SPACES = {"prompt": (PROMPT, PUBLISHED), "context": (CONTEXT, UNASKED)}
FOLDERS = "data", "haystack", "squad", "hotpotqa"
Axes = dict[str, list[str]]
Choice = tuple[str, ...]  # one of each axis
LONGBENCH = (
    ("qasper", "hotpotqa", "multi_news", "trec", "samsum", "passage_retrieval_en", "lcc", "qmsum"),
    ("multifieldqa_en", "2wikimqa", "gov_report", "triviaqa", "musique", "narrativeqa", "repobench-p", "passage_count"),
)
NIAH = (
    ("niah_single_2", "niah_multikey_1", "niah_multikey_3", "niah_multiquery"),
    ("niah_single_1", "niah_single_3", "niah_multikey_2", "niah_multivalue", "needle_number"),
)
RULER = (
    ("niah_single_2", "niah_multikey_1", "niah_multikey_3", "niah_multiquery", "vt", "qa_1"),
    ("niah_single_1", "niah_single_3", "niah_multikey_2", "niah_multivalue", "cwe", "fwe", "qa_2"),
)
HALVES = {
    "mixed": [[*niah, *(f"longbench/{task}" for task in rest)] for niah, rest in zip(NIAH, LONGBENCH, strict=True)],
    "ruler": RULER,
}


def main() -> None:
    options = _options()
    out, (axes, published) = Path(options.out), SPACES[options.space]
    if options.stage == 1:
        specs = sorted(map(spec, drawn(axes, options.count, options.seed)))
    elif options.stage == 2:
        specs = sorted(map(spec, refined(axes, mean_scores(read(out / "stage1")))))
    else:
        specs = [max(ranked(mean_scores(read(out / "stage2"))), key=lambda pair: pair[1])[0]]
    half = [task for task in HALVES[options.tasks][options.stage == 3] if not options.only or task in options.only]
    rows = evaluate((*(options.among or published), *specs), half, out / f"stage{options.stage}", options)
    for name, score in ranked(mean_scores(rows))[:25]:
        print(f"{score:6.2f}  {name}{'' if name in published else '   (ours)'}")


def drawn(axes: Axes, count: int, seed: int) -> list[Choice]:
    """A random sample of the valid combinations."""
    working = [choice for choice in product(*axes.values()) if works(spec(choice))]
    return random.Random(seed).sample(working, count)


def refined(axes: Axes, scores: dict[str, float]) -> set[Choice]:
    """The five best combinations, the best levels of all axes together, and neighbours on one axis."""
    known = {choice: scores[spec(choice)] for choice in product(*axes.values()) if spec(choice) in scores}
    best = sorted(known, key=lambda choice: -known[choice])[:5]
    together = tuple(_best_level(number, known) for number in range(len(axes)))
    centre = [choice for choice in (together, best[0]) if works(spec(choice))]
    near = {
        (*choice[:axis], level, *choice[axis + 1 :])
        for choice in centre
        for axis, levels in enumerate(axes.values())
        for level in levels
    }
    return {choice for choice in {*best, *near} if works(spec(choice))}


def _best_level(axis: int, known: dict[Choice, float]) -> str:
    """By its mean over all combinations it is in."""
    levels = defaultdict(list)
    for choice, score in known.items():
        levels[choice[axis]].append(score)
    return max(levels, key=lambda level: sum(levels[level]) / len(levels[level]))


def spec(choice: Choice) -> str:
    return "".join(choice)


def works(name: str) -> bool:
    try:
        parse(name)
    except KvkeepError:
        return False
    return True


def evaluate(methods: Sequence[str], tasks: Sequence[str], out: Path, options: Any) -> list[dict[str, Any]]:
    eval_options = EvalOptions(
        tuple(tasks), str(out), ("full", *dict.fromkeys(methods)), tuple(options.budget), model=options.model,
        device=options.device, dtype=options.dtype, max_length=options.max_length,
    )  # fmt: skip
    grid = Grid(eval_options.methods, eval_options.budget, tuple(options.protocols))
    places = {name: Path(value) for name in FOLDERS if (value := getattr(options, name))}
    sources = suite.Sources(**places, lengths=(options.length,), limit=options.limit, seed=options.seed)
    samples, skipped = suite.load(tasks, load_tokenizer(options.model), sources)
    assert not skipped, skipped
    make = partial(load_worker, eval_options, tuple(grid.configs))
    progress = partial(print, flush=True)  # rows done, rows in all
    return run(map_in_processes(make, options.workers), samples, grid, out, progress)


def mean_scores(rows: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Mean over tasks, protocols and budgets, in percent."""
    found = defaultdict(list)
    for cell in summarize(rows):
        found[cell.method].append(cell.score)
    return {method: sum(scores) / len(scores) for method, scores in found.items()}


def ranked(scores: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(((name, score) for name, score in scores.items() if name != "full"), key=lambda pair: -pair[1])


def read(folder: Path) -> list[dict[str, Any]]:
    return Results(folder / "rows.jsonl").rows


def budgets_of(text: str) -> list[int | float]:
    """Tokens, or shares of them."""
    return [float(part) if "." in part else int(part) for part in text.split(",")]


def _options() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), required=True)
    parser.add_argument("--out", required=True)
    for name in FOLDERS:
        parser.add_argument(f"--{name}")
    parser.add_argument("--tasks", choices=HALVES, default="mixed")
    parser.add_argument("--only", nargs="+", help="these tasks of the half alone")
    parser.add_argument("--protocols", nargs="+", default=["agnostic", "aware"])
    parser.add_argument("--model", default="default")
    parser.add_argument("--device")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--budget", type=budgets_of, default=[128, 512], help="by commas: tokens, or shares of them")
    parser.add_argument("--count", type=int, default=60, help="combinations drawn in stage 1")
    parser.add_argument("--limit", type=int, default=8, help="samples of each task")
    parser.add_argument("--space", choices=SPACES, default="prompt", help="what is combined")
    parser.add_argument("--among", nargs="+", help="methods beside them, in place of the published ones")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--max-length", type=int, default=None)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=7)
    return parser.parse_args()


if __name__ == "__main__":
    main()
