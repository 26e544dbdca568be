"""The records that stage processes leave in the run directory: who serves a stage, and why one ended.

``<stage>.<pid>.process`` is made by the process itself and removed by it when it ends in order, so a record without its
process is a death. It holds the names of the shared-memory regions that Triton made for it, which Triton removes only
when the process ends in order, and the reason when the process gave one.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
SUFFIX = ".process"


@dataclass(frozen=True)
class ProcessRecord:
    stage: str
    pid: int
    regions: tuple[str, ...] = ()
    reason: str = ""
    """Why the process ended itself."""
    started: float = field(default_factory=time.time)

    def write(self, run: Path) -> None:
        """Readers may look at any moment: the record appears whole."""
        path = self.path(run)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(self)))
        temporary.replace(path)

    def path(self, run: Path) -> Path:
        return run / f"{self.stage}.{self.pid}{SUFFIX}"


def read_records(run: Path) -> list[ProcessRecord]:
    """Of all processes that serve or have died."""
    found = []
    for path in run.glob(f"*.*{SUFFIX}"):
        try:
            data = json.loads(path.read_text())
        except OSError:
            continue  # it has just ended in order
        data["regions"] = tuple(data["regions"])
        found.append(ProcessRecord(**data))
    return found


def remove_regions(record: ProcessRecord) -> None:
    """The shared memory that Triton made for a process and did not remove."""
    for name in record.regions:
        (SHARED_MEMORY / name).unlink(missing_ok=True)


def is_alive(pid: int) -> bool:
    """Whether it has not ended yet; one that only waits to be collected has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def mark_started(run: Path, stage: str) -> bool:
    """Whether a process of this stage had started before this one, in this run."""
    try:
        os.close(os.open(run / f"{stage}.started", os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        return True
    return False
