"""`tritone serve`: a server in the foreground. Ctrl-C and SIGTERM let running requests end, for a limited time."""

from __future__ import annotations

import argparse
import contextlib

from tritone.commands import launch
from tritone.commands.terminal import console, errors
from tritone.errors import TritoneError
from tritone.supervisor.server import START_SECONDS


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("serve", help="start a server and keep it until Ctrl-C", description=__doc__)
    launch.add_options(parser)
    parser.add_argument("--start-timeout", type=float, default=START_SECONDS, metavar="SECONDS", help="(%(default)s)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    deployment = launch.read_deployment(arguments)
    with launch.running(deployment, arguments.start_timeout) as server:
        console.print(f"[bold green]ready[/]  models: {', '.join(server.models)}")
        console.print(f"  gRPC     {server.grpc_url}")
        console.print(f"  HTTP     {server.http_url}")
        console.print(f"  metrics  {server.metrics_url}")
        console.print(f"  log      {server.log}")
        console.print(f'try: tritone chat --url {server.grpc_url} "What is the capital of France?"', soft_wrap=True)
        code: int | None = None
        try:
            while code is None:
                # In slices: a wait without an end would hold back signals.
                code = server.wait(1.0)
        except KeyboardInterrupt:
            seconds = server.deployment.server.drain_seconds
            errors.print(f"stopping: running requests may go on for up to {seconds:g} s; Ctrl-C cuts them off")
            with contextlib.suppress(KeyboardInterrupt):
                server.drain()
            return 0
    raise TritoneError(f"the server ended by itself with exit code {code}; its log: {server.log}", "UNAVAILABLE")
