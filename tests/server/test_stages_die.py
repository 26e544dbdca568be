"""A stage's process is killed under 16 streams: who needed it gets an error, nobody else notices, and it comes back."""

from __future__ import annotations

import http.client
import os
import signal
import threading
import time
from dataclasses import dataclass

import pytest

from tests.server.helpers import (
    Answer,
    Request,
    ask,
    fresh,
    in_threads,
    shared_memory,
    stage_processes,
    status_of,
    wait_idle,
    wait_until,
)
from tritone.supervisor import Server
from tritone.supervisor.control import ask as ask_http

ERROR_SECONDS = 5.0
READY_SECONDS = 20.0
STORY = "Tell me a story about a lighthouse."
SPEECH = "The library closes at nine in the evening, and it opens again at eight. " * 4
TOKENS = 60
OPTIONS = {"ignore_eos": True, "max_tokens": TOKENS, "temperature": 0.0}
MODELS = ("omni", "chat", "speech", "omni")


@dataclass
class Stream:
    model: str
    request: Request
    had_text: bool = False
    answer: Answer | None = None
    took: float = 0.0
    """From the death to the last response."""

    @property
    def ended(self) -> str:
        assert self.answer is not None
        return "error" if self.answer.error is not None else self.answer.end.kind

    @property
    def why(self) -> str:
        """Code and message of its error: an event, or, before anything streamed, Triton's own."""
        assert self.answer is not None
        if self.answer.error is not None:
            return str(self.answer.error)
        return f"{self.answer.info['code']}: {self.answer.info['message']}"


def start_streams(server: Server) -> list[Stream]:
    """16 streams of all three ensembles; most have begun to answer, some wait for their prompt's turn."""
    streams = []
    for number in range(16):
        model = MODELS[number % 4]
        content, options = (SPEECH, {}) if model == "speech" else (STORY, {**OPTIONS, **fresh()})
        streams.append(Stream(model, Request(server, model, content, **options)))
    streams[0].request.wait_for("text")
    return streams


def is_ready(server: Server, path: str) -> bool:
    return ask_http(server.http_url.removeprefix("http://"), "GET", path, 5)[0] == 200


def finish_all(streams: list[Stream], died: float) -> None:
    def finish(number: int) -> None:
        stream = streams[number]
        stream.answer = stream.request.finish(timeout=60)
        stream.took = (time.monotonic() if stream.answer.error is not None else stream.answer.end.received) - died

    in_threads(len(streams), finish)


@pytest.fixture(scope="module")
def story(server: Server) -> str:
    """What every undisturbed answer to STORY says."""
    return ask(server, "chat", STORY, **OPTIONS).text


@pytest.fixture(scope="module")
def error_seconds(server: Server, story: str) -> float:
    """What waits for its prompt ends when its turn comes: where one answer alone takes longer than a quarter of the bound,
    the bound is four such answers."""
    begun = time.monotonic()
    ask(server, "chat", STORY, **OPTIONS, **fresh())
    return max(ERROR_SECONDS, 4 * (time.monotonic() - begun))


# Which requests a dead stage ends: those of these ensembles, if their speech or text still needed it.
NEEDED = {
    "preprocess": ("omni", "chat", "speech"),
    "prefill": ("omni", "chat"),
    "integrity": ("omni", "chat"),
    "decode": ("omni", "chat"),
    "talker": ("speech",),
    "voicebox": ("speech",),
    "postprocess": ("omni", "chat", "speech"),
}


