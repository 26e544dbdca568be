"""The owner's side of a pool."""

from __future__ import annotations

import os
import secrets
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tritone.messages import BlockRefs
from tritone.pools import files
from tritone.pools.digest import digest
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

    A block's tag changes at every allocation and whenever the block becomes free (a 64-bit counter, never reused while the
    pool lives), so a reference held too long can be told from a fresh one. One thread uses a pool; readers are other
    processes (:class:`PoolView`).
    """

    def __init__(self, directory: Path, name: str, blocks: int, shape: Sequence[int], dtype: str, itemsize: int,
                 *, seal: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        """Make the pool's files in ``directory``; ``shape`` x ``itemsize`` bytes a block, ``dtype`` a torch name.
        ``seal``: publish the digest of every kept block."""
        block_bytes = int(np.prod(shape)) * itemsize
        self.name = name
        self.header = files.Header(secrets.randbits(63), blocks, block_bytes, tuple(shape), dtype)
        (directory / f"{name}.json").unlink(missing_ok=True)
        sizes = {"data": blocks * block_bytes} | {name: (blocks + more) * files.WORD for name, more in files.WORDS.items()}
        for suffix, size in sizes.items():
            # A reader of an earlier owner keeps its old file and epoch: never truncate under it.
            (directory / f"{name}.{suffix}").unlink(missing_ok=True)
            files.create(directory / f"{name}.{suffix}", size)
        self.data: npt.NDArray[np.uint8] = files.map_array(directory / f"{name}.data", "u1", "r+")
        self.tags: npt.NDArray[np.uint64] = files.map_array(directory / f"{name}.tags", "u8", "r+")
        self._lease_words = files.map_array(directory / f"{name}.leases", "u8", "r+")
        self._seals = files.map_array(directory / f"{name}.seals", "u8", "r+")
        self.condemned: npt.NDArray[np.uint64] = files.map_array(directory / f"{name}.condemned", "u8", "r")
        descriptor = files.lock(directory / f"{name}.owner")
        weakref.finalize(self, os.close, descriptor)
        files.write_header(directory / f"{name}.json", self.header)
        self._free = FreeList(blocks)
        self._issued = self.tags.copy()
        self._next_tag = 1
        self.seal = seal
        """Whether digests of kept blocks are published."""
        self._leases: dict[int, Lease] = {}
        self._clock = clock

    @property
    def total(self) -> int:
        return self._free.total

    @property
    def available(self) -> int:
        """Blocks that can be allocated: free and cached ones."""
        return self._free.available

    @property
    def leases(self) -> int:
        return len(self._leases)

    @property
    def leased(self) -> int:
        """Blocks that leases alone hold."""
        lent = Counter(block for lease in self._leases.values() for block in lease.blocks)
        return sum(self._free.holders(block) <= count for block, count in lent.items())

    @property
    def on_evict(self) -> Callable[[int], None]:
        return self._free.on_evict

    @on_evict.setter
    def on_evict(self, call: Callable[[int], None]) -> None:
        self._free.on_evict = call

    def allocate(self, count: int) -> list[int]:
        """``count`` blocks with new tags; raises :class:`PoolExhausted` and takes none when fewer are free."""
        blocks = self._free.allocate(count)
        self._retag(blocks)
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        self._free.share(blocks)

    def free(self, blocks: Sequence[int]) -> None:
        self._retag(self._free.free(blocks))

    def keep(self, block: int) -> None:
        """The content of a held block is complete and worth keeping; nothing is written into it from here on."""
        self._free.keep(block)
        if self.seal:
            self._seals[block] = digest(self.block(block))

    def is_kept(self, block: int) -> bool:
        return self._free.is_kept(block)

    def holders(self, block: int) -> int:
        return self._free.holders(block)

    def discard(self, block: int) -> None:
        """The content of a kept block is no good: it is found no more, and free once nobody holds it."""
        self._free.discard(block)

    def issued(self, blocks: Sequence[int]) -> npt.NDArray[np.uint64]:
        """The tags that this pool gave ``blocks``, whatever the shared table says."""
        return self._issued[np.asarray(blocks, np.int64)]

    def digests(self, blocks: Sequence[int]) -> tuple[int, ...]:
        """The digest of each block's content; that of a sealed one is as it was sealed."""
        return tuple(int(self._seals[block]) or digest(self.block(block)) for block in blocks)

    def _retag(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._seals[block] = 0
            self._issued[block] = self.tags[block] = self._next_tag
            self._next_tag += 1

    def evict_all(self) -> None:
        self._free.evict_all()

    def block(self, index: int) -> npt.NDArray[np.uint8]:
        """The bytes of one block, uint8 [block_bytes]."""
        size = self.header.block_bytes
        return self.data[index * size : (index + 1) * size]

    def lend(self, blocks: Sequence[int], seconds: float) -> BlockRefs:
        """Hand allocated blocks to one reader, with the caller's hold on them; :meth:`collect` frees them once released or
        overdue. Two readers may be lent the same kept blocks, but the last one of a lease must be in no other lease."""
        slot = blocks[-1]
        if slot in self._leases:
            raise ValueError(f"block {slot} already ends a lease")
        lease = Lease(slot, secrets.randbits(62) + 1, tuple(blocks), self._clock() + seconds)
        self._leases[slot] = lease
        self._lease_words[slot] = lease.nonce
        return BlockRefs(
            pool=self.name,
            epoch=self.header.epoch,
            blocks=lease.blocks,
            tags=tuple(self.issued(blocks).tolist()),
            slot=slot,
            nonce=lease.nonce,
            shape=self.header.shape,
            dtype=self.header.dtype,
        )

    def collect(self) -> int:
        """Free the blocks of leases that were released or are overdue; gives the number of overdue ones.

        Blocks that become free get new tags, so that a reader which is still copying finds out. What others hold, and what
        the prefix cache keeps, stays as it is: so may its reader.
        """
        now = self._clock()
        overdue = 0
        for slot, lease in list(self._leases.items()):
            released = int(self._lease_words[slot]) != lease.nonce
            if not released and now < lease.deadline:
                continue
            del self._leases[slot]
            self.free(lease.blocks)
            if not released:
                overdue += 1
                self._lease_words[slot] = 0
        return overdue

    def is_lent(self, refs: BlockRefs) -> bool:
        """Whether the lease of ``refs`` has not been collected yet."""
        lease = self._leases.get(refs.slot)
        return lease is not None and lease.nonce == refs.nonce

    def take_back(self, slot: int, nonce: int) -> None:
        """Release a lease in its reader's place; does nothing if it is over."""
        if int(self._lease_words[slot]) == nonce:
            self._lease_words[slot] = 0

    def gauges(self) -> dict[str, float]:
        """Blocks by state; each is in one, so that they add up to the total."""
        cached, leased = self._free.cached, self.leased
        free = self.available - cached
        return {"free": free, "cached": cached, "leased": leased, "used": self.total - free - cached - leased}


def torch_view(pool_data: npt.NDArray[np.uint8], dtype: str, shape: Sequence[int]) -> Any:
    """The bytes as a torch tensor [blocks, *shape], sharing memory; numpy holds the mapping open."""
    import warnings

    import torch

    with warnings.catch_warnings():
        # A reader's mapping is read-only and stays so: nothing writes through this tensor.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        flat = torch.from_numpy(pool_data)
    return flat.view(getattr(torch, dtype)).view(-1, *shape)
