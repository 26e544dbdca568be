"""The run directory of one server: in shared memory, holds the resolved deployment, the pools and the cancel board."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import time
from pathlib import Path
from types import TracebackType

from tritone.deployment import RESOLVED, Deployment
from tritone.errors import TritoneError
from tritone.processes import SHARED_MEMORY
from tritone.supervisor.orphans import end_processes

PREFIX = "tritone-"
LOCK = "supervisor.lock"
YOUNG_SECONDS = 60.0
STUB_BYTES = 64 << 20
"""Room for the shared-memory regions that Triton itself makes, one or two a stage process."""


class RunDirectory:
    """Made by :meth:`create`, removed by :meth:`remove`. A lock held by this process marks it as in use.

    The lock, not the process id in the name, decides: ids are reused, and differ between containers that share /dev/shm.
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def create(cls, deployment: Deployment, root: Path = SHARED_MEMORY) -> RunDirectory:
        """Makes the directory and writes the resolved deployment into it."""
        path = root / f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        path.mkdir(mode=0o700)
        lock = os.open(path / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        (path / RESOLVED).write_text(json.dumps(deployment.model_dump(), indent=2) + "\n")
        return cls(path, lock)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()


def remove_stale(root: Path = SHARED_MEMORY) -> list[Path]:
    """Removes what supervisors that were killed have left: stage processes that hang and run directories, which it returns."""
    removed = []
    for path in run_directories(root):
        if not is_used(path):
            end_processes(path, grace=0)
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
    return removed


def run_directories(root: Path | None = None) -> list[Path]:
    """Those of all servers, living and killed."""
    found = (SHARED_MEMORY if root is None else root).glob(f"{PREFIX}*-*")
    return [path for path in found if path.is_dir() and not path.is_symlink()]


def is_used(path: Path) -> bool:
    """Whether the supervisor that made the directory lives, or cannot be asked."""
    try:
        lock = os.open(path / LOCK, os.O_RDWR)
    except FileNotFoundError:
        # Its supervisor may be between making the directory and making the lock.
        try:
            return time.time() - path.stat().st_mtime <= YOUNG_SECONDS
        except OSError:
            return True
    except OSError:
        return True  # another user's
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


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
