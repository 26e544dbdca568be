"""The state of a running server, for `tritone status`: a file in its run directory."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tritone.locked_directory import is_used, locked_directories
from tritone.processes import SHARED_MEMORY
from tritone.supervisor.watch import StageState

if TYPE_CHECKING:
    from tritone.supervisor.server import Server

FILE = "status.json"


def write_status(server: Server, states: Mapping[str, StageState], unready: set[str]) -> None:
    status = {
        "name": server.deployment.name,
        "pid": server.pid,
        "grpc": server.grpc_url,
        "http": server.http_url,
        "metrics": server.metrics_url,
        "log": str(server.log),
        "written": time.time(),
        "models": {name: name not in unready for name in server.models},
        "stages": {stage: asdict(state) for stage, state in sorted(states.items())},
    }
    temporary = server.run_directory / f"{FILE}.tmp"
    temporary.write_text(json.dumps(status, indent=2) + "\n")
    temporary.replace(server.run_directory / FILE)


def read_statuses(root: Path = SHARED_MEMORY) -> list[dict[str, Any]]:
    """Of all servers of this user whose supervisor lives; ``run_directory`` tells them apart."""
    found = []
    for path in locked_directories(root):
        try:
            if is_used(path):
                found.append({"run_directory": str(path), **json.loads((path / FILE).read_text())})
        except (OSError, ValueError):
            continue  # it is just starting or stopping
    return found
