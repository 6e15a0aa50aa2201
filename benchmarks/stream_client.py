"""A client of an OpenAI server, and what it sees of a streamed answer. Plain sockets, the standard library alone."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

TOGETHER_S = 0.0002  # events this close came in one packet


@dataclass
class Answer:
    """What came of a request."""

    status: int  # of HTTP
    began: float  # time.monotonic(), as all times
    ended: float
    problem: str  # why it ended early
    said: str  # the beginning of the body, or an error in the middle of it
    events: list[tuple[float, str]]  # when text came, and which
    num_events: int  # before those that came together became one
    finish: str | None
    usage: dict[str, Any] | None

    @property
    def failure(self) -> str:
        """Why this is no whole answer; empty where it is one."""
        if self.status not in (0, 200):
            return str(self.status)
        return self.problem or ("" if self.finish else "cut off") or ("" if self.events else "no text")

    @property
    def text(self) -> str:
        return "".join(text for _, text in self.events)

    @property
    def counts(self) -> list[int]:
        """The tokens of every event; where the server does not count them, each is taken for one."""
        total = (self.usage or {}).get("completion_tokens") or self.num_events
        return shared_out(total, [len(text) for _, text in self.events])

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)

    @property
    def first_token_s(self) -> float:
        return self.events[0][0] - self.began

    @property
    def gaps(self) -> list[float]:
        """Seconds between events."""
        return [after - before for (before, _), (after, _) in zip(self.events, self.events[1:], strict=False)]

    @property
    def token_gaps(self) -> list[float]:
        """Seconds between tokens; those that come together share the gap before them."""
        pairs = zip(self.gaps, self.counts[1:], strict=True)
        return [gap / count for gap, count in pairs if count for _ in range(count)]

    @property
    def mean_gap(self) -> float:
        """Seconds a token, after the first event."""
        later = sum(self.counts[1:])
        return (self.events[-1][0] - self.events[0][0]) / later if later else 0.0


def shared_out(total: int, sizes: list[int]) -> list[int]:
    """So many for every size, in proportion; at least one each, as far as they go."""
    counts, done, seen, whole = [], 0, 0, sum(sizes)
    for left, size in zip(range(len(sizes) - 1, -1, -1), sizes, strict=True):
        seen += size
        at_least, at_most = done + 1, max(total - left, done + 1)
        until = min(total, at_most, max(at_least, round(total * seen / whole)))
        counts.append(until - done)
        done = until
    return counts


@dataclass
class Stream:
    """A request under way: what arrives is noted with its time, and read afterwards, which costs the least."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    began: float = 0.0
    ended: float = 0.0
    problem: str = ""
    pieces: list[tuple[float, bytes]] = field(default_factory=list)  # of the body

    def answer(self) -> Answer:
        said = b"".join(piece for _, piece in self.pieces)[:300].decode("utf8", "replace")
        found = Answer(self.status, self.began, self.ended, self.problem, said, [], 0, None, None)
        for at, event in self._events():
            if event.get("error"):
                found.problem, found.said = "error in the stream", json.dumps(event["error"])[:300]
            found.usage = event.get("usage") or found.usage
            choices = event.get("choices") or ()
            if text := "".join(map(text_of, choices)):
                found.num_events += 1
                together = bool(found.events) and at - found.events[-1][0] < TOGETHER_S
                before = found.events.pop() if together else (at, "")
                found.events.append((before[0], before[1] + text))
            for choice in choices:
                found.finish = choice.get("finish_reason") or found.finish
        return found

    def _events(self) -> Iterator[tuple[float, dict[str, Any]]]:
        rest = b""
        for at, piece in self.pieces:
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                    yield at, parsed(data)


def parsed(data: bytes) -> dict[str, Any]:
    try:
        return json.loads(data)
    except ValueError:
        return {"error": f"not JSON: {data[:200]!r}"}


def text_of(choice: dict[str, Any]) -> str:
    """Of a completion, or of a chat."""
    return choice.get("text") or (choice.get("delta") or {}).get("content") or ""


class Server:
    """Where to ask, over plain sockets."""

    def __init__(self, url: str, key: str = "", timeout: float = 600) -> None:
        """timeout: seconds of a request"""
        self.where, self.timeout = urlsplit(url), timeout
        self.base = self.where.path.rstrip("/").removesuffix("/v1")
        self.headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})

    def model(self) -> str:
        """The first that the server has."""
        url = f"{self.where.scheme}://{self.where.netloc}{self.base}/v1/models"
        with urllib.request.urlopen(urllib.request.Request(url, headers=self.headers)) as reply:
            return json.load(reply)["data"][0]["id"]

    async def post(
        self, path: str, body: bytes, stream: Stream | None = None, enough: Callable[[Stream], bool] | None = None
    ) -> Stream:
        """Ask, and note what arrives in the stream. enough: leave when it says so

        What goes wrong is noted, too.
        """
        stream = stream or Stream()
        stream.began = time.monotonic()
        try:
            await asyncio.wait_for(self._post(path, body, stream, enough), self.timeout)
        except (asyncio.TimeoutError, TimeoutError):
            stream.problem = "timeout"
        except (OSError, EOFError, ValueError, IndexError):
            stream.problem = "dropped" if stream.status else "no reply"
        finally:
            stream.ended = time.monotonic()
        return stream

    async def _post(self, path: str, body: bytes, stream: Stream, enough: Callable[[Stream], bool] | None) -> None:
        tls = self.where.scheme == "https" or None
        port = self.where.port or (443 if tls else 80)
        reader, writer = await asyncio.open_connection(self.where.hostname, port, ssl=tls)
        try:
            headers = self.headers | {"Host": self.where.netloc, "Content-Length": len(body), "Connection": "close"}
            lines = [f"POST {self.base}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
            writer.write("\r\n".join([*lines, "", ""]).encode() + body)
            stream.status = int((await reader.readline()).split()[1])
            while line := (await reader.readline()).strip().decode("latin1"):
                name, _, value = line.partition(":")
                stream.headers[name.lower()] = value.strip().lower()
            while piece := await next_piece(reader, stream):
                stream.pieces.append((time.monotonic(), piece))
                if enough and enough(stream):
                    break
        finally:
            writer.close()


async def next_piece(reader: asyncio.StreamReader, stream: Stream) -> bytes:
    """Of the body; nothing at its end."""
    if "chunked" in stream.headers.get("transfer-encoding", ""):
        size = int((await reader.readline()).split(b";")[0], 16)
        return (await reader.readexactly(size + 2))[:-2]
    if length := stream.headers.get("content-length"):
        return b"" if stream.pieces else await reader.readexactly(int(length))
    return await reader.read(2**16)
