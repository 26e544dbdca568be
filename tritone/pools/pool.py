"""The owner's side of a pool."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tritone.messages import BlockRefs
from tritone.pools import files
from tritone.pools.free_list import FreeList


@dataclass(frozen=True)
class Lease:
    """Blocks lent to one reader until it clears word ``slot``, or until ``deadline`` (monotonic seconds)."""

    slot: int
    nonce: int
    blocks: tuple[int, ...]
    deadline: float


class BlockPool:
    """A region of equal blocks in shared memory, owned by one process.

    A block's tag changes at every allocation (a 64-bit counter, never reused while the pool lives), so a reference held
    too long can be told from a fresh one. One thread uses a pool; readers are other processes (:class:`PoolView`).
    """

    def __init__(self, directory: Path, name: str, blocks: int, shape: Sequence[int], dtype: str, itemsize: int,
                 *, clock: Callable[[], float] = time.monotonic) -> None:
        """Make the pool's files in ``directory``; ``shape`` x ``itemsize`` bytes a block, ``dtype`` a torch name."""
        block_bytes = int(np.prod(shape)) * itemsize
        self.name = name
        self.header = files.Header(secrets.randbits(63), blocks, block_bytes, tuple(shape), dtype)
        (directory / f"{name}.json").unlink(missing_ok=True)
        for suffix, size in (("data", blocks * block_bytes), ("tags", blocks * files.WORD), ("leases", blocks * files.WORD)):
            # A reader of an earlier owner keeps its old file and epoch: never truncate under it.
            (directory / f"{name}.{suffix}").unlink(missing_ok=True)
            files.create(directory / f"{name}.{suffix}", size)
        self.data: npt.NDArray[np.uint8] = files.map_array(directory / f"{name}.data", "u1", "r+")
        self.tags: npt.NDArray[np.uint64] = files.map_array(directory / f"{name}.tags", "u8", "r+")
        self._lease_words = files.map_array(directory / f"{name}.leases", "u8", "r+")
        files.write_header(directory / f"{name}.json", self.header)
        self._free = FreeList(blocks)
        self._next_tag = 1
        self._leases: dict[int, Lease] = {}
        self._clock = clock

    @property
    def total(self) -> int:
        return self._free.total

    @property
    def available(self) -> int:
        return self._free.available

    @property
    def leased(self) -> int:
        return sum(len(lease.blocks) for lease in self._leases.values())

    def allocate(self, count: int) -> list[int]:
        """``count`` blocks with new tags; raises :class:`PoolExhausted` and takes none when fewer are free."""
        blocks = self._free.allocate(count)
        for block in blocks:
            self.tags[block] = self._next_tag
            self._next_tag += 1
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        self._free.free(blocks)

    def block(self, index: int) -> npt.NDArray[np.uint8]:
        """The bytes of one block, uint8 [block_bytes]."""
        size = self.header.block_bytes
        return self.data[index * size : (index + 1) * size]

    def lend(self, blocks: Sequence[int], seconds: float) -> BlockRefs:
        """Hand allocated blocks to one reader; :meth:`collect` frees them once released or overdue."""
        slot = blocks[0]
        lease = Lease(slot, secrets.randbits(62) + 1, tuple(blocks), self._clock() + seconds)
        self._leases[slot] = lease
        self._lease_words[slot] = lease.nonce
        return BlockRefs(
            pool=self.name,
            epoch=self.header.epoch,
            blocks=lease.blocks,
            tags=tuple(int(self.tags[block]) for block in blocks),
            slot=slot,
            nonce=lease.nonce,
            shape=self.header.shape,
            dtype=self.header.dtype,
        )

    def collect(self) -> int:
        """Free the blocks of leases that were released or are overdue; gives the number of overdue ones.

        An overdue block's tag changes at once, so that a reader which is still copying finds out.
        """
        now = self._clock()
        overdue = 0
        for slot, lease in list(self._leases.items()):
            released = int(self._lease_words[slot]) != lease.nonce
            if not released and now < lease.deadline:
                continue
            if not released:
                overdue += 1
                self._lease_words[slot] = 0
                for block in lease.blocks:
                    self.tags[block] = self._next_tag
                    self._next_tag += 1
            del self._leases[slot]
            self._free.free(lease.blocks)
        return overdue

    def gauges(self) -> dict[str, float]:
        return {"free": self.available, "leased": self.leased, "used": self.total - self.available - self.leased}


def torch_view(pool_data: npt.NDArray[np.uint8], dtype: str, shape: Sequence[int]) -> Any:
    """The bytes as a torch tensor [blocks, *shape], sharing memory; numpy holds the mapping open."""
    import warnings

    import torch

    with warnings.catch_warnings():
        # A reader's mapping is read-only and stays so: nothing writes through this tensor.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        flat = torch.from_numpy(pool_data)
    return flat.view(getattr(torch, dtype)).view(-1, *shape)
