"""What conversations cost that lose nothing: benchmarks/conversations.py --shape llama-8b --out folder

Random weights, or those of a model's folder (--shape folder: exact answers need weights that mean something). Every row
is a measure through the public API. `python benchmarks/conversations.py --url http://127.0.0.1:8000 --model m` asks
any OpenAI server instead: conversations about long texts that take turns, each in a stream of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from typing import Any

from stream_client import Server

QUESTION = 64  # tokens
REQUEST = "Tell what happened, in the order of the text, with every number in it."
WORDS = "the", "keeper", "counted", "geese", "over", "a", "calm", "grey", "sea", "at", "dawn"


def measure(options: Any) -> None:
    """Measure here, in this process."""
    import torch
    from characters import Characters
    from user_paths import Run, text

    from kvkeep.evaluate.tasks.talk import sized

    run = Run(options)
    weights = torch.cuda.memory_allocated() if run.cuda else 0

    def peak() -> float:
        """GB above the weights since it was asked last; 0 without a GPU."""
        if not run.cuda:
            return 0.0
        most = torch.cuda.max_memory_allocated() - weights
        torch.cuda.reset_peak_memory_stats()
        return most / 1e9

    def talk(length: int, seed: int = 0) -> list[dict[str, str]]:
        said = text(length, seed), text(QUESTION, 1)
        if not isinstance(run.words, Characters):  # weights that mean something
            said = sized("talk/system", length, run.words, 1, seed)[0].context, REQUEST
        return [{"role": role, "content": each} for role, each in zip(("system", "user"), said, strict=True)]

    def first_token(length: int, storage: str | None, is_ahead: bool) -> None:
        """Of questions in turn about a text on the host, and how long its layers take to be read by themselves."""
        engine = run.engine(options.method, history_storage=storage)
        engine.warmup(rows=1)
        assert engine.store.histories is not None
        pool, said = engine.store.histories.pool, talk(length)
        if not is_ahead:
            for ahead in pool.ahead.values():
                ahead._following = lambda *_: None
        about = {"length": length, "storage": storage or "model", "ahead": str(is_ahead)}
        for turn in range(4):
            peak()
            began = run.now()
            handle = engine.submit(said, max_new_tokens=16)
            texts = iter(handle)
            next(texts)
            first = time.perf_counter() - began
            reply = handle.text + "".join(texts)
            cached = handle.request.num_cached
            run.note("a turn", turn=turn, first_token_ms=1000 * first, cached=cached, peak_gb=peak(), **about)
            said += [{"role": "assistant", "content": reply}, {"role": "user", "content": text(QUESTION, turn + 2)}]
        known = engine.store.histories.find("", engine.config.encode(said))
        for _ in range(3):
            began = run.now()
            for index in pool.formats:
                known.read(index)
            pool.mark_used()
            run.note("its layers, read alone", ms=1000 * (run.now() - began), **about)
        engine.close()

    def held(length: int, storage: str | None) -> None:
        """Memory of many conversations that decode at a time."""
        engine = run.engine(options.method, history_storage=storage, max_rows=options.rows)
        engine.warmup(rows=options.rows)
        peak()
        began = run.now()
        handles = [engine.submit(talk(length, seed), max_new_tokens=options.new_each) for seed in range(options.rows)]
        for handle in handles:
            handle.result()
        assert engine.store.histories is not None
        found = {"s": run.now() - began, "peak_gb": peak(), "host_gb": engine.store.histories.nbytes / 1e9}
        run.note(f"{options.rows} conversations", length=length, storage=storage or "model", **found)
        engine.close()

    def reading(length: int) -> None:
        """Read a text with the method that needs no question."""
        for method in ("kvkeep_context", "kvkeep"):
            engine = run.engine(method)
            engine.read(text(length // 8, 1))
            peak()
            began = run.now()
            engine.read(text(length))
            run.note("Engine.read", method=method, length=length, s=run.now() - began, peak_gb=peak())
            engine.close()

    def exact(length: int) -> None:
        """Against compressed answers, and those of all tokens."""
        answers: dict[str, list[int]] = {}
        for name, method, how in (
            ("compressed", options.method, {}),
            ("exact", options.method, {"exact": True}),
            ("full", "full", {}),
        ):
            engine = run.engine(method)
            engine.warmup(rows=1)
            for call in ("first", "second"):
                began = run.now()
                handle = engine.submit(talk(length, int(call == "second")), max_new_tokens=options.new_exact, **how)
                handle.result()
                answers[name + call], found = handle.request.answer.ids, handle.request.agreement
                same = answers[name + call] == answers.get("exact" + call, answers[name + call])
                seen = {"passes": found.passes, "guessed": found.guessed, "right": found.right, "is_exacts": str(same)}
                run.note(f"{name} answer", call=call, length=length, s=run.now() - began, **seen)
            engine.close()

    def gap(length: int) -> None:
        """The longest pause of rows that decode while a turn over a long history streams."""
        engine = run.engine(options.method)
        engine.warmup(rows=17)
        said = talk(length)
        said += [{"role": "assistant", "content": engine.submit(said, max_new_tokens=4).result()}]
        said += [{"role": "user", "content": text(QUESTION, 3)}]
        running = [engine.submit(text(2000, seed), max_new_tokens=1000) for seed in range(16)]
        watched, times = iter(running[0]), list[float]()
        next(watched)
        while not all(handle.text for handle in running):
            next(watched)
        began, late = run.now(), engine.submit(said, max_new_tokens=2)
        while not late.done:
            next(watched)
            times.append(time.perf_counter())
        gaps = [1000 * (b - a) for a, b in zip([began, *times], times, strict=False)]
        cached = late.request.num_cached
        run.note("16 rows beside a turn", length=length, worst_gap_ms=max(gaps), cached=cached, steps=len(gaps))
        for handle in running:
            handle.cancel()
        engine.close()

    lengths = [int(length) for length in options.lengths.split(",")]
    kinds = {"model": None, "int8": "int8", "int4": "int4"}
    storages = [kinds[name] for name in options.storages.split(",")]
    measures = {
        "turn": lambda: [first_token(n, kind, ahead) for n in lengths for kind in storages for ahead in (True, False)],
        "gap": lambda: gap(lengths[0]),
        "reading": lambda: reading(lengths[-1] - 1024),
        "exact": lambda: exact(lengths[0]),
        "held": lambda: held(lengths[0], storages[-1]),
    }
    run.measure(measures, "conversations.json")


async def ask(options: Any, said: list[dict[str, str]]) -> tuple[float, str]:
    """POST /v1/chat/completions. -> seconds until the first text, and the answer, which joins the conversation"""
    body = {"model": options.model, "messages": said, "max_tokens": options.new, "temperature": 0, "stream": True}
    stream = await Server(options.url).post("/v1/chat/completions", json.dumps(body).encode())
    answer = stream.answer()
    if answer.failure:
        raise RuntimeError(f"{answer.failure}: {answer.said}")
    return answer.first_token_s, answer.text


async def converse(options: Any) -> None:
    """Conversations that take turns; in every round, all of them ask at a time."""

    def words(count: int, source: random.Random) -> str:
        if options.numbered:
            return " ".join(f"t{source.randrange(options.numbered)}" for _ in range(count))
        return " ".join(source.choice(WORDS) for _ in range(count))

    draws = [random.Random(number) for number in range(options.rows)]
    length = int(options.lengths.split(",")[0])
    talks = [[{"role": "system", "content": words(length, draw)}] for draw in draws]
    places = asyncio.Semaphore(options.at_once or options.rows)

    async def turn(said: list[dict[str, str]], draw: random.Random) -> float:
        said.append({"role": "user", "content": words(QUESTION, draw)})
        async with places:
            first, answer = await ask(options, said)
        said.append({"role": "assistant", "content": answer})
        return first

    for number in range(options.turns):
        began = time.monotonic()
        firsts = await asyncio.gather(*(turn(said, draw) for said, draw in zip(talks, draws, strict=True)))
        took = time.monotonic() - began
        row = {"round": number, "turns_per_s": len(talks) / took, "first_token_s": statistics.median(firsts)}
        print(json.dumps(row | {"worst_s": max(firsts), "s": took}), flush=True)


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="tiny")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--method", default="kvkeep")
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--lengths", default="32000,130000", help="of texts, in tokens; for --url in words")
    parser.add_argument("--storages", default="model,int8,int4", help="of histories; the last is that of many")
    parser.add_argument("--rows", type=int, default=64, help="conversations at a time")
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--new-each", type=int, default=64)
    parser.add_argument("--new-exact", type=int, default=1000)
    parser.add_argument("--only", default="")
    parser.add_argument("--url", help="of an OpenAI server")
    parser.add_argument("--model", default="random")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--numbered", type=int, help="of a tokenizer with the words t0 … of a token each: so many")
    parser.add_argument("--at-once", type=int, help="requests under way; all by default")
    parser.add_argument("--out")
    options = parser.parse_args()
    asyncio.run(converse(options)) if options.url else measure(options)


if __name__ == "__main__":
    main()
