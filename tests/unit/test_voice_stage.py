"""The trained voice in its stage: events of decode in, codes out, each clause a segment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.code_talker_bench import CodeTalkerBench
from tests.unit.helpers import FakeReply, wait_until
from tritone.models.codec.codec import Codes
from tritone.models.talker.config import HEART
from tritone.models.talker.files import load_codec, load_network
from tritone.models.talker.generate import speak
from tritone.models.talker.text import TextReader
from tritone.options import Options, Sampling

CLAUSES = ("Hello there.", "It is late.")
HIDDEN = 576


class Bench(CodeTalkerBench):
    def __init__(self, directory: Path) -> None:
        super().__init__(HEART, directory, HIDDEN, "bfloat16", pool_tokens=4096)

    def begin(self, session: int, kind: str = "start", text: str = "") -> FakeReply:
        options = Options(speech=True, voice="heart", sampling=Sampling(seed=1)).to_json()
        return self.send(session, kind, text=text, info={"options": options, "created": 1.0})

    def end(self, session: int) -> FakeReply:
        return self.send(session, "end", info={"finish_reason": "stop"})

    def segments(self, session: int) -> list[list[list[int]]]:
        """Codes, cut where the events say that a segment ends; those of an unfinished one are the last."""
        found: list[list[list[int]]] = [[]]
        for event in self.log:
            if event.session == session and event.codes is not None:
                found[-1] += event.codes.tolist()
                if event.info["last"] and found[-1]:
                    found.append([])
        return found

    def clean(self) -> None:
        wait_until(lambda: not self.stage._sessions and self.pages.available == self.pages.total)
        self.hidden.collect()
        assert self.hidden.leases == 0


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.stage.stop()


@pytest.fixture(scope="module")
def expected() -> list[Codes]:
    """By the network in plain torch."""
    reader = TextReader()
    return speak(load_network(HEART), [unit for clause in CLAUSES for unit in reader.read(clause)])


def test_each_clause_is_a_segment_that_ends_when_it_is_said(bench: Bench, expected: list[Codes]) -> None:
    """Also while the text behind it is still to come."""
    bench.begin(1)
    bench.send(1, "text", text=CLAUSES[0] + " It")
    wait_until(lambda: len(bench.segments(1)) == 2)
    assert bench.segments(1) == [expected[0].tolist(), []]
    bench.send(1, "text", text=" is late.")
    last = bench.end(1).wait(20)[-1]
    assert last.kind == "end" and bench.segments(1) == [expected[0].tolist(), expected[1].tolist(), []]
    bench.clean()


def test_text_alone_and_side_by_side(bench: Bench, expected: list[Codes]) -> None:
    replies = [bench.begin(session, "speak", " ".join(CLAUSES)) for session in range(1, 9)]
    for session, reply in enumerate(replies, 1):
        assert [event.kind for event in reply.wait(20)][-1] == "end"
        assert bench.segments(session) == [expected[0].tolist(), expected[1].tolist(), []]
    bench.clean()


def test_hidden_states_change_what_is_said_and_are_given_back(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = bench.stage._engine.model
    monkeypatch.setattr(model, "_context", torch.randn(192, HIDDEN, generator=torch.Generator().manual_seed(2)) * 0.05)
    rows = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    for session, known in ((1, None), (2, rows), (3, rows)):
        bench.begin(session)
        bench.send(session, "text", known, text="Hello")
        bench.hidden.collect()
        assert bench.hidden.leases == 0
        bench.end(session).wait(20)
    assert bench.segments(2) == bench.segments(3) != bench.segments(1)
    bench.clean()


def test_a_long_text_goes_on_after_a_passage(bench: Bench) -> None:
    text = "The lazy dog sleeps. " * 14
    messages = bench.begin(1, "speak", text).wait(60)
    assert [event.kind for event in messages if event.kind != "beat"][-1] == "end"
    said = bench.segments(1)
    assert len(said) == 15 and said[-1] == []
    # A passage begins as an answer does.
    assert said[0] in said[1:]
    bench.clean()


def test_a_cancelled_passage_stops_all_of_them(bench: Bench) -> None:
    reply = bench.begin(1, "speak", "The lazy dog sleeps. " * 60)
    wait_until(lambda: len(bench.segments(1)) > 5, 60)
    bench.stage._board.post(1)
    assert reply.wait()[-1].kind == "cancelled"
    assert len(bench.segments(1)) < 60
    bench.clean()


def test_codes_become_frames_of_the_demo_voice(expected: list[Codes]) -> None:
    frames = load_codec(HEART).decode(expected[0])
    assert frames.features.shape == (4 * len(expected[0]), 130)
    assert 1.5 < len(frames) / 80 * 2 < 3.5, "about a second for two words"
    voiced = frames.f0[frames.f0 > 0]
    assert len(voiced) > 20 and 80 < np.median(voiced) < 350
