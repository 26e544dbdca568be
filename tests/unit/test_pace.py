"""The pace of a stage: tokens a second, and what a queue of them takes."""

from __future__ import annotations

import pytest

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
