"""Which blocks of a pool are free; pure Python, the allocator behind every pool."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class PoolExhausted(Exception):
    """More blocks were asked for than are free."""


class FreeList:
    """Blocks 0 … ``total`` - 1, handed out least recently freed first (a late reader of a freed block then finds its
    content for as long as possible, and its tag changed once it is gone)."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free: deque[int] = deque(range(total))
        self._held = bytearray(total)

    @property
    def available(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """``count`` blocks, all or none; raises :class:`PoolExhausted`."""
        if count > len(self._free):
            raise PoolExhausted(f"{count} blocks asked for, {len(self._free)} of {self.total} free")
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._held[block] = 1
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        """Give blocks back; one that is not held raises ``ValueError`` and frees nothing of the rest."""
        for block in blocks:
            if not (0 <= block < self.total and self._held[block]):
                raise ValueError(f"block {block} is not allocated")
            self._held[block] = 0
            self._free.append(block)
