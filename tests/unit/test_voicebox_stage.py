"""The VoiceBox stage over a made-up vocoder: whose sound is computed when."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import FakeReply, wait_until

from tritone.messages import FRAME_WIDTH, Event
from tritone.metrics import Metrics
from tritone.models.omni.voicebox.batch import Call, Steps
from tritone.options import Options
from tritone.pools import CancelBoard
from tritone.stages.sounds import Floats
from tritone.stages.voicebox import VoiceBoxStage


class Vocoder:
    """One sample a frame, the frame's first number; ``computed`` has the batches, and the gate holds them back."""

    sample_rate = 100
    slots = 2

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.computed: list[list[float]] = []

    def open(self, options: Options) -> Vocoder:
        return self

    def push(self, event: Event) -> Steps[Floats]:
        (made,) = yield Call(self._network, (torch.tensor([event.frames[0, 0]]),))
        return made.numpy()

    def _network(self, values: torch.Tensor) -> tuple[torch.Tensor]:
        self.computed.append([value for value in values[:, 0].tolist() if value])
        assert self.gate.wait(5)
        return (values.clone(),)


@pytest.fixture
def vocoder() -> Vocoder:
    return Vocoder()


@pytest.fixture
def stage(vocoder: Vocoder, tmp_path: Path) -> Iterator[VoiceBoxStage]:
    made = VoiceBoxStage(vocoder, CancelBoard(tmp_path), Metrics("voicebox"), 100)
    yield made
    made.stop()


def test_a_first_sound_goes_before_what_others_continue_with(vocoder: Vocoder, stage: VoiceBoxStage) -> None:
    log: list[Event] = []

    def submit(session: int, kind: str, value: float = 0) -> None:
        info = {"options": Options(speech=True, voice="anna").to_json(), "created": 1.0} if kind == "start" else {"last": False}
        frames = np.full((1, FRAME_WIDTH), value, np.float32) if kind == "frames" else None
        stage.submit(Event(session, kind, info=info, frames=frames), FakeReply(False, log))  # type: ignore[arg-type]

    def heard() -> list[float]:
        return [float(event.audio[0]) for event in log if event.kind == "audio" and event.audio is not None]

    for session in range(1, 6):
        submit(session, "start")
    submit(1, "frames", 11)
    wait_until(lambda: vocoder.computed == [[11]])
    submit(2, "frames", 21)
    submit(3, "frames", 31)
    vocoder.gate.set()
    wait_until(lambda: len(heard()) == 3)
    vocoder.gate.clear()
    submit(3, "frames", 32)
    wait_until(lambda: vocoder.computed[-1] == [32])
    for session, value in ((1, 12), (2, 22), (4, 41), (5, 51)):
        submit(session, "frames", value)
    vocoder.gate.set()
    wait_until(lambda: len(heard()) == 8)
    assert vocoder.computed == [[11], [21, 31], [32], [41, 51], [12, 22]]
    assert sorted(heard()) == [11, 12, 21, 22, 31, 32, 41, 51]
