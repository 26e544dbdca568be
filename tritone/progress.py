"""How far the stages are with loading weights: small files in the run directory that the supervisor shows as a bar."""

from __future__ import annotations

import time
from pathlib import Path

SUFFIX = ".loading"
SECONDS = 0.2


class LoadProgress:
    """Called with (bytes done, bytes in all) by a stage that loads; writes at most every :data:`SECONDS`."""

    def __init__(self, directory: Path, stage: str) -> None:
        self._path = directory / f"{stage}{SUFFIX}"
        self._written = 0.0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done < total and now - self._written < SECONDS:
            return
        self._written = now
        temporary = self._path.with_suffix(".new")
        temporary.write_text(f"{done} {total}")
        temporary.replace(self._path)


def loaded_bytes(directory: Path) -> tuple[int, int]:
    """(bytes loaded, bytes in all) over all stages that have begun to load; (0, 0) before the first."""
    done = total = 0
    for path in directory.glob(f"*{SUFFIX}"):
        one, all_of_them = path.read_text().split()
        done, total = done + int(one), total + int(all_of_them)
    return done, total
