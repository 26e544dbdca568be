"""What the client sees: numbered events, one end, joined answers, audio in both forms, timings."""

from __future__ import annotations

import base64
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import FakeReply, assert_fits

from tritone.messages import Event, Failure, failure_event
from tritone.metrics import Metrics
from tritone.options import Options
from tritone.pools import CancelBoard, Views
from tritone.stages.postprocess import WAITING_SECONDS, PostprocessStage


class Bench:
    def __init__(self, directory: Path, restarted: bool = False) -> None:
        self.board = CancelBoard(directory)
        self.metrics = Metrics("postprocess")
        self.stage = PostprocessStage(self.board, Views(directory), self.metrics, restarted=restarted)
        self.created = time.monotonic() - 2.0

    def send(self, session: int, kind: Any, cancelled: bool = False, **more: Any) -> dict[str, Any] | None:
        """What the client gets for this event; None when nothing."""
        reply = FakeReply(cancelled)
        self.stage.submit(Event(session, kind, **more), reply)
        assert reply.closed and not reply.faults
        assert len(reply.messages) <= 1
        if not reply.messages:
            return None
        tensors = reply.messages[0]
        for name in ("event", "text", "audio_base64", "info"):
            if name in tensors:
                assert tensors[name].dtype == np.object_ and tensors[name].shape == (1,)
        full = {"text": np.array([b""], np.object_), "info": np.array([b"{}"], np.object_)}
        full |= {"audio_base64": np.array([b""], np.object_), "audio": np.zeros(0, np.float32)}
        assert_fits("postprocess", full | tensors, output=True)
        read: dict[str, Any] = {"index": int(tensors["index"][0]), "event": tensors["event"][0].decode()}
        if "text" in tensors:
            read["text"] = tensors["text"][0].decode()
        if "info" in tensors:
            read["info"] = json.loads(tensors["info"][0])
        if "audio" in tensors:
            read["audio"] = tensors["audio"].tolist()
        if "audio_base64" in tensors:
            read["pcm"] = np.frombuffer(base64.b64decode(tensors["audio_base64"][0]), "<i2").tolist()
        return read

    def start(self, session: int, **options: Any) -> None:
        info = {"options": Options(**options).to_json(), "created": self.created}
        assert self.send(session, "start", info=info) is None

    def end(self, session: int) -> dict[str, Any]:
        made = self.send(
            session,
            "end",
            info={
                "finish_reason": "stop",
                "usage": {"completion_tokens": 3},
                "timings": {"queue": 0.25, "decode": 0.5},
            },
        )
        assert made is not None
        return made


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def audio(*values: float) -> Any:
    return np.array(values, np.float32)


def test_a_streamed_answer_is_numbered_from_zero_without_gaps(bench: Bench) -> None:
    bench.start(1)
    assert bench.send(1, "text", text="안녕 ") == {"index": 0, "event": "text", "text": "안녕 "}
    assert bench.send(1, "beat") is None
    assert bench.send(1, "audio", audio=audio(0.5, -0.5)) == {
        "index": 1,
        "event": "audio",
        "audio": [0.5, -0.5],
    }
    assert bench.send(1, "text", text="👩‍👧") == {"index": 2, "event": "text", "text": "👩‍👧"}
    end = bench.end(1)
    assert (end["index"], end["event"]) == (3, "end")
    assert "text" not in end and "audio" not in end


def test_sessions_are_numbered_apart(bench: Bench) -> None:
    bench.start(1)
    bench.start(2)
    made = [bench.send(session, "text", text=str(session)) for session in (1, 2, 1, 1, 2)]
    assert [(part["index"], part["text"]) for part in made if part] == [
        (0, "1"),
        (0, "2"),
        (1, "1"),
        (2, "1"),
        (1, "2"),
    ]


def test_the_end_says_usage_and_timings(bench: Bench) -> None:
    bench.start(1)
    bench.send(1, "text", text="hi")
    bench.send(1, "audio", audio=np.zeros(12_000, np.float32))
    bench.send(1, "audio", audio=np.zeros(24_000, np.float32))
    info = bench.end(1)["info"]
    assert info["finish_reason"] == "stop"
    assert info["usage"] == {"completion_tokens": 3, "audio_seconds": 1.5}
    assert info["sample_rate"] == 24_000
    timings = info["timings"]
    assert (timings["queue"], timings["decode"]) == (0.25, 0.5)
    assert 2.0 <= timings["first_text"] <= timings["first_audio"] <= timings["total"] < 4.0


def test_an_answer_without_text_or_audio_has_no_first_ones(bench: Bench) -> None:
    bench.start(1)
    info = bench.end(1)["info"]
    assert set(info["timings"]) == {"queue", "decode", "total"}
    assert info["usage"]["audio_seconds"] == 0
    assert "sample_rate" not in info


