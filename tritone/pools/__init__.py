"""Block pools in shared memory: one owner allocates, other processes map and read."""

from tritone.pools.board import CancelBoard
from tritone.pools.free_list import FreeList, PoolExhausted
from tritone.pools.pool import BlockPool, Lease
from tritone.pools.view import PoolView, StaleBlocks, Views

__all__ = ["BlockPool", "CancelBoard", "FreeList", "Lease", "PoolExhausted", "PoolView", "StaleBlocks", "Views"]
