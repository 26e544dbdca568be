"""The Talker stage of omni checkpoints: an engine that speaks answers while their text is still being made."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tritone.engine.talker import Spoken, TalkerEngine, TalkerSequence
from tritone.errors import TritoneError
from tritone.fatal import end_if_out_of_memory
from tritone.messages import Event, Failure, failure_event
from tritone.metrics import Metrics
from tritone.models.omni.heard import Heard
from tritone.models.omni.script import StreamedScript
from tritone.models.omni.talker import OmniTalker, SpeechDefaults
from tritone.options import Options
from tritone.pools import BlockPool, CancelBoard, StaleBlocks, Views
from tritone.stages.loop import EngineLoop
from tritone.stages.outbox import Outbox
from tritone.stages.prefill import BEAT_SECONDS
from tritone.stages.reply import Reply
from tritone.stages.saved import saver
from tritone.stages.sessions import SessionStage

log = logging.getLogger(__name__)

WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Told:
    """What an event brings for the Talker: the Thinker's rows, each [N, hidden], and of the prompt what is read of it."""

    rows: list[Tensor]
    heard: Heard | None = None


@dataclass(eq=False)
class Speaking:
    """One answer with speech. Only the engine's thread looks at what comes after ``options``.

    ``reply`` is that of the session's latest event; what is spoken leaves by it. ``end``: the session's last event, which
    waits until all is spoken. ``sequence`` is None before the prompt's rows came, and once it is ``spoken``.
    """

    options: Options
    sequence: TalkerSequence | None = None
    reply: Reply[Event] | None = None
    end: Event | None = None
    spoken: str | None = None
    """Why the speech ended (``stop``, ``length``)."""
    last_sent: float = 0.0


