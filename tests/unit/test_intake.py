"""Preprocess's queue: first in, first out, and nobody waits long."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import pytest
from helpers import FakeReply, wait_until
from test_preprocess import checkpoint

from tritone.deployment import Deployment
from tritone.errors import InvalidArgument, Unavailable
from tritone.messages import STAGES, Event, GenerateRequest, Tensors
from tritone.metrics import Metrics
from tritone.options import Role
from tritone.stages.intake import REQUEST_BYTES, Intake
from tritone.stages.preprocess import PreprocessStage

READ_SECONDS = 0.02
MEDIA_SECONDS = 0.5


class SlowStage(PreprocessStage):
    def read(self, role: Role, raw: bytes, parameters: Mapping[str, Any], arrived: float) -> Tensors:
        if raw == b"broken":
            raise ZeroDivisionError("by zero")
        time.sleep(MEDIA_SECONDS if b"input_audio" in raw else READ_SECONDS)
        return super().read(role, raw, parameters, arrived)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> SlowStage:
    directory = tmp_path_factory.mktemp("intake")
    (directory / "voice.json").write_text(json.dumps({"voices": ["anna"], "default_voice": "anna"}))
    where = {"checkpoint": str(checkpoint(directory)), "voice": str(directory), "max_context": 96}
    return SlowStage(Deployment.parse(where, "test"))


def intake_of(stage: PreprocessStage, max_wait_seconds: float = 30.0) -> tuple[Intake, Metrics]:
    metrics = Metrics("preprocess")
    return Intake(stage, metrics, max_wait_seconds), metrics


def waiting(metrics: Metrics) -> float:
    _, gauges, _ = metrics.drain()
    (value,) = (value for (name, _), value in gauges.items() if name == "tritone_queue_requests")
    return value


def test_requests_of_all_ensembles_are_answered_in_order(stage: SlowStage) -> None:
    intake, metrics = intake_of(stage)
    log: list[Tensors] = []
    replies = [FakeReply(log=log) for _ in range(3)]
    before = time.monotonic()
    for role, reply in zip(("chat", "omni", "speech"), replies, strict=True):
        intake.submit(role, f"This is {role}.".encode(), {"seed": 4}, reply)  # type: ignore[arg-type]
    submitted = time.monotonic()
    for reply, output in zip(replies, ("chat_request", "omni_request", "speech_event"), strict=True):
        (tensors,) = reply.wait()
        table = {tensor.name for tensor in STAGES["preprocess"].outputs}
        prompt = set() if output == "speech_event" else {"ids", "media"}
        assert set(tensors) == ({"session", output} | prompt) & table
    assert [tensors is reply.messages[0] for tensors, reply in zip(log, replies, strict=True)] == [True] * 3
    request = GenerateRequest.from_tensors({**log[0], "request": log[0]["chat_request"]})
    assert before <= request.created <= submitted, "it counts from its arrival, not from its turn"
    assert Event.from_tensors({"session": log[2]["session"], "event": log[2]["speech_event"]}).text == "This is speech."
    wait_until(lambda: waiting(metrics) == 0)
    intake.stop()


def test_a_request_that_cannot_be_read_fails_alone(stage: SlowStage) -> None:
    intake, _ = intake_of(stage)
    broken, wrong, fine = FakeReply(), FakeReply(), FakeReply()
    intake.submit("chat", b"broken", {}, broken)
    intake.submit("chat", b"hello", {"temperature": 3}, wrong)
    intake.submit("chat", b"hello", {}, fine)
    assert str(broken.wait()[0]) == "INTERNAL: preprocess: ZeroDivisionError('by zero')"
    assert str(wrong.wait()[0]).startswith("INVALID_ARGUMENT: temperature: 3 is not allowed")
    assert set(fine.wait()[0]) == {"session", "ids", "media", "chat_request"}
    intake.stop()


@pytest.mark.parametrize("where", ["text", "options"])
def test_what_no_context_holds_is_refused_unread(stage: SlowStage, where: str) -> None:
    intake, _ = intake_of(stage)
    huge = "x" * (stage.max_bytes + 1)
    raw, parameters = (huge.encode(), {}) if where == "text" else (b"", {"tools": huge})
    with pytest.raises(InvalidArgument, match=f"request: {len(huge)} bytes .* allowed: at most {len(huge) - 1}"):
        intake.submit("chat", raw, parameters, FakeReply())
    intake.stop()


def test_nobody_waits_longer_than_a_tenth_of_the_longest_wait(stage: SlowStage) -> None:
    allowed = 0.5
    intake, metrics = intake_of(stage, 10 * allowed)
    first = FakeReply()
    intake.submit("chat", b"hello", {}, first)
    first.wait()
    taken: list[tuple[float, FakeReply]] = []
    refused = []
    begun = time.monotonic()
    for _ in range(200):
        reply = FakeReply()
        try:
            intake.submit("chat", b"hello", {}, reply)
            taken.append((time.monotonic(), reply))
        except Unavailable as error:
            refused.append(error.message)
    assert time.monotonic() - begun < allowed, "a refusal waits for nothing"
    # As many as are read in that time, which the first one told, and what was read meanwhile.
    assert 0.5 * allowed / READ_SECONDS < len(taken) < 1.5 * allowed / READ_SECONDS
    assert refused[0].startswith("max_wait_seconds: about ") and refused[0].endswith("; try again in 1 s")
    for _, reply in taken:
        assert set(reply.wait()[0]) == {"session", "ids", "media", "chat_request"}
    assert time.monotonic() - begun < 2 * allowed
    wait_until(lambda: waiting(metrics) == 0)
    late = FakeReply()
    intake.submit("chat", b"hello", {}, late)
    assert late.wait()
    intake.stop()


def test_long_requests_count_by_their_length(stage: SlowStage) -> None:
    """Ten times the work of a short one: a tenth of them is taken."""
    intake, _ = intake_of(stage, 10.0)
    first = FakeReply()
    intake.submit("chat", b"hello", {}, first)
    first.wait()
    text = b" " * (10 * REQUEST_BYTES - 512) + b"!"
    taken = 0
    with pytest.raises(Unavailable):
        for _ in range(200):
            intake.submit("chat", text, {}, FakeReply())
            taken += 1
    assert 3 <= taken <= 8
    intake.stop()


def test_text_does_not_wait_for_media(stage: SlowStage) -> None:
    metrics = Metrics("preprocess")
    intake = Intake(stage, metrics, 30.0, stage)
    heard = json.dumps([{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]).encode()
    media, text = [FakeReply() for _ in range(2)], FakeReply()
    begun = time.monotonic()
    for reply in media:
        intake.submit("chat", heard, {}, reply)
    intake.submit("chat", b"hello", {}, text)
    assert waiting(metrics) == 3
    assert set(text.wait()[0]) == {"session", "ids", "media", "chat_request"}
    assert time.monotonic() - begun < MEDIA_SECONDS and not media[0].messages
    for reply in media:
        assert "INVALID_ARGUMENT: messages" in str(reply.wait()[0])
    assert time.monotonic() - begun > 2 * MEDIA_SECONDS, "one after another"
    wait_until(lambda: waiting(metrics) == 0)
    intake.stop()
