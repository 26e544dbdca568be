"""Decode's side of the hand-over: prefill's pages are copied into decode's own, checked, and given back."""

from __future__ import annotations

import time

import torch

from tritone.engine.engine import Engine
from tritone.engine.sequence import Sequence
from tritone.errors import TritoneError
from tritone.integrity import IntegrityError
from tritone.integrity.faults import Faults
from tritone.kernels import QuantizedPages, default_kernels
from tritone.messages import BlockRefs, Handoff
from tritone.pools import BlockPool, PoolView, StaleBlocks, Views
from tritone.pools.digest import digest
from tritone.pools.pool import torch_view


class Puller:
    """``pages`` is the pool behind ``engine``; ``scales`` are those of prefill's pages, if they are e4m3."""

    def __init__(self, engine: Engine, pages: BlockPool, views: Views, faults: Faults, *, seconds: float,
                 scales: torch.Tensor | None) -> None:
        self._engine = engine
        self._page_size = engine.scheduler.page_size
        self._tracker = engine.scheduler.tracker
        self._pages = pages
        self._views = views
        self._faults = faults
        self._seconds = seconds
        self._scales = scales
        own = engine.kv.scales if isinstance(engine.kv, QuantizedPages) else None
        self._same_scales = scales is None or (own is not None and torch.equal(scales, own))
        self._kernels = default_kernels()

    def pull(self, handoff: Handoff, sequence: Sequence) -> None:
        """Copy the pages and release their lease. Raises :class:`IntegrityError` when they are not what was handed over, or
        came too late."""
        begun = time.monotonic()
        try:
            view = self._views.of(handoff.pages)
            try:
                self._copy(view, handoff, sequence)
                self._faults.pulled(sequence.salt)
            finally:
                view.release(handoff.pages)
        except StaleBlocks as error:
            raise self._found(error.kind, error.message) from None
        if late := self.late(time.monotonic() - begun):
            raise late

    def late(self, seconds: float) -> IntegrityError | None:
        """What ends a request whose pages have been on their way for so long, if that is too long."""
        if seconds <= self._seconds:
            return None
        message = f"{seconds:.1f} s for the pages to come; integrity.transfer_seconds is {self._seconds:g}"
        return self._found("transfer", message, "DEADLINE_EXCEEDED")

    def gone(self, refs: BlockRefs) -> IntegrityError | None:
        """What ends a request that waits with ``refs``, if prefill has taken them back, was restarted or has ended."""
        try:
            if self._views.hold(refs):
                return None
            return self._found("handover", f"{refs.pool}: prefill has taken the pages back")
        except StaleBlocks as error:
            return self._found(error.kind, error.message)

    def _copy(self, view: PoolView, handoff: Handoff, sequence: Sequence) -> None:
        """The pages that the prefix cache did not have, in this pool's precision. Tags are compared before and after, and
        digests with what was read."""
        refs = handoff.pages
        first = sequence.cached // self._page_size
        sources, targets = refs.blocks[first:], sequence.pages[first : len(refs.blocks)]
        view.check_owner()
        view.check(refs)
        same = refs.dtype == self._pages.header.dtype and self._same_scales
        if same:
            for source, target in zip(sources, targets, strict=True):
                self._pages.block(target)[:] = view.block(source)
        elif sources:
            held: torch.Tensor = torch_view(view.data, refs.dtype, refs.shape)
            pages = held if self._scales is None else QuantizedPages(held, self._scales)
            tokens = sequence.imported - first * self._page_size
            wrong = self._kernels.convert_pages(pages, sources, self._engine.kv, targets, tokens)
            if wrong is not None:
                raise TritoneError(f"decode: page {first + wrong} of the prompt's keys and values holds NaN")
        for number, value in enumerate(handoff.digests[first:]):
            # The copy itself is looked at, where it has the same bytes: it cannot differ from what was looked at.
            read = self._pages.block(targets[number]) if same else view.block(sources[number])
            if digest(read) != value:
                view.condemn(sources[number], refs.tags[first + number])
                raise StaleBlocks(f"{view.name}: the bytes of block {sources[number]} are not those handed over", "content")
        view.check(refs)

    def _found(self, kind: str, message: str, code: str | None = None) -> IntegrityError:
        self._tracker.found(kind, message)
        return IntegrityError(kind, message, code)
