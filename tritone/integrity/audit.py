"""The audit: another process maps the pools and says what can be proved wrong from outside."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tritone.errors import TritoneError
from tritone.integrity.kinds import KINDS
from tritone.integrity.ledger import STATES, Ledger, Reading
from tritone.metrics import Metrics
from tritone.pools import PoolView
from tritone.pools.digest import digest

log = logging.getLogger(__name__)

TICK_SECONDS = 0.5
CONTENT_BYTES = 256 << 20
"""The most that one sweep reads of each pool's data; the next sweep goes on where it ended."""
LEASE_MARGIN = 5.0
"""Seconds after its end until which an owner that is busy may still collect a lease."""
LATE_SECONDS = 5.0
"""On a busy machine a sweep may come so much later than three times its interval."""
NICE = 10


class PoolAudit:
    """One pool: its view, its owner's ledger (page pools have one), and what was seen of it before.

    ``needed``: no hand-over may pass while its owner's tracker does not report.
    """

    def __init__(self, directory: Path, name: str, lease_seconds: float, *, ledger: bool, needed: bool = False) -> None:
        self.name = name
        self.needed = needed
        self.found: Counter[str] = Counter()
        self.swept = 0
        """Blocks whose tag was looked at, in all sweeps."""
        self._directory = directory
        self._lease_seconds = lease_seconds
        self._has_ledger = ledger
        self._view: PoolView | None = None
        self._ledger: Ledger | None = None
        self._tags: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)
        self._leases: dict[tuple[int, int], float] = {}
        self._next_content = 0
        self._known_bad: set[tuple[int, int]] = set()

    @property
    def epoch(self) -> int:
        return self._view.header.epoch if self._view is not None else 0

    def read(self) -> Reading | None:
        """The owner's ledger; None before the owner has made its pool, and for pools without one."""
        self._map()
        return self._ledger.read() if self._ledger is not None else None

    def sweep(self, now: float) -> None:
        """Compare everything once; what is wrong is counted in :attr:`found` and logged. ``now`` in monotonic seconds."""
        self._map()
        view = self._view
        if view is None:
            return
        self._sweep_tags(view)
        self._sweep_leases(view, now)
        self._sweep_content(view)

    def _map(self) -> None:
        """Map the pool as its owner made it last. What was seen of an earlier one says nothing about it."""
        try:
            if self._view is not None and self._view.is_current():
                return
            self._tags = np.zeros(0, np.uint64)
            self._leases = {}
            self._next_content = 0
            self._known_bad = set()
            self._view = PoolView(self._directory, self.name)
            self._ledger = Ledger(self._directory, self.name) if self._has_ledger else None
        except FileNotFoundError:
            self._view = self._ledger = None

    def _sweep_tags(self, view: PoolView) -> None:
        """A tag is given out once, so no two blocks ever carry the same, and it only grows."""
        tags = view.tags.copy()
        given = tags[tags != 0]
        values, counts = np.unique(given, return_counts=True)
        for tag in values[counts > 1].tolist():
            blocks = np.flatnonzero(tags == tag).tolist()
            self.report("table", f"blocks {blocks} carry the same tag {tag}")
        if self._tags.size:
            for block in np.flatnonzero(tags < self._tags).tolist():
                self.report("table", f"block {block}: tag {int(tags[block])} follows {int(self._tags[block])}")
        self._tags = tags
        self.swept += tags.size

    def _sweep_leases(self, view: PoolView, now: float) -> None:
        """An owner takes a lease back when it is over."""
        words = view.leases
        standing = {(slot, int(words[slot])) for slot in np.flatnonzero(words).tolist()}
        self._leases = {lease: self._leases.get(lease, now) for lease in standing}
        for (slot, nonce), seen in self._leases.items():
            if now - seen > self._lease_seconds + LEASE_MARGIN:
                self.report("table", f"lease of block {slot} stands for {now - seen:.0f} s; its owner does not collect it")
                self._leases[slot, nonce] = float("inf")

    def _sweep_content(self, view: PoolView) -> None:
        """A sealed block keeps its bytes for as long as it keeps its tag."""
        sealed = np.flatnonzero(view.seals).tolist()
        most = max(1, CONTENT_BYTES // max(view.header.block_bytes, 1))
        order = [block for block in sealed if block >= self._next_content] + [b for b in sealed if b < self._next_content]
        for block in order[:most]:
            before = int(view.tags[block]), int(view.seals[block])
            same = digest(view.block(block)) == before[1]
            # Seal and tag as before: nobody had the right to write in between.
            if not same and before[1] and (int(view.tags[block]), int(view.seals[block])) == before:
                if (block, before[0]) not in self._known_bad:
                    self._known_bad.add((block, before[0]))
                    self.report("content", f"block {block} is not what it was when it was finished")
                view.condemn(block, before[0])
            self._next_content = block + 1

    def report(self, kind: str, message: str) -> None:
        """Count and log something wrong."""
        self.found[kind] += 1
        log.error("integrity: %s: %s: %s", kind, self.name, message)


class Auditor:
    """Sweeps pools every ``seconds`` in a thread of its own (0: never), reads the owners' ledgers and exports both.

    ``pages`` are the pools whose engines have a tracker, ``others`` those that only readers check. ``spoken`` have trackers,
    too, but belong to a Talker, without which text goes on: they may be missing.
    """

    def __init__(self, directory: Path, pages: Sequence[str], others: Sequence[str], metrics: Metrics, *, seconds: float,
                 lease_seconds: float, spoken: Sequence[str] = (), clock: Callable[[], float] = time.monotonic) -> None:
        self._pages = [
            PoolAudit(directory, name, lease_seconds, ledger=True, needed=name in pages) for name in (*pages, *spoken)
        ]
        self._all = self._pages + [PoolAudit(directory, name, lease_seconds, ledger=False) for name in others]
        self._metrics = metrics
        self._seconds = seconds
        self._clock = clock
        self._sweeps = 0
        self._last = self._ticked = clock()
        self._known: str | None = "not looked at yet"
        """The problem at the last tick."""
        self._exported: dict[tuple[object, ...], int] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="audit", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def sweep(self) -> None:
        with self._lock:
            for pool in self._all:
                pool.sweep(self._clock())
            self._sweeps += 1
            self._last = self._clock()

    def found(self, kind: str, message: str) -> None:
        """A hand-over was refused: counted with the pool that it came from."""
        with self._lock:
            self._pages[0].report(kind, message)

    def problem(self) -> str | None:
        """Why a check that is on cannot be trusted to run, or None; does not wait for a sweep that runs."""
        if late := self._late():
            return late
        if self._known is not None:
            with self._lock:
                self._known = self._problem()
        return self._known

    def report(self) -> dict[str, Any]:
        """Everything known now: JSON types only; ``seconds_ago`` is None before the first."""
        with self._lock:
            now, pools = self._clock(), {}
            for pool in self._all:
                reading = pool.read()
                found = Counter({kind: count for kind, count in pool.found.items() if count})
                entry: dict[str, Any] = {"blocks_swept": pool.swept}
                if reading is not None:
                    found += Counter(reading.mismatches)
                    entry |= {
                        "checks": reading.checks,
                        "pages_checked": reading.pages_checked,
                        "last_check_seconds_ago": now - reading.last_check if reading.checks else None,
                        "blocks": reading.blocks,
                    }
                pools[pool.name] = entry | {"mismatches": dict(found)}
            problem = self._problem()
            return {
                "ready": problem is None,
                "problem": problem,
                "sweeps": self._sweeps,
                "last_sweep_seconds_ago": now - self._last if self._sweeps else None,
                "mismatches": {kind: sum(p["mismatches"].get(kind, 0) for p in pools.values()) for kind in KINDS},
                "pools": pools,
            }

    def _problem(self) -> str | None:
        for pool in self._pages:
            try:
                reading = pool.read()
            except (OSError, ValueError) as error:
                return f"{pool.name}: {error}"
            if pool.needed and reading is None:
                return f"{pool.name}: no tracker reports"
            if reading is not None and (reading.checks < reading.steps or (pool.needed and not reading.checks)):
                return f"{pool.name}: {reading.steps} steps, {reading.checks} checks"
        return self._late()

    def _late(self) -> str | None:
        now = self._clock()
        if self._seconds and now - self._last > 3 * self._seconds + LATE_SECONDS:
            return f"the last sweep ended {now - self._last:.0f} s ago; audit_seconds is {self._seconds:g}"
        if now - self._ticked > 3 * self._seconds + LATE_SECONDS:
            return f"the audit last looked {now - self._ticked:.0f} s ago"
        return None

    def _run(self) -> None:
        # Of this thread alone: a sweep must not take the cores from the stages.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        due = self._clock()
        while not self._stop.is_set():
            try:
                if self._seconds and self._clock() >= due:
                    self.sweep()
                    due = self._clock() + self._seconds
                self.export()
                self._ticked = self._clock()
            except (OSError, ValueError, TritoneError):
                log.exception("audit")
            self._stop.wait(min(TICK_SECONDS, self._seconds or TICK_SECONDS))

    def export(self) -> None:
        """Bring the metrics up to date."""
        metrics = self._metrics
        with self._lock:
            self._export("sweeps", self._sweeps)
            for pool in self._all:
                for kind, count in pool.found.items():
                    self._export("mismatches", count, pool=pool.name, kind=kind)
                reading = pool.read()
                if reading is None:
                    continue
                epoch = pool.epoch
                self._export("checks", reading.checks, epoch, pool=pool.name)
                self._export("pages_checked", reading.pages_checked, epoch, pool=pool.name)
                for kind, count in reading.mismatches.items():
                    self._export("mismatches", count, epoch, pool=pool.name, kind=kind)
                for state in STATES:
                    metrics.gauge("tritone_integrity_blocks", reading.blocks[state], pool=pool.name, state=state)
            metrics.gauge("tritone_integrity_sweep_age_seconds", self._clock() - self._last)
            self._known = self._problem()
            metrics.gauge("tritone_integrity_ready", self._known is None)

    def _export(self, what: str, total: int, epoch: int = 0, **labels: str) -> None:
        """Count what came since the last export; ``epoch`` is that of the owner who counts, who begins at 0."""
        key = (what, epoch, *labels.values())
        more = total - self._exported.get(key, 0)
        self._exported[key] = total
        self._metrics.count(f"tritone_integrity_{what}_total", more, **labels)
