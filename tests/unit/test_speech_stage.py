"""A speech stage with a made-up voice: text never waits for it, and every session ends once, in order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import FakeReply, wait_until

from tritone.errors import TritoneError
from tritone.messages import FRAME_WIDTH, Event, Failure, failure_event
from tritone.metrics import Metrics
from tritone.options import Options
from tritone.pools import CancelBoard
from tritone.stages.speech import SpeechStage

USAGE = {"completion_tokens": 3}


@dataclass
class Voice:
    """State of one session: the words it has been given."""

    words: list[str] = field(default_factory=list)


class TalkerLike(SpeechStage[Voice]):
    """Makes one frame per word of text, and one more at the end; the gate holds it back."""

    work_kinds = frozenset({"text", "end"})

    def __init__(self, board: CancelBoard, metrics: Metrics, max_queue: int = 100) -> None:
        super().__init__("voice", board, metrics, max_queue)
        self.gate = threading.Event()
        self.gate.set()
        self.begun: list[str] = []
        self.opened: list[str] = []

    def open(self, session: int, options: Options) -> Voice:
        if options.voice == "broken":
            raise TritoneError("no such voice", "NOT_FOUND")
        self.opened.append(options.voice)
        return Voice()

    def work(self, state: Voice, event: Event) -> Generator[Event, None, None]:
        for word in event.text.split() if event.kind == "text" else ["(end)"]:
            self.begun.append(word)
            assert self.gate.wait(5)
            if word == "boom":
                raise RuntimeError("expected by the test")
            if word == "full":
                raise TritoneError("no room", "RESOURCE_EXHAUSTED")
            if event.info.get("fail"):
                raise RuntimeError("expected by the test")
            state.words.append(word)
            frames = np.full((1, FRAME_WIDTH), len(state.words), np.float32)
            yield Event(event.session, "frames", info={"word": word}, frames=frames)


class VoiceBoxLike(TalkerLike):
    """Makes audio of frames; the events of one frame chunk come when the gate opens."""

    work_kinds = frozenset({"frames", "end"})

    def work(self, state: Voice, event: Event) -> Generator[Event, None, None]:
        self.begun.append(event.kind)
        assert self.gate.wait(5)
        if event.kind == "frames":
            yield Event(event.session, "audio", audio=np.zeros(4, np.float32))


class Bench:
    def __init__(self, directory: Path, kind: type[TalkerLike], max_queue: int = 100) -> None:
        self.board = CancelBoard(directory)
        self.metrics = Metrics("voice")
        self.stage = kind(self.board, self.metrics, max_queue)
        self.log: list[Event] = []

    def submit(
        self, session: int, kind: Any, text: str = "", cancelled: bool = False, **more: Any
    ) -> FakeReply:
        return self.send(Event(session, kind, text=text, **more), cancelled)

    def send(self, event: Event, cancelled: bool = False) -> FakeReply:
        reply = FakeReply(cancelled, self.log)
        self.stage.submit(event, reply)
        return reply

    def start(self, session: int, **options: Any) -> None:
        options = {"speech": True, "voice": "anna", **options}
        info = {"options": Options(**options).to_json(), "created": 1.0}
        reply = self.submit(session, "start", info=info)
        assert kinds(reply) == ["start"] and reply.closed

    def end(self, session: int) -> FakeReply:
        return self.submit(session, "end", info={"finish_reason": "stop", "usage": USAGE})

    def of(self, session: int) -> list[str]:
        return [event.info.get("word", event.kind) for event in self.log if event.session == session]

    def gauges(self) -> dict[str, float]:
        return {name: value for (name, _), value in self.metrics.drain()[1].items()}


def kinds(reply: FakeReply) -> list[str]:
    return [event.kind for event in reply.messages]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def one(kind: type[TalkerLike] = TalkerLike, max_queue: int = 100) -> Bench:
        made.append(Bench(tmp_path, kind, max_queue))
        return made[-1]

    yield one
    for bench in made:
        bench.stage.gate.set()
        bench.stage.stop()


def assert_nothing_left(bench: Bench) -> None:
    wait_until(lambda: bench.gauges() == {"tritone_sessions": 0, "tritone_queue_requests": 0})
    assert bench.stage._sessions == {}
    assert bench.stage._failed == set()


def test_a_spoken_answer(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.start(1, voice="berta")
    assert bench.stage.opened == ["berta"]
    first, second = bench.submit(1, "text", "one two"), bench.submit(1, "text", "three")
    end = bench.end(1)
    assert kinds(end) == [] or end.closed
    assert [event.info.get("word") for event in first.wait()] == [None, "one", "two"]
    assert [event.info.get("word") for event in second.wait()] == [None, "three"]
    assert [event.info.get("word", event.kind) for event in end.wait()] == ["(end)", "end"]
    assert end.messages[-1].info == {"finish_reason": "stop", "usage": USAGE}
    assert [event for event in bench.of(1) if event not in ("start", "text")] == [
        "one",
        "two",
        "three",
        "(end)",
        "end",
    ]
    frames = [int(event.frames[0, 0]) for event in bench.log if event.frames is not None]
    assert frames == [1, 2, 3, 4]
    assert_nothing_left(bench)


def test_text_passes_at_once_while_the_voice_is_busy(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.stage.gate.clear()
    bench.start(1)
    replies = [bench.submit(1, "text", text) for text in ("one", "two", "three")]
    end = bench.end(1)
    assert [kinds(reply) for reply in replies] == [["text"]] * 3
    assert not any(reply.closed for reply in [*replies, end])
    assert bench.of(1) == ["start", "text", "text", "text"]
    bench.stage.gate.set()
    end.wait()
    assert bench.of(1)[4:] == ["one", "two", "three", "(end)", "end"]


def test_a_voicebox_passes_text_and_holds_the_end_until_the_audio_is_out(make: Callable[..., Bench]) -> None:
    bench = make(VoiceBoxLike)
    bench.stage.gate.clear()
    bench.start(1)
    frames = bench.submit(1, "frames", frames=np.zeros((2, FRAME_WIDTH), np.float32))
    text = bench.submit(1, "text", "one")
    assert kinds(text) == ["text"] and text.closed
    end = bench.end(1)
    assert not frames.closed and not end.closed
    bench.stage.gate.set()
    assert [event.kind for event in frames.wait()] == ["audio"]
    assert [event.kind for event in end.wait()] == ["end"]
    assert bench.of(1) == ["start", "text", "audio", "end"]
    assert_nothing_left(bench)


def test_a_text_only_session_passes_through(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.stage.gate.clear()
    bench.start(1, speech=False)
    for reply in (bench.submit(1, "text", "one"), bench.submit(1, "beat"), bench.end(1)):
        assert reply.closed and len(reply.messages) == 1
    assert bench.of(1) == ["start", "text", "beat", "end"]
    assert bench.log[-1].info == {"finish_reason": "stop", "usage": USAGE}
    assert bench.stage.begun == []


def test_beats_pass_at_once(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.stage.gate.clear()
    bench.start(1)
    bench.submit(1, "text", "one")
    beat = bench.submit(1, "beat")
    assert kinds(beat) == ["beat"] and beat.closed


def test_two_sessions_share_the_voice(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.stage.gate.clear()
    bench.start(1)
    bench.start(2)
    bench.submit(1, "text", "a0 a1 a2 a3 a4 a5")
    wait_until(lambda: bench.stage.begun)
    bench.submit(2, "text", "b0 b1")
    ends = [bench.end(1), bench.end(2)]
    bench.stage.gate.set()
    for end in ends:
        end.wait()
    order = [event.info["word"] for event in bench.log if event.kind == "frames"]
    assert [word for word in order if word[0] == "a"] == [f"a{number}" for number in range(6)]
    assert order.index("b1") < order.index("a4")
    assert_nothing_left(bench)


@pytest.mark.parametrize(
    ("word", "code", "message"),
    [
        ("boom", "INTERNAL", "voice: RuntimeError('expected by the test')"),
        ("full", "RESOURCE_EXHAUSTED", "no room"),
    ],
)
def test_a_failure_ends_one_session(word: str, code: str, message: str, make: Callable[..., Bench]) -> None:
    bench = make()
    bench.start(1)
    bench.start(2)
    failing = bench.submit(1, "text", f"one {word} never")
    assert failing.wait()[-1].info == {"finish_reason": "error", "code": code, "message": message}
    assert [event.kind for event in failing.messages] == ["text", "frames", "error"]
    # The stages before this one shall stop, and whatever still comes from them is not passed on.
    assert bench.board.is_cancelled(1)
    for late in (bench.submit(1, "text", "late"), bench.send(failure_event(1, Failure("cancelled"), USAGE))):
        assert late.wait() == []
    assert not bench.board.is_cancelled(2)
    fine = bench.submit(2, "text", "fine")
    assert [event.kind for event in fine.wait()] == ["text", "frames"]
    assert bench.end(2).wait()[-1].kind == "end"
    assert bench.of(1).count("error") == 1
    assert bench.metrics.drain()[0] == {
        ("tritone_requests_total", (("stage", "voice"), ("outcome", "error"))): 1
    }
    assert_nothing_left(bench)


def test_a_failure_while_more_of_the_session_waits(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.stage.gate.clear()
    bench.start(1)
    replies = [bench.submit(1, "text", "boom"), bench.submit(1, "text", "later"), bench.end(1)]
    bench.stage.gate.set()
    assert [[event.kind for event in reply.wait()] for reply in replies] == [["text", "error"], ["text"], []]
    assert "later" not in bench.stage.begun
    assert_nothing_left(bench)


def test_a_failure_on_the_last_event_leaves_nothing_behind(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.start(1)
    end = bench.submit(1, "end", info={"finish_reason": "stop", "fail": True})
    assert [event.kind for event in end.wait()] == ["error"]
    assert_nothing_left(bench)


def test_a_voice_that_cannot_be_opened_is_an_error_event(make: Callable[..., Bench]) -> None:
    bench = make()
    info = {"options": Options(speech=True, voice="broken").to_json(), "created": 1.0}
    reply = bench.submit(1, "start", info=info)
    # The start goes first: without it a later stage does not know the session whose error this is.
    assert [event.kind for event in reply.wait()] == ["start", "error"]
    assert reply.messages[-1].info == {
        "finish_reason": "error",
        "code": "NOT_FOUND",
        "message": "no such voice",
    }
    assert bench.board.is_cancelled(1)
    assert bench.submit(1, "text", "late").wait() == []
    assert bench.end(1).wait() == []
    assert_nothing_left(bench)


def test_a_cancelled_session_stops_working_and_ends_as_cancelled(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.stage.gate.clear()
    bench.start(1)
    first, second = bench.submit(1, "text", "one two three"), bench.submit(1, "text", "four")
    end = bench.end(1)
    wait_until(lambda: bench.stage.begun)
    bench.board.post(1)
    bench.stage.gate.set()
    assert end.wait()[-1].kind == "cancelled"
    assert end.messages[-1].info == {"finish_reason": "cancelled", "usage": USAGE}
    assert len(end.messages) == 1
    first.wait()
    second.wait()
    assert bench.stage.begun == ["one"]
    assert_nothing_left(bench)


def test_a_client_seen_gone_is_posted(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.start(1)
    assert not bench.board.is_cancelled(1)
    bench.submit(1, "beat", cancelled=True)
    assert bench.board.is_cancelled(1)
    assert bench.end(1).wait()[-1].kind == "cancelled"


@pytest.mark.parametrize("failure", [Failure("error", "INTERNAL", "decode broke"), Failure("cancelled")])
def test_how_decode_ended_comes_after_the_audio(failure: Failure, make: Callable[..., Bench]) -> None:
    bench = make(VoiceBoxLike)
    bench.stage.gate.clear()
    bench.start(1)
    bench.submit(1, "frames", frames=np.zeros((1, FRAME_WIDTH), np.float32))
    last = bench.send(failure_event(1, failure, USAGE))
    bench.stage.gate.set()
    assert last.wait() == [failure_event(1, failure, USAGE)]
    assert bench.of(1) == ["start", "audio", failure.kind]
    assert_nothing_left(bench)


def test_a_full_queue_refuses_work_but_never_an_end(make: Callable[..., Bench]) -> None:
    bench = make(max_queue=2)
    bench.stage.gate.clear()
    for session in (1, 2, 3):
        bench.start(session)
    bench.submit(1, "text", "a")
    bench.submit(2, "text", "b")
    refused = bench.submit(3, "text", "c")
    assert [event.kind for event in refused.wait()] == ["text", "error"]
    assert refused.messages[-1].info["code"] == "UNAVAILABLE"
    assert "2 pieces of work" in refused.messages[-1].info["message"]
    ends = [bench.end(session) for session in (1, 2, 3)]
    bench.stage.gate.set()
    assert [[event.kind for event in end.wait()][-1:] for end in ends] == [["end"], ["end"], []]
    assert_nothing_left(bench)


def test_nothing_follows_an_error_while_the_voice_works_on_that_session(make: Callable[..., Bench]) -> None:
    bench = make(max_queue=1)
    bench.stage.gate.clear()
    bench.start(1)
    first = bench.submit(1, "text", "one two")
    wait_until(lambda: bench.stage.begun)
    refused = bench.submit(1, "text", "three")
    assert [event.kind for event in refused.wait()] == ["text", "error"]
    end = bench.end(1)
    bench.stage.gate.set()
    first.wait()
    end.wait()
    assert bench.of(1) == ["start", "text", "text", "error"]
    assert_nothing_left(bench)


def test_events_of_an_unknown_session_pass(make: Callable[..., Bench]) -> None:
    bench = make()
    reply = bench.submit(9, "text", "stray")
    assert kinds(reply) == ["text"] and reply.closed


def test_many_sessions_in_a_row_leave_no_trace(make: Callable[..., Bench]) -> None:
    bench = make()
    for session in range(1, 101):
        bench.start(session)
        bench.submit(session, "text", "boom" if session % 3 == 0 else "one two")
        if session % 5 == 0:
            bench.board.post(session)
        last = bench.end(session)
        last.wait()
    assert_nothing_left(bench)


@pytest.mark.parametrize("kind", [TalkerLike, VoiceBoxLike])
def test_a_restarted_stage_passes_on_what_it_does_not_know(tmp_path: Path, kind: type[TalkerLike]) -> None:
    """Marked as without speech; frames have no use any more."""
    bench = Bench(tmp_path, kind)
    bench.stage._restarted = True
    frames = np.zeros((2, FRAME_WIDTH), np.float32)
    replies = [bench.submit(1, "text", "a"), bench.submit(1, "frames", frames=frames), bench.end(1)]
    passed = [reply.wait()[0] for reply in replies]
    assert [(event.kind, event.lost) for event in passed] == [("text", "voice"), ("beat", "voice"), ("end", "voice")]
    assert passed[1].frames is None
    bench.start(2)
    assert bench.submit(2, "start", info={"options": {}}).wait()[0].lost == "", "announced again by a stage before"
    assert {event.lost for event in bench.end(2).wait()} == {""}
    assert_nothing_left(bench)
    bench.stage.stop()
