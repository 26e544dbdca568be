"""Which pages a sequence took under which tags, and whether it still holds them before it computes with them. No torch."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tritone.integrity.kinds import IntegrityError
from tritone.integrity.ledger import Ledger

if TYPE_CHECKING:
    from tritone.engine.sequence import Sequence
    from tritone.pools import BlockPool

log = logging.getLogger(__name__)


class NoTracker:
    """Keeps and checks nothing: the library's default. Scheduler and engine call it like :class:`Tracker`."""

    def begin(self) -> None:
        """A step is about to be planned."""

    def take(self, sequence: Sequence, pages: list[int]) -> None:
        """``pages``, now the last ones of the sequence, were allocated for it."""

    def share(self, sequence: Sequence, pages: list[int]) -> None:
        """``pages``, now the first ones of the sequence, come from the prefix cache, in place of as many given up."""

    def examine(self, sequence: Sequence) -> None:
        """The content of the sequence's pages is about to be put aside: check them now."""

    def give_up(self, sequence: Sequence, count: int | None = None) -> list[int]:
        """The sequence gives up its first ``count`` pages (None: all); gives those that are its own to free."""
        return sequence.pages[:count]

    def check(self, sequences: Iterable[Sequence]) -> list[tuple[Sequence, IntegrityError]]:
        """The sequences, planned for this step or not, that must not be computed any more."""
        return []

    def found(self, kind: str, message: str) -> None:
        """Something outside the tracker's own checks was found wrong."""

    def publish(self, blocks: Mapping[str, float], steps: int) -> None:
        """Tell the auditor the pool's blocks by state and the engine's steps so far."""


@dataclass
class _Held:
    pages: list[int] = field(default_factory=list)
    tags: list[int] = field(default_factory=list)
    reported: bool = False


