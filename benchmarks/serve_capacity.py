"""How many long requests fit, how fast they decode, and how soon questions about a shared text are answered, by HTTP.

    PYTHONPATH=src python benchmarks/serve_capacity.py --shape llama-8b --length 32000 --memory 24GB --clients 32

A server with compressed caches and one without, each with the same memory for keys and values and the same clients: all
send their prompts at once, no two alike, and read their answers as they come, in a process of their own. When no more
requests begin to run, a window is measured. Then a text is read once, and asked about many times. Random weights, one
token per character. Needs the extra [serve].
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import uvicorn
from serve_clients import Clients
from stream_client import Answer
from user_paths import Characters, text

import kvkeep
from kvkeep.cli.inputs import byte_count
from kvkeep.model.random_models import random_model
from kvkeep.serve.access import Limits
from kvkeep.serve.routes import create_app
from kvkeep.serve.server import Server

PREFIX_BYTES = 2 * 10**9


class Letters(Characters):
    def get_vocab(self) -> dict[str, int]:
        return {"x": 0}


def tokens(answer: Answer, start: float, end: float) -> int:
    """Those of a window: a token is a character."""
    return sum(len(text) for at, text in answer.events if start <= at < end)


def asking(port: int, bodies: list[dict[str, Any]], at_once: int | None = None) -> Clients:
    return Clients(f"http://127.0.0.1:{port}", [{"model": "random"} | body for body in bodies], at_once)


@contextmanager
def serving(engine: kvkeep.Engine, max_tokens: int) -> Iterator[int]:
    """As `kvkeep serve` does, in a thread. Gives the port."""
    server = Server(engine, "random", limits=Limits(max_tokens=max_tokens, max_answers=10**6))
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listening:
        running = uvicorn.Server(uvicorn.Config(create_app(server), log_level="error", timeout_graceful_shutdown=5))
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            while not running.started:
                time.sleep(0.01)
            yield listening.getsockname()[1]
        finally:
            running.should_exit = True
            thread.join()


def post(port: int, path: str, body: dict[str, Any]) -> dict[str, Any]:
    sent = json.dumps(body | {"model": "random"}).encode()
    asked = urllib.request.Request(f"http://127.0.0.1:{port}{path}", sent, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked) as reply:
        return json.load(reply)


def decoding(engine: kvkeep.Engine) -> int:
    """Requests that have a row now."""
    return sum(len(batch.requests) for batch in list(engine._driver.scheduler.held.batches.values()))


class Run:
    def __init__(self, options: Any) -> None:
        self.options, self.rows = options, list[dict[str, Any]]()
        kind = torch.bfloat16 if options.device.startswith("cuda") else torch.float32
        self.model = random_model(options.shape, options.device, kind)
        self.model.generation_config.eos_token_id = None
        self.memory = byte_count("--memory", options.memory)

    def note(self, measure: str, **figures: Any) -> None:
        rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()}
        self.rows.append({"measure": measure} | rounded)
        print(json.dumps(self.rows[-1]), flush=True)

    def serve(self, method: str | None, budget: int | None, num_clients: int) -> None:
        options, name, began = self.options, method or "kvkeep", time.monotonic()
        how = {"memory": self.memory, "max_rows": options.max_rows, "prefix_cache": min(PREFIX_BYTES, self.memory // 4)}
        with kvkeep.Engine(self.model, Letters(), method, budget, **how) as engine:
            engine.warmup(rows=min(num_clients, options.max_rows))
            self.note("warm-up", method=name, s=time.monotonic() - began)
            with serving(engine, options.new) as port:
                self.capacity(engine, port, name, num_clients)
                if method is None:
                    self.questions(port)
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def capacity(self, engine: kvkeep.Engine, port: int, name: str, num_clients: int) -> None:
        options = self.options
        prompts = [{"prompt": text(options.length, seed), "max_tokens": options.new} for seed in range(num_clients)]
        asked = asking(port, prompts)
        most = self.fill(engine, num_clients)
        start, held = time.monotonic(), engine.held_bytes
        time.sleep(options.seconds)
        end = time.monotonic()
        most = max(most, decoding(engine))
        answers = asked.answers()
        middle = (start + end) / 2
        steady = sum(bool(tokens(each, start, middle) and tokens(each, middle, end)) for each in answers)
        decoded = sum(tokens(each, start, end) for each in answers)
        first = sorted(each.first_token_s for each in answers if each.events and each.events[0][0] < end)
        self.note(
            "capacity", method=name, length=options.length, memory=options.memory, clients=num_clients, in_flight=most,
            read_to_the_end_of_the_window=steady, tokens_per_s=decoded / (end - start),
            held_gb=held / 1e9, first_token_of_first_s=first[0], first_token_median_s=statistics.median(first),
            first_token_of_last_s=first[-1], answered=len(first),
            filled_s=start - min(each.began for each in answers),
        )  # fmt: skip
        while engine._driver.scheduler.held.num_requests:  # their clients have gone
            time.sleep(0.01)

    def fill(self, engine: kvkeep.Engine, num_clients: int) -> int:
        """Until all run, or no more begin to for a while. -> the most that ran"""
        most, since = 0, time.monotonic()
        end = since + self.options.fill_seconds
        while most < num_clients and time.monotonic() < end:
            time.sleep(0.05)
            if (now := decoding(engine)) > most:
                most, since = now, time.monotonic()
            if most and time.monotonic() - since > self.options.patience:
                break
        time.sleep(self.options.settle)
        return most

    def questions(self, port: int) -> None:
        """About one text; each has its own."""
        options, began = self.options, time.monotonic()
        made = post(port, "/v1/contexts", {"text": text(options.length, 10**6)})
        self.note("POST /v1/contexts", tokens=made["tokens"], mb=made["bytes"] / 1e6, s=time.monotonic() - began)
        about = {"max_tokens": 8, "kvkeep": {"context": made["id"]}}
        bodies = [about | {"prompt": text(40, 2 * 10**6 + number)} for number in range(options.questions)]
        for at_once in (1, 10):
            answers = asking(port, bodies, at_once).answers()
            waits = sorted(1000 * each.first_token_s for each in answers)
            spread = {"median_ms": statistics.median(waits), "p99_ms": waits[int(0.99 * len(waits))]}
            more = {"first_asked_ms": 1000 * answers[0].first_token_s, "worst_ms": waits[-1]}
            self.note("first token of a question", questions=len(waits), at_once=at_once, **spread, **more)

    def table(self) -> None:
        for row in self.rows:
            print(" | ".join(f"{name} {value}" for name, value in row.items()))
        full, kvkeep_ = [row for row in self.rows if row["measure"] == "capacity"]
        for name in ("in_flight", "tokens_per_s"):
            print(f"{name}: {kvkeep_[name] / full[name]:.1f} x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama-8b")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--length", type=int, default=32_000, help="tokens of a prompt")
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--memory", default="24GB", help="of keys and values, for either server")
    parser.add_argument("--clients", type=int, default=32, help="of the server that compresses")
    parser.add_argument("--full-clients", type=int, default=8, help="of the one that does not: more than it holds")
    parser.add_argument("--new", type=int, default=2048, help="tokens of an answer")
    parser.add_argument("--max-rows", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=5, help="of the window")
    parser.add_argument("--patience", type=float, default=6, help="seconds without one more that runs: it is full")
    parser.add_argument("--settle", type=float, default=1, help="seconds between these and the window")
    parser.add_argument("--fill-seconds", type=float, default=120, help="until the window, at most")
    parser.add_argument("--questions", type=int, default=100)
    run = Run(parser.parse_args())
    run.serve(None, run.options.budget, run.options.clients)
    run.serve("full", None, run.options.full_clients)
    run.rows.sort(key=lambda row: row.get("method", "kvkeep") == "kvkeep")
    run.table()


if __name__ == "__main__":
    main()
