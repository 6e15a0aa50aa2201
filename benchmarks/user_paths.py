"""What a user waits for, through the public API alone: benchmarks/user_paths.py --shape llama-8b --out folder

Random weights, or those of the default model (--shape default). Every measure is a row: what the user writes, seconds
or milliseconds, beside stock transformers in the same run. First and second calls are apart; engines are warmed up
where the row says so.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from characters import Characters

import kvkeep
from kvkeep.model.random_models import random_model

READ = (
    "streamingllm,kvkeep,kvkeep_context,random,knorm,keydiff,lagkv,expected_attention+adakv,compactor+adakv,snapkv+adakv,"
    "lookahead,echo+shared,kvzip:local=true,kvzip"
)
BUFFERED = ("rkv", "buffer"), ("kvkeep", "buffer"), ("snapkv+adakv", "buffer"), ("snapkv+adakv", "step")


def text(tokens: int, seed: int = 0) -> str:
    made = torch.randint(65, 120, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
    return "".join(map(chr, made))


class Run:
    def __init__(self, options: Any) -> None:
        self.options, self.rows = options, []
        self.cuda = options.device.startswith("cuda")
        kind = torch.bfloat16 if self.cuda else torch.float32
        self.words: Any = Characters()
        if Path(options.shape).is_dir():
            self.model, self.words = kvkeep.load(options.shape, device=options.device, dtype=kind)
        else:
            default = options.shape == "default"
            self.model = kvkeep.load()[0] if default else random_model(options.shape, options.device, kind)
        self.model.generation_config.eos_token_id = None

    def now(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def note(self, path: str, **figures: float | str) -> None:
        rounded = {name: round(value, 2) if isinstance(value, float) else value for name, value in figures.items()}
        self.rows.append({"path": path} | rounded)
        print(json.dumps(self.rows[-1]), flush=True)

    def measure(self, measures: dict[str, Callable[[], Any]], file: str) -> None:
        """Run those that were asked for, and write all rows after each of them."""
        for name, measure in measures.items():
            if not self.options.only or name in self.options.only.split(","):
                try:
                    measure()
                except Exception as error:  # a path that fails is a result, too
                    self.note(name, failed=repr(error)[:300])
                if self.options.out:
                    Path(self.options.out).mkdir(parents=True, exist_ok=True)
                    Path(self.options.out, file).write_text(json.dumps(self.rows, indent=1) + "\n")

    def engine(self, method: str = "kvkeep", budget: int | None = None, **how: Any) -> kvkeep.Engine:
        return kvkeep.Engine(self.model, self.words, method, budget or self.options.budget, **how)

    def timed(self, texts: Iterator[str]) -> dict[str, float]:
        """Of an answer that is streamed."""
        began = self.now()
        at = [time.perf_counter() for _ in texts]
        gaps = [1000 * (b - a) for a, b in zip(at[1:], at[2:], strict=False)]  # the first two come together
        return {"first_token_s": at[0] - began, "ms": statistics.median(gaps), "worst_ms": max(gaps)}

    def stock(self, length: int) -> None:
        """transformers' own cache."""
        ids = self.words(text(length), return_tensors="pt").input_ids.to(self.model.device)
        for call in ("first", "second"):
            began = self.now()
            self.model.generate(ids, max_new_tokens=1, do_sample=False)
            prefill = self.now() - began
            began = self.now()
            self.model.generate(ids, max_new_tokens=1 + self.options.new, do_sample=False)
            ms = 1000 * (self.now() - began - prefill) / self.options.new
            self.note("transformers generate", length=length, call=call, first_token_s=prefill, ms=ms)

    def one(self, length: int, method: str = "kvkeep") -> None:
        """stream, chat and generate of one prompt, after a warm-up."""
        engine = self.engine(method)
        began = self.now()
        engine.warmup(rows=1)
        self.note("warm-up, 1 row", method=method, s=self.now() - began)
        new = {"max_new_tokens": self.options.new}
        for call in ("first", "second"):
            found = self.timed(engine.stream(text(length + (call == "second")), **new))
            self.note("Engine.stream", method=method, length=length, call=call, **found)
        began = self.now()
        engine.generate(text(length, 1), **new)
        total = self.now() - began
        began = self.now()
        engine.generate(text(length, 1), max_new_tokens=1)
        prefill = self.now() - began
        ms = 1000 * (total - prefill) / (self.options.new - 1)
        self.note("Engine.generate(str)", method=method, length=length, ms=ms, first_token_s=prefill)
        began = self.now()
        engine.chat([{"role": "user", "content": text(length, 2)}], **new)
        chat = 1000 * (self.now() - began - prefill) / (self.options.new - 1)
        self.note("Engine.chat", method=method, length=length, ms=chat)
        engine.close()

    def many(self, rows: int, length: int, method: str = "kvkeep", budget: int | None = None, **how: Any) -> None:
        """A list of prompts; the step is the median time between tokens once all are running."""
        engine = self.engine(method, budget, **how)
        began = self.now()
        engine.warmup(rows=rows)
        self.note(f"warm-up, {rows} rows", method=method, s=self.now() - began, **how)
        prompts = [text(length, seed) for seed in range(rows)]
        for call in ("first", "second") if length <= 8000 else ("first",):
            began = self.now()
            engine.generate(prompts, max_new_tokens=1)
            prefilled = self.now() - began
            began = self.now()
            engine.generate(prompts, max_new_tokens=self.options.new_each)
            total = self.now() - began
            row = {"method": method, "length": length, "call": call, **how}
            self.note(f"Engine.generate of {rows}", total_s=total, prefill_s=prefilled, **row)
        handles = [engine.submit(prompt[: 2 * engine.config.budget], max_new_tokens=700) for prompt in prompts]
        last = iter(handles[-1])
        next(last)
        at = [time.perf_counter() for _, _ in zip(range(300), last, strict=False)]  # more than two buffers of 128
        assert not any(handle.done for handle in handles), "of fewer rows"
        gaps = [1000 * (b - a) for a, b in zip(at[1:], at[2:], strict=False)]
        for handle in handles:
            handle.cancel()
        figures = {"ms": statistics.median(gaps), "mean_ms": statistics.mean(gaps), "worst_ms": max(gaps)}
        self.note(f"a step of {rows} rows", method=method, **figures, **how)
        engine.close()

    def questions(self, rows: int, length: int, method: str) -> None:
        """Questions about one long text at a time: the median step, for one and for `rows` of them."""
        engine = self.engine(method)
        began = self.now()
        engine.warmup(rows=rows)
        self.note(f"warm-up, {rows} rows", method=method, s=self.now() - began)
        began = self.now()
        context = engine.read(text(length))
        self.note("Engine.read", method=method, length=length, s=self.now() - began)
        for n in (1, rows):
            new = self.options.new + 2 * n
            streams = [context.stream(text(8, seed), max_new_tokens=new) for seed in range(n)]
            began = self.now()
            for stream in streams:
                next(stream)
            first = self.now() - began
            at = []
            for _ in range(self.options.new):
                for stream in streams:
                    next(stream)
                at.append(time.perf_counter())
            gaps = [1000 * (b - a) for a, b in zip(at[2:], at[3:], strict=False)]
            found = {"first_tokens_s": first, "ms": statistics.median(gaps), "worst_ms": max(gaps)}
            self.note(f"a step of {n} questions about one text", method=method, length=length, **found)
            for stream in streams:
                stream.close()
        engine.close()

    def overheads(self, methods: list[str], length: int) -> None:
        """What a method adds to reading a text; the first of them is the measure."""
        base = 0.0
        for method in methods:
            engine = self.engine(method, history=None)
            engine.read(text(length if not base else length // 8, 1))  # kernels are compiled
            began = self.now()
            engine.read(text(length))
            seconds = self.now() - began
            base = base or seconds
            self.note("Engine.read", method=method, length=length, s=seconds, overhead=f"{seconds / base - 1:.1%}")
            engine.close()

    def cache(self, method: str, length: int) -> None:
        """model.generate with a kvkeep.Cache."""
        ids = self.words(text(length), return_tensors="pt").input_ids.to(self.model.device)
        for call in ("first", "second"):
            caches = [kvkeep.Cache(self.model, method, self.options.budget) for _ in range(2)]
            shorter = ids[:, call == "second" :]
            began = self.now()
            self.model.generate(shorter, max_new_tokens=1, do_sample=False, past_key_values=caches[0])
            prefill = self.now() - began
            began = self.now()
            new = {"max_new_tokens": 1 + self.options.new, "do_sample": False}
            self.model.generate(shorter, **new, past_key_values=caches[1])
            ms = 1000 * (self.now() - began - prefill) / self.options.new
            self.note("generate with kvkeep.Cache", method=method, length=length, call=call, ms=ms)

    def arrival(self, rows: int, length: int, arriving: int) -> None:
        """Rows decode while a long prompt arrives: the longest gap between two tokens of a row."""
        engine = self.engine()
        engine.warmup(rows=rows + 1)
        new, times = 1000, []
        running = [engine.submit(text(length, seed), max_new_tokens=new) for seed in range(rows)]
        watched = iter(running[0])
        next(watched)

        def watch() -> None:
            times.extend(time.perf_counter() for _ in watched)

        watcher = threading.Thread(target=watch)
        watcher.start()
        while not running[-1].text:
            time.sleep(0.05)
        began = self.now()
        late = engine.submit(text(arriving, 99), max_new_tokens=2)
        late.result()
        ended = self.now()
        gaps = [b - a for a, b in zip(times, times[1:], strict=False) if began <= a <= ended]
        worst = sorted(range(len(gaps)), key=lambda number: -gaps[number])[:4]
        decoded = sum(began <= at <= ended for at in times)
        self.note(
            f"{rows} rows decode, {arriving} tokens arrive", worst_gap_ms=1000 * max(gaps), arrival_s=ended - began,
            steps_meanwhile=decoded, selection=late.request.selection,
            worst_at=" ".join(f"{number}:{1000 * gaps[number]:.0f}" for number in worst),
        )  # fmt: skip
        for handle in running:
            handle.cancel()
        watcher.join()
        engine.close()


def measures(run: Run) -> dict[str, Callable[[], None]]:
    long, short, rows, method = run.options.length, run.options.short, run.options.rows, run.options.method
    return {
        "stock": lambda: run.stock(short),
        "one": lambda: run.one(short, method),
        "long": lambda: run.one(long, method),
        "many": lambda: run.many(rows, short, method),
        "int8": lambda: run.many(rows, short, storage="int8"),
        "cache": lambda: [run.cache(method, short) for method in run.options.cache_methods.split(",")],
        "steps": lambda: [
            run.many(n, 2000, method, 1024) for method in run.options.step_methods.split(",") for n in (rows // 4, rows)
        ],
        "buffered": lambda: [
            run.many(n, 2000, method, 1024, schedule=schedule)
            for method, schedule in BUFFERED
            for n in (rows // 4, rows)
        ],
        "retrieval": lambda: [
            run.questions(rows // 8, long // 2, name) for name in run.options.retrieval_methods.split(",")
        ],
        "overheads": lambda: run.overheads(run.options.read_methods.split(","), long),
        "arrival": lambda: run.arrival(rows // 2, 2000, long),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="tiny")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--method", default="kvkeep", help="of one, long and many")
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--length", type=int, default=131_000 - 512)
    parser.add_argument("--short", type=int, default=8000)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--new-each", type=int, default=129)
    parser.add_argument("--only", default="")
    parser.add_argument("--cache-methods", default="kvkeep,snapkv+adakv,h2o")
    parser.add_argument("--step-methods", default="h2o,streamingllm,ahakv")
    parser.add_argument("--retrieval-methods", default="actqkv,infllm,quest,tokenselect")
    parser.add_argument("--read-methods", default=READ)
    parser.add_argument("--out")
    options = parser.parse_args()
    run = Run(options)
    run.measure(measures(run), "user_paths.json")


if __name__ == "__main__":
    main()
