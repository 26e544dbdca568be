"""The Talker stage: text in as decode makes it, speech frames out, clause by clause."""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass, replace

import numpy as np

from tritone.messages import Event
from tritone.metrics import Metrics
from tritone.models.voice.chunks import plan_chunks
from tritone.models.voice.frames import Frames
from tritone.models.voice.talker import HibariTalker, TalkerSession
from tritone.options import Options
from tritone.pools import CancelBoard, Views
from tritone.stages.reply import Reply
from tritone.stages.speech import SpeechStage


@dataclass(frozen=True)
class _Speaking:
    session: TalkerSession
    mode: str


class TalkerStage(SpeechStage[_Speaking]):
    """Frames of a clause leave as soon as the clause is complete; ``speak`` events bring their whole text at once.

    The hibari voice reads text alone, so hidden states are released unread, in :meth:`submit`, where they arrive.
    """

    work_kinds = frozenset({"text", "speak", "end"})

    def __init__(
        self, talker: HibariTalker, views: Views, board: CancelBoard, metrics: Metrics, max_queue: int, restarted: bool = False
    ) -> None:
        super().__init__("talker", board, metrics, max_queue, restarted)
        self._talker = talker
        self._views = views

    def submit(self, event: Event, reply: Reply[Event]) -> None:
        if event.hidden:
            self._views.release(*event.hidden)
            event = replace(event, hidden=())
        super().submit(event, reply)

    def open(self, session: int, options: Options) -> _Speaking:
        return _Speaking(TalkerSession(self._talker, options.voice, options.speed), options.audio_mode)

    def work(self, state: _Speaking, event: Event) -> Generator[Event, None, None]:
        begun = time.monotonic()
        if event.kind in ("text", "speak"):
            for frames in state.session.feed(event.text):
                yield from self._events(event.session, state.mode, frames, begun)
                begun = time.monotonic()
        if event.kind in ("end", "speak"):
            for frames in state.session.finish():
                yield from self._events(event.session, state.mode, frames, begun)
                begun = time.monotonic()

    def _events(self, session: int, mode: str, frames: Frames, begun: float) -> Generator[Event, None, None]:
        self.metrics.observe("tritone_stage_seconds", time.monotonic() - begun)
        joined = np.concatenate([frames.features, frames.f0[:, None]], axis=1)
        start = 0
        for size in plan_chunks(len(joined), mode):
            stop = start + size
            yield Event(session, "frames", info={"last": stop == len(joined)}, frames=joined[start:stop])
            start = stop
