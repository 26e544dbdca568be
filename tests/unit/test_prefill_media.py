"""Prefill computes media beside its engine: text does not wait for them, and a fault or a cancel ends one request."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.unit.cascade import ask, deployment, make_engine
from tests.unit.helpers import FakeReply, wait_until
from tritone.errors import InvalidArgument
from tritone.media.features import MediaFeatures
from tritone.messages import GenerateRequest
from tritone.metrics import Metrics
from tritone.models.omni.prompt import Ints, MediaPrompt
from tritone.pools import CancelBoard
from tritone.stages import media
from tritone.stages.prefill import PrefillStage

IMAGE = MediaFeatures(images=(np.zeros((2, 2, 3), np.uint8),))


class GatedTowers:
    """Waits for its gate, then finds nothing in a picture; refuses ids that begin with ``wrong``."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.wrong = -1
        self.begun: list[int] = []

    def prompt(self, ids: Ints, media: MediaFeatures) -> MediaPrompt:
        self.begun.append(int(ids[0]))
        assert self.gate.wait(10)
        if ids[0] == self.wrong:
            raise InvalidArgument("expected by the test")
        none = np.zeros(0, np.int32)
        positions = np.broadcast_to(np.arange(len(ids), dtype=np.int32), (3, len(ids)))
        return MediaPrompt(ids, positions, 0, none, torch.zeros(0, 320), none, torch.zeros(0, 0, 320), b"digest")


class Bench:
    def __init__(self, directory: Path) -> None:
        self.board = CancelBoard(directory)
        self.towers = GatedTowers()
        engine, self.pool = make_engine(deployment(mode="off", checksum=False), directory, "prefill")
        self.stage = PrefillStage(
            engine, self.pool, None, self.board, Metrics("prefill"), max_queue=2, lease_seconds=60.0, towers=self.towers
        )

    def submit(self, request: GenerateRequest) -> FakeReply:
        reply = FakeReply()
        self.stage.submit(request, reply)
        return reply


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.towers.gate.set()
    made.stage.stop()


def seen(session: int) -> GenerateRequest:
    return replace(ask(session), media=IMAGE)


def test_text_does_not_wait_for_media(bench: Bench) -> None:
    picture, text = bench.submit(seen(1)), bench.submit(ask(2))
    assert text.wait()[-1].handoff is not None
    assert not picture.closed
    wait_until(lambda: any(message.handoff is None for message in picture.messages))  # a beat
    bench.towers.gate.set()
    last = picture.wait()[-1]
    assert last.handoff is not None and last.request.media is None


def test_a_fault_of_the_towers_ends_its_request_alone(bench: Bench) -> None:
    bench.towers.wrong = int(ask(1).ids[0])
    wrong, right = bench.submit(seen(1)), bench.submit(seen(2))
    bench.towers.gate.set()
    failure = wrong.wait()[-1].failure
    assert (failure.kind, failure.code, failure.message) == ("error", "INVALID_ARGUMENT", "expected by the test")
    assert right.wait()[-1].handoff is not None


def test_a_cancelled_request_is_not_computed(bench: Bench) -> None:
    first, second = bench.submit(seen(1)), bench.submit(seen(2))
    wait_until(lambda: bench.towers.begun)
    bench.board.post(2)
    assert second.wait()[-1].failure.kind == "cancelled"
    bench.board.post(1)
    assert first.wait()[-1].failure.kind == "cancelled"
    bench.towers.gate.set()
    assert bench.submit(seen(3)).wait()[-1].handoff is not None
    assert bench.towers.begun == [int(ask(session).ids[0]) for session in (1, 3)]


def test_more_than_the_queue_are_refused(bench: Bench) -> None:
    waiting = [bench.submit(seen(session)) for session in (1, 2)]
    refused = bench.submit(seen(3)).wait()[-1].failure
    assert refused.code == "UNAVAILABLE" and "prefill.max_queue: 2" in refused.message
    bench.towers.gate.set()
    assert all(reply.wait()[-1].handoff is not None for reply in waiting)


def test_media_that_wait_are_bounded_in_bytes(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one request are taken however large they are; a cancelled one counts until its turn, as its memory does."""
    monkeypatch.setattr(media, "MAX_HELD_BYTES", IMAGE.nbytes + 1)
    waiting = bench.submit(seen(1))
    wait_until(lambda: bench.towers.begun)
    refused = bench.submit(seen(2)).wait()[-1]
    assert refused.failure.code == "UNAVAILABLE" and refused.request.media is None
    assert refused.failure.message.startswith("media: 12 bytes beside those that wait; allowed: ")
    bench.board.post(1)
    assert waiting.wait()[-1].failure.kind == "cancelled"
    assert bench.submit(seen(3)).wait()[-1].failure.code == "UNAVAILABLE"
    bench.towers.gate.set()
    wait_until(lambda: bench.submit(seen(4)).wait()[-1].handoff is not None)
    monkeypatch.setattr(media, "MAX_HELD_BYTES", 0)
    assert bench.submit(seen(5)).wait()[-1].handoff is not None
