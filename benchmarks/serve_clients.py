"""The same load for any OpenAI server: kvkeep, vLLM, SGLang.

    python benchmarks/serve_clients.py --url http://127.0.0.1:8000 --setting a --repeat 2
    python benchmarks/serve_clients.py --url http://127.0.0.1:8000 --requests 200 --rate 4 --goal-ttft 2 --goal-itl .05

Prompts are random token ids, no two alike beyond --shared tokens at their beginning. All are asked at once, --at-once
of them at a time, or at random moments, --rate a second. A run prints a line of JSON, and on a terminal a table. Read
the second run: in the first one a server may still compile. Runs have other prompts with the same shared beginning; a
server that is asked once more with the same --seed may have them cached.

A first token, with all that come with it, is there when an event has text; its client waits from before it connects,
with --at-once from when it has a place. An event may have several tokens: the server's usage says how many an answer
has, and its events share them by their characters. Latencies, in seconds: ttft (first token), itl (between two tokens;
those that come together share the gap before them), gap (between two events), tpot (the mean between the tokens of an
answer), e2e (the whole answer). client_lag is how late this process itself was: if it is not far below the others, it
had too little CPU, and they are not the server's.

It needs the standard library, stream_client.py and load_figures.py. Other benchmarks have their `Clients` from here.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Any

from load_figures import figures, table
from stream_client import Answer, Server, Stream

SETTINGS = {  # requests, tokens of a prompt, of an answer, and of the beginning that prompts share
    "a": (64, 8_000, 128, 0),
    "b": (32, 32_000, 512, 0),
    "c": (64, 2_000, 1_000, 0),
    "d": (1, 8_000, 256, 0),
    "e": (64, 8_000, 128, 7_000),
    "f": (256, 8_000, 512, 0),
}
SIZES = "requests", "prompt_tokens", "answer_tokens", "shared"
NAMED = "label", "model", "at_once", "rate", "prompt_as", "seed"
WORDS = "the", "keeper", "counted", "geese", "over", "a", "calm", "grey", "sea", "at", "dawn"
POLL_S = 0.005
TELL_S = 5.0


async def ask_all(
    server: Server,
    bodies: list[bytes],
    streams: list[Stream],
    at_once: int | None = None,
    due: list[float] | None = None,
) -> None:
    """at_once: None: all. due: seconds from now, for each"""
    places, began = asyncio.Semaphore(at_once or len(bodies)), time.monotonic()

    async def one(number: int) -> None:
        if due:
            await asyncio.sleep(began + due[number] - time.monotonic())
        async with places:
            await server.post("/v1/completions", bodies[number], streams[number])

    await asyncio.gather(*map(one, range(len(bodies))))


class Clients:
    """Clients of a benchmark, under way in a process of their own, so that they take no time from its server."""

    def __init__(self, url: str, bodies: list[dict[str, Any]], at_once: int | None = None) -> None:
        """at_once: None: all, until somebody asks for the answers"""
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([sys.executable, __file__, "--asked"], **pipes)
        assert self.process.stdin
        self.process.stdin.write(json.dumps({"url": url, "bodies": bodies, "at_once": at_once}) + "\n")
        self.process.stdin.flush()

    def answers(self) -> list[Answer]:
        """Those that are not whole are as far as they came."""
        found = [Answer(**each) for each in json.loads(self.process.communicate()[0])]
        wrong = {each.status for each in found} - {200}
        assert not wrong, f"HTTP {wrong}"
        return found


async def asked() -> None:
    """That process: a line of its input says what to ask, and its output is what all clients saw."""
    what = json.loads(sys.stdin.readline())
    bodies = [json.dumps(body | {"stream": True}).encode() for body in what["bodies"]]
    streams = [Stream() for _ in bodies]
    going = asyncio.ensure_future(ask_all(Server(what["url"], timeout=10**6), bodies, streams, what["at_once"]))
    if not what["at_once"]:
        await asyncio.to_thread(sys.stdin.read)
        going.cancel()
    with suppress(asyncio.CancelledError):
        await going
    json.dump([asdict(stream.answer()) for stream in streams], sys.stdout)


class Load:
    """What one run asks for."""

    def __init__(self, options: Any, setting: str, number: int) -> None:
        self.options, self.setting, self.number = options, setting, number
        sizes = dict(zip(SIZES, SETTINGS[setting or "a"], strict=True))
        sizes |= {name: getattr(options, name) for name in SIZES if getattr(options, name) is not None}
        self.requests, self.prompt_tokens, self.answer_tokens, self.shared = sizes.values()
        if self.shared > self.prompt_tokens:
            raise SystemExit(f"--shared {self.shared} is longer than --prompt-tokens {self.prompt_tokens}.")
        self.draw = random.Random(f"{options.seed} {number}")
        self.beginning = random.Random(options.seed).choices(self.ids, k=self.shared)

    @property
    def ids(self) -> range:
        return range(*map(int, self.options.ids.split(":")))

    def prompt(self) -> list[int] | str:
        ids = self.beginning + self.draw.choices(self.ids, k=self.prompt_tokens - self.shared)
        if self.options.prompt_as == "ids":
            return ids
        word = self.options.word
        return " ".join(word.format(each) if word else WORDS[each % len(WORDS)] for each in ids)

    def body(self, answer_tokens: int) -> bytes:
        asked = {"model": self.options.model, "prompt": self.prompt(), "max_tokens": answer_tokens, "temperature": 0}
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
        return json.dumps(asked | ({} if self.options.eos else {"ignore_eos": True})).encode()

    def due(self) -> list[float] | None:
        """Seconds until each request, where they arrive by themselves."""
        if not self.options.rate:
            return None
        return list(accumulate(self.draw.expovariate(self.options.rate) for _ in range(self.requests)))

    async def run(self, server: Server) -> dict[str, Any]:
        for _ in range(self.options.warm):
            await server.post("/v1/completions", self.body(8))
        bodies = [self.body(self.answer_tokens) for _ in range(self.requests)]
        streams, lags = [Stream() for _ in bodies], list[float]()
        beside = asyncio.ensure_future(watch(streams, lags))
        gc.disable()  # a collection would come between events
        await ask_all(server, bodies, streams, self.options.at_once, self.due())
        gc.enable()
        beside.cancel()
        return self.named() | figures(self, [stream.answer() for stream in streams], lags)

    def named(self) -> dict[str, Any]:
        """What was asked for, by name."""
        given = {name: getattr(self.options, name) for name in NAMED}
        return given | {"setting": self.setting, "run": self.number} | {name: getattr(self, name) for name in SIZES}


async def watch(streams: list[Stream], lags: list[float]) -> None:
    """Note how late this process is, and tell a terminal how far the answers are."""
    began = told = time.monotonic()
    while True:
        due = time.monotonic() + POLL_S
        await asyncio.sleep(POLL_S)
        now = time.monotonic()
        lags.append(now - due)
        if sys.stderr.isatty() and now > told + TELL_S:
            told = now
            said = (f"{sum(bool(getattr(each, name)) for each in streams)} {name}" for name in ("began", "ended"))
            print(f"{now - began:.0f} s:", *said, file=sys.stderr)


def parsed() -> Any:
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=about)
    parser.add_argument("--url", required=True, help="of the server, with or without /v1")
    parser.add_argument("--model", help="by default the first that the server has")
    parser.add_argument("--setting", default="", help="a to f: sizes by name, one or several by commas")
    for name, default in zip(SIZES, SETTINGS["a"], strict=True):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=f"{default}, or as the setting has it")
    loop = parser.add_mutually_exclusive_group()
    loop.add_argument("--at-once", type=int, help="requests under way; by default all")
    loop.add_argument("--rate", type=float, help="requests a second that arrive, at random (Poisson)")
    parser.add_argument("--repeat", type=int, default=1, help="runs of every setting")
    parser.add_argument("--warm", type=int, default=0, help="requests with answers of 8 tokens before every run")
    parser.add_argument("--goal-ttft", type=float, help="seconds until the first token")
    parser.add_argument("--goal-itl", type=float, help="seconds a token after that, in an answer's mean")
    parser.add_argument("--prompt-as", choices=["ids", "text"], default="ids")
    parser.add_argument("--ids", default="100:128000", help="first:end of the token ids that prompts have")
    parser.add_argument("--word", help="a text's word for an id, such as t{}; by default a common one")
    parser.add_argument("--eos", action="store_true", help="an answer may end early; else ignore_eos is sent")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=600, help="seconds of a request")
    parser.add_argument("--key", default="", help="that the server wants")
    parser.add_argument("--label", default="")
    parser.add_argument("--out", type=Path, help="a file that the JSON lines are appended to, too")
    options = parser.parse_args()
    options.settings = options.setting.split(",")
    if wrong := set(options.settings) - {"", *SETTINGS}:
        parser.error(f"--setting {', '.join(sorted(wrong))}: there are {', '.join(SETTINGS)}.")
    return options


def main() -> None:
    options = parsed()
    server = Server(options.url, options.key, options.timeout)
    options.model = options.model or server.model()
    settings = [setting for setting in options.settings for _ in range(options.repeat)]
    for number, setting in enumerate(settings, 1):
        row = asyncio.run(Load(options, setting, number).run(server))
        print(json.dumps(row), flush=True)
        if sys.stderr.isatty():
            print(table(row), file=sys.stderr)
        if options.out:
            with options.out.open("a") as out:
                out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    asyncio.run(asked()) if sys.argv[1:] == ["--asked"] else main()