class Tracker(NoTracker):
    """Checks every page of every sequence of a step, in one pass before the step, apart from the attention code.

    A sequence's record says which pages it took under which tags. Two things can make it differ from what attention is
    about to read, and each is looked at in full at every step:

    - **The pool's tags.** All of them are compared with those of the last check (as one piece of memory, 8 bytes a block,
      whoever wrote them), and only blocks whose tag differs are compared with the records. This is exact: a record was
      right when it was made or last checked, a record does not change, so it is wrong now only if a tag it names has
      changed since; and every changed tag is in the comparison. The cost grows with the pool and with what changed,
      not with the contexts.
    - **The sequences' page lists.** They are plain lists, so they can change without this class being told; each is
      compared with its record as a whole, below a nanosecond a page.

    That a page is held twice is known when it is taken. What readers and the auditor condemn by content arrives in the
    pool's condemned words. ``log_only``: what is found is counted and logged, and the sequence goes on, unless a page lies
    outside the pool: with that nothing can be computed.
    """

    def __init__(self, pool: BlockPool, ledger: Ledger, *, log_only: bool = False) -> None:
        self._pool = pool
        self._ledger = ledger
        self._log_only = log_only
        self._held: dict[Sequence, _Held] = {}
        self._holders = np.zeros(pool.total, np.int32)
        self._recorded = np.zeros(pool.total, np.uint64)
        """The tag under which a block was last taken; the prefix cache keeps pages under it."""
        self._seen = pool.tags.tobytes()
        self._seen_condemned = 0
        self._suspects: set[int] = set()
        self._condemned: set[int] = set()
        self._faults: dict[Sequence, tuple[str, str]] = {}

    def begin(self) -> None:
        """Take condemned pages out of the prefix cache, before a new sequence finds them there."""
        if int(self._pool.condemned[-1]) == self._seen_condemned:
            return
        self._seen_condemned = int(self._pool.condemned[-1])
        tags = self._pool.tags
        for page in np.flatnonzero((self._pool.condemned[:-1] == tags) & (tags != 0)).tolist():
            if page not in self._condemned:
                self._condemned.add(page)
                self._suspects.add(page)
                self._pool.discard(page)
                if not self._holders[page]:
                    self.found("content", f"page {page} was condemned; no sequence held it")

    def take(self, sequence: Sequence, pages: list[int]) -> None:
        held = self._held.setdefault(sequence, _Held())
        if outside := [page for page in pages if not 0 <= page < self._pool.total]:
            self._find(sequence, "out_of_range", f"page {outside[0]} is outside 0..{self._pool.total - 1}")
            return
        self._condemned.difference_update(pages)
        self._suspects.update(page for page in pages if self._holders[page])
        self._recorded[pages] = self._pool.issued(pages)
        self._record(held, len(held.pages), pages)

    def share(self, sequence: Sequence, pages: list[int]) -> None:
        held = self._held.setdefault(sequence, _Held())
        # The tag under which the page entered, not today's: a cache that kept a page too long is found out.
        self._suspects.update(page for page in pages if self._recorded[page] != self._pool.tags[page])
        del held.pages[: len(pages)], held.tags[: len(pages)]
        self._record(held, 0, pages)

    def examine(self, sequence: Sequence) -> None:
        held = self._held[sequence]
        self._compare_tags(sequence, held)
        self._compare_lists(sequence, held)

    def give_up(self, sequence: Sequence, count: int | None = None) -> list[int]:
        """Pages that the pool gave to another since are not among those to free, nor those that were never given."""
        held = self._held.get(sequence, _Held())
        pages, tags = held.pages[:count], held.tags[:count]
        if count is None:
            self._held.pop(sequence, None)
        np.subtract.at(self._holders, pages, 1)
        issued = self._pool.issued(pages).tolist()
        return [page for page, tag, now in zip(pages, tags, issued, strict=True) if tag == now]

    def check(self, sequences: Iterable[Sequence]) -> list[tuple[Sequence, IntegrityError]]:
        # As bytes: one copy and one comparison in C, half the time of numpy's where nothing lies in the caches.
        seen = self._pool.tags.tobytes()
        if seen != self._seen:
            tags, before = np.frombuffer(seen, np.uint64), np.frombuffer(self._seen, np.uint64)
            changed = np.flatnonzero(tags != before)
            wrong = (self._holders[changed] > 0) & (self._recorded[changed] != tags[changed])
            self._suspects.update(changed[wrong].tolist())
            self._seen = seen
        pages = 0
        for sequence in sequences:
            held = self._held[sequence]
            pages += len(held.pages)
            if held.pages != sequence.pages:
                self._compare_lists(sequence, held)
        if self._suspects:
            self._resolve()
        self._ledger.checked(pages)
        return self._end() if self._faults else []

    def found(self, kind: str, message: str) -> None:
        self._ledger.mismatch(kind)
        log.error("integrity: %s: %s: %s", kind, self._pool.name, message)

    def publish(self, blocks: Mapping[str, float], steps: int) -> None:
        self._ledger.blocks(blocks)
        self._ledger.stepped(steps)

    def _record(self, held: _Held, at: int, pages: list[int]) -> None:
        held.pages[at:at] = pages
        held.tags[at:at] = self._recorded[pages].tolist()
        np.add.at(self._holders, pages, 1)

    def _resolve(self) -> None:
        """Find the sequences that hold a suspected page, all of them, also those not planned."""
        suspects, self._suspects = self._suspects, set()
        holders: dict[int, list[Sequence]] = {}
        for sequence, held in self._held.items():
            for page in suspects.intersection(held.pages):
                holders.setdefault(page, []).append(sequence)
            self._compare_tags(sequence, held)
        for page, held_by in holders.items():
            if page in self._condemned:
                for sequence in held_by:
                    self._find(sequence, "content", f"page {page} was condemned: its bytes are not those that were written")
            current = [s for s in held_by if s not in self._faults]
            if len(current) > 1 and not self._pool.is_kept(page):
                for sequence in current:
                    self._find(sequence, "double_hold", f"page {page} is held by {len(current)} sequences")
        for page in suspects:
            if self._recorded[page] != self._pool.tags[page]:
                self._pool.discard(page)

    def _compare_tags(self, sequence: Sequence, held: _Held) -> None:
        found = self._pool.tags[held.pages]
        wrong = np.flatnonzero(found != np.asarray(held.tags, np.uint64))
        if wrong.size:
            at = int(wrong[0])
            message = f"page {held.pages[at]} carries tag {int(found[at])}, the sequence took it under {held.tags[at]}"
            self._find(sequence, "stale_tag", message)

    def _compare_lists(self, sequence: Sequence, held: _Held) -> None:
        if held.pages == sequence.pages:
            return
        total = self._pool.total
        outside = [page for page in sequence.pages if not 0 <= page < total]
        if outside:
            self._find(sequence, "out_of_range", f"page {outside[0]} is outside 0..{total - 1}")
            return
        pairs = list(zip(held.pages, sequence.pages, strict=False))
        at = next((number for number, (given, found) in enumerate(pairs) if given != found), len(pairs))
        found = sequence.pages[at] if at < len(sequence.pages) else "missing"
        given = held.pages[at] if at < len(held.pages) else "none"
        self._find(sequence, "page_table", f"page {at} of the sequence is {found}; it was given {given}")

    def _find(self, sequence: Sequence, kind: str, message: str) -> None:
        self._faults.setdefault(sequence, (kind, message))

    def _end(self) -> list[tuple[Sequence, IntegrityError]]:
        faults, self._faults = self._faults, {}
        ended = []
        for sequence, (kind, message) in faults.items():
            held = self._held.get(sequence)
            if held is None or not held.reported:
                self.found(kind, f"session {sequence.session}: {message}")
            if held is not None:
                held.reported = True
            if not self._log_only or kind == "out_of_range":
                ended.append((sequence, IntegrityError(kind, message)))
        return ended

