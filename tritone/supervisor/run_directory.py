"""The run directory of one server: in shared memory, holds the resolved deployment, the pools and the cancel board."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tritone.deployment import RESOLVED, Deployment
from tritone.errors import TritoneError
from tritone.locked_directory import LockedDirectory, is_used, locked_directories
from tritone.processes import SHARED_MEMORY
from tritone.supervisor.orphans import end_processes

STUB_BYTES = 64 << 20
"""Room for the shared-memory regions that Triton itself makes, one or two a stage process."""


class RunDirectory(LockedDirectory):
    """Made by :meth:`create`, removed by :meth:`remove`; in use while the supervisor lives."""

    @classmethod
    def create(cls, deployment: Deployment, root: Path = SHARED_MEMORY) -> RunDirectory:
        """Makes the directory and writes the resolved deployment into it."""
        run = cls.make(root)
        (run.path / RESOLVED).write_text(json.dumps(deployment.model_dump(), indent=2) + "\n")
        return run


def remove_stale(root: Path = SHARED_MEMORY) -> list[Path]:
    """Removes what supervisors and measurements that were killed have left: stage processes that hang, and directories,
    which it returns."""
    removed = []
    for path in locked_directories(root):
        if not is_used(path):
            end_processes(path, grace=0)
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
    return removed


def check_shared_memory(needed: int, root: Path = SHARED_MEMORY) -> None:
    """Raises TritoneError when fewer than ``needed`` bytes (plus Triton's own share) are free: a pool mapped beyond the
    end of a full tmpfs would kill its process at the first write, long after the start."""
    free = shutil.disk_usage(root).free
    wanted = needed + STUB_BYTES
    if free < wanted:
        raise TritoneError(
            f"{root} has {free >> 20} MiB free, this deployment needs {-(-wanted >> 20)} MiB: "
            "start the container with --shm-size (or `mount -o remount,size=... /dev/shm`), or make pool_tokens smaller",
            "RESOURCE_EXHAUSTED",
        )
