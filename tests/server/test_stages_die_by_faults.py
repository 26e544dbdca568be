"""Faults that end a stage during a hand-over: their request gets an error, nobody a foreign token, no page is lost."""

from __future__ import annotations

import time

import pytest

from tests.server.helpers import (
    EXPORT_SECONDS,
    Request,
    ask,
    ask_together,
    fresh,
    integrity_report,
    marked,
    markers,
    stage_processes,
    status_of,
    wait_idle,
    wait_until,
)
from tests.server.serving import DEADLY_FAULTS
from tritone.supervisor import Server

ERROR_SECONDS = 5.0
READY_SECONDS = 20.0
NEIGHBOURS = 3
MARKERS = markers(NEIGHBOURS + 1)
# Long enough to be under way while the stage dies and comes back.
GREEDY = {"temperature": 0.0, "max_tokens": 80, "ignore_eos": True}
SPEECH = "The library closes at nine in the evening."


def blocks(server: Server) -> dict[str, dict[str, int]]:
    """Blocks of both page pools by state."""
    pools = integrity_report(server)["pools"]
    return {name: pools[name].get("blocks", {}) for name in ("prefill_pages", "decode_pages")}


@pytest.mark.parametrize("fault", DEADLY_FAULTS)
def test_a_fault_that_ends_a_stage(server: Server, unharmed: None, fault: str) -> None:
    stage, reason = DEADLY_FAULTS[fault]
    *neighbours, carrier = MARKERS
    clean = [answer.text for answer in ask_together(server, "chat", [(marked(m), GREEDY | fresh()) for m in MARKERS])]
    spoken = ask(server, "speech", SPEECH, seed=3).audio
    others = {name: process.pid for name, process in stage_processes(server).items() if name != stage}

    beside = [Request(server, "chat", marked(marker), **GREEDY, **fresh()) for marker in neighbours]
    for request in beside:
        request.wait_for("text")
    asked = time.monotonic()
    faulty = Request(server, "chat", marked(carrier), **GREEDY, cache_salt=f"fault:{fault}")
    speech = Request(server, "speech", SPEECH, seed=3)
    answer = faulty.finish(timeout=30)
    took = answer.end.received - asked
    answers = [request.finish(timeout=60) for request in beside]

    print(f"{fault}: error after {took:.2f} s: {answer.info}")
    answer.check_complete()
    assert answer.end.kind == "error"
    assert f"{answer.info['code']}: {answer.info['message']}".startswith(reason), answer.info
    assert took < ERROR_SECONDS
    assert clean[-1].startswith(answer.text), "its first token alone may have left"
    for text, other in zip(clean, answers, strict=False):
        other.check_complete()
        if stage == "decode":
            # What a dead decode held ends; what had left is right.
            assert other.end.kind == "error" and text.startswith(other.text)
        else:
            assert other.end.kind == "end" and other.text == text
    for marker, own in zip(MARKERS, [*answers, answer], strict=True):
        assert not any(other in own.text for other in MARKERS if other != marker)
    assert (speech.finish().audio == spoken).all()

    wait_until(server.is_ready, "the stage is back", READY_SECONDS)
    why = status_of(server, stage)["reason"]
    assert ("out of memory" in why) == (fault == "prefill_memory"), why
    again = ask_together(server, "chat", [(marked(marker), GREEDY | fresh()) for marker in MARKERS])
    assert [answer.text for answer in again] == clean
    assert {name: process.pid for name, process in stage_processes(server).items() if name != stage} == others
    wait_idle(server)
    time.sleep(EXPORT_SECONDS)
    deployment = server.deployment
    for name, held in blocks(server).items():
        total = getattr(deployment, name.removesuffix("_pages")).pool_tokens // deployment.page_size
        assert held["free"] + held["cached"] == sum(held.values()) == total
