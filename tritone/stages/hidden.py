"""Hidden states on their way to the Talker: written into pool blocks, sent as references."""

from __future__ import annotations

import torch

from tritone.messages import BlockRefs
from tritone.pools import BlockPool
from tritone.pools.pool import torch_view
from tritone.sizes import HIDDEN_ROWS


class HiddenWriter:
    """Writes rows [hidden] of one event into blocks [HIDDEN_ROWS, hidden] and lends them to the Talker."""

    def __init__(self, pool: BlockPool, lease_seconds: float) -> None:
        self._pool = pool
        self._lease_seconds = lease_seconds
        self._blocks: torch.Tensor = torch_view(pool.data, pool.header.dtype, pool.header.shape)

    def lend(self, rows: list[torch.Tensor]) -> tuple[BlockRefs, ...]:
        """References to ``rows`` in order; raises :class:`PoolExhausted` with nothing taken."""
        needed = -(-len(rows) // HIDDEN_ROWS)
        if needed > self._pool.available:
            self._pool.collect()
        blocks = self._pool.allocate(needed)
        refs = []
        for number, block in enumerate(blocks):
            part = torch.stack(rows[number * HIDDEN_ROWS : (number + 1) * HIDDEN_ROWS])
            self._blocks[block, : len(part)] = part
            refs.append(self._pool.lend([block], self._lease_seconds))
        return tuple(refs)
