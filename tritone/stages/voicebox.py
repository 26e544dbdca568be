"""The VoiceBox stage: speech frames in, audio out."""

from __future__ import annotations

import time
from collections.abc import Generator, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from tritone.messages import Event
from tritone.metrics import Metrics
from tritone.models.omni.voicebox.batch import Call, Tensors, compute
from tritone.options import Options
from tritone.pools import CancelBoard
from tritone.stages.fair import Computed
from tritone.stages.sounds import Sound, SoundMaker
from tritone.stages.speech import SpeechStage


@dataclass
class _Speech:
    sound: Sound
    audible: bool = False
    """Whether any sound has left."""


@dataclass(frozen=True)
class _Wanted:
    call: Call
    urgent: bool

    @property
    def kind(self) -> Hashable:
        return self.call.kind


class VoiceBoxStage(SpeechStage[_Speech]):
    """What a session's first sound needs is computed before what others continue with: a listener waits for the one, and still
    hears what came before the other.
    """

    work_kinds = frozenset({"frames", "codes", "end"})

    def __init__(
        self, sounds: SoundMaker, board: CancelBoard, metrics: Metrics, max_queue: int, restarted: bool = False
    ) -> None:
        super().__init__("voicebox", board, metrics, max_queue, restarted, self._batch, sounds.slots)
        self._sounds = sounds

    def open(self, session: int, options: Options) -> _Speech:
        return _Speech(self._sounds.open(options))

    def work(self, state: _Speech, event: Event) -> Generator[Event | Computed, Any, None]:
        if event.kind not in ("frames", "codes"):
            return
        making, spent = state.sound.push(event), 0.0
        made: Any = None
        while True:
            begun = time.monotonic()
            try:
                call = making.send(made)
            except StopIteration as ended:
                audio = ended.value
                break
            finally:
                spent += time.monotonic() - begun
            made, seconds = yield _Wanted(call, urgent=not state.audible)
            spent += seconds
        if not len(audio):
            return
        seconds = len(audio) / self._sounds.sample_rate
        self.metrics.observe("tritone_real_time_factor", spent / seconds)
        self.metrics.count("tritone_audio_seconds_total", seconds)
        state.audible = True
        yield Event(event.session, "audio", audio=audio)

    def _batch(self, wanted: Sequence[_Wanted]) -> list[tuple[Tensors, float]]:
        """What each call gets, and the seconds that the batch took, which every session in it had to wait."""
        begun = time.monotonic()
        made = compute([one.call for one in wanted], self._sounds.slots)
        seconds = time.monotonic() - begun
        self.metrics.observe("tritone_batch_sessions", len(wanted))
        return [(tensors, seconds) for tensors in made]
