"""The reader's side of a pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tritone.errors import TritoneError
from tritone.messages import BlockRefs
from tritone.pools import files


class StaleBlocks(TritoneError):
    """The blocks are not those the reference was made for; fails one request, never its neighbours."""

    code = "INTERNAL"


class PoolView:
    """A pool mapped read-only, except for the lease words, which the reader clears."""

    def __init__(self, directory: Path, name: str) -> None:
        self.name = name
        self.header = files.read_header(directory / f"{name}.json")
        self.data: npt.NDArray[np.uint8] = files.map_array(directory / f"{name}.data", "u1", "r")
        self.tags: npt.NDArray[np.uint64] = files.map_array(directory / f"{name}.tags", "u8", "r")
        self._lease_words = files.map_array(directory / f"{name}.leases", "u8", "r+")

    def check(self, refs: BlockRefs) -> None:
        """Raise :class:`StaleBlocks` unless epoch, bounds, shape and tags are those of ``refs``."""
        header = self.header
        if refs.epoch != header.epoch:
            raise StaleBlocks(f"{self.name}: epoch {refs.epoch} is over, the pool was made anew (epoch {header.epoch})")
        if refs.shape != header.shape or refs.dtype != header.dtype:
            raise StaleBlocks(
                f"{self.name}: blocks of {refs.dtype} {list(refs.shape)} referred to, "
                f"pool holds {header.dtype} {list(header.shape)}"
            )
        if len(refs.blocks) != len(refs.tags):
            raise StaleBlocks(f"{self.name}: {len(refs.blocks)} blocks with {len(refs.tags)} tags")
        blocks = np.asarray(refs.blocks, np.int64)
        outside = blocks[(blocks < 0) | (blocks >= header.blocks)]
        if outside.size:
            raise StaleBlocks(f"{self.name}: block {int(outside[0])} is outside 0..{header.blocks - 1}")
        found = self.tags[blocks]
        wrong = np.flatnonzero(found != np.asarray(refs.tags, np.uint64))
        if wrong.size:
            at = int(wrong[0])
            raise StaleBlocks(
                f"{self.name}: block {refs.blocks[at]} carries tag {int(found[at])}, the reference says {refs.tags[at]} "
                f"({wrong.size} of {blocks.size} blocks differ)"
            )

    def block(self, index: int) -> npt.NDArray[np.uint8]:
        size = self.header.block_bytes
        return self.data[index * size : (index + 1) * size]

    def release(self, refs: BlockRefs) -> None:
        """End the lease; the owner frees the blocks. Does nothing if the owner already took them back."""
        known = refs.epoch == self.header.epoch and 0 <= refs.slot < self.header.blocks
        if known and int(self._lease_words[refs.slot]) == refs.nonce:
            self._lease_words[refs.slot] = 0


class Views:
    """The pools of other processes, mapped at first use and mapped anew when their owner restarted."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._views: dict[str, PoolView] = {}

    def of(self, refs: BlockRefs) -> PoolView:
        view = self._views.get(refs.pool)
        if view is None or view.header.epoch != refs.epoch:
            if not refs.pool.replace("_", "").isalnum():
                raise StaleBlocks(f"pool {refs.pool!r} is no pool name")
            try:
                view = PoolView(self._directory, refs.pool)
            except FileNotFoundError:
                raise StaleBlocks(f"pool {refs.pool!r} does not exist") from None
            self._views[refs.pool] = view
        return view

    def release(self, *many: BlockRefs | None) -> None:
        """Release without reading; a pool that is gone needs none."""
        for refs in many:
            if refs is not None:
                try:
                    self.of(refs).release(refs)
                except StaleBlocks:
                    continue

    def copy_rows(self, refs: BlockRefs, rows: int) -> Any:
        """The first ``rows`` rows of the only block of ``refs`` as a torch tensor of its own; then release."""
        from tritone.pools.pool import torch_view

        view = self.of(refs)
        try:
            view.check(refs)
            copy = torch_view(view.block(refs.blocks[0]), refs.dtype, refs.shape)[0, :rows].clone()
            view.check(refs)
        finally:
            view.release(refs)
        return copy
