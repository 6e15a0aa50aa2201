"""The other processes of a server whose model is split over several: started, told, watched, ended.

Each reads from its standard input. When that ends, so does the process: whether the server was closed, or killed.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import IO, cast

LENGTH = 8  # bytes before a message that tell its size
GRACE_S = 3.0  # for the server's own error, if all processes fail alike
END_S = 10.0  # for a process to end by itself


class Followers:
    def __init__(self, command: list[str], count: int, lost: Callable[[str], None]) -> None:
        """lost: told that one has ended, in words"""
        self.lost, self.closing = lost, threading.Event()
        self.ready = False  # the server is: before, an error is its own to say
        self.processes = [subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(count)]
        for rank, process in enumerate(self.processes, 1):
            threading.Thread(target=self._watch, args=(rank, process), name="kvkeep-follower", daemon=True).start()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if not self.closing.wait(0 if self.ready else GRACE_S):
            how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
            self.lost(f"process {rank} of {len(self.processes) + 1} {how}, and each has a part of the model.")

    def failed(self, error: BaseException) -> None:
        """Tell that this process failed; if another one has ended, its watch tells that better reason before."""
        time.sleep(GRACE_S)
        self.lost(f"process 0 of {len(self.processes) + 1} cannot go on in step with the others: {error}")

    def send(self, message: bytes) -> None:
        for rank in range(1, len(self.processes) + 1):
            self.send_to(rank, message)

    def send_to(self, rank: int, message: bytes) -> None:
        pipe = cast(IO[bytes], self.processes[rank - 1].stdin)
        pipe.write(len(message).to_bytes(LENGTH, "big") + message)
        pipe.flush()

    def close(self) -> None:
        self.closing.set()
        for process in self.processes:
            cast(IO[bytes], process.stdin).close()
        for process in self.processes:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def incoming(pipe: IO[bytes]) -> Callable[[], bytes]:
    """Give a function that waits for a follower's next message. Without more of them, the process ends at once."""
    messages: SimpleQueue[bytes] = SimpleQueue()

    def read() -> None:
        while head := pipe.read(LENGTH):
            messages.put(pipe.read(int.from_bytes(head, "big")))
        os._exit(0)  # the main thread may wait for a process that is gone

    threading.Thread(target=read, name="kvkeep-messages", daemon=True).start()
    return messages.get
