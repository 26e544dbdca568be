"""Options that name a deployment, and the server they stand for."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tritone.cache import default_cache
from tritone.checkpoints import Progress
from tritone.commands.terminal import ProgressLine
from tritone.deployment import Deployment
from tritone.errors import bad
from tritone.sizes import required_shared_memory
from tritone.supervisor import Server, resolve_deployment
from tritone.supervisor.installation import PROJECT
from tritone.supervisor.server import START_SECONDS

DEFAULT_DEPLOYMENT = PROJECT / "deployments" / "demo-cpu.yaml"
_PORTS = ("http_port", "grpc_port", "metrics_port")


def add_options(parser: argparse.ArgumentParser, *, server: bool = True) -> None:
    parser.add_argument("--deployment", type=Path, default=DEFAULT_DEPLOYMENT, help="deployment file (%(default)s)")
    parser.add_argument("--checkpoint", help="a Hugging Face directory or hub name, instead of the deployment's")
    parser.add_argument("--voice", help="demo:hibari, demo:heart, a directory, checkpoint (the checkpoint's own), or none")
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="any field of the deployment, e.g. decode.threads=2"
    )
    if server:
        parser.add_argument("--host", help="address to listen on")
        for name in _PORTS:
            parser.add_argument(f"--{name.replace('_', '-')}", type=int, help="0 takes a free port")


def read_deployment(arguments: argparse.Namespace) -> Deployment:
    """The deployment file with the command line's changes; validated, not yet resolved."""
    data: dict[str, Any] = Deployment.load(arguments.deployment).model_dump()
    if arguments.checkpoint is not None:
        data["checkpoint"] = arguments.checkpoint
    if arguments.voice is not None:
        data["voice"] = None if arguments.voice == "none" else arguments.voice
    for name in ("host", *_PORTS):
        if getattr(arguments, name, None) is not None:
            data["server"][name] = getattr(arguments, name)
    for change in arguments.set:
        _apply(data, change)
    return Deployment.parse(data, str(arguments.deployment))


def make_server(deployment: Deployment, progress: Progress) -> Server:
    """Resolves the deployment and gives its server, not yet started."""
    cache = default_cache()
    resolved = resolve_deployment(deployment, cache, progress)
    return Server(resolved, cache=cache, shared_memory=required_shared_memory, progress=progress)


@contextlib.contextmanager
def running(deployment: Deployment, timeout: float = START_SECONDS) -> Iterator[Server]:
    """Prepares and starts the server with a progress bar; stops it at the end, however that comes."""
    with contextlib.ExitStack() as stack:
        with ProgressLine() as progress:
            server = make_server(deployment, progress)
            stack.callback(server.stop)
            server.start(timeout)
        yield server


def _apply(data: dict[str, Any], change: str) -> None:
    path, separator, value = change.partition("=")
    if not separator:
        raise bad("--set", change, "FIELD=VALUE, for example decode.threads=2")
    *parts, last = path.split(".")
    target: Any = data
    for part in parts:
        target = target.get(part) if isinstance(target, dict) else None
    if not isinstance(target, dict):
        raise bad("--set", path, "a field of the deployment, for example decode.threads")
    target[last] = yaml.safe_load(value)
