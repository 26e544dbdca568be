"""The audit from another process's point of view: what it can prove, what it must not claim, and when it calls for help."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.cascade import Cascade, ask, deployment, make_decode, make_prefill, tokens_of
from tests.unit.helpers import FakeReply, wait_until
from tests.unit.test_faults import expected
from tritone.errors import InvalidArgument
from tritone.integrity.agreement import check_pools
from tritone.integrity.audit import LATE_SECONDS, LEASE_MARGIN, Auditor
from tritone.integrity.ledger import Ledger
from tritone.metrics import Metrics
from tritone.pools import BlockPool, CancelBoard
from tritone.stages.integrity import IntegrityStage

BLOCKS = 8


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Bench:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.clock = Clock()
        self.start_owner()
        self.metrics = Metrics("integrity")
        self.auditor = Auditor(
            directory, ["pages"], [], self.metrics, seconds=2.0, lease_seconds=30.0, clock=self.clock
        )

    def start_owner(self) -> None:
        self.ledger = Ledger(self.directory, "pages", owner=True)
        self.pool = BlockPool(self.directory, "pages", BLOCKS, (4,), "float32", 4, seal=True, clock=self.clock)

    def found(self) -> dict[str, int]:
        self.auditor.sweep()
        return {kind: count for kind, count in self.auditor.report()["mismatches"].items() if count}


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_a_pool_in_use_is_in_order(bench: Bench) -> None:
    chance = np.random.default_rng(1)
    for _ in range(60):
        blocks = bench.pool.allocate(int(chance.integers(1, 5)))
        for block in blocks:
            bench.pool.block(block)[:] = chance.integers(0, 256, 16)
        bench.pool.keep(blocks[0])
        assert bench.found() == {}
        bench.pool.free(blocks)
        assert bench.found() == {}
    assert bench.auditor.report()["pools"]["pages"]["blocks_swept"] == 120 * BLOCKS


def test_two_blocks_under_one_tag(bench: Bench) -> None:
    first, second = bench.pool.allocate(2)
    bench.pool.tags[second] = bench.pool.tags[first]
    assert bench.found() == {"table": 1}


def test_a_tag_that_goes_back(bench: Bench) -> None:
    block = bench.pool.allocate(3)[2]
    assert bench.found() == {}
    bench.pool.tags[block] = 0
    assert bench.found() == {"table": 1}


def test_one_changed_bit_in_a_finished_block_is_found_and_condemned(bench: Bench) -> None:
    kept, open_ = bench.pool.allocate(2)
    bench.pool.block(kept)[:] = 5
    bench.pool.keep(kept)
    assert bench.found() == {}
    bench.pool.block(open_)[3] ^= 1  # still being written: nobody's fault
    assert bench.found() == {}
    bench.pool.block(kept)[3] ^= 1
    assert bench.found() == {"content": 1}
    assert bench.pool.condemned[kept] == bench.pool.tags[kept]
    assert bench.pool.condemned[open_] == 0
    assert bench.found() == {"content": 1}, "counted once"
    bench.pool.discard(kept)
    bench.pool.free([kept])
    bench.pool.allocate(BLOCKS - 1)
    assert bench.pool.condemned[kept] != bench.pool.tags[kept]


def test_a_lease_that_its_owner_never_collects(bench: Bench) -> None:
    bench.pool.lend(bench.pool.allocate(2), 30.0)
    assert bench.found() == {}
    bench.clock.now += 30.0 + LEASE_MARGIN
    assert bench.found() == {}
    bench.clock.now += 1
    assert bench.found() == {"table": 1}
    assert bench.found() == {"table": 1}


@pytest.mark.parametrize("asked", [False, True])
def test_a_restarted_owner_is_no_fault(bench: Bench, asked: bool) -> None:
    """Also when its ledger is read before the next sweep."""
    bench.pool.allocate(5)
    assert bench.found() == {}
    bench.start_owner()
    if asked:
        bench.auditor.report()
    bench.pool.allocate(1)
    assert bench.found() == {}
    bench.ledger.checked(3)
    assert bench.auditor.report()["pools"]["pages"]["pages_checked"] == 3


def test_a_silent_checker_is_a_problem(bench: Bench) -> None:
    auditor = bench.auditor
    auditor.sweep()
    assert auditor.problem() == "pages: 0 steps, 0 checks"
    bench.ledger.checked(1)
    assert auditor.problem() is None
    bench.ledger.stepped(2)
    auditor.export()
    assert auditor.problem() == "pages: 2 steps, 1 checks"
    bench.ledger.checked(1)
    assert auditor.problem() is None
    bench.clock.now += 3 * 2.0 + LATE_SECONDS
    assert auditor.problem() is None
    bench.clock.now += 1
    assert "the last sweep ended 12 s ago" in str(auditor.problem())
    assert auditor.report()["ready"] is False


def test_a_missing_tracker_is_a_problem(tmp_path: Path) -> None:
    auditor = Auditor(tmp_path, ["pages"], [], Metrics("integrity"), seconds=2.0, lease_seconds=30.0)
    assert auditor.problem() == "pages: no tracker reports"
    BlockPool(tmp_path, "pages", 2, (1,), "float32", 4)
    assert auditor.problem() == "pages: no tracker reports"


def test_a_talkers_pages_are_swept_too_and_text_goes_on_without_them(bench: Bench) -> None:
    times: dict[str, Any] = {"seconds": 2.0, "lease_seconds": 30.0, "clock": bench.clock}
    auditor = Auditor(bench.directory, ["pages"], [], Metrics("integrity"), spoken=["spoken"], **times)
    bench.ledger.checked(1)
    auditor.sweep()
    assert auditor.problem() is None
    ledger = Ledger(bench.directory, "spoken", owner=True)
    pool = BlockPool(bench.directory, "spoken", 4, (1,), "float32", 4)
    auditor.export()
    assert auditor.problem() is None, "it is being loaded"
    first, second = pool.allocate(2)
    pool.tags[second] = pool.tags[first]
    ledger.checked(2)
    auditor.sweep()
    report = auditor.report()["pools"]["spoken"]
    assert report["mismatches"] == {"table": 1} and (report["blocks_swept"], report["pages_checked"]) == (4, 2)
    ledger.stepped(2)
    auditor.export()
    assert auditor.problem() == "spoken: 2 steps, 1 checks", "a checker that is silent"


def test_metrics_follow_the_ledger(bench: Bench) -> None:
    bench.ledger.checked(7)
    bench.ledger.mismatch("stale_tag")
    bench.ledger.blocks({"free": 5, "used": 1, "cached": 2, "leased": 0})
    bench.auditor.sweep()
    bench.auditor.export()
    bench.auditor.export()
    counters, gauges, _ = bench.metrics.drain()
    label = ("stage", "integrity"), ("pool", "pages")
    assert counters["tritone_integrity_checks_total", label] == 1
    assert counters["tritone_integrity_pages_checked_total", label] == 7
    assert counters["tritone_integrity_mismatches_total", (label[0], ("kind", "stale_tag"), label[1])] == 1
    assert gauges["tritone_integrity_blocks", (*label, ("state", "cached"))] == 2
    assert gauges["tritone_integrity_ready", label[:1]] == 1
    # An owner that was restarted counts from 0 again; the counter goes on.
    bench.start_owner()
    bench.ledger.checked(2)
    bench.auditor.export()
    assert bench.metrics.drain()[0]["tritone_integrity_checks_total", label] == 1


# Through the stages


@pytest.fixture
def cascade(tmp_path: Path) -> Iterator[Cascade]:
    made = Cascade(tmp_path)
    yield made
    made.stop()


def test_the_report_of_a_clean_run(cascade: Cascade) -> None:
    for session in range(1, 5):
        assert tokens_of(cascade.submit(ask(session)).wait()) == expected(session)
    wait_until(lambda: cascade.integrity.report()["sweeps"] > 1)
    wait_until(cascade.idle)
    wait_until(lambda: cascade.integrity.report()["pools"]["decode_pages"]["blocks"] == cascade.pools()[1])
    report = json.loads(json.dumps(cascade.integrity.report()))
    assert (report["mode"], report["ready"], report["problem"]) == ("raise", True, None)
    assert set(report["mismatches"].values()) == {0}
    for name, blocks in zip(("prefill_pages", "decode_pages"), cascade.pools(), strict=True):
        pool = report["pools"][name]
        assert pool["blocks"] == blocks and sum(blocks.values()) == 64
        assert pool["checks"] > 4 and pool["pages_checked"] > pool["checks"]
        assert pool["last_check_seconds_ago"] < 10


def test_a_finished_page_that_changes_ends_its_sequence_and_leaves_the_cache(tmp_path: Path) -> None:
    """Nobody but the audit looks into decode's own pages."""
    cascade = Cascade(tmp_path, audit_seconds=0.02)
    victim = cascade.submit(ask(1, tokens=450))
    other = cascade.submit(ask(2))
    wait_until(lambda: 1 in cascade.decode._running and cascade.decode._running[1][1].answer_length > 20)
    page = cascade.decode._running[1][1].pages[0]
    cascade.decode_pool.block(page)[-1] ^= 1
    assert victim.wait(10)[-1].info["message"].startswith(f"integrity: content: page {page} was condemned")
    assert tokens_of(other.wait()) == expected(2)
    # The same prompt again is computed from prefill's pages, not from the bad one.
    assert tokens_of(cascade.submit(ask(1)).wait()) == expected(1)
    wait_until(cascade.idle)
    cascade.stop()


