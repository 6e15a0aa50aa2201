"""`kvkeep serve`: everything is checked before the model is loaded."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from kvkeep.cli.inputs import Plan, byte_count
from kvkeep.errors import BadInput, BadParameter, MissingExtra

PACKAGES = "fastapi", "uvicorn", "prometheus_client", "llguidance"  # of the extra
KEEP_ALIVE_S = 75  # of a connection between two requests: longer than clients keep theirs


@dataclass(frozen=True)
class Options:
    model: str
    method: str | None
    name: str | None
    host: str
    port: int
    keys: str | None
    public: bool
    memory: str | None
    max_rows: int
    max_waiting: int
    prefix_cache: str
    prefix_folder: str | None
    max_tokens: int
    max_body: str
    max_seconds: float
    max_answers: int
    drain_seconds: float
    device: str | None
    dtype: str | None
    allow_parameters: bool = False


def check_packages() -> None:
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise MissingExtra(f"kvkeep serve needs {', '.join(missing)}; install it with `pip install 'kvkeep[serve]'`.")


def run(options: Options, plan: Plan, say: Callable[[str], None]) -> None:
    """Until SIGTERM or SIGINT: then answers under way are finished, and new ones refused."""
    check_packages()
    from kvkeep.serve.keys import Keys

    keys = Keys.load(options.keys)
    check_access(options, bool(keys))
    with bind(options.host, options.port) as listening:
        engine = _engine(options, plan, say)
        _serve(options, _server(options, engine, keys), listening, say)


def check_access(options: Options, has_keys: bool) -> None:
    """Other machines need a key, unless the server is to be public."""
    if not (has_keys or options.public or is_local(options.host)):
        raise BadParameter(
            f"--host {options.host} lets other machines in, and there are no API keys: give --keys FILE or "
            "KVKEEP_API_KEYS, or --public if everybody may use it."
        )


def is_local(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bind(host: str, port: int) -> socket.socket:
    """Before the model is loaded: a port in use is said at once. Nobody can connect yet."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with ExitStack() as unless_bound:
            found = unless_bound.enter_context(socket.socket(family, kind, protocol))
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
            unless_bound.pop_all()
    except OSError as error:
        raise BadInput(
            f"--host {host} --port {port} cannot be used ({error.strerror or error}); give others."
        ) from None
    return found


def _engine(options: Options, plan: Plan, say: Callable[[str], None]) -> Any:
    from kvkeep.cli.run import load_engine
    from kvkeep.engine.prefix_store import PrefixStore

    size = byte_count("--prefix-cache", options.prefix_cache)
    how = {
        "method": options.method,  # None: kvkeep, and kvkeep_context for contexts
        "memory": byte_count("--memory", options.memory) if options.memory else None,
        "prefix_cache": PrefixStore(size, options.prefix_folder) if size else None,
        "max_rows": options.max_rows,
        "max_waiting": options.max_waiting,
    }
    return load_engine(options.model, options.device, options.dtype, plan, say, **how)


def _server(options: Options, engine: Any, keys: Any) -> Any:
    from kvkeep.serve.limits import Limits
    from kvkeep.serve.server import Server

    limits = Limits(
        max_body=byte_count("--max-body", options.max_body),
        max_tokens=options.max_tokens,
        max_seconds=options.max_seconds,
        max_answers=options.max_answers,
        allow_parameters=options.allow_parameters,
    )
    return Server(engine, options.name or model_name(options.model), keys, limits)


def model_name(model: str) -> str:
    """What clients call it: a folder's name, or that on the hub."""
    from kvkeep.model.load import DEFAULT, DEFAULT_NAMES

    folder = Path(model).expanduser()
    return DEFAULT if model in DEFAULT_NAMES else folder.resolve().name if folder.is_dir() else model


def _serve(options: Options, server: Any, listening: socket.socket, say: Callable[[str], None]) -> None:
    import uvicorn

    from kvkeep.serve.routes import create_app

    local_only = is_local(options.host) and not server.keys
    config = uvicorn.Config(
        create_app(server, local_only), timeout_graceful_shutdown=round(options.drain_seconds),
        timeout_keep_alive=KEEP_ALIVE_S, server_header=False, log_level="warning", lifespan="on",
    )  # fmt: skip
    host, port = listening.getsockname()[:2]
    say(f"serving {server.name} at http://{f'[{host}]' if ':' in host else host}:{port}/v1")
    signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn drains, then sends the signal again
    uvicorn.Server(config).run(sockets=[listening])
