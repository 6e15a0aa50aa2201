"""HTTP connections with limits: uvicorn alone waits for a header and a body as long as a client likes."""

from __future__ import annotations

from asyncio import TimerHandle
from dataclasses import dataclass
from typing import Any, ClassVar

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

SPARE = 96  # descriptors for files, libraries and the engine
MAX_HEADER = 65_536  # bytes
KEEP_ALIVE_S = 75  # of a connection between two requests: longer than clients keep theirs


@dataclass(frozen=True)
class ConnectionLimits:
    max_connections: int = 1024  # open at a time
    header_seconds: float = 10.0  # until the header of a request is complete
    body_seconds: float = 60.0  # until its body is

    def most(self) -> int:
        """The number of connections, within what the system lets this process open."""
        try:
            import resource
        except ImportError:  # not on this system
            return self.max_connections
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if allowed == resource.RLIM_INFINITY:
            return self.max_connections
        return max(1, min(self.max_connections, max(allowed - SPARE, allowed // 2)))


class LimitedProtocol(H11Protocol):
    """One connection. Where there are too many, a new one closes the oldest ones that no answer is under way on."""

    limits: ClassVar[ConnectionLimits]
    since = asked = 0.0  # when it was opened or had its last answer; when its last header was complete
    made_room = False  # it was closed for a new connection
    deadline: TimerHandle | None = None

    @classmethod
    def of(cls, limits: ConnectionLimits) -> type[LimitedProtocol]:
        return type(cls.__name__, (cls,), {"limits": limits})

    @property
    def waits(self) -> bool:
        """Whether no answer is under way: its client has to send something, or does not take what is left for it."""
        return self.transport.is_closing() or not self.cycle or self.cycle.response_complete or self.cycle.more_body

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.since = self.loop.time()
        self._wait(self.limits.header_seconds)
        self._make_room()

    def _make_room(self) -> None:
        """Close as many connections as are too many. The limit of the system may have changed since the last one."""
        held = [each for each in self.connections if isinstance(each, LimitedProtocol) and not each.made_room]
        excess = len(held) - self.limits.most()
        if excess > 0:
            waiting = sorted((each for each in held if each.waits), key=lambda each: each.since)
            for each in waiting[:excess]:
                each.made_room = True  # it stays among the connections until the loop's next round
                each.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self.deadline is None and self.conn.their_state is h11.IDLE:
            self._wait(self.limits.header_seconds)
        super().data_received(data)

    def handle_events(self) -> None:
        """A header that is complete ends one wait, and begins that for the body."""
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self.asked = self.loop.time()
        if self.cycle and not self.cycle.response_complete:
            self._stop_waiting()
            if self.cycle.more_body:
                self._wait(self.asked + self.limits.body_seconds - self.loop.time())

    def on_response_complete(self) -> None:
        self._stop_waiting()
        self.since = self.loop.time()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait(self, seconds: float) -> None:
        self.deadline = self.loop.call_later(max(0.0, seconds), self.transport.abort)

    def _stop_waiting(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None


def web_server(app: Any, limits: ConnectionLimits, drain_seconds: float, lifespan: Any = "on") -> uvicorn.Server:
    """Make uvicorn's server of an app. drain_seconds: for answers under way when it is to stop"""
    config = uvicorn.Config(
        app, http=LimitedProtocol.of(limits), ws="none", h11_max_incomplete_event_size=MAX_HEADER,
        timeout_graceful_shutdown=round(drain_seconds), timeout_keep_alive=KEEP_ALIVE_S,
        server_header=False, log_level="warning", lifespan=lifespan,
    )  # fmt: skip
    return uvicorn.Server(config)