def test_nothing_passes_while_a_check_does_not_run(cascade: Cascade) -> None:
    cascade.decode._scheduler.tracker.check = lambda sequences: []  # type: ignore[method-assign]
    assert cascade.submit(ask(1)).wait()[-1].kind == "end"
    wait_until(lambda: not cascade.integrity.report()["ready"])
    # From the next look on.
    cascade.integrity._auditor.export()  # type: ignore[union-attr]
    last = cascade.submit(ask(2)).wait()[-1]
    assert last.info["code"] == "UNAVAILABLE"
    assert last.info["message"].startswith("integrity: checker: decode_pages: ")


def test_without_checks_there_is_no_audit(tmp_path: Path) -> None:
    given = deployment(mode="off", checksum=False)
    stage = IntegrityStage(given, tmp_path, CancelBoard(tmp_path), Metrics("integrity"))
    assert stage.report() == {"mode": "off"}
    stage.stop()


# Pools that do not fit together


def made(directory: Path, name: str, **changes: Any) -> None:
    values: dict[str, Any] = {"blocks": 64, "shape": (2, 2, 1, 16, 4), "dtype": "float32"} | changes
    BlockPool(directory, f"{name}_pages", values["blocks"], values["shape"], values["dtype"], 4)


def test_pools_that_fit(tmp_path: Path) -> None:
    made(tmp_path, "prefill")
    check_pools(deployment(), tmp_path)
    made(tmp_path, "decode")
    check_pools(deployment(), tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": (2, 2, 1, 32, 4)}, "decode's page_size: 32 does not fit the deployment's page_size: 16"),
        ({"dtype": "bfloat16"}, "decode's pages: bfloat16 does not fit the deployment's decode.kv: float32"),
        ({"blocks": 31}, "decode's pool: 496 tokens do not hold max_context: 512"),
        ({"shape": (3, 2, 1, 16, 4)}, r"prefill's pages: \[2, 2, 1, 16, 4\] do not fit decode's pages: \[3, 2, 1, 16, 4\]"),
    ],
)
def test_pools_that_do_not_fit_are_refused_with_both_values(tmp_path: Path, changes: Any, message: str) -> None:
    made(tmp_path, "prefill")
    made(tmp_path, "decode", **changes)
    with pytest.raises(InvalidArgument, match=message):
        check_pools(deployment(), tmp_path)


def test_prefill_and_decode_may_start_in_either_order(tmp_path: Path) -> None:
    given = deployment()
    decode, _ = make_decode(given, tmp_path)
    prefill, _ = make_prefill(given, tmp_path)
    integrity = IntegrityStage(given, tmp_path, CancelBoard(tmp_path), Metrics("integrity"))
    try:
        reply = FakeReply()
        prefill.submit(ask(1), reply)
        answer = FakeReply()
        decode.submit(integrity.check(reply.wait()[-1], False), answer)
        assert tokens_of(answer.wait()) == expected(1)
    finally:
        for stage in (prefill, decode, integrity):
            stage.stop()
