"""Faults on purpose: a request whose ``cache_salt`` is ``fault:<name>`` gets that fault, where the deployment allows it."""

from __future__ import annotations

import logging
import math
import os
import signal
import time
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING
from weakref import WeakSet

from tritone.pools import BlockPool

if TYPE_CHECKING:
    from tritone.engine.sequence import Sequence

log = logging.getLogger(__name__)

PREFIX = "fault:"
AFTER_TOKENS = 3
"""Faults of running sequences strike once the answer is so long, in the middle of decoding."""
DEATH_SECONDS = 0.4
"""So long after a hand-over prefill ends itself; decode takes the pages later than that."""
PREFILL_ENDS = ("prefill_dies", "prefill_memory")
FOREIGN = 0x3C
"""What the new holder of a freed page writes into it."""


class Faults:
    """``kinds`` are those that the deployment allows; a salt may go on after the name (``fault:stale_tag:7``)."""

    def __init__(self, kinds: Collection[str], pages: BlockPool, transfer_seconds: float) -> None:
        self._kinds = frozenset(kinds)
        self._pages = pages
        self._transfer_seconds = transfer_seconds
        self._struck: WeakSet[Sequence] = WeakSet()
        self._intruders: list[int] = []
        self._death, self._memory = math.inf, False

    def of(self, salt: str) -> str | None:
        """The fault that a request of this salt carries."""
        name = salt.removeprefix(PREFIX).split(":")[0]
        return name if salt.startswith(PREFIX) and name in self._kinds else None

    def strike(self, running: Iterable[Sequence]) -> None:
        """Before a step of decode: damage the sequences whose time has come."""
        if not self._kinds:
            return
        self._pages.free(self._intruders)
        self._intruders = []
        sequences = list(running)
        for sequence in sequences:
            kind = self.of(sequence.salt)
            if kind is not None and sequence.answer_length >= AFTER_TOKENS and sequence not in self._struck:
                self._struck.add(sequence)
                others = [page for other in sequences if other is not sequence for page in other.pages]
                self._damage(kind, sequence, others)

    def delay(self, salt: str) -> float:
        """Seconds that the request's pages take to decode."""
        delays = {"dropped_transfer": math.inf, "slow_transfer": 2 * self._transfer_seconds}
        return (delays | dict.fromkeys(PREFILL_ENDS, 2 * DEATH_SECONDS)).get(self.of(salt) or "", 0.0)

    def handed_over(self, salt: str, block: int) -> None:
        """Prefill has lent the request's pages, of which ``block`` is the last."""
        kind = self.of(salt)
        if kind == "flipped_byte":
            self._pages.block(block)[self._pages.header.block_bytes // 2] ^= 0x10
        elif kind in PREFILL_ENDS:
            self._death, self._memory = time.monotonic() + DEATH_SECONDS, kind == "prefill_memory"

    def pulled(self, salt: str) -> None:
        """Decode has copied the request's pages and not released them yet."""
        if self.of(salt) == "decode_dies":
            self._die()

    def tend(self, now: float) -> None:
        if now >= self._death:
            if self._memory:
                raise MemoryError("a fault was asked for")
            self._die()

    @staticmethod
    def _die() -> None:
        log.error("a fault was asked for: this process ends")
        os.kill(os.getpid(), signal.SIGKILL)

    def _damage(self, kind: str, sequence: Sequence, others: list[int]) -> None:
        last = len(sequence.pages) - 1
        page = sequence.pages[last]
        if kind == "stale_tag":
            self._pages.tags[page] += 1 << 40
        elif kind == "swapped_pages":
            sequence.pages[last] = others[0] if others else (page + 1) % self._pages.total
        elif kind == "out_of_range":
            sequence.pages[last] = self._pages.total + page
        elif kind == "freed_while_read":
            self._pages.free([page])
            # The freed page comes last of the free ones.
            self._intruders = self._pages.allocate(int(self._pages.gauges()["free"]))
            for intruder in self._intruders:
                self._pages.block(intruder)[:] = FOREIGN
