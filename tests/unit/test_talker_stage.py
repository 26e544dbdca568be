"""The stage of a Talker that speaks in codes: events in, text and codes out, and nothing is left behind."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.talker_reference import SPEAKER, Speech
from tests.unit.code_talker_bench import CodeTalkerBench
from tests.unit.helpers import FakeReply, wait_until
from tests.unit.test_talker_engine import FRAMES, GREEDY, WORDS, reference, spoken
from tritone.messages import Event
from tritone.models.omni.heard import Heard
from tritone.models.omni.talker_config import SpeechDefaults, hearer_of
from tritone.options import Options, Sampling
from tritone.stages.code_talker import SINGLE_FRAMES


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("talkers")


@pytest.fixture(params=["qwen3", "qwen2.5"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Bench(CodeTalkerBench):
    def __init__(self, family: str, weights: Path, directory: Path, frames: int = FRAMES, **sizes: Any) -> None:
        checkpoint = reference(family, weights).directory
        super().__init__(checkpoint, directory, 128, "float32", **{"pool_tokens": 2048} | sizes)
        self.hear = hearer_of(checkpoint)
        self.stage._defaults = SpeechDefaults(GREEDY, frames)

    def start(self, session: int, speech: Speech, voice: str = SPEAKER, **options: Any) -> FakeReply:
        given = Options(speech=True, voice=voice, sampling=Sampling(seed=1), **options).to_json()
        return self.send(session, "start", info={"options": given, "created": 1.0})

    def heard(self, speech: Speech) -> Heard:
        asked = speech.asked
        return self.hear(np.array(asked.ids, np.int32), asked.prompt and asked.prompt.positions)

    def say(self, session: int, speech: Speech) -> list[FakeReply]:
        """The prompt's rows with the first word, then word by word."""
        prompt = len(speech.asked.ids) + 1
        replies = [self.send(session, "text", speech.rows[:prompt], text="a", heard=self.heard(speech))]
        replies += [self.send(session, "text", row[None], text="b") for row in speech.rows[prompt:]]
        return [*replies, self.send(session, "end", info={"finish_reason": "stop", "usage": {"completion_tokens": 3}})]

    def codes(self, session: int) -> list[list[int]]:
        events = [event for event in self.log if event.session == session and event.kind == "codes"]
        return [codes for event in events if event.codes is not None for codes in event.codes.tolist()]

    def clean(self) -> None:
        """Nothing is held: pages, leases, sessions, open replies."""
        wait_until(lambda: not self.stage._sessions and self.pages.available == self.pages.total)
        self.hidden.collect()
        assert self.hidden.leases == 0


@pytest.fixture
def bench(family: str, directory: Path, tmp_path: Path) -> Iterator[Bench]:
    made = Bench(family, directory, tmp_path)
    yield made
    made.stage.stop()


def test_sessions_side_by_side_speak_what_transformers_speaks(family: str, directory: Path, bench: Bench) -> None:
    every = list(spoken(family, directory).values())
    for session, speech in enumerate(every, 1):
        bench.start(session, speech)
    replies = [bench.say(session, speech) for session, speech in enumerate(every, 1)]
    for session, speech in enumerate(every, 1):
        last = replies[session - 1][-1].wait(20)[-1]
        assert last.kind == "end" and last.info["usage"] == {"completion_tokens": 3}
        assert bench.codes(session) == speech.codes.tolist()
        events = [event for event in bench.log if event.session == session]
        assert [event.kind for event in events][:2] == ["start", "text"] and events[-1] is last
        assert sum(event.kind == "text" for event in events) == WORDS - 1
        chunks = [event for event in events if event.kind == "codes"]
        assert [len(event.codes) for event in chunks[:SINGLE_FRAMES]] == [1] * SINGLE_FRAMES  # type: ignore[arg-type]
        assert [event.info["last"] for event in chunks] == [False] * (len(chunks) - 1) + [True]
        assert all(reply.closed and not reply.faults for reply in replies[session - 1])
    bench.clean()


def test_rows_are_taken_where_they_arrive(family: str, directory: Path, bench: Bench) -> None:
    """A session that cannot speak yet holds no block of the pool that they came in."""
    speech = spoken(family, directory)["both"]
    bench.start(1, speech)
    bench.send(1, "text", speech.rows[:-6], text="a", heard=bench.heard(speech))
    bench.send(1, "text", speech.rows[-6:-5], text="b")
    bench.hidden.collect()
    assert bench.hidden.leases == 0
    bench.send(2, "text", speech.rows[:4], text="of a session without speech")
    bench.hidden.collect()
    assert bench.hidden.leases == 0
    bench.send(1, "error", info={"code": "INTERNAL", "message": "m"})
    bench.clean()


