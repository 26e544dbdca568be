"""What Triton drops of a cancelled session is forgotten by the stages, and lent blocks come back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.cascade import ask, deployment, make_decode
from tests.unit.helpers import FakeReply
from tests.unit.test_postprocess import Bench
from tritone.messages import Prefilled
from tritone.pools import BlockPool, CancelBoard
from tritone.pools.board import FAILED_PURGE_SECONDS, PURGE_SECONDS


def test_a_lease_can_be_taken_back_once_and_only_by_its_nonce(tmp_path: Path) -> None:
    pool = BlockPool(tmp_path, "pages", 4, (2,), "float32", 4)
    refs = pool.lend(pool.allocate(2), 60.0)
    pool.take_back(refs.slot, refs.nonce + 1)
    assert (pool.collect(), pool.available) == (0, 2)
    pool.take_back(refs.slot, refs.nonce)
    assert (pool.collect(), pool.available) == (0, 4)


def test_only_cancelled_sessions_that_fell_silent_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("tritone.stages.postprocess.time.monotonic", lambda: now)
    bench = Bench(tmp_path)
    for session in (1, 2):
        bench.start(session)
        assert bench.send(session, "text", text="a", cancelled=session == 1) is not None
    bench.stage.purge()
    assert set(bench.stage._sessions) == {1, 2}
    now += PURGE_SECONDS + 60
    bench.stage.purge()
    assert set(bench.stage._sessions) == {2}


def test_the_error_of_a_failed_session_may_be_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that is stopped because a stage died: its client listens, and its error may need seconds on a busy machine."""
    now = 100.0
    monkeypatch.setattr("tritone.stages.postprocess.time.monotonic", lambda: now)
    bench, board = Bench(tmp_path), CancelBoard(tmp_path)
    for session in (1, 2):
        bench.start(session)
        assert bench.send(session, "text", text="a") is not None
        board.fail(session)
    assert board.is_cancelled(1) and board.is_cancelled(2)
    now += FAILED_PURGE_SECONDS - 1
    bench.stage.purge()
    assert bench.send(1, "error", info={"finish_reason": "error"}) is not None
    assert set(bench.stage._sessions) == {2}
    now += FAILED_PURGE_SECONDS
    bench.stage.purge()
    assert not bench.stage._sessions


def test_a_client_that_has_left_has_left_whatever_failed(tmp_path: Path) -> None:
    board = CancelBoard(tmp_path)
    for session, calls in ((5, ("post", "fail")), (6, ("fail", "post"))):
        for call in calls:
            getattr(board, call)(session)
        assert board.is_over(session, PURGE_SECONDS + 0.1) and not board.is_over(session, PURGE_SECONDS - 0.1)
    assert not board.is_cancelled(7)


def test_decode_forgets_announced_sessions_whose_hand_over_was_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("tritone.stages.decode.time.monotonic", lambda: now)
    stage, _ = make_decode(deployment(), tmp_path)
    stage._loop.stop()
    board = CancelBoard(tmp_path)
    try:
        for session in (1, 2):
            stage.submit(Prefilled(ask(session), session), FakeReply())
        board.post(1)
        stage.purge()
        assert set(stage._announced) == {1, 2}
        now += PURGE_SECONDS + 1
        stage.submit(Prefilled(None, 2), FakeReply())
        stage.purge()
        assert set(stage._announced) == {2}
    finally:
        stage.stop()
