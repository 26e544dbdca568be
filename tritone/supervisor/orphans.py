"""Stage processes that have outlived their server.

Most see that it has gone and end; one that is inside a send, or in a long computation, does not and would stay for ever,
with its memory.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

from tritone.deployment import ENVIRONMENT
from tritone.processes import SHARED_MEMORY, is_alive, read_records, remove_regions

PROGRAMS = ("triton_python_backend_stub", "tritonserver")
POLL_SECONDS = 0.05
KILL_SECONDS = 5.0
_REGION = re.compile(r"triton_\w+_backend_shm_region_[\w-]+")


def end_processes(run: Path, grace: float) -> list[int]:
    """Gives the processes of the server that had this run directory ``grace`` seconds to end, then kills those left and
    removes the shared memory they would have removed. Returns the ids of the killed."""
    deadline = time.monotonic() + grace
    while (left := processes_of(run)) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    for process in left:
        regions = _regions(process)
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            continue
        for region in regions:
            region.unlink(missing_ok=True)
    # A signal takes its time with a process of many gigabytes.
    deadline = time.monotonic() + KILL_SECONDS
    while any(is_alive(process) for process in left) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    # Those of stages that ended before, but not in order.
    for record in read_records(run):
        remove_regions(record)
    return left


def processes_of(run: Path) -> list[int]:
    """Triton's processes that were started with this run directory, which no two servers share."""
    mark = f"{ENVIRONMENT}={run}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes().split(b"\0") and _arguments(process)[0].endswith(PROGRAMS):
                found.append(int(process.name))
        except OSError:
            continue  # it has just ended, or is another user's
    return found


def _arguments(process: Path) -> list[str]:
    return (process / "cmdline").read_bytes().decode(errors="replace").split("\0")


def _regions(process: int) -> list[Path]:
    """A stub is told the name of its region in its arguments."""
    try:
        return [SHARED_MEMORY / word for word in _arguments(Path(f"/proc/{process}")) if _REGION.fullmatch(word)]
    except OSError:
        return []
