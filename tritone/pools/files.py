"""The files of a pool in the run directory, and their mappings.

``<name>.json``   header: epoch, blocks, block_bytes, shape, dtype
``<name>.data``   blocks x block_bytes bytes
``<name>.tags``   uint64 per block, written by the owner only
``<name>.leases`` uint64 per block, set by the owner, cleared by the reader
``<name>.seals``  uint64 per block, written by the owner: the digest of content that changes no more while its tag stands
``<name>.condemned`` uint64 per block and one more, written by readers: the tag under which a block's content was found to
                 be wrong; the last word changes with each entry
``<name>.owner``  empty; locked as long as the owner lives

POSIX shared memory files are mapped by hand: ``multiprocessing.shared_memory`` unlinks a segment when a process that only
attached to it exits (before Python 3.13).
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tritone.errors import TritoneError

WORD = 8
WORDS = {"tags": 0, "leases": 0, "seals": 0, "condemned": 1}
"""The files of one word per block, and how many words they have beyond that."""


@dataclass(frozen=True)
class Header:
    """``shape`` and ``dtype`` say what one block holds; ``epoch`` is new each time an owner makes the pool."""

    epoch: int
    blocks: int
    block_bytes: int
    shape: tuple[int, ...]
    dtype: str


def create(path: Path, size: int) -> None:
    """A file of ``size`` bytes whose memory is reserved now: a full /dev/shm fails here, not as SIGBUS later."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, max(size, 1))
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise TritoneError(
                f"{path.parent}: no room for {size / 2**20:.0f} MiB of shared memory ({path.name}); "
                "make /dev/shm larger (docker: --shm-size) or pool_tokens smaller",
                "RESOURCE_EXHAUSTED",
            ) from None
        raise
    finally:
        os.close(descriptor)


def lock(path: Path) -> int:
    """A descriptor that holds the lock of a new file; it ends with the process, however that ends."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def map_array(path: Path, dtype: str, mode: Literal["r", "r+"]) -> npt.NDArray[Any]:
    """The whole file as a flat numpy array; the mapping lives as long as the array or a view of it."""
    return np.asarray(np.memmap(path, dtype=dtype, mode=mode))


def write_header(path: Path, header: Header) -> None:
    """Readers may look at any moment: the header appears whole, and last."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(asdict(header)))
    temporary.replace(path)


def read_header(path: Path) -> Header:
    data = json.loads(path.read_text())
    data["shape"] = tuple(data["shape"])
    return Header(**data)
