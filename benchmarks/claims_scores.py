"""The papers' claims that are scores, each a comparison of two methods on the same samples:

    python benchmarks/claims_scores.py --run ruler_16k longbench --out DIR --model MODEL --device cuda --workers 8 \
        --data DIR --haystack DIR --squad FILE --hotpotqa FILE
    python benchmarks/claims_scores.py --tables --out DIR        # of all runs that are done, as Markdown

A run answers all samples with all its methods; a sample's methods share one prefill. A pair is the mean difference of
two methods over the samples of a run, with its 95 % interval and the probability of a difference at least as large if
signs were drawn by lot. docs/CLAIMS.md holds these tables. Data: see docs/guides/reproducing-a-paper.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from process_pool import map_in_processes

from kvkeep.cli.eval import EvalOptions, load_worker
from kvkeep.evaluate import suite
from kvkeep.evaluate.grid import run
from kvkeep.evaluate.prefill import Config
from kvkeep.evaluate.results import Results
from kvkeep.evaluate.summary import normalized_score
from kvkeep.model.load import load_tokenizer

MATH, LONG_MATH = "math", "math_long"  # rows of claims_math.py: --budget 256 --tokens 512, --budget 128 --tokens 1024
FOLDERS = "data", "haystack", "squad", "hotpotqa"
DRAWS = 20_000  # of signs
INTENT = "intentkv:boundary=first"
SUBSEQUENT = "intentkv:boundary=subsequent"
LITERAL = "actqkv:representatives=4"  # the paper's number
RAW = "protokv:votes=raw"  # the votes as printed
LONGBENCH = tuple(
    f"longbench/{task}"
    for task in (
        "2wikimqa", "gov_report", "hotpotqa", "lcc", "multi_news", "multifieldqa_en", "musique", "narrativeqa",
        "passage_count", "passage_retrieval_en", "qasper", "qmsum", "repobench-p", "samsum", "trec", "triviaqa",
    )
)  # fmt: skip
RETRIEVED = tuple(
    f"longbench/{task}"
    for task in (
        "2wikimqa", "hotpotqa", "multifieldqa_en", "musique", "narrativeqa", "passage_retrieval_en", "qasper",
        "samsum", "trec", "triviaqa",
    )
)  # fmt: skip


def each(budgets: Sequence[float], *methods: str) -> tuple[Config, ...]:
    return tuple((method, budget) for budget in budgets for method in methods)


@dataclass(frozen=True)
class Run:
    """Samples, and the methods that answer them with the question known."""

    tasks: tuple[str, ...]
    methods: tuple[Config, ...]
    length: int = 4096  # of generated tasks
    limit: int | None = None  # samples of each task
    max_length: int | None = None  # longer prompts lose their middle, as LongBench's rule has it
    beyond_window: bool = False
    protocols: tuple[str, ...] = ("aware",)

    @property
    def configs(self) -> list[Config]:
        return [("full", None), *self.methods]


RUNS = {
    "ruler_16k": Run(
        ("ruler",),
        each(
            (4096, 1024), INTENT, f"{INTENT}:block=1", f"{INTENT}:block=4", f"{INTENT}:block=8", f"{INTENT}:block=64",
            f"{INTENT}:block=256", f"{INTENT}:window=32", f"{INTENT}:window=128", f"{INTENT}:intention=false",
            f"{INTENT}:intention=false:block=1", f"{INTENT}:window=128:intention=false", SUBSEQUENT, "snapkv",
            "snapkv:pool=1", "streamingllm:sinks=128", "random", "kvkeep",
        ),
        length=16_384,
        limit=8,
    ),
    "ruler_32k": Run(
        ("ruler",),
        each(
            (4096, 1024), INTENT, f"{INTENT}:block=1", f"{INTENT}:block=4", f"{INTENT}:block=256",
            f"{INTENT}:intention=false", f"{INTENT}:intention=false:block=1", SUBSEQUENT, "snapkv",
            "streamingllm:sinks=128", "random",
        ),
        length=32_000,
        limit=8,
    ),
    "longbench": Run(
        LONGBENCH,
        (
            *each(
                (1000,), "ahakv", "ahakv:recent_only=false", "ahakv:step_gain=false", "ahakv:value_prior=false",
                "ahakv:gain=multiply", "h2o", "snapkv", "streamingllm", "random",
            ),
            *each(
                (512, 128), "protokv", RAW, "protokv:prototypes=chunks", "protokv:prototypes=lsh", "satkv",
                "snapkv:window=32", "chunkkv", "pyramidkv", "h2o", "streamingllm",
            ),
            *each(
                (2048,), "intelllm", "intelllm:gap=1024", "intelllm:gap=4096", "intelllm:mode=local",
                "intelllm:keep_head=false", "intelllm:head_gravity=0", "snapkv", "streamingllm",
            ),
        ),
        limit=8,
        max_length=16_384,
    ),
    "recall": Run(
        RETRIEVED,
        each((512,), "protokv", "protokv+recall", "clusterkv", "squeezed", "sentencekv"),
        limit=6,
        max_length=8192,
    ),
    "recall_2k": Run(  # for a small model on a CPU
        ("niah_single_2", "niah_multikey_1", "niah_multiquery"),
        each((256,), "protokv", "protokv+recall", "clusterkv", "squeezed", "sentencekv"),
        length=2048,
        limit=12,
    ),
    "actqkv": Run(
        RETRIEVED,
        each(
            (2048,), "actqkv", LITERAL, f"{LITERAL}:density=false", f"{LITERAL}:probe=mean",
            f"{LITERAL}:probe=mean:density=false", "infllm", "streamingllm", "snapkv",
        ),
        max_length=8192,
    ),
    "beyond": Run(
        ("passkey", "number_string", "kv_retrieval"),
        each((2048,), "actqkv", LITERAL, "infllm", "streamingllm"),
        length=49_152,
        limit=8,
        beyond_window=True,
    ),
    "beyond_12k": Run(  # for a small model on a CPU
        ("passkey", "number_string"),
        each((2048,), "actqkv", LITERAL, "infllm", "streamingllm"),
        length=12_288,
        limit=4,
        beyond_window=True,
    ),
    "short": Run(
        ("openbookqa", "arc_easy", "wic", "winogrande"),
        each((0.2, 0.04), "ahakv", "h2o", "snapkv", "streamingllm"),
        limit=50,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """A claim of a paper: the first method scores at least as much as the second."""

    where: str  # in the paper
    claim: str
    run: str  # one of RUNS, or MATH, LONG_MATH
    first: Config
    second: Config


def pairs(run: str, budgets: Sequence[float], *claims: tuple[str, str, str, str]) -> list[Pair]:
    """claims: where in the paper, what it says, the method that should be ahead, the other one."""
    return [
        Pair(where, claim, run, (first, budget), (second, None if second == "full" else budget))
        for budget in budgets
        for where, claim, first, second in claims
    ]


INTENTION = (
    ("t. 8", "blocks help", INTENT, f"{INTENT}:block=1"),
    ("t. 8", "the intention helps", INTENT, f"{INTENT}:intention=false"),
    ("t. 8", "the intention helps without blocks", f"{INTENT}:block=1", f"{INTENT}:intention=false:block=1"),
    ("t. 1, 4", "ahead of SnapKV", INTENT, "snapkv"),
    ("t. 1", "ahead of StreamingLLM", INTENT, "streamingllm:sinks=128"),
    ("t. 3", "blocks of 16 are ahead of 4", INTENT, f"{INTENT}:block=4"),
    ("t. 3", "blocks of 256 are level with 16", f"{INTENT}:block=256", INTENT),
    ("ours", "subsequent rows", SUBSEQUENT, INTENT),
)
WINDOWS = (
    ("t. 6", "a window of 32 is level", f"{INTENT}:window=32", INTENT),
    ("t. 6", "a window of 128 is level", f"{INTENT}:window=128", INTENT),
    ("t. 6", "the intention helps in a window of 128", f"{INTENT}:window=128", f"{INTENT}:window=128:intention=false"),
    ("t. 7", "without blocks ahead of SnapKV without pooling", f"{INTENT}:block=1", "snapkv:pool=1"),
)
AHA_PARTS = "recent_only", "step_gain", "value_prior"
AHA_OTHERS = "h2o", "snapkv", "streamingllm"
AHA = (
    *(("t. 2", f"{part} helps", "ahakv", f"ahakv:{part}=false") for part in AHA_PARTS),
    *(("t. 1, 3", f"ahead of {other}", "ahakv", other) for other in AHA_OTHERS),
    ("ours", "gain as derived, not as printed", "ahakv", "ahakv:gain=multiply"),
)
PROTO = (
    *(
        ("t. L", f"ahead of {other}", "protokv", other)
        for other in ("snapkv:window=32", "chunkkv", "pyramidkv", "h2o", "streamingllm")
    ),
    *(("fig. 10", f"ahead of {part} alone", "protokv", f"protokv:prototypes={part}") for part in ("chunks", "lsh")),
    ("ours", "softmax votes", "protokv", RAW),
)
INTEL = (
    ("t. 1", "level with the full cache", "intelllm", "full"),
    ("t. 1", "ahead of streamingllm", "intelllm", "streamingllm"),
    ("t. 3", "a gap of 4K helps", "intelllm:gap=4096", "intelllm:gap=1024"),
    ("t. 3", "masking 6 head tokens helps", "intelllm", "intelllm:head_gravity=0"),
    ("ours", "the head stays", "intelllm", "intelllm:keep_head=false"),
)
ACT = (
    ("t. 1", "level with the full cache", LITERAL, "full"),
    ("t. 1", "ahead of infllm", LITERAL, "infllm"),
    ("t. 1", "ahead of streamingllm", LITERAL, "streamingllm"),
    ("t. 3", "the probe (APQ) helps", LITERAL, f"{LITERAL}:probe=mean"),
    ("t. 3", "the cut-off (DCM) helps", LITERAL, f"{LITERAL}:density=false"),
    ("t. 9", "both help", LITERAL, f"{LITERAL}:probe=mean:density=false"),
    ("ours", "32 representatives", "actqkv", LITERAL),
)
RECALL = tuple(
    ("t. 3", f"recall ahead of {other}", "protokv+recall", other)
    for other in ("clusterkv", "squeezed", "sentencekv", "protokv")
)
PROTO_MATH = tuple(
    ("t. 8", f"ahead of {other}", "protokv", other) for other in ("snapkv:window=32", "chunkkv", "h2o", "streamingllm")
)
AHA_MATH = (
    ("sec. 4", "ahead of h2o", "ahakv", "h2o"),
    ("sec. 4", "ahead of streamingllm", "ahakv", "streamingllm"),
    ("ours", "half of the budget is recent, as h2o's", "ahakv:recent=64", "ahakv"),
)
PAIRS = (
    *pairs("ruler_16k", (4096, 1024), *INTENTION, *WINDOWS),
    *pairs("ruler_32k", (4096, 1024), *INTENTION),
    *pairs("longbench", (1000,), *AHA),
    *pairs("longbench", (512, 128), *PROTO),
    *pairs("longbench", (2048,), *INTEL),
    *pairs("recall", (512,), *RECALL),
    *pairs("recall_2k", (256,), *RECALL),
    *pairs("actqkv", (2048,), *ACT),
    *pairs("beyond", (2048,), *ACT[1:3], ACT[-1]),
    *pairs("beyond_12k", (2048,), *ACT[1:3], ACT[-1]),
    *pairs("short", (0.2, 0.04), *(("fig. 4", f"ahead of {other}", "ahakv", other) for other in AHA_OTHERS)),
    *pairs(MATH, (256,), *PROTO_MATH, *AHA_MATH),
    *pairs(LONG_MATH, (128,), *PROTO_MATH, *AHA_MATH),
)


def answer(name: str, options: argparse.Namespace) -> None:
    """Answer the samples of one run that have no row yet."""
    plan = RUNS[name]
    if options.methods:
        plan = replace(plan, methods=tuple(config for config in plan.methods if config[0] in options.methods))
    out = options.out / name
    places = {place: Path(value) for place in FOLDERS if (value := getattr(options, place))}
    limit = options.limit or plan.limit
    sources = suite.Sources(**places, lengths=(plan.length,), limit=limit, seed=options.seed)
    samples, skipped = suite.load(plan.tasks, load_tokenizer(options.model), sources)
    if skipped:
        print(f"{name}: left out: {skipped}")
    eval_options = EvalOptions(
        plan.tasks, str(out), model=options.model, device=options.device, dtype=options.dtype,
        max_length=plan.max_length, beyond_window=plan.beyond_window,
    )  # fmt: skip
    make = partial(load_worker, eval_options, tuple(plan.configs))
    run(map_in_processes(make, options.workers), samples, plan, out, partial(print, name, flush=True))


Scores = dict[Config, dict[tuple[str, str], float]]  # percent, by task and id


def scores_of(rows: Sequence[Mapping[str, Any]]) -> Scores:
    found: Scores = {}
    for row in rows:
        found.setdefault((row["method"], row["budget"]), {})[row["task"], row["id"]] = 100 * normalized_score(row)
    return found


def differences(scores: Scores, first: Config, second: Config) -> torch.Tensor:
    """Per sample that both answered."""
    both = sorted(scores[first].keys() & scores[second].keys())
    return torch.tensor([scores[first][place] - scores[second][place] for place in both], dtype=torch.float64)


def half_width(values: torch.Tensor) -> float:
    """Half of the 95 % interval of the mean."""
    return float(1.96 * values.std() / len(values) ** 0.5)


def chance(values: torch.Tensor) -> float:
    """How often signs drawn by lot give a mean at least as far from 0."""
    signs = torch.randint(0, 2, (DRAWS, len(values)), generator=torch.Generator().manual_seed(0)) * 2 - 1
    drawn = (signs.double() @ values).abs()
    return float((drawn >= values.sum().abs() - 1e-9).double().mean())


def table_of_scores(name: str, scores: Scores) -> Iterator[str]:
    budgets = list(dict.fromkeys(budget for _, budget in scores if budget is not None))
    n = len(next(iter(scores.values())))
    full = torch.tensor(list(scores["full", None].values()))
    yield f"\n### {name} (n = {n}; `full` {full.mean():.1f} ± {half_width(full):.1f})\n"
    yield f"| method | {' | '.join(f'{budget:,}' for budget in budgets)} |"
    yield "|---" * (len(budgets) + 1) + "|"
    for method in dict.fromkeys(method for method, budget in scores if budget is not None):
        cells = [torch.tensor(list(scores.get((method, budget), {}).values())) for budget in budgets]
        shown = [f"{cell.mean():.1f} ± {half_width(cell):.1f}" if len(cell) else "" for cell in cells]
        yield f"| {method} | {' | '.join(shown)} |"


def table_of_pairs(scores: Mapping[str, Scores]) -> Iterator[str]:
    yield "\n| where | claim | run, budget | first | second | difference | p | n |"
    yield "|---" * 8 + "|"
    for pair in PAIRS:
        known = scores.get(pair.run, {})
        if pair.first not in known or pair.second not in known:
            continue
        values = differences(known, pair.first, pair.second)
        shown = [f"{sum(known[each].values()) / len(known[each]):.1f}" for each in (pair.first, pair.second)]
        difference = f"{values.mean():+.1f} ± {half_width(values):.1f}"
        place = f"{pair.run}, {pair.first[1]:,}"
        cells = (pair.where, pair.claim, place, *shown, difference, f"{chance(values):.3f}", str(len(values)))
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", nargs="+", choices=RUNS, default=[])
    parser.add_argument("--methods", nargs="+", help="some of a run's methods, with all their budgets, beside full")
    parser.add_argument("--tables", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="default")
    parser.add_argument("--device")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--limit", type=int, help="samples of each task, in place of the run's own number")
    parser.add_argument("--seed", type=int, default=101)
    parser.add_argument("--workers", type=int, default=1)
    for name in FOLDERS:
        parser.add_argument(f"--{name}")
    options = parser.parse_args()
    for name in options.run:
        answer(name, options)
    if options.tables:
        done = [name for name in (*RUNS, MATH, LONG_MATH) if (options.out / name / "rows.jsonl").exists()]
        scores = {name: scores_of(Results(options.out / name / "rows.jsonl").rows) for name in done}
        for name in done:
            print(*table_of_scores(name, scores[name]), sep="\n")
        print(*table_of_pairs(scores), sep="\n")


if __name__ == "__main__":
    sys.exit(main())
