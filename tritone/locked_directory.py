"""Directories in shared memory that last as long as the process that made them, and that others remove once it was killed."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import time
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from tritone.processes import SHARED_MEMORY

PREFIX = "tritone-"
LOCK = "supervisor.lock"
"""Not to be renamed: a server of another version would take the directories of this one for left over."""
YOUNG_SECONDS = 60.0

Made = TypeVar("Made", bound="LockedDirectory")


class LockedDirectory:
    """Made by :meth:`make`, removed by :meth:`remove`. A lock held by this process marks it as in use.

    The lock, not the process id in the name, decides: ids are reused, and differ between containers that share /dev/shm.
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def make(cls: type[Made], root: Path = SHARED_MEMORY) -> Made:
        path = root / f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        path.mkdir(mode=0o700)
        lock = os.open(path / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        return cls(path, lock)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self: Made) -> Made:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()


def locked_directories(root: Path = SHARED_MEMORY) -> list[Path]:
    """Those of all processes, living and killed."""
    return [path for path in root.glob(f"{PREFIX}*-*") if path.is_dir() and not path.is_symlink()]


def is_used(path: Path) -> bool:
    """Whether the process that made the directory lives, or cannot be asked."""
    try:
        lock = os.open(path / LOCK, os.O_RDWR)
    except FileNotFoundError:
        # Its maker may be between making the directory and making the lock.
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
