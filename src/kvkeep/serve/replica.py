"""One of several servers of the same model, on Ray Serve: the same app, its HTTP messages passed on by the front."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter

from kvkeep.errors import BadInput
from kvkeep.serve.routes import create_app
from kvkeep.serve.server import Server

Message = dict[str, Any]  # of ASGI
LAST = 300  # characters of what a replica says that does not start: the reason is at the end


@dataclass(frozen=True)
class Deployment:
    """How many there are, and what each may take."""

    name: str  # of the application: others on the same cluster have their own
    replicas: int = 1  # where it scales by itself, at least so many
    autoscaling: dict[str, Any] = field(default_factory=dict)  # of Ray Serve's AutoscalingConfig; empty: as many
    max_ongoing: int = 64  # of one replica: then the next one is asked
    max_queued: int = 1024  # that no replica has taken; more are refused
    drain_seconds: float = 60.0
    resources: dict[str, Any] = field(default_factory=dict)  # of one replica: num_cpus, num_gpus

    def start(self, make: Callable[[], Server]) -> Any:
        """Wait until the replicas are ready. -> the application's handle"""
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        serve.start(proxy_location="Disabled")
        scales = {"min_replicas": self.replicas, "initial_replicas": self.replicas, **self.autoscaling}
        router: Any = {"request_router_class": ConsistentHashRouter}
        try:
            deployment = serve.deployment(
                name="kvkeep",
                **({"autoscaling_config": scales} if self.autoscaling else {"num_replicas": self.replicas}),
                max_ongoing_requests=self.max_ongoing,
                max_queued_requests=self.max_queued,
                graceful_shutdown_timeout_s=self.drain_seconds,
                ray_actor_options=self.resources,
                request_router_config=RequestRouterConfig(**router),
            )
            return serve.run(deployment(Replica).bind(make), name=self.name, route_prefix=None)
        except (RuntimeError, ValueError) as error:  # of a replica, or of Ray Serve about its settings
            known = serve.status().applications.get(self.name)
            said = [each.message for each in known.deployments.values()] if known else []
            raise BadInput(f"no replica could be started: {' '.join([str(error), *said])[-LAST:]}") from error

    def stop(self) -> None:
        """Replicas finish what they have."""
        serve.delete(self.name)


class Replica:
    def __init__(self, make: Callable[[], Server]) -> None:
        self.server = make()
        self.app = create_app(self.server)

    async def ask(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[list[Message]]:
        """What the app sends, as many messages at a time as there are. Who stops reading has gone."""
        sent: asyncio.Queue[Any] = asyncio.Queue()  # messages; at the end, None
        received, gone = iter([{"type": "http.request", "body": body}]), asyncio.Event()

        async def receive() -> Message:
            if message := next(received, None):
                return message
            await gone.wait()
            return {"type": "http.disconnect"}

        task = asyncio.ensure_future(self.app(scope, receive, sent.put))
        task.add_done_callback(lambda _: sent.put_nowait(None))
        try:
            more = True
            while more:
                batch = [await sent.get(), *(sent.get_nowait() for _ in range(sent.qsize()))]
                more = batch[-1] is not None
                if messages := [message for message in batch if message is not None]:
                    yield messages
        finally:
            gone.set()

    async def metrics(self) -> tuple[int, str]:
        """The replica's number, and its page."""
        return serve.get_replica_context().rank.rank, self.server.metrics.page().decode()

    async def contexts(self, owner: str) -> list[dict[str, Any]]:
        return self.server.contexts(owner)

    def __del__(self) -> None:
        """Ray Serve calls it when the replica has drained."""
        if hasattr(self, "server"):
            self.server.close()
