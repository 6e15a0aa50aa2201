"""`kvkeep serve`: everything is checked before the model is loaded."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import fields, replace
from functools import partial
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal, NoReturn

from kvkeep.cli.inputs import Plan, byte_count
from kvkeep.cli.options import LOCAL, ServeOptions
from kvkeep.errors import BadInput, BadParameter, MissingExtra

PACKAGES = "fastapi", "uvicorn", "prometheus_client", "llguidance"  # of the extra


def check_packages(what: str = "kvkeep serve") -> None:
    """Refuse to serve without the extra. what: needs it"""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise MissingExtra(f"{what} needs {', '.join(missing)}; install it with `pip install 'kvkeep[serve]'`.")


def run(options: ServeOptions, plan: Plan, say: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT: then answers under way are finished, and new ones refused."""
    check_packages()
    from kvkeep.serve.access import Keys

    keys = Keys.load(options.keys)
    check_access(options, bool(keys))
    autoscaling_settings(options)
    if options.tensor_parallel > 1 and options.prefix_folder:
        raise BadParameter(
            f"--prefix-folder saves whole caches, and --tensor-parallel {options.tensor_parallel} splits them; leave "
            "one of them out."
        )
    check_weights(options.weights, options.tensor_parallel)
    with bind(options.host, options.port) as listening:
        if options.ray:
            return _serve_replicas(options, plan, keys, listening, say)
        server = make_server(options, plan, keys, say)
        from kvkeep.serve.routes import create_app

        _serve(options, create_app(server, _local_only(options, keys)), server.name, listening, say)


def check_weights(weights: str | None, processes: int) -> None:
    """Refuse a wrong --weights before the model is loaded."""
    if weights is None:
        return
    from kvkeep.model import fp8_model

    fp8_model.check_weights(weights)
    if processes > 1:
        raise BadParameter(f"--weights {weights} is for one process; leave it or --tensor-parallel {processes} out.")


def check_access(options: ServeOptions, has_keys: bool) -> None:
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
    """Bind the port before the model is loaded: one in use is said at once. Nobody can connect yet."""
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


def _engine(
    options: ServeOptions, plan: Plan, say: Callable[[str], None], tp_plan: Literal["auto"] | None = None
) -> Any:
    from kvkeep.cli.run import load_engine
    from kvkeep.engine.store import Store

    size = byte_count("--prefix-cache", options.prefix_cache)
    if options.prefix_folder and not size:
        raise BadInput("--prefix-folder saves what --prefix-cache allows, and that is 0; leave one of them out.")
    limits = {
        "memory": byte_count("--memory", options.memory) if options.memory else None,
        "prefix_cache": Store(size, options.prefix_folder),
        "history": None if options.history == "none" else options.history,
        "history_storage": options.history_storage,
        "host_memory": byte_count("--host-memory", options.host_memory) if options.host_memory else None,
        "max_rows": options.max_rows,
        "max_waiting": options.max_waiting,
        "target_itl": options.target_itl,
        "allow_special_tokens": options.allow_special_tokens,
        "weights": options.weights,
    }
    return load_engine(options, plan, say, tp_plan, **limits)


def make_server(options: ServeOptions, plan: Plan, keys: Any, say: Callable[[str], None] = lambda text: None) -> Any:
    from kvkeep.serve.access import Limits
    from kvkeep.serve.server import Server

    sizes = {"max_body": byte_count("--max-body", options.max_body), "max_context_bytes": _context_bytes(options, keys)}
    limits = Limits(**{each.name: getattr(options, each.name) for each in fields(Limits)} | sizes)
    name = options.name or model_name(options.model)
    if options.tensor_parallel > 1:
        return _split_server(options, plan, say, lambda engine: Server(engine, name, keys, limits))
    return Server(_engine(options, plan, say), name, keys, limits)


def _split_server(options: ServeOptions, plan: Plan, say: Callable[[str], None], make: Callable[[Any], Any]) -> Any:
    """Serve a model that is split over several processes: this is the first, the others follow. make: of an engine"""
    from kvkeep.serve.followers import Followers

    size = options.tensor_parallel
    followers = Followers([sys.executable, "-m", "kvkeep.cli.follower"], size - 1, _end)
    try:
        from kvkeep.model.tensor_parallel import Place, check_split

        first = Place(0, size, check_split(options.model, size, options.device))
        meeting = first.listen()
        say(f"splitting the model over {size} processes")
        for rank in range(1, size):
            followers.send_to(rank, pickle.dumps((options, plan, replace(first, rank=rank, port=meeting.port))))
        server = make(load_split_engine(options, plan, first, say, meeting))
        server.engine.lead(followers.send, followers.failed, grammars=server.grammars)
    except BaseException:
        followers.close()
        raise
    server.followers, followers.ready = followers, True
    return server


