"""`tritone status`: the servers of this machine, their models and stages. Exit code 1 unless all of them are ready."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from rich.table import Table

from tritone.commands.terminal import console
from tritone.supervisor.status import read_statuses


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("status", help="say which servers run here and what serves", description=__doc__)
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    servers = read_statuses()
    ready = bool(servers) and all(all(server["models"].values()) for server in servers)
    if arguments.json:
        print(json.dumps({"ready": ready, "servers": servers}, indent=2))
    elif not servers:
        console.print("no server runs here")
    else:
        for server in servers:
            _print(server)
    return 0 if ready else 1


def _print(server: dict[str, Any]) -> None:
    models = ", ".join(f"{name} {'ready' if ready else 'NOT READY'}" for name, ready in server["models"].items())
    line = f"{server['name']}  gRPC {server['grpc']}  {server['http']}  log {server['log']}"
    console.print(line, soft_wrap=True, markup=False)
    console.print(f"  {models}", markup=False)
    table = Table("stage", "state", "for", "process", "deaths", "last reason", box=None, padding=(0, 2))
    for name, stage in server["stages"].items():
        since = f"{time.time() - stage['since']:.0f} s"
        table.add_row(name, stage["state"], since, str(stage["pid"]), str(stage["deaths"]), stage["reason"])
    console.print(table)