@pytest.mark.parametrize("stage", NEEDED)
def test_a_killed_stage(server: Server, unharmed: None, story: str, error_seconds: float, stage: str) -> None:
    files = len(shared_memory(server))
    others = {name: process.pid for name, process in stage_processes(server).items() if name != stage}
    deaths = status_of(server, stage)["deaths"]
    streams = start_streams(server)
    victim = stage_processes(server)[stage]
    died = time.monotonic()
    os.kill(victim.pid, signal.SIGKILL)
    finishing = threading.Thread(target=finish_all, args=(streams, died))
    finishing.start()

    # The truth about it, and only about it.
    wait_until(lambda: not is_ready(server, f"/v2/models/{stage}/ready"), "not ready", 2)
    assert not is_ready(server, "/v2/health/ready")
    assert not is_ready(server, "/v2/models/omni/ready")
    if stage in ("talker", "voicebox"):
        assert is_ready(server, "/v2/models/chat/ready")
        assert "Paris" in ask(server, "chat", "What is the capital of France?", temperature=0.0, max_tokens=8).text
    wait_until(server.is_ready, "ready again", READY_SECONDS)
    back = time.monotonic() - died
    assert status_of(server, stage)["deaths"] == deaths + 1
    assert "killed" in status_of(server, stage)["reason"]
    answer = ask(server, "omni", "What is the capital of France?", temperature=0.0, max_tokens=8)
    answer.check_complete()
    assert "Paris" in answer.text and len(answer.audio) > 12_000

    finishing.join()
    failed = [stream for stream in streams if stream.ended == "error"]
    longest = max((stream.took for stream in failed), default=0.0)
    print(f"{stage}: {len(failed)} of 16 ended with an error, the last after {longest:.2f} s; ready after {back:.1f} s")
    assert longest < error_seconds
    assert {stream.model for stream in failed} <= set(NEEDED[stage])
    for stream in streams:
        assert stream.answer is not None
        if stream.ended == "error":
            assert "UNAVAILABLE: " in stream.why and stage in stream.why
            assert stream.answer.error is None or stage == "preprocess", "what streams ends with an event"
        else:
            stream.answer.check_complete()
            assert stream.model == "speech" or stream.answer.text == story, "not a word is missing"
    if stage in ("decode", "postprocess"):
        assert failed
        assert all(stream.ended == "error" for stream in streams if stream.model in ("omni", "chat"))
    if stage in ("talker", "voicebox"):
        lost = ["audio_lost" in stream.answer.kinds for stream in streams if stream.answer and stream.model == "omni"]
        assert any(lost)
    else:
        assert not any("audio_lost" in stream.answer.kinds for stream in streams if stream.answer)

    wait_idle(server)
    # Triton ends what is left of the old process once its last request is over.
    wait_until(lambda: len(shared_memory(server)) == files, "no shared file is left", 5)
    now = {name: process.pid for name, process in stage_processes(server).items()}
    assert now.pop(stage) != victim.pid
    assert now == others, "no other stage was touched"


def test_connections_are_served_while_a_stage_is_loaded(server: Server, unharmed: None) -> None:
    """Each of tritonserver's HTTP threads serves some of these connections; none is busy with the load."""
    host = server.http_url.removeprefix("http://")
    connections = [http.client.HTTPConnection(host, timeout=30) for _ in range(32)]

    def longest_answer() -> float:
        longest = 0.0
        for connection in connections:
            asked = time.monotonic()
            connection.request("GET", "/v2/health/live")
            assert connection.getresponse().read() == b""
            longest = max(longest, time.monotonic() - asked)
        return longest

    longest_answer()
    os.kill(stage_processes(server)["postprocess"].pid, signal.SIGKILL)
    wait_until(lambda: status_of(server, "postprocess")["state"] == "loading", "loading again", 30)
    looks = []
    while status_of(server, "postprocess")["state"] == "loading":
        looks.append(longest_answer())
    for connection in connections:
        connection.close()
    wait_until(server.is_ready, "ready again", READY_SECONDS)
    assert max(looks) < 0.8, "a load takes longer"


def test_four_times_as_many_requests_as_fit_all_end(server: Server, unharmed: None) -> None:
    count = 4 * server.deployment.decode.max_sequences
    requests = [Request(server, "chat", f"{number}", max_tokens=3, input_format="text") for number in range(count)]
    ends = [request.finish(timeout=60).end for request in requests]
    refused = [end for end in ends if end.kind == "error"]
    assert {end.info["code"] for end in refused} <= {"UNAVAILABLE"}
    assert all(end.kind == "end" for end in ends if end not in refused)
    print(f"{count} requests at once: {len(refused)} refused")
