"""A server in a thread, for this process alone: `kvkeep eval --via http` asks it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvkeep.engine.engine import Engine
from kvkeep.serve.access import Keys, Limits
from kvkeep.serve.connections import ConnectionLimits, web_server
from kvkeep.serve.routes import create_app
from kvkeep.serve.server import Server

LIMITS = Limits(max_body=2**30, max_seconds=86_400.0)  # nobody else waits: long prompts on slow machines are answered
CLOSE_S = 10.0  # for an answer under way, whose client has gone


@contextmanager
def served(engine: Engine, name: str) -> Iterator[tuple[str, int]]:
    """Serve an engine at a free local port; its address is given. The engine is closed with the server.

    name: of the model, for clients
    """
    server = web_server(create_app(Server(engine, name, Keys(), LIMITS), local_only=True), ConnectionLimits(), CLOSE_S)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, args=([listening],), name="kvkeep-http", daemon=True)
        thread.start()
        try:
            while not server.started:
                if not thread.is_alive():
                    raise RuntimeError("the HTTP server did not start; its log says why.")
                time.sleep(0.01)
            yield listening.getsockname()
        finally:
            server.should_exit = True
            thread.join()
