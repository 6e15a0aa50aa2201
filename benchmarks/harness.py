"""lm-eval's own model, kvkeep inside lm-eval, and kvkeep's own evaluation on the same samples:

    python benchmarks/harness.py --data DIR --limit 100 --method snapkv --budget 0.2

DIR holds arc_easy.jsonl, openbookqa.jsonl, wic.jsonl and winogrande.jsonl. Every log-likelihood is compared. With
everything kept all three must agree; with --method, the two of kvkeep must, and lm-eval's own is the full cache.
The tasks are the definitions lm-eval ships, with local files in place of the hub.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before lm-eval is imported: all data is local

import lm_eval
from lm_eval.tasks import TaskManager

from kvkeep.evaluate import suite
from kvkeep.evaluate.grid import Grid, run
from kvkeep.evaluate.lm_eval_model import HFLM, KvkeepLM
from kvkeep.evaluate.worker import Worker
from kvkeep.model.load import load, quiet_transformers

SHIPPED = {  # where lm-eval keeps each definition
    "arc_easy": "arc/arc_easy.yaml",
    "openbookqa": "openbookqa/openbookqa.yaml",
    "wic": "super_glue/wic/default.yaml",
    "winogrande": "winogrande/default.yaml",
}
LOCAL = """include: {shipped}
task: local_{task}
tag: null
dataset_path: json
dataset_name: null
dataset_kwargs: {{data_files: {{validation: {file}}}, cache_dir: {cache}}}
training_split: null
validation_split: validation
test_split: null
"""


def localize(data: Path, folder: Path) -> TaskManager:
    """Definitions that read files, and the files in the shape of the hub's."""
    for task, shipped in SHIPPED.items():
        source, file = Path(lm_eval.__file__).parent / "tasks" / shipped, folder / f"{task}.jsonl"
        records = [json.loads(line) for line in (data / f"{task}.jsonl").read_text(encoding="utf-8").splitlines()]
        file.write_text("".join(json.dumps(as_on_hub(record)) + "\n" for record in records))
        text = LOCAL.format(shipped=source, task=task, file=file, cache=folder / "cache")
        (folder / f"local_{task}.yaml").write_text(text)
    return TaskManager(include_path=str(folder), include_defaults=False)


def as_on_hub(record: dict[str, Any]) -> dict[str, Any]:
    """wic's labels are numbers there, and texts in the published files."""
    return {**record, "label": int(str(record["label"]).lower() in ("true", "1"))} if "label" in record else record


def by_lm_eval(lm: Any, tasks: TaskManager, limit: int) -> dict[str, list[tuple[float, list[float]]]]:
    """Task -> (right or not, log-likelihoods) of every sample, by lm-eval."""
    names = [f"local_{task}" for task in SHIPPED]
    found = lm_eval.simple_evaluate(lm, tasks=names, task_manager=tasks, limit=limit, bootstrap_iters=0)["samples"]
    return {
        task: [(one["acc"], [score for score, _ in one["filtered_resps"]]) for one in _in_order(found[f"local_{task}"])]
        for task in SHIPPED
    }


def _in_order(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(samples, key=lambda one: one["doc_id"])


def by_kvkeep(model: Any, tokenizer: Any, data: Path, limit: int, grid: Grid) -> dict[str, dict[str, list]]:
    """Method -> the same, by kvkeep's evaluation, query-aware."""
    samples, _ = suite.load(SHIPPED, tokenizer, suite.Sources(data=data, limit=limit))
    with tempfile.TemporaryDirectory() as out:
        rows = run(Worker(model, tokenizer, grid.configs), samples, grid, out)
    found: dict[str, dict[str, list]] = {method: {task: [] for task in SHIPPED} for method in grid.methods}
    for row in rows:
        found[row["method"]][row["task"]].append((row["score"], row["loglikelihoods"]))
    return found


def apart(a: list[tuple[float, list[float]]], b: list[tuple[float, list[float]]]) -> float:
    """The largest difference between two log-likelihoods of the same text."""
    pairs = [pair for one, two in zip(a, b, strict=True) for pair in zip(one[1], two[1], strict=True)]
    return max(abs(x - y) for x, y in pairs)


def accuracy(found: list[tuple[float, list[float]]]) -> float:
    return sum(right for right, _ in found) / len(found)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--method", help="compared too, beside full")
    parser.add_argument("--budget", type=lambda text: float(text) if "." in text else int(text), default=0.2)
    parser.add_argument("--model", default="default")
    parser.add_argument("--device")
    options = parser.parse_args()
    quiet_transformers()
    model, tokenizer = load(options.model, device=options.device)
    grid = Grid(("full", options.method) if options.method else ("full",), (options.budget,), ("aware",))
    with tempfile.TemporaryDirectory() as folder:
        tasks = localize(options.data, Path(folder))
        stock = timed("lm-eval", by_lm_eval, HFLM(model, tokenizer=tokenizer), tasks, options.limit)  # before any cache
        inside = {}
        for method, budget in grid.configs:
            lm = KvkeepLM(model, method, budget, tokenizer=tokenizer)
            inside[method] = timed(f"kvkeep in lm-eval, {method}", by_lm_eval, lm, tasks, options.limit)
    own = timed("kvkeep eval", by_kvkeep, model, tokenizer, options.data, options.limit, grid)
    print("| task | method | samples | texts | lm-eval | kvkeep in lm-eval | kvkeep eval | apart: 1, 2 | apart: 2, 3 |")
    print("|---|---|---|---|---|---|---|---|---|")
    for (method, budget), task in product(grid.configs, SHIPPED):
        a, b, c = stock[task], inside[method][task], own[method][task]
        texts = sum(len(scores) for _, scores in a)
        name = f"{method} {budget}" if budget else method
        right = " | ".join(f"{accuracy(found):.2f}" for found in (a, b, c))
        print(f"| {task} | {name} | {len(a)} | {texts} | {right} | {apart(a, b):.1e} | {apart(b, c):.1e} |")


def timed(name: str, work: Callable, *arguments: Any) -> Any:
    began = time.perf_counter()
    done = work(*arguments)
    print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
    return done


if __name__ == "__main__":
    main()
