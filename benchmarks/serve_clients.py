"""Clients of benchmarks/serve_capacity.py: a process of their own, so that they take no time from the server.

The first line of its input says what to ask, as JSON: port, bodies, and how many at_once (null: all, until the input
ends). Its output is what every client saw.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from typing import Any

TEXT = re.compile(rb'"text": "(x*)"')  # a letter for every token


async def follow(port: int, body: dict[str, Any], stream: dict[str, Any]) -> None:
    """POST /v1/completions. stream: gets its status, when it began, and when how many tokens came"""
    sent = json.dumps(body | {"model": "random", "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    stream["began"] = time.monotonic()
    writer.write(f"{head}Content-Length: {len(sent)}\r\nConnection: close\r\n\r\n".encode() + sent)
    try:
        async for line in reader:
            if line.startswith(b"HTTP/1.1 "):
                stream["status"] = int(line.split()[1])
            if count := sum(map(len, TEXT.findall(line))):
                stream["seen"].append((time.monotonic(), count))
    finally:
        writer.close()


async def main() -> None:
    asked = json.loads(sys.stdin.readline())
    streams = [{"status": 0, "began": 0.0, "seen": []} for _ in asked["bodies"]]
    places = asyncio.Semaphore(asked["at_once"] or len(streams))

    async def one(body: dict[str, Any], stream: dict[str, Any]) -> None:
        async with places:
            await follow(asked["port"], body, stream)

    tasks = [asyncio.ensure_future(one(*each)) for each in zip(asked["bodies"], streams, strict=True)]
    if not asked["at_once"]:
        await asyncio.to_thread(sys.stdin.read)
        for task in tasks:
            task.cancel()
    for error in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(error, Exception):
            raise error
    json.dump(streams, sys.stdout)


if __name__ == "__main__":
    asyncio.run(main())