def test_the_first_text_is_the_first_that_shows_anything(bench: Bench) -> None:
    bench.start(1)
    bench.send(1, "text", text="", info={"logprobs": [{}]})
    assert "first_text" not in bench.end(1)["info"]["timings"]


def test_one_joined_answer(bench: Bench) -> None:
    bench.start(1, stream=False)
    assert bench.send(1, "text", text="안녕 ") is None
    assert bench.send(1, "audio", audio=audio(0.25)) is None
    assert bench.send(1, "text", text="👩‍👧") is None
    assert bench.send(1, "audio", audio=audio(-1.0, 1.0)) is None
    assert bench.send(1, "beat") is None
    end = bench.end(1)
    assert (end["index"], end["event"], end["text"], end["audio"]) == (
        0,
        "end",
        "안녕 👩‍👧",
        [0.25, -1.0, 1.0],
    )
    assert end["info"]["usage"]["audio_seconds"] == 3 / 24_000


def test_a_joined_answer_of_text_alone_has_no_audio(bench: Bench) -> None:
    bench.start(1, stream=False)
    end = bench.end(1)
    assert end["text"] == ""
    assert "audio" not in end and "pcm" not in end


def test_joined_stream_is_the_joined_answer(bench: Bench) -> None:
    texts, parts = ["a", "", "ß", "👩‍👧"], [audio(0.1, 0.2), audio(-0.3), audio()]
    for session, stream in ((1, True), (2, False)):
        bench.start(session, stream=stream)
    streamed: list[dict[str, Any]] = []
    for session in (1, 2):
        for text in texts:
            made = bench.send(session, "text", text=text)
            streamed += [made] if made else []
        for part in parts:
            made = bench.send(session, "audio", audio=part)
            streamed += [made] if made else []
    joined = bench.end(2)
    assert "".join(part.get("text", "") for part in streamed) == joined["text"]
    assert [value for part in streamed for value in part.get("audio", [])] == joined["audio"]


def test_pcm_for_json_clients(bench: Bench) -> None:
    values = audio(0.0, 1.0, -1.0, 2.0, -7.5, 0.5, 1 / 65536)
    expected = [0, 32767, -32767, 32767, -32767, 16384, 0]
    bench.start(1, audio_format="pcm16_base64")
    assert bench.send(1, "audio", audio=values) == {"index": 0, "event": "audio", "pcm": expected}
    bench.start(2, audio_format="pcm16_base64", stream=False)
    bench.send(2, "audio", audio=values[:2])
    bench.send(2, "audio", audio=values[2:])
    end = bench.end(2)
    assert end["pcm"] == expected
    assert "audio" not in end