class CodeTalkerStage(SessionStage[Speaking]):
    """Frames are codes, float32 [1, groups], each sent as soon as it is made; an empty one ends the segment.

    The Thinker's rows are copied out of their blocks in :meth:`submit`, where they arrive.
    """

    work_kinds = frozenset({"text", "end", "error", "cancelled"})

    def __init__(
        self,
        engine: TalkerEngine,
        pages: BlockPool,
        views: Views,
        board: CancelBoard,
        metrics: Metrics,
        defaults: SpeechDefaults,
        *,
        max_queue: int,
        restarted: bool = False,
    ) -> None:
        super().__init__("talker", board, metrics, max_queue, restarted)
        self._engine = engine
        self._pages = pages
        self._views = views
        self._defaults = defaults
        self._save_kv = saver(pages, engine.scheduler.page_size)
        self._told = Told([])
        """By the event that ``submit`` is at."""
        self._outbox = Outbox("talker-out")
        self._loop = EngineLoop(self, "talker")

    @property
    def model(self) -> OmniTalker:
        assert isinstance(self._engine.model, OmniTalker)
        return self._engine.model

    def submit(self, event: Event, reply: Reply[Event]) -> None:
        try:
            self._told = Told(self._read(event), event.heard)
        except StaleBlocks as error:
            if event.session in self._sessions:
                found = error
                self._loop.post(lambda: self._give_up(event, reply, found))
                return
        super().submit(replace(event, hidden=(), rows=(), heard=None), reply)

    def open(self, session: int, options: Options) -> Speaking:
        if len(self._sessions) >= self._max_queue + self._engine.scheduler.max_sequences:
            message = f"talker.max_queue: {self._max_queue} answers wait already; try again in 1 s"
            raise TritoneError(message, "UNAVAILABLE")
        return Speaking(options)

    def queue(self, event: Event, reply: Reply[Event]) -> None:
        told = self._told
        self._loop.post(lambda: self._take(event, told, reply))

    def waiting(self) -> int:
        return len(self._engine.scheduler.waiting)

    def stop(self) -> None:
        self._loop.stop()
        self._outbox.stop()

    def warm_up(self) -> None:
        """Speak a little, so that the first request finds everything made. Before any request."""
        half = WARM_UP_TOKENS // 2
        script = self.model.script(Heard(WARM_UP_TOKENS, ((0, half),), opening=half), "")
        script.feed(torch.zeros(WARM_UP_TOKENS + 2, self.model.thinker_size))
        script.finish()
        sequence = TalkerSequence(0, [], 0, self._defaults.sampling, max_tokens=4, script=script)
        self._engine.add(sequence)
        self._engine.arrived(sequence)
        while len(self._engine.scheduler):
            self._engine.speak()

    # -- the engine's thread -------------------------------------------------------------------------------------------

    def step(self) -> bool:
        before = self._engine.steps
        for one in self._engine.speak():
            self._say_safely(one)
        return self._engine.steps > before

    def tend(self, now: float) -> bool:
        for session, state in list(self._sessions.items()):
            if self._board.is_cancelled(session):
                self._silence(state)
                if state.end is not None:
                    self._finish(session, state)
                elif state.reply is not None:
                    # Triton may drop the session's last event, whose reply would close this one.
                    self._outbox.close(state.reply)
                    state.reply = None
            elif state.end is not None and state.reply is not None and now - state.last_sent >= BEAT_SECONDS:
                state.last_sent = now
                self._outbox.put(state.reply, Event(session, "beat"))
        self.metrics.gauge("tritone_running_requests", len(self._engine.scheduler.running))
        self.metrics.gauges("tritone_pages", self._pages.gauges())
        return bool(self._sessions)

    def _take(self, event: Event, told: Told, reply: Reply[Event]) -> None:
        session = event.session
        state = self._carried(event, reply)
        if state is None:
            return
        try:
            self._hear(state, event, told)
        except Exception as error:  # one answer's fault ends that answer
            end_if_out_of_memory("talker", error)
            log.exception("talker")
            self._fail(session, state, error)

    def _give_up(self, event: Event, reply: Reply[Event], error: Exception) -> None:
        """End a session one of whose events cannot be read."""
        state = self._carried(event, reply)
        if state is not None:
            self._fail(event.session, state, error)

    def _carried(self, event: Event, reply: Reply[Event]) -> Speaking | None:
        """What is spoken leaves by ``reply`` from now on; None, and it is closed, where the session has ended."""
        session = event.session
        state = self._sessions.get(session)
        if state is None:
            # The session failed while this event waited.
            if event.terminal:
                self._failed.discard(session)
            self._outbox.close(reply)
            return None
        if state.reply is not None:
            self._outbox.close(state.reply)
        state.reply = reply
        if event.terminal:
            state.end = event
            state.last_sent = time.monotonic()
        return state

    def _hear(self, state: Speaking, event: Event, told: Told) -> None:
        """Take in the rows of one event, or the answer's end."""
        if event.kind in ("error", "cancelled"):
            self._silence(state)
        if told.heard is not None and state.spoken is None:
            state.sequence = self._sequence(event.session, told.heard, state.options)
            self._engine.add(state.sequence)
        sequence = state.sequence
        if sequence is None:
            if event.terminal:
                self._finish(event.session, state)
            return
        script = sequence.script
        assert isinstance(script, StreamedScript)
        for part in told.rows:
            script.feed(part)
        if event.terminal:
            script.finish()
        ended = self._engine.arrived(sequence)
        if ended is not None:
            self._say(ended)

    def _sequence(self, session: int, heard: Heard, options: Options) -> TalkerSequence:
        return TalkerSequence(
            session=session,
            tokens=[],
            prompt_length=0,
            sampling=replace(self._defaults.sampling, seed=options.sampling.seed),
            max_tokens=self._defaults.max_frames,
            save_kv=self._save_kv,
            script=self.model.script(heard, options.voice),
        )

    def _say_safely(self, one: Spoken) -> None:
        """An error in one answer ends that answer; the step's other frames are still said."""
        try:
            self._say(one)
        except Exception as error:
            end_if_out_of_memory("talker", error)
            log.exception("talker")
            state = self._sessions.get(one.sequence.session)
            if state is not None:
                self._fail(one.sequence.session, state, error)

    def _say(self, one: Spoken) -> None:
        session = one.sequence.session
        state = self._sessions.get(session)
        if state is None or state.sequence is not one.sequence:
            return
        if one.error is not None or one.finish is not None:
            # The engine has let go of it.
            state.sequence = None
            state.spoken = one.finish
        if one.error is not None:
            self._fail(session, state, one.error)
            return
        if one.codes is not None:
            self._send(session, state, one.codes.numpy()[None], last=one.finish is not None)
        elif one.finish is not None and one.sequence.spoken:
            self._send(session, state, np.zeros((0, self.model.codebooks)), last=True)
        if one.finish is not None and state.end is not None:
            self._finish(session, state)

    def _send(self, session: int, state: Speaking, codes: npt.NDArray[Any], last: bool) -> None:
        assert state.reply is not None
        state.last_sent = time.monotonic()
        frames = codes.astype(np.float32)
        self._outbox.put(state.reply, Event(session, "frames", info={"last": last}, frames=frames))

    def _silence(self, state: Speaking) -> None:
        """Nothing more is spoken."""
        if state.sequence is not None:
            self._engine.remove(state.sequence)
            state.sequence = None
        state.spoken = state.spoken or "cancelled"

    def _finish(self, session: int, state: Speaking) -> None:
        """The session's last event leaves, after all that is spoken."""
        last, reply = state.end, state.reply
        assert last is not None and reply is not None
        self._sessions.pop(session, None)
        if last.kind == "end":
            usage = last.info.get("usage")
            if self._board.is_cancelled(session):
                last = failure_event(session, Failure("cancelled"), usage)
            elif state.spoken is not None:
                last = replace(last, info={**last.info, "speech_finish_reason": state.spoken})
        self._outbox.put(reply, last, last=True)
        self._gauge()

    def _fail(self, session: int, state: Speaking, error: Exception) -> None:
        self._silence(state)
        reply = state.reply
        assert reply is not None
        self._outbox.put(reply, self._failure(session, error, last=state.end is not None), last=True)
        self._gauge()

    def _read(self, event: Event) -> list[Tensor]:
        """The rows that an event refers to, in memory of their own; their blocks are given back."""
        if event.session not in self._sessions:
            self._views.release(*event.hidden)
            return []
        return [self._views.copy_rows(refs, count) for refs, count in zip(event.hidden, event.rows, strict=True)]
