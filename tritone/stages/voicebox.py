"""The VoiceBox stage: speech frames in, audio out."""

from __future__ import annotations

import time
from collections.abc import Iterator

from tritone.messages import Event
from tritone.metrics import Metrics
from tritone.models.voice.frames import Frames
from tritone.models.voice.voicebox import VoiceBox, VoiceBoxStream
from tritone.options import Options
from tritone.pools import CancelBoard
from tritone.stages.speech import SpeechStage


class VoiceBoxStage(SpeechStage[VoiceBoxStream]):
    work_kinds = frozenset({"frames", "end"})

    def __init__(
        self, box: VoiceBox, board: CancelBoard, metrics: Metrics, max_queue: int, restarted: bool = False
    ) -> None:
        super().__init__("voicebox", board, metrics, max_queue, restarted)
        self._box = box

    def open(self, session: int, options: Options) -> VoiceBoxStream:
        return VoiceBoxStream(self._box, options.sampling.seed)

    def work(self, state: VoiceBoxStream, event: Event) -> Iterator[Event]:
        if event.kind != "frames":
            return
        assert event.frames is not None
        begun = time.monotonic()
        frames = Frames(event.frames[:, :-1], event.frames[:, -1])
        audio = state.push(frames, event.info["last"])
        if not len(audio):
            return
        seconds = len(audio) / self._box.sample_rate
        self.metrics.observe("tritone_real_time_factor", (time.monotonic() - begun) / seconds)
        self.metrics.count("tritone_audio_seconds_total", seconds)
        yield Event(event.session, "audio", audio=audio)
