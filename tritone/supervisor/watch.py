"""Watches the stage processes of a server: a death ends the requests it held, and the stage is loaded again."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tritone.processes import ProcessRecord, is_alive, read_records, remove_regions
from tritone.supervisor.backoff import Backoff

POLL_SECONDS = 0.1
log = logging.getLogger(__name__)


@dataclass
class StageState:
    """``state`` is waiting between a death and the next try to load the stage."""

    state: Literal["ready", "waiting", "loading"] = "ready"
    pid: int = 0
    deaths: int = 0
    failed_loads: int = 0
    reason: str = ""
    """Of the last death or failed load."""
    since: float = 0.0
    """Unix time of the last change."""


class StageWatch:
    """One thread. ``end`` and ``load`` are called with a stage's name: ``end`` at once when its process has died, ``load``,
    which may take its time and raise, in a thread of its own. ``changed`` gets the states after each change.
    """

    def __init__(
        self,
        run: Path,
        end: Callable[[str], None],
        load: Callable[[str], None],
        changed: Callable[[Mapping[str, StageState]], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run = run
        self._end = end
        self._load = load
        self._changed = changed
        self._clock = clock
        self.states: dict[str, StageState] = {}
        self._backoffs: dict[str, Backoff] = {}
        self._due: dict[str, float] = {}
        self._watched: dict[int, tuple[ProcessRecord, int]] = {}
        self._poll = select.poll()
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self.look()
        self._thread = threading.Thread(target=self._watch, name="stage-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Deaths from here on are the server's own stop."""
        self._stop.set()
        self._thread.join(timeout=5)
        for _, descriptor in self._watched.values():
            os.close(descriptor)
        self._watched.clear()

    def _watch(self) -> None:
        while not self._stop.is_set():
            try:
                self._poll.poll(POLL_SECONDS * 1000)
                if not self._stop.is_set():
                    self.look()
            except Exception:  # it must go on watching
                log.exception("stage watch")
                self._stop.wait(POLL_SECONDS)

    def look(self) -> None:
        """One look at the records, the processes and the clock."""
        with self._lock:
            known = {record.pid: record for record in read_records(self._run)}
            for pid, record in known.items():
                if pid not in self._watched:
                    self._add(record)
            ended = dict(self._poll.poll(0))
            for pid, (record, descriptor) in list(self._watched.items()):
                if descriptor in ended or descriptor < 0:
                    self._forget(pid)
                    # Read again: its last words may have come after the look above.
                    left = {record.pid: record for record in read_records(self._run)}.get(pid)
                    if left is not None:
                        self._died(left)
                elif pid not in known:
                    self._forget(pid)
            for stage, due in list(self._due.items()):
                if self._clock() >= due:
                    del self._due[stage]
                    self._start_load(stage)

    def _add(self, record: ProcessRecord) -> None:
        try:
            descriptor = os.pidfd_open(record.pid)
            self._poll.register(descriptor, select.POLLIN)
        except ProcessLookupError:
            descriptor = -1
        self._watched[record.pid] = (record, descriptor)
        if record.stage not in self.states:
            self.states[record.stage] = StageState(pid=record.pid, since=time.time())
            self._changed(self.states)

    def _forget(self, pid: int) -> None:
        _, descriptor = self._watched.pop(pid)
        if descriptor >= 0:
            self._poll.unregister(descriptor)
            os.close(descriptor)

    def _died(self, record: ProcessRecord) -> None:
        record.path(self._run).unlink(missing_ok=True)
        remove_regions(record)
        state = self.states[record.stage]
        if state.state != "ready":
            return  # whoever loads the stage sees it
        state.deaths += 1
        self._fail(record.stage, record.reason or f"process {record.pid} was killed or crashed", end=True)

    def _fail(self, stage: str, reason: str, *, end: bool = False) -> None:
        state = self.states[stage]
        if end:
            self._end(stage)
        wait = self._backoffs.setdefault(stage, Backoff()).failed(self._clock())
        state.state, state.reason, state.since = "waiting", reason, time.time()
        self._due[stage] = self._clock() + wait
        log.warning("stage %s: %s; loading it again%s", stage, reason, f" in {wait:.0f} s" if wait else "")
        self._changed(self.states)

    def _start_load(self, stage: str) -> None:
        self.states[stage].state = "loading"
        self._changed(self.states)
        threading.Thread(target=self._run_load, args=(stage,), name=f"load-{stage}", daemon=True).start()

    def _run_load(self, stage: str) -> None:
        begun = time.monotonic()
        try:
            self._load(stage)
        except Exception as error:
            if not self._stop.is_set():
                with self._lock:
                    self.states[stage].failed_loads += 1
                    self._fail(stage, f"could not be loaded: {error}")
            return
        with self._lock:
            state = self.states[stage]
            alive = [record for record in read_records(self._run) if record.stage == stage and is_alive(record.pid)]
            if not alive:
                state.deaths += 1
                self._fail(stage, "the process ended as soon as it was loaded", end=True)
                return
            state.state, state.since = "ready", time.time()
            state.pid = max(alive, key=lambda record: record.started).pid
            self._backoffs[stage].served(self._clock())
            log.warning("stage %s: ready again after %.1f s", stage, time.monotonic() - begun)
            self._changed(self.states)


def unready_models(states: Mapping[str, StageState], steps: Mapping[str, Iterable[str]]) -> set[str]:
    """Stages that do not serve, and the ensembles that need them; ``steps`` are the models of each ensemble."""
    down = {stage for stage, state in states.items() if state.state != "ready"}
    return down | {ensemble for ensemble, needed in steps.items() if down & set(needed)}


def describe(states: Mapping[str, StageState]) -> dict[str, Any]:
    return {stage: asdict(state) for stage, state in sorted(states.items())}

