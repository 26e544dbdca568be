"""The Talker stage of a Talker that speaks in codes: text events in, codes out, many sessions in one engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from tritone.engine.talker import Script, Spoken, TalkerEngine, TalkerSequence
from tritone.errors import TritoneError
from tritone.messages import Event, Failure, failure_event
from tritone.metrics import Metrics
from tritone.models.omni.heard import Heard
from tritone.models.omni.talker_config import SpeechDefaults
from tritone.options import Options
from tritone.pools import BlockPool, CancelBoard, Views
from tritone.stages.loop import EngineLoop
from tritone.stages.outbox import Outbox
from tritone.stages.prefill import BEAT_SECONDS
from tritone.stages.reply import Reply
from tritone.stages.saved import saver
from tritone.stages.sessions import SpeechSessions, is_last

log = logging.getLogger(__name__)

SINGLE_FRAMES, CHUNK_FRAMES = 8, 4
"""So many frames leave one by one, as soon as they are made; later ones in chunks."""


class StreamingScript(Script, Protocol):
    """A script that a stage fills."""

    def feed(self, text: str, rows: torch.Tensor | None, /) -> None:
        """More of the answer's text, and the Thinker's rows [K, hidden] that came with it."""

    def finish(self) -> None:
        """The answer's last event has come."""

    @property
    def paused(self) -> bool:
        """Whether the codes so far end a segment, whose sound needs nothing that comes later."""

    def resume(self) -> bool:
        """After a sequence has come to its end: whether another one is to go on with the script."""


Opener = Callable[[Options, Heard | None], StreamingScript]
"""The script of a session, from its options and the ``heard`` of the first event that is to be spoken. Raises
``InvalidArgument``."""


@dataclass(frozen=True)
class Told:
    """What an event brings besides its text: the Thinker's rows [N, hidden], and of its prompt what is read."""

    rows: torch.Tensor | None = None
    heard: Heard | None = None
    error: Exception | None = None
    """Why the rows cannot be read."""


@dataclass(eq=False)
class Speaking:
    """A session. ``reply`` is that of its newest event, the only one that is open; codes leave through it."""

    options: Options
    script: StreamingScript | None = None
    """None before the first text came."""
    sequence: TalkerSequence | None = None
    reply: Reply[Event] | None = None
    last: Event | None = None
    """The session's last event, held back until everything is said."""
    codes: list[torch.Tensor] = field(default_factory=list)
    said: bool = False
    sent: float = 0.0


