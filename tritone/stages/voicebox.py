"""The VoiceBox stage: speech frames in, audio out."""

from __future__ import annotations

import time
from collections.abc import Iterator

from tritone.messages import Event
from tritone.metrics import Metrics
from tritone.options import Options
from tritone.pools import CancelBoard
from tritone.stages.sounds import Sound, SoundMaker
from tritone.stages.speech import SpeechStage


class VoiceBoxStage(SpeechStage[Sound]):
    work_kinds = frozenset({"frames", "codes", "end"})

    def __init__(
        self, sounds: SoundMaker, board: CancelBoard, metrics: Metrics, max_queue: int, restarted: bool = False
    ) -> None:
        super().__init__("voicebox", board, metrics, max_queue, restarted)
        self._sounds = sounds

    def open(self, session: int, options: Options) -> Sound:
        return self._sounds.open(options)

    def work(self, state: Sound, event: Event) -> Iterator[Event]:
        if event.kind not in ("frames", "codes"):
            return
        begun = time.monotonic()
        audio = state.push(event)
        if not len(audio):
            return
        seconds = len(audio) / self._sounds.sample_rate
        self.metrics.observe("tritone_real_time_factor", (time.monotonic() - begun) / seconds)
        self.metrics.count("tritone_audio_seconds_total", seconds)
        yield Event(event.session, "audio", audio=audio)