def test_an_answer_without_words_ends_at_once(family: str, directory: Path, bench: Bench) -> None:
    speech = spoken(family, directory)["text"]
    bench.start(1, speech)
    bench.send(1, "text", speech.rows[: len(speech.asked.ids)], text="", heard=bench.heard(speech))
    messages = bench.send(1, "end", info={"finish_reason": "stop"}).wait()
    assert [event.kind for event in messages] == ["codes", "end"]
    assert messages[0].info == {"last": True} and messages[0].codes.shape == (0, speech.codes.shape[1])
    bench.clean()


def test_the_most_frames_end_the_speech_before_the_text(family: str, directory: Path, tmp_path: Path) -> None:
    bench = Bench(family, directory, tmp_path, frames=2)
    try:
        speech = spoken(family, directory)["sound"]
        bench.start(1, speech)
        *earlier, last = bench.say(1, speech)
        assert last.wait()[-1].kind == "end"
        assert bench.codes(1) == speech.codes[:2].tolist()
        assert all(reply.closed for reply in earlier)
        bench.clean()
    finally:
        bench.stage.stop()


@pytest.mark.parametrize("ended", [False, True])
def test_a_cancelled_session_stops(family: str, directory: Path, tmp_path: Path, ended: bool) -> None:
    bench = Bench(family, directory, tmp_path, frames=400)
    try:
        speech = spoken(family, directory)["sound"]
        bench.start(1, speech)
        replies = bench.say(1, speech) if ended else [bench.send(1, "text", speech.rows, text="a", heard=bench.heard(speech))]
        wait_until(lambda: len(bench.codes(1)) > 3)
        bench.stage._board.post(1)
        if not ended:
            wait_until(lambda: replies[0].closed)
            replies.append(bench.send(1, "end", info={"finish_reason": "stop"}))
        assert replies[-1].wait()[-1].kind == "cancelled"
        assert len(bench.codes(1)) < 400
        assert all(reply.closed and not reply.faults for reply in replies)
        bench.clean()
    finally:
        bench.stage.stop()


def test_rows_that_are_gone_end_their_session_alone(family: str, directory: Path, bench: Bench) -> None:
    first, other = (spoken(family, directory)[name] for name in ("text", "sound"))
    bench.start(1, first)
    bench.start(2, other)
    refs = bench._writer.lend(first.rows[:3])
    bench.stage._views.release(refs)
    bench.hidden.collect()
    reply = FakeReply(log=bench.log)
    bench.stage.submit(Event(1, "text", text="a", hidden=(refs,), rows=(3,)), reply)
    failed = reply.wait()[-1]
    assert failed.kind == "error" and "tag" in failed.info["message"]
    assert bench.send(1, "end", info={"finish_reason": "stop"}).wait() == []
    assert bench.say(2, other)[-1].wait(20)[-1].kind == "end"
    assert bench.codes(2) == other.codes.tolist()
    bench.clean()


def test_an_unknown_voice_is_an_error_with_the_list(family: str, directory: Path, bench: Bench) -> None:
    speech = spoken(family, directory)["text"]
    bench.start(1, speech, voice="nobody")
    replies = bench.say(1, speech)
    messages = replies[0].wait()
    assert [event.kind for event in messages] == ["text", "error"]
    # Text goes on while the failure is not known yet.
    assert all({event.kind for event in reply.wait()} <= {"text", "error"} for reply in replies)
    assert "voice: 'nobody' is not allowed; allowed: " in messages[1].info["message"]
    assert "ethan" in messages[1].info["message"].lower()
    bench.clean()


def test_beats_while_the_last_event_is_held(family: str, directory: Path, tmp_path: Path) -> None:
    """So that a client that leaves is seen: nothing else goes out while a session waits for its turn."""
    bench = Bench(family, directory, tmp_path, max_sequences=1, frames=300)
    try:
        speech = spoken(family, directory)["sound"]
        waiting = speech.rows[: len(speech.asked.ids) + 1]
        bench.start(1, speech)
        bench.send(1, "text", waiting, text="a", heard=bench.heard(speech))
        wait_until(lambda: len(bench.codes(1)) == 1)
        bench.start(2, speech)
        reply = bench.say(2, speech)[-1]
        begun = time.monotonic()
        wait_until(lambda: sum(event.kind == "beat" for event in reply.messages) >= 2)
        assert time.monotonic() - begun < 2 and not bench.codes(2)
        for session in (1, 2):
            bench.stage._board.post(session)
        assert reply.wait()[-1].kind == "cancelled"
        bench.send(1, "end", info={"finish_reason": "stop"}).wait()
        bench.clean()
    finally:
        bench.stage.stop()