def test_logprobs_come_with_their_text_or_joined(bench: Bench) -> None:
    entries = [{"token_id": number, "logprob": -0.5} for number in range(3)]
    bench.start(1)
    bench.start(2, stream=False)
    made = bench.send(1, "text", text="ab", info={"logprobs": entries[:2]})
    assert made is not None and made["info"] == {"logprobs": entries[:2]}
    bench.send(2, "text", text="ab", info={"logprobs": entries[:2]})
    bench.send(2, "text", text="", info={"logprobs": entries[2:]})
    assert bench.end(2)["info"]["logprobs"] == entries
    assert "logprobs" not in bench.end(1)["info"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("failure", [Failure("error", "UNAVAILABLE", "später 💥"), Failure("cancelled")])
def test_failures_are_events(stream: bool, failure: Failure, bench: Bench) -> None:
    bench.start(1, stream=stream)
    bench.send(1, "text", text="half")
    event = failure_event(1, failure, {"completion_tokens": 1})
    made = bench.send(1, failure.kind, info=event.info)
    assert made is not None
    assert (made["event"], made["index"]) == (failure.kind, int(stream))
    assert made["info"]["finish_reason"] == failure.kind
    assert made["info"]["usage"] == {"completion_tokens": 1, "audio_seconds": 0}
    if failure.kind == "error":
        assert (made["info"]["code"], made["info"]["message"]) == ("UNAVAILABLE", "später 💥")
    assert made.get("text", "half") == "half"


def test_there_is_one_end_and_nothing_after_it(bench: Bench) -> None:
    bench.start(1)
    bench.end(1)
    for kind in ("text", "beat", "end", "error", "cancelled"):
        assert bench.send(1, kind) is None
    assert bench.send(1, "audio", audio=audio(1.0)) is None


def test_a_client_seen_gone_is_posted(bench: Bench) -> None:
    bench.start(1)
    bench.start(2)
    bench.send(1, "beat", cancelled=True)
    assert bench.board.is_cancelled(1)
    assert not bench.board.is_cancelled(2)
    bench.send(2, "text", text="x", cancelled=True)
    assert bench.board.is_cancelled(2)


def test_metrics(bench: Bench) -> None:
    bench.start(1)
    bench.send(1, "audio", audio=np.zeros(48_000, np.float32))
    bench.send(1, "audio", audio=np.zeros(48_000, np.float32))
    _, gauges, _ = bench.metrics.drain()
    assert list(gauges.values()) == [1]
    bench.end(1)
    counters, gauges, observed = bench.metrics.drain()
    assert list(gauges.values()) == [0]
    stage = ("stage", "postprocess")
    assert counters == {("tritone_requests_total", (stage, ("outcome", "stop"))): 1}
    assert observed[("tritone_request_seconds", (stage,))] == pytest.approx([2.0], abs=1.0)
    # Two seconds before the first audio, four seconds of audio.
    assert observed[("tritone_real_time_factor", (stage,))] == pytest.approx([0.5], abs=0.2)


def test_time_to_first_audio_is_observed_once(bench: Bench) -> None:
    bench.start(1)
    bench.send(1, "audio", audio=audio(0.0))
    bench.send(1, "audio", audio=audio(0.0))
    observed = bench.metrics.drain()[2]
    assert observed[("tritone_time_to_first_audio_seconds", (("stage", "postprocess"),))] == pytest.approx(
        [2.0], abs=1.0
    )


def test_a_streamed_request_that_has_nothing_to_say_gets_waiting_events(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("tritone.stages.postprocess.time.monotonic", lambda: now)
    bench.start(1)
    now += WAITING_SECONDS - 0.01
    assert bench.send(1, "beat") is None
    now += 0.02
    assert bench.send(1, "beat") == {"index": 0, "event": "waiting"}
    assert bench.send(1, "beat") is None
    assert bench.send(1, "text", text="a") == {"index": 1, "event": "text", "text": "a"}


def test_a_joined_answer_has_no_waiting_events(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("tritone.stages.postprocess.time.monotonic", lambda: now)
    bench.start(1, stream=False)
    now += 10 * WAITING_SECONDS
    assert bench.send(1, "beat") is None


def test_speech_that_was_lost_is_told_once_and_the_text_goes_on(bench: Bench) -> None:
    bench.start(1, speech=True)
    bench.start(2)
    replies = FakeReply()
    bench.stage.submit(Event(1, "text", text="a", lost="talker"), replies)
    kinds = [message["event"][0] for message in replies.messages]
    assert kinds == [b"audio_lost", b"text"]
    assert [int(message["index"][0]) for message in replies.messages] == [0, 1]
    assert json.loads(replies.messages[0]["info"][0])["stage"] == "talker"
    assert bench.send(1, "text", text="b", lost="talker") == {"index": 2, "event": "text", "text": "b"}
    assert bench.end(1)["info"]["audio_lost"] == "talker"
    assert bench.send(2, "text", text="c", lost="talker") == {"index": 0, "event": "text", "text": "c"}


def test_a_joined_answer_says_at_its_end_that_speech_was_lost(bench: Bench) -> None:
    bench.start(1, speech=True, stream=False)
    bench.send(1, "audio", audio=audio(0.5))
    assert bench.send(1, "text", text="a", lost="voicebox") is None
    made = bench.end(1)
    assert (made["info"]["audio_lost"], made["text"], made["audio"]) == ("voicebox", "a", [0.5])


def test_a_request_for_speech_alone_fails_with_its_speech(bench: Bench) -> None:
    info = {"options": Options(speech=True).to_json(), "created": bench.created, "only_audio": True}
    assert bench.send(1, "start", info=info) is None
    made = bench.send(1, "beat", lost="voicebox")
    assert made is not None and (made["event"], made["info"]["code"]) == ("error", "UNAVAILABLE")
    assert bench.board.is_cancelled(1)
    assert bench.send(1, "end") is None


def test_a_second_start_changes_nothing(bench: Bench) -> None:
    """A stage before this one was restarted and announces the session again."""
    bench.start(1)
    assert bench.send(1, "text", text="a") == {"index": 0, "event": "text", "text": "a"}
    bench.start(1)
    assert bench.send(1, "text", text="b") == {"index": 1, "event": "text", "text": "b"}


def test_a_restarted_stage_ends_sessions_that_it_does_not_know(tmp_path: Path) -> None:
    bench = Bench(tmp_path, restarted=True)
    made = bench.send(1, "text", text="b")
    assert made is not None and (made["index"], made["event"], made["info"]["code"]) == (-1, "error", "UNAVAILABLE")
    assert bench.board.is_cancelled(1), "the stages before it stop"
    assert bench.send(1, "text", text="c") is None
    bench.start(2)
    assert bench.send(2, "text", text="d") == {"index": 0, "event": "text", "text": "d"}
