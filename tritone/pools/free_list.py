"""Which blocks of a pool are free, cached or held; pure Python, the allocator behind every pool."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable


class PoolExhausted(Exception):
    """More blocks were asked for than are free."""


class FreeList:
    """Blocks 0 … ``total`` - 1, each held by a number of holders.

    A block that nobody holds is free, or *cached* if it was marked by :meth:`keep`: then its content stays until its
    memory is needed. Free blocks are handed out least recently freed first (a late reader of a freed block then finds its
    content for as long as possible, and its tag changed once it is gone); cached ones only when no other is left, least
    recently used first.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.on_evict: Callable[[int], None] = lambda block: None
        """Called with a cached block whose content is about to go."""
        self._free: deque[int] = deque(range(total))
        self._cached: dict[int, None] = {}
        self._holders = [0] * total
        self._kept = bytearray(total)

    @property
    def available(self) -> int:
        """Blocks that can be allocated: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        return len(self._cached)

    def holders(self, block: int) -> int:
        return self._holders[block]

    def is_kept(self, block: int) -> bool:
        return bool(self._kept[block])

    def allocate(self, count: int) -> list[int]:
        """``count`` blocks, all or none, with one holder each; raises :class:`PoolExhausted`."""
        if count > self.available:
            raise PoolExhausted(f"{count} blocks asked for, {self.available} of {self.total} free")
        while len(self._free) < count:
            self.evict(next(iter(self._cached)))
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._holders[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more holder for each of ``blocks``; all must be held or cached, and only kept ones have several holders."""
        for block in blocks:
            if not self._kept[block]:
                raise ValueError(f"block {block} is not kept, so it cannot be shared")
            self._cached.pop(block, None)
            self._holders[block] += 1

    def free(self, blocks: Iterable[int]) -> list[int]:
        """One holder less for each of ``blocks``, a sequence's in its order: of those that become cached, the last one is
        the first to go. Gives those that became free. A block that nobody holds raises ``ValueError`` and frees nothing of
        the rest."""
        cached: list[int] = []
        freed: list[int] = []
        try:
            for block in blocks:
                if not (0 <= block < self.total and self._holders[block]):
                    raise ValueError(f"block {block} is not allocated")
                self._holders[block] -= 1
                if not self._holders[block]:
                    if self._kept[block]:
                        cached.append(block)
                    else:
                        freed.append(block)
        finally:
            self._free += freed
            self._cached |= dict.fromkeys(reversed(cached))
        return freed

    def keep(self, block: int) -> None:
        """The content of a held block is worth keeping: it is cached, not free, once nobody holds it."""
        if not self._holders[block]:
            raise ValueError(f"block {block} is not allocated")
        self._kept[block] = 1

    def discard(self, block: int) -> None:
        """The content of a kept block is no good: it is found no more, and free once nobody holds it."""
        if block in self._cached:
            self.evict(block)
        elif self._kept[block]:
            self._kept[block] = 0
            self.on_evict(block)

    def evict(self, block: int) -> None:
        """Make a cached block free."""
        del self._cached[block]
        self._kept[block] = 0
        self._free.append(block)
        self.on_evict(block)

    def evict_all(self) -> None:
        for block in list(self._cached):
            self.evict(block)