class CodeTalkerStage(SpeechSessions[Speaking]):
    """``pages`` is the engine's KV pool. The Thinker's rows are copied where they arrive, so that their blocks are free at
    once, however long a session waits for its turn."""

    work_kinds = frozenset({"text", "speak", "end"})

    def __init__(
        self,
        engine: TalkerEngine,
        pages: BlockPool,
        opener: Opener,
        defaults: SpeechDefaults,
        views: Views,
        board: CancelBoard,
        metrics: Metrics,
        max_queue: int,
        restarted: bool = False,
    ) -> None:
        super().__init__("talker", board, metrics, restarted)
        self._engine = engine
        self._pages = pages
        self._opener = opener
        self._defaults = defaults
        self._views = views
        self._max_queue = max_queue
        self._save_kv = saver(pages, engine.scheduler.page_size)
        self._told = Told()
        """By the event that ``submit`` is at."""
        self._outbox = Outbox("talker-out")
        self._loop = EngineLoop(self, "talker")

    def submit(self, event: Event, reply: Reply[Event]) -> None:
        # Before the event goes on: whoever gets references behind the Talker takes it for dead and releases them.
        self._told = self._read(event)
        super().submit(replace(event, hidden=(), rows=(), heard=None), reply)

    def _read(self, event: Event) -> Told:
        """The rows that an event refers to, in memory of their own; their blocks are given back."""
        if not event.hidden or event.session not in self._sessions:
            self._views.release(*event.hidden)
            return Told(heard=event.heard)
        try:
            copied = [self._views.copy_rows(refs, rows) for refs, rows in zip(event.hidden, event.rows, strict=True)]
        except Exception as error:  # rows that are gone end this session only
            self._views.release(*event.hidden)
            return Told(error=error)
        return Told(torch.cat(copied), event.heard)

    def stop(self) -> None:
        self._loop.stop()
        self._outbox.stop()

    def purge(self) -> None:
        self._loop.post(self._purge)

    def open(self, session: int, options: Options) -> Speaking:
        if len(self._sessions) >= self._max_queue:
            message = f"talker.max_queue: {self._max_queue} sessions speak or wait already; try again in 1 s"
            raise TritoneError(message, "UNAVAILABLE")
        return Speaking(options)

    def _queue(self, event: Event, reply: Reply[Event]) -> None:
        told = self._told
        if told.error is not None:
            error = told.error
            self._loop.post(lambda: self._give_up(event, reply, error))
        else:
            self._loop.post(lambda: self._arrived(event, told, reply))

    def _queued(self) -> int:
        return len(self._engine.scheduler.waiting)

    def _finish(self, reply: Reply[Event], last: Event) -> None:
        self._outbox.put(reply, last, last=True)

    # From here on: the loop's thread.

    def _purge(self) -> None:
        # Sessions that are dropped must not be in the engine.
        self.tend(time.monotonic())
        super().purge()

    def _arrived(self, event: Event, told: Told, reply: Reply[Event]) -> None:
        state = self._sessions.get(event.session)
        if state is None:
            if event.terminal:
                self._failed.discard(event.session)
            self._outbox.close(reply)
            return
        self._close(state)
        state.reply, state.sent = reply, time.monotonic()
        if is_last(event):
            state.last = event
        try:
            self._hear(state, event, told)
        except Exception as error:  # whatever a script raises ends its own session only
            log.exception("talker")
            self._give_up(event, reply, error)
            return
        self._end_if_said(event.session, state)

    def _hear(self, state: Speaking, event: Event, told: Told) -> None:
        if state.said or event.kind in ("error", "cancelled") or self._board.is_cancelled(event.session):
            return
        if state.script is None or state.sequence is None:
            state.script = self._opener(state.options, told.heard)
            state.sequence = self._sequence(event.session, state.options, state.script)
        if event.kind in ("text", "speak"):
            state.script.feed(event.text, told.rows)
        if is_last(event):
            state.script.finish()
        self._proceed(state.sequence)

    def _proceed(self, sequence: TalkerSequence) -> None:
        ended = self._engine.arrived(sequence)
        if ended is not None:
            self._said(ended)

    def _sequence(self, session: int, options: Options, script: StreamingScript) -> TalkerSequence:
        """A new one, in the engine."""
        sequence = TalkerSequence(
            session=session,
            tokens=[],
            prompt_length=0,
            sampling=replace(self._defaults.sampling, seed=options.sampling.seed),
            max_tokens=self._defaults.max_frames,
            script=script,
            save_kv=self._save_kv,
        )
        self._engine.add(sequence)
        return sequence

    def step(self) -> bool:
        spoken = self._engine.speak()
        for one in spoken:
            self._said(one)
        return bool(spoken)

    def _said(self, one: Spoken) -> None:
        session = one.sequence.session
        state = self._sessions[session]
        assert state.reply is not None and state.script is not None
        if one.error is not None:
            state.said = True
            self._give_up(state.last or Event(session, "text"), state.reply, one.error)
            return
        if one.codes is not None:
            state.codes.append(one.codes)
            self.metrics.count("tritone_speech_frames_total")
        goes_on = one.finish == "stop" and state.script.resume()
        state.said = one.finish is not None and not goes_on
        last = state.said or state.script.paused
        if last or len(state.codes) >= (1 if one.sequence.spoken <= SINGLE_FRAMES else CHUNK_FRAMES):
            self._send(session, state, last)
        if goes_on:
            state.sequence = self._sequence(session, state.options, state.script)
            self._proceed(state.sequence)
        self._end_if_said(session, state)

    def _send(self, session: int, state: Speaking, last: bool) -> None:
        assert state.reply is not None
        width = self._engine.model.codebooks
        codes = torch.stack(state.codes) if state.codes else torch.zeros(0, width, dtype=torch.int64)
        state.codes, state.sent = [], time.monotonic()
        event = Event(session, "codes", info={"last": last}, codes=codes.int().numpy())
        self._outbox.put(state.reply, event)

    def _end_if_said(self, session: int, state: Speaking) -> None:
        """The session's last event leaves once everything is said, or nothing is to be said any more."""
        if state.last is None or self._sessions.get(session) is not state:
            return
        cancelled = self._board.is_cancelled(session)
        if not (state.said or cancelled or state.last.kind in ("error", "cancelled")):
            return
        self._silence(state)
        del self._sessions[session]
        last = state.last if state.last.terminal else Event(session, "end", info={"finish_reason": "stop"})
        if cancelled and last.kind == "end":
            last = failure_event(session, Failure("cancelled"), last.info.get("usage"))
        assert state.reply is not None
        self._outbox.put(state.reply, last, last=True)

    def _give_up(self, event: Event, reply: Reply[Event], error: Exception) -> None:
        state = self._sessions.get(event.session)
        if state is None:
            self._outbox.close(reply)
            return
        self._silence(state)
        if state.reply is not reply:
            self._close(state)
        self._fail(event, reply, error)

    def _close(self, state: Speaking) -> None:
        """Nothing more leaves through its newest event."""
        if state.reply is not None:
            self._outbox.close(state.reply)
            state.reply = None

    def _silence(self, state: Speaking) -> None:
        """Nothing more of it is computed; its pages are free."""
        if state.sequence is not None and not state.said:
            self._engine.remove(state.sequence)
        state.said = True

    def tend(self, now: float) -> bool:
        for session, state in list(self._sessions.items()):
            if self._board.is_cancelled(session):
                self._silence(state)
                self._end_if_said(session, state)
                if state.last is None:
                    self._close(state)
            elif state.last is not None and now - state.sent >= BEAT_SECONDS:
                state.sent = now
                assert state.reply is not None
                self._outbox.put(state.reply, Event(session, "beat"))
        self._gauge()
        self.metrics.gauge("tritone_running_requests", len(self._engine.scheduler.running))
        blocks = self._pages.gauges()
        self.metrics.gauges("tritone_pages", blocks)
        self._engine.scheduler.tracker.publish(blocks, self._engine.steps)
        return bool(self._sessions)
