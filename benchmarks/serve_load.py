"""Many streaming clients of `kvkeep serve`: is every answer that of its solo run, and how long do clients wait?

    PYTHONPATH=src python benchmarks/serve_load.py --clients 50 --seconds 30

Starts a server of a tiny random model (float64: batches round too little to change a sampled token), lets clients ask
jobs of mixed lengths, methods and seeds, one after the other, then asks every job alone and compares all answers. Needs
the development extras.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from stream_client import Server

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import serving  # noqa: E402 (of the tests: a server of a tiny model)

METHODS = [("kvkeep", 64), ("snapkv+adakv", 48), ("streamingllm", 64), ("full", None), ("h2o", 64), ("quest", 64)]
LENGTHS = 20, 200, 900  # characters of prompts, which are its tokens
VANISHING = 0.05  # of the clients' requests are left in the middle
LEFT_AFTER = 3  # pieces of the reply


@dataclass
class Waits:
    """Seconds that clients waited, and what they got."""

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    answers: list[tuple[int, str]] = field(default_factory=list)  # job, text
    left: int = 0
    lost: int = 0
    statuses: Counter[int] = field(default_factory=Counter)


def make_jobs(count: int, methods: list[tuple[str, int | None]]) -> list[dict]:
    draw, words = (
        random.Random(0),
        ["the", "keeper", "counted", "geese", "over", "a", "calm", "grey", "sea", "at", "dawn"],
    )
    jobs = []
    for number in range(count):
        method, budget = methods[number % len(methods)]
        length = draw.choice(LENGTHS)
        text = " ".join(draw.choice(words) for _ in range(length))[:length]
        job = {"model": "tiny", "messages": [{"role": "user", "content": text}], "stream": True, "seed": number}
        job |= {"max_tokens": draw.choice((8, 24, 64)), "temperature": draw.choice((0, 1))}
        jobs.append(job | {"kvkeep": {"method": method} | ({"budget": budget} if budget else {})})
    return jobs


async def ask(server: Server, number: int, job: dict, waits: Waits, leaves: bool = False) -> None:
    enough = (lambda stream: len(stream.pieces) > LEFT_AFTER) if leaves else None
    stream = await server.post("/v1/chat/completions", json.dumps(job).encode(), enough=enough)
    answer = stream.answer()
    waits.statuses[answer.status] += 1
    if answer.status != 200:
        return await asyncio.sleep(float(stream.headers.get("retry-after", 1)))
    waits.first += [answer.first_token_s] if answer.events else []
    waits.between += answer.gaps
    if answer.finish:
        waits.answers.append((number, answer.text))
    else:
        waits.left += leaves
        waits.lost += not leaves


async def load(url: str, jobs: list[dict], clients: int, seconds: float) -> Waits:
    waits, end, server = Waits(), time.monotonic() + seconds, Server(url)

    async def client(seed: int) -> None:
        draw = random.Random(seed)
        while time.monotonic() < end:
            number = draw.randrange(len(jobs))
            await ask(server, number, jobs[number], waits, draw.random() < VANISHING)

    await asyncio.gather(*map(client, range(clients)))
    return waits


async def solo(url: str, jobs: list[dict]) -> dict[int, str]:
    waits = Waits()
    for number, job in enumerate(jobs):
        await ask(Server(url), number, job, waits)
    return dict(waits.answers)


def read(url: str) -> str:
    with urllib.request.urlopen(f"{url}/metrics") as reply:
        return reply.read().decode()


def histogram_quantile(page: str, name: str, share: float) -> tuple[float, float]:
    """Between which two bounds of a histogram."""
    found = [(float(bound), float(count)) for bound, count in re.findall(rf'{name}_bucket{{le="(.*?)"}} (\S+)', page)]
    wanted, below = share * found[-1][1], 0.0
    for bound, count in found:
        if count >= wanted:
            return below, bound
        below = bound
    raise AssertionError


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--jobs", type=int, default=60)
    parser.add_argument("--methods", help="of these, by commas: " + ",".join(name for name, _ in METHODS))
    args = parser.parse_args()
    chosen = args.methods.split(",") if args.methods else [name for name, _ in METHODS]
    jobs = make_jobs(args.jobs, [each for each in METHODS if each[0] in chosen])
    options = "--dtype", "auto", "--max-rows", str(args.clients), "--max-answers", str(4 * args.clients)
    with tempfile.TemporaryDirectory() as folder, serving.process(folder, *options, double=True) as server:
        process = psutil.Process(server.pid)
        asyncio.run(load(server.url, jobs, args.clients, args.seconds / 3))
        middle = process.memory_info().rss
        before = read(server.url)
        waits = asyncio.run(load(server.url, jobs, args.clients, args.seconds))
        page, end = read(server.url), process.memory_info().rss
        alone = asyncio.run(solo(server.url, jobs))
    wrong = [number for number, text in waits.answers if text != alone[number]]
    ends = f"{waits.left} left early, {waits.lost} lost, HTTP {dict(waits.statuses)}"
    print(f"{len(waits.answers)} answers of {args.clients} clients, {ends}")
    print(f"not as alone: {len(wrong)} answers, of the jobs {sorted(set(wrong))}")
    print(f"server's memory: {middle / 1e6:.0f} MB after a third of the time, {end / 1e6:.0f} MB at the end")
    print(f"{len(waits.between) + len(waits.first)} pieces of text, {len(waits.between) / args.seconds:.0f} per second")
    for name, values in (("first_token", waits.first), ("between_tokens", waits.between)):
        for share in (0.5, 0.99):
            low, high = histogram_quantile(since(page, before), f"kvkeep_{name}_seconds", share)
            seen = quantile(values, share)
            print(f"{name} p{share * 100:.0f}: clients {seen:.4f} s, /metrics {low:.4f} to {high:.4f} s")


def since(page: str, before: str) -> str:
    """The page with its counts less those of an earlier one."""
    old = dict(line.rsplit(" ", 1) for line in before.splitlines() if not line.startswith("#"))
    lines = [line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#")]
    return "\n".join(f"{name} {float(value) - float(old.get(name, 0))}" for name, value in lines)


if __name__ == "__main__":
    main()