def load_split_engine(
    options: ServeOptions, plan: Plan, place: Any, say: Callable[[str], None], meeting: Any = None
) -> Any:
    """The part of one process. place, meeting: of model/tensor_parallel.py"""
    place.join(meeting)
    return _engine(options, plan, say, tp_plan="auto")


def _end(reason: str) -> NoReturn:
    """The server, from any thread: others may wait for a process that is gone."""
    print(f"error: {reason} The server ends; start it again.", file=sys.stderr, flush=True)
    os._exit(1)


def _context_bytes(options: ServeOptions, keys: Any) -> int | None:
    """None: all of the store. Several keys do not let one have it all."""
    if options.max_context_bytes:
        return byte_count("--max-context-bytes", options.max_context_bytes)
    if len(keys) < 2:
        return None
    if options.history == "none":
        return byte_count("--prefix-cache", options.prefix_cache) // 2
    from kvkeep.engine.memory import half_of_host

    return (byte_count("--host-memory", options.host_memory) if options.host_memory else half_of_host()) // 2


def model_name(model: str) -> str:
    """What clients call it: a folder's name, or that on the hub."""
    from kvkeep.model.load import DEFAULT, DEFAULT_NAMES

    folder = Path(model).expanduser()
    return DEFAULT if model in DEFAULT_NAMES else folder.resolve().name if folder.is_dir() else model


def _serve_replicas(
    options: ServeOptions, plan: Plan, keys: Any, listening: socket.socket, say: Callable[[str], None]
) -> None:
    """The same on Ray Serve: this process is the way in, the replicas are wherever Ray has room."""
    from kvkeep.evaluate.ray_pool import check_ray, connected

    ray = check_ray()
    try:
        from kvkeep.serve.front import Front
        from kvkeep.serve.replica import Deployment
    except ImportError as error:
        raise MissingExtra(f"--ray needs ray[serve] ({error}); install it with `pip install 'kvkeep[ray]'`.") from None
    with connected(ray, None if options.ray == LOCAL else options.ray):
        has_gpus = ray.cluster_resources().get("GPU") and not (options.device or "").startswith("cpu")
        deployment = Deployment(
            name=f"kvkeep-{socket.gethostname()}-{listening.getsockname()[1]}",
            replicas=options.replicas,
            autoscaling=autoscaling_settings(options),
            max_ongoing=options.max_rows,
            max_queued=options.max_waiting,
            drain_seconds=options.drain_seconds,
            resources={
                "num_cpus": options.tensor_parallel,
                "num_gpus": options.tensor_parallel if has_gpus else 0,
            },
        )
        say(f"starting {options.replicas} replicas on Ray")
        try:
            handle = deployment.start(partial(make_server, options, plan, keys))
            most = byte_count("--max-body", options.max_body)
            front = Front(handle, keys, most, _local_only(options, keys))
            _serve(options, front, options.name or model_name(options.model), listening, say, lifespan="off")
        finally:
            deployment.stop()


def autoscaling_settings(options: ServeOptions) -> dict[str, Any]:
    """List the autoscaling settings of Ray Serve by name."""
    import yaml

    given = options.autoscale or []
    pairs = [each.partition("=") for each in given]
    wrong = [name for name, _, value in pairs if not (name and value)]
    if wrong:
        raise BadParameter(f"--autoscale {' '.join(given)}: give name=value, such as max_replicas=8.")
    if (pairs or options.replicas > 1) and not options.ray:
        raise BadParameter("--replicas and --autoscale are for Ray; give --ray, too.")
    return {name: yaml.safe_load(value) for name, _, value in pairs}


def _local_only(options: ServeOptions, keys: Any) -> bool:
    """Refuse pages of other sites that a browser here shows."""
    return is_local(options.host) and not keys


def _serve(
    options: ServeOptions,
    app: Any,
    name: str,
    listening: socket.socket,
    say: Callable[[str], None],
    lifespan: Any = "on",
) -> None:
    from starlette.middleware.cors import CORSMiddleware

    from kvkeep.serve.connections import ConnectionLimits, web_server

    if options.access_log:
        access = logging.getLogger("kvkeep.access")
        access.setLevel(logging.INFO)
        access.addHandler(logging.StreamHandler())
    if options.cors_origin:
        app = CORSMiddleware(app, options.cors_origin, allow_methods=["*"], allow_headers=["*"])
    limits = ConnectionLimits(options.max_connections, options.header_seconds, options.body_seconds)
    host, port = listening.getsockname()[:2]
    say(f"serving {name} at http://{f'[{host}]' if ':' in host else host}:{port}/v1")
    signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn drains, then sends the signal again
    web_server(app, limits, options.drain_seconds, lifespan).run(sockets=[listening])
