"""The reader's side of a pool."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tritone.errors import TritoneError
from tritone.messages import BlockRefs
from tritone.pools import files


class StaleBlocks(TritoneError):
    """The blocks are not those the reference was made for; fails one request, never its neighbours. ``kind`` is one of
    :data:`tritone.integrity.kinds.KINDS`."""

    code = "INTERNAL"

    def __init__(self, message: str, kind: str = "handover") -> None:
        super().__init__(message)
        self.kind = kind


class PoolView:
    """A pool mapped read-only, except for the lease words, which the reader clears, and the condemned words."""

    def __init__(self, directory: Path, name: str) -> None:
        self.name = name
        self._header_file = directory / f"{name}.json"
        self._made = _stamp(self._header_file)
        self.header = files.read_header(self._header_file)
        self.data: npt.NDArray[np.uint8] = files.map_array(directory / f"{name}.data", "u1", "r")
        self.tags: npt.NDArray[np.uint64] = files.map_array(directory / f"{name}.tags", "u8", "r")
        self._lease_words = files.map_array(directory / f"{name}.leases", "u8", "r+")
        self.seals: npt.NDArray[np.uint64] = files.map_array(directory / f"{name}.seals", "u8", "r")
        self._condemned = files.map_array(directory / f"{name}.condemned", "u8", "r+")

    @property
    def leases(self) -> npt.NDArray[np.uint64]:
        """A copy of the lease words."""
        return self._lease_words.copy()

    def check_owner(self) -> None:
        """Raise :class:`StaleBlocks` when the process that owns the pool has ended."""
        if not files.is_locked(self._header_file.with_suffix(".owner")):
            raise StaleBlocks(f"{self.name}: the process that owns it has ended", "epoch")

    def is_current(self) -> bool:
        """Whether the owner has not made the pool anew since it was mapped."""
        return _stamp(self._header_file) == self._made

    def check(self, refs: BlockRefs) -> None:
        """Raise :class:`StaleBlocks` unless epoch, bounds, shape and tags are those of ``refs``."""
        header = self.header
        if refs.epoch != header.epoch:
            message = f"{self.name}: epoch {refs.epoch} is over, the pool was made anew (epoch {header.epoch})"
            raise StaleBlocks(message, "epoch")
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
            message = f"{self.name}: block {int(outside[0])} is outside 0..{header.blocks - 1}"
            raise StaleBlocks(message, "out_of_range")
        found = self.tags[blocks]
        wrong = np.flatnonzero(found != np.asarray(refs.tags, np.uint64))
        if wrong.size:
            at = int(wrong[0])
            raise StaleBlocks(
                f"{self.name}: block {refs.blocks[at]} carries tag {int(found[at])}, the reference says {refs.tags[at]} "
                f"({wrong.size} of {blocks.size} blocks differ)",
                "stale_tag",
            )

    def holds(self, refs: BlockRefs) -> bool:
        """Whether the lease of ``refs`` still stands."""
        known = refs.epoch == self.header.epoch and 0 <= refs.slot < self.header.blocks
        return known and int(self._lease_words[refs.slot]) == refs.nonce

    def condemn(self, block: int, tag: int) -> None:
        """Tell the owner that the content of ``block`` under ``tag`` is wrong."""
        self._condemned[block] = tag
        self._condemned[-1] = time.monotonic_ns()

    def block(self, index: int) -> npt.NDArray[np.uint8]:
        size = self.header.block_bytes
        return self.data[index * size : (index + 1) * size]

    def release(self, refs: BlockRefs) -> None:
        """End the lease; the owner frees the blocks. Does nothing if the owner already took them back."""
        if self.holds(refs):
            self._lease_words[refs.slot] = 0


def _stamp(header: Path) -> tuple[int, int]:
    """What differs between two writings of a header file, whatever they say."""
    found = os.stat(header)
    return found.st_ino, found.st_mtime_ns


class Views:
    """The pools of other processes, mapped at first use and mapped anew when their owner restarted."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._views: dict[str, PoolView] = {}

    def of(self, refs: BlockRefs) -> PoolView:
        """The pool that ``refs`` names, as its owner made it last."""
        view = self._views.get(refs.pool)
        try:
            if view is None or not view.is_current():
                if not refs.pool.replace("_", "").isalnum():
                    raise StaleBlocks(f"pool {refs.pool!r} is no pool name")
                view = self._views[refs.pool] = PoolView(self._directory, refs.pool)
        except FileNotFoundError:
            raise StaleBlocks(f"pool {refs.pool!r} does not exist", "epoch") from None
        return view

    def hold(self, refs: BlockRefs) -> bool:
        """Whether the lease of ``refs`` still stands; raises :class:`StaleBlocks` when its blocks, pool or owner are gone."""
        view = self.of(refs)
        view.check_owner()
        view.check(refs)
        return view.holds(refs)

    def release(self, *many: BlockRefs | None) -> None:
        """Release without reading; a pool that is gone needs none."""
        for refs in many:
            if refs is not None:
                try:
                    self.of(refs).release(refs)
                except StaleBlocks:
                    continue

    def copy_rows(self, refs: BlockRefs, rows: int) -> Any:
        """The first ``rows`` rows of the blocks of ``refs``, in their order, as a torch tensor of its own; then release."""
        from tritone.pools.pool import torch_view

        view = self.of(refs)
        try:
            view.check(refs)
            copy = torch_view(view.data, refs.dtype, refs.shape)[list(refs.blocks)].flatten(0, 1)[:rows]
            view.check(refs)
        finally:
            view.release(refs)
        return copy
