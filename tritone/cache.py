"""Where lies what is made once: prepared checkpoints and voices, compiled libraries."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ENVIRONMENT = "TRITONE_CACHE"
PROJECT = Path(__file__).resolve().parents[1]


def default_cache() -> Path:
    """``$TRITONE_CACHE``, else ``.cache/tritone`` in the checkout."""
    value = os.environ.get(ENVIRONMENT)
    return Path(value).expanduser().resolve() if value else PROJECT / ".cache" / "tritone"


@contextmanager
def made_whole(destination: Path) -> Iterator[Path | None]:
    """Gives a temporary directory that becomes ``destination`` when the block ends well, so others see all of it or
    none; gives None when it exists already. Of two processes at once, the second waits and then gets None."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    with (destination.parent / f".{destination.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if destination.is_dir():
            yield None
            return
        # Only the holder of the lock makes such directories: what is there was left by one that was killed.
        for left in destination.parent.glob(f".{destination.name}.new-*"):
            shutil.rmtree(left, ignore_errors=True)
        work = Path(tempfile.mkdtemp(prefix=f".{destination.name}.new-", dir=destination.parent))
        work.chmod(0o755)
        try:
            yield work
            work.rename(destination)
        finally:
            shutil.rmtree(work, ignore_errors=True)
