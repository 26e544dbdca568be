"""The sessions of a stage that makes speech: text passes at once, what needs work is queued, sessions end in order."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Generic, TypeVar

from tritone.errors import TritoneError
from tritone.fatal import end_if_out_of_memory
from tritone.messages import Event, EventKind, Failure, failure_event
from tritone.metrics import Metrics
from tritone.options import Options
from tritone.pools import CancelBoard
from tritone.pools.board import PURGE_SECONDS
from tritone.stages.reply import Reply

log = logging.getLogger(__name__)

State = TypeVar("State")


class SpeechSessions(ABC, Generic[State]):
    """What every such stage does with its events, whoever computes; a session with speech has a ``State``.

    :meth:`submit` is called by one thread, event by event. What needs no work (start, text, beats, and everything of a
    text-only session) is passed on from there, so text never waits for audio. The rest, ``work_kinds``, is queued.
    """

    work_kinds: frozenset[str]

    def __init__(self, name: str, board: CancelBoard, metrics: Metrics, restarted: bool = False) -> None:
        """``restarted``: sessions may come that an earlier process of this stage knew; their speech is lost."""
        self.name = name
        self.metrics = metrics
        self._board = board
        self._restarted = restarted
        self._sessions: dict[int, State] = {}
        self._failed: set[int] = set()
        self._seen: dict[int, float] = {}
        self._gauge_lock = threading.Lock()

    @abstractmethod
    def open(self, session: int, options: Options) -> State:
        """State of a new session with speech."""

    @abstractmethod
    def _queue(self, event: Event, reply: Reply[Event]) -> None:
        """An event of ``work_kinds``, or the last, of a session that has a state."""

    @abstractmethod
    def _queued(self) -> int:
        """How much work waits."""

    def submit(self, event: Event, reply: Reply[Event]) -> None:
        session = event.session
        self._seen[session] = time.monotonic()
        if reply.is_cancelled():
            self._board.post(session)
        if event.kind in ("start", "speak") and session not in self._sessions:
            self._start(event, reply)
        elif event.kind == "beat":
            reply.send(event, last=True)
        elif session in self._failed:
            # This stage has already reported the session's end.
            if event.terminal:
                self._failed.discard(session)
            reply.close()
        elif session not in self._sessions:
            self._pass(event, reply)
        elif event.kind == "start" or (event.kind == "text" and "text" not in self.work_kinds):
            reply.send(event, last=True)
        else:
            if event.kind == "text":
                reply.send(event)
            self._queue(event, reply)
        self._gauge()

    def purge(self) -> None:
        """Forget cancelled sessions whose end will not come: Triton drops cancelled requests between two stages."""
        now = time.monotonic()
        for session, seen in list(self._seen.items()):
            if now - seen > PURGE_SECONDS and session not in self._sessions:
                self._seen.pop(session, None)
            elif self._board.is_over(session, now - seen):
                self._sessions.pop(session, None)
        self._gauge()

    def _start(self, event: Event, reply: Reply[Event]) -> None:
        """A new session; ``speak`` brings its text along."""
        session = event.session
        options = Options.from_json(event.info["options"])
        # The start goes first whatever happens: later stages know only sessions that started.
        reply.send(replace(event, kind="start", text=""), last=event.kind == "start" and not options.speech)
        if not options.speech:
            return
        try:
            self._sessions[session] = self.open(session, options)
        except Exception as error:
            end_if_out_of_memory(self.name, error)
            log.exception("%s", self.name)
            self._fail(event, reply, error)
            return
        if event.kind == "speak":
            self._queue(event, reply)
        else:
            reply.close()

    def _pass(self, event: Event, reply: Reply[Event]) -> None:
        """An event of a session without speech, or of one whose speech was lost with an earlier process: postprocess knows
        which of the two it is."""
        if self._restarted:
            kind: EventKind = "beat" if event.kind in ("frames", "codes") else event.kind
            event = replace(event, kind=kind, frames=None, codes=None, lost=self.name)
        reply.send(event, last=True)

    def _fail(self, event: Event, reply: Reply[Event], error: Exception) -> None:
        """End the session with an error event, and stop the stages before this one."""
        session = event.session
        # In this order: the thread of submit must never find the session in neither.
        if not is_last(event):
            self._failed.add(session)
        self._sessions.pop(session, None)
        self._board.fail(session)
        code = error.code if isinstance(error, TritoneError) else "INTERNAL"
        message = error.message if isinstance(error, TritoneError) else f"{self.name}: {error!r}"
        self.metrics.count("tritone_requests_total", outcome="error")
        self._finish(reply, failure_event(session, Failure("error", code, message)))

    def _finish(self, reply: Reply[Event], last: Event) -> None:
        """The last message of a failed session, behind whatever was sent for it."""
        reply.send(last, last=True)

    def _gauge(self) -> None:
        # Two threads come here: the later look must also be the one that stays.
        with self._gauge_lock:
            self.metrics.gauge("tritone_sessions", len(self._sessions))
            self.metrics.gauge("tritone_queue_requests", self._queued())


def is_last(event: Event) -> bool:
    """Whether no event of the session comes after this one."""
    return event.terminal or event.kind == "speak"
