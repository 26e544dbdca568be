"""The pace of a stage: tokens a second, and what a queue of them takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.cascade import ask, deployment, make_prefill
from tests.unit.helpers import FakeReply
from tritone.stages.pace import Pace


def test_nothing_is_said_before_the_first_step() -> None:
    pace = Pace()
    assert pace.seconds(10_000) == 0
    pace.add(0, 5.0)
    assert pace.seconds(10_000) == 0


def test_a_steady_pace() -> None:
    pace = Pace()
    for tokens in (100, 300, 200):
        pace.add(tokens, tokens / 50)
        pace.add(0, 1.0)
    assert pace.seconds(1000) == pytest.approx(20.0)


def test_it_follows_a_change() -> None:
    pace = Pace()
    for _ in range(50):
        pace.add(100, 1.0)
    for _ in range(50):
        pace.add(100, 4.0)
    assert pace.seconds(100) == pytest.approx(4.0, rel=0.02)


def test_a_prompt_that_would_wait_too_long_is_refused_at_once(tmp_path: Path) -> None:
    """A stage that computes 10 tokens a second and has 21 of them to do: 2.1 s, where 2 are allowed."""
    stage, _ = make_prefill(deployment(), tmp_path)
    stage._loop.stop()  # nothing is computed
    stage._max_wait_seconds = 2.0
    stage._pace.add(100, 10.0)
    replies = [FakeReply(), FakeReply()]
    try:
        for session, reply in enumerate(replies, 1):
            stage.submit(ask(session), reply)
            stage._loop._commands.popleft()()
        failure = replies[1].wait()[-1].failure
        assert (failure.kind, failure.code) == ("error", "UNAVAILABLE")
        assert failure.message == "max_wait_seconds: about 2 s until this request's turn; allowed: 2; try again in 1 s"
        assert not replies[0].closed and len(stage._jobs) == 1
    finally:
        stage.stop()
