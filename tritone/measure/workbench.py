"""One checkpoint in several precisions, ready to be timed in turn: decoders, page pools, engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from tritone.engine.engine import Engine
from tritone.engine.scheduler import Scheduler
from tritone.kernels import KV, QuantizedPages
from tritone.locked_directory import LockedDirectory
from tritone.models.decoder import Decoder, DecoderConfig, load_decoder, load_kv_scales
from tritone.pools import BlockPool
from tritone.pools.pool import torch_view
from tritone.sizes import ITEM_SIZES, KV_DTYPES

BATCH_TOKENS = 512
"""Tokens computed in one step, as in a deployment that says nothing."""


@dataclass(frozen=True)
class Pages:
    """A page pool in shared memory, as a stage has one, and the tensor over it; the pages hold random numbers."""

    pool: BlockPool
    kv: KV
    page_size: int

    @property
    def tokens(self) -> int:
        return self.pool.total * self.page_size


class Workbench:
    """A context manager: what it makes in shared memory goes with it.

    ``dtype`` is that of activations and of weights that are not quantised. All decoders are in memory at once, so that they
    can be timed in turn on a machine whose speed drifts.
    """

    def __init__(self, checkpoint: Path, dtype: torch.dtype, page_size: int) -> None:
        self.checkpoint = checkpoint
        self.config = DecoderConfig.from_directory(checkpoint)
        self.decoders: dict[str, Decoder] = {}
        self._dtype = dtype
        self.page_size = page_size
        self._locked = LockedDirectory.make()
        self._made = 0

    @property
    def directory(self) -> Path:
        """Where the pools lie; it goes with the process, or is removed by the next start of a server or a measurement."""
        return self._locked.path

    def __enter__(self) -> Workbench:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._locked.remove()

    def load(
        self,
        weights: str,
        positions: int,
        group: int,
        progress: Callable[[int, int], None],
        *,
        name: str | None = None,
        checkpoint: Path | None = None,
    ) -> None:
        """Add a decoder, called ``name`` (by default as its ``weights``), of another ``checkpoint`` of the same model perhaps.

        ``group`` is that of INT4 weights that are made here. ``progress`` gets bytes done, bytes in all.
        """
        self.decoders[name or weights] = load_decoder(
            checkpoint or self.checkpoint,
            dtype=self._dtype,
            progress=progress,
            max_positions=positions,
            weights=weights,
            group=group,
        )

    def pages(self, kv: str, tokens: int) -> Pages:
        """Room for ``tokens`` tokens, rounded up to whole pages."""
        dtype, shape = KV_DTYPES[kv], self.config.page_shape(self.page_size)
        self._made += 1
        name, count = f"pages{self._made}", -(-tokens // self.page_size)
        pool = BlockPool(self.directory, name, count, shape, dtype, ITEM_SIZES[dtype])
        view: torch.Tensor = torch_view(pool.data, dtype, shape)
        page = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(view.dtype)
        view.view(torch.uint8)[:] = page.view(torch.uint8)
        if kv != "fp8":
            return Pages(pool, view, self.page_size)
        # Offsets are each decoder's own, and the pages are any decoder's; the time is the same with zeros.
        offsets = torch.zeros(self.config.layers, self.config.kv_heads, self.config.head_dim)
        return Pages(pool, QuantizedPages(view, load_kv_scales(self.checkpoint, self.config), offsets), self.page_size)

    def engine(self, decoder: Decoder, pages: Pages, sequences: int = 256) -> Engine:
        """Several engines may use the same pages, one after another."""
        scheduler = Scheduler(pages.pool, self.page_size, sequences, BATCH_TOKENS)
        return Engine(decoder, pages.kv, scheduler)
