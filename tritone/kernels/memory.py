"""Memory for packed weights on huge pages, which a single core reads about 1.4 times as fast."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

_CHUNK = 64 << 20
_ALIGNMENT = 64


class HugeMemory:
    """Cuts tensors of bytes from large private mappings for which huge pages are asked.

    A mapping lives as long as any tensor cut from it. Untouched room at its end costs address space only.
    """

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, size: int) -> Tensor:
        """A uint8 tensor [size], aligned to 64 bytes, of undefined content."""
        if self._used + size > self._chunk.numel():
            self._chunk, self._used = _map(max(size, _CHUNK)), 0
        piece = self._chunk[self._used : self._used + size]
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return piece


def _map(size: int) -> Tensor:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # a kernel without transparent huge pages: ordinary ones do
    return torch.frombuffer(memory, dtype=torch.uint8)
