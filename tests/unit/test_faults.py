"""Faults on purpose, through prefill, integrity and decode: each is found, ends the request that asked for it and nobody
else's, and lets no token of another prompt out."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cascade import PERIOD, Cascade, ThroughIntegrity, ask, deployment, make_decode, make_prefill, prompt, tokens_of
from tests.unit.helpers import FakeReply, wait_until
from tritone.deployment import Fault
from tritone.errors import InvalidArgument
from tritone.messages import Event, Prefilled
from tritone.metrics import Metrics
from tritone.pools import CancelBoard
from tritone.stages.decode import DecodeStage
from tritone.stages.integrity import IntegrityStage

KINDS = {
    "stale_tag": "stale_tag",
    "swapped_pages": "page_table",
    "freed_while_read": "stale_tag",
    "flipped_byte": "content",
    "out_of_range": "out_of_range",
    "dropped_transfer": "transfer",
    "slow_transfer": "transfer",
}
"""What each fault is found as, of those that leave the processes alive."""
DEATHS = ("prefill_dies", "decode_dies")
CARRIER = 3


def expected(session: int, tokens: int = 40) -> list[int]:
    return [prompt(session)[place % PERIOD] for place in range(tokens)]


def own(session: int, tokens: list[int]) -> bool:
    return set(tokens) <= set(prompt(session))


@pytest.fixture(scope="module")
def cascade(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cascade]:
    made = Cascade(tmp_path_factory.mktemp("run"), faults=tuple(KINDS))
    yield made
    made.stop()


def test_every_fault_of_the_deployment_has_its_test() -> None:
    # Memory that runs out ends a whole stage: tests/server/test_stages_die_by_faults.py.
    assert {*KINDS, *DEATHS, "prefill_memory"} == set(Fault.__args__)  # type: ignore[attr-defined]


@pytest.mark.parametrize("repeat", range(3))
@pytest.mark.parametrize("fault", KINDS)
def test_a_fault_ends_its_carrier_alone(cascade: Cascade, fault: str, repeat: int) -> None:
    salts = {session: f"fault:{fault}:{repeat}" if session == CARRIER else f"{fault}{repeat}" for session in range(1, 9)}
    replies = {session: cascade.submit(ask(session, salt)) for session, salt in salts.items()}
    answers: dict[int, list[Event]] = {session: reply.wait(10) for session, reply in replies.items()}
    for session, events in answers.items():
        tokens = tokens_of(events)
        assert own(session, tokens), f"a foreign token in {session}"
        if session != CARRIER:
            assert events[-1].kind == "end" and tokens == expected(session)
    last = answers[CARRIER][-1]
    assert last.kind == "error"
    assert last.info["message"].startswith(f"integrity: {KINDS[fault]}: ")
    assert len(tokens_of(answers[CARRIER])) < 40
    wait_until(cascade.idle)


def test_all_faults_at_once(cascade: Cascade) -> None:
    salts = [*(f"fault:{fault}:all" for fault in KINDS), *(f"all{number}" for number in range(9))]
    replies = [cascade.submit(ask(session, salt)) for session, salt in enumerate(salts, 1)]
    for session, reply in enumerate(replies, 1):
        events = reply.wait(10)
        assert own(session, tokens_of(events))
        if session <= len(KINDS):
            kind = list(KINDS.values())[session - 1]
            assert events[-1].info["message"].startswith(f"integrity: {kind}: ")
        else:
            assert tokens_of(events) == expected(session)
    wait_until(cascade.idle)


def test_the_report_counts_what_was_found(cascade: Cascade) -> None:
    before = cascade.integrity.report()["mismatches"]
    for number, fault in enumerate(KINDS, 1):
        cascade.submit(ask(number, f"fault:{fault}:report")).wait(10)
    wait_until(cascade.idle)
    after = cascade.integrity.report()["mismatches"]
    found = {kind: count - before[kind] for kind, count in after.items() if count != before[kind]}
    # A sweep of the audit may come by while a page is damaged, and see it too.
    assert found.pop("content") >= 1
    assert found.pop("table", 0) <= 1
    assert found == {"stale_tag": 2, "page_table": 1, "out_of_range": 1, "transfer": 2}


def test_the_test_would_see_foreign_tokens(tmp_path: Path) -> None:
    """Without a tracker the same damage lets another prompt's tokens out: what the tests above look for."""
    blind = Cascade(tmp_path, mode="off", checksum=False)
    try:
        victim, _ = blind.submit(ask(1, tokens=400)), blind.submit(ask(2, tokens=450))
        sequences = blind.decode._running
        wait_until(lambda: len(sequences) == 2 and all(s.answer_length > 40 for _, s in sequences.values()))
        pages = {session: sequence.pages for session, (_, sequence) in sequences.items()}
        pages[1][-2] = pages[2][-2]
        assert not own(1, tokens_of(victim.wait(20)))
    finally:
        blind.stop()


@pytest.mark.parametrize("integrity", [{"mode": "off"}, {"mode": False}, {}])
def test_faults_are_refused_where_nothing_checks(integrity: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=r"\['stale_tag'\] need mode raise or log; mode is 'off'"):
        deployment(**({"mode": "off", "checksum": False} | integrity), faults=["stale_tag"])


def test_a_flipped_byte_needs_digests() -> None:
    with pytest.raises(InvalidArgument, match="'flipped_byte' is found by digests alone, and checksum is false"):
        deployment(checksum=False, faults=["flipped_byte"])


def test_a_salt_asks_for_nothing_that_the_deployment_does_not_list(cascade: Cascade) -> None:
    for salt in ("fault:decode_dies", "fault:rust", "fault:", "xfault:stale_tag"):
        assert cascade.submit(ask(1, salt)).wait(10)[-1].kind == "end"


# Processes that die


def _prefill_process(directory: str, asked: Any, answers: Any) -> None:
    stage, _ = make_prefill(deployment(faults=DEATHS), Path(directory))

    class Out(FakeReply):
        def send(self, message: Prefilled, *, last: bool = False) -> None:
            answers.put(message.to_tensors())

    answers.put(None)
    while True:
        stage.submit(asked.get(), Out())


def _decode_process(directory: str, asked: Any, answers: Any) -> None:
    stage, _ = make_decode(deployment(faults=DEATHS), Path(directory))

    class Out(FakeReply):
        def send(self, message: Event, *, last: bool = False) -> None:
            answers.put(message)

    answers.put(None)
    while True:
        stage.submit(asked.get(), Out())


class Child:
    """A stage in a process of its own."""

    def __init__(self, target: Any, directory: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.asked, self.answers = context.Queue(), context.Queue()
        self.process = context.Process(target=target, args=(str(directory), self.asked, self.answers), daemon=True)
        self.process.start()
        self.answers.get(timeout=60)

    def hand_over(self, session: int, salt: str = "") -> Prefilled:
        """Prefill's answer to a request of :func:`ask`."""
        self.asked.put(ask(session, salt))
        while True:
            answer = Prefilled.from_tensors(self.answers.get(timeout=20))
            if answer.handoff is not None:
                return answer

    def answer(self, handoff: Prefilled) -> list[Event]:
        """Decode's whole answer to a hand-over."""
        self.asked.put(handoff)
        events: list[Event] = []
        while not events or not events[-1].terminal:
            events.append(self.answers.get(timeout=20))
        return events

    def died(self) -> None:
        self.process.join(10)
        assert self.process.exitcode == -signal.SIGKILL

    def kill(self) -> None:
        self.process.kill()
        self.process.join(10)


def pass_on(handoff: Prefilled, integrity: IntegrityStage, decode: DecodeStage) -> list[Event]:
    reply = FakeReply()
    decode.submit(integrity.check(handoff, False), reply)
    return reply.wait(10)


def test_prefill_dies_between_export_and_pull(tmp_path: Path) -> None:
    given = deployment(faults=DEATHS, transfer_seconds=20)
    child = Child(_prefill_process, tmp_path)
    decode, pool = make_decode(given, tmp_path)
    integrity = IntegrityStage(given, tmp_path, CancelBoard(tmp_path), Metrics("integrity"))
    restarted = None
    try:
        assert tokens_of(pass_on(child.hand_over(1), integrity, decode)) == expected(1)
        late = child.hand_over(2)
        carried = child.hand_over(3, "fault:prefill_dies")
        begun = time.monotonic()
        last = pass_on(carried, integrity, decode)[-1]
        assert time.monotonic() - begun < 2.0
        assert last.info["message"] == "integrity: epoch: prefill_pages: the process that owns it has ended"
        child.died()
        # Started again, it makes its pool anew: new hand-overs pass, those of its former life do not.
        restarted, _ = make_prefill(given, tmp_path)
        reply = FakeReply()
        restarted.submit(ask(4), ThroughIntegrity(integrity, decode, reply))
        assert tokens_of(reply.wait(10)) == expected(4)
        assert pass_on(late, integrity, decode)[-1].info["message"].startswith("integrity: epoch: prefill_pages: epoch")
        wait_until(lambda: pool.gauges()["free"] + pool.gauges()["cached"] == pool.total)
    finally:
        child.kill()
        for stage in (decode, integrity, restarted):
            if stage is not None:
                stage.stop()


def test_decode_dies_between_pull_and_release(tmp_path: Path) -> None:
    prefill, pool = make_prefill(deployment(faults=DEATHS), tmp_path, lease_seconds=1.0)

    def handoff(session: int, salt: str = "") -> Prefilled:
        reply = FakeReply()
        prefill.submit(ask(session, salt), reply)
        return reply.wait(10)[-1]

    child = Child(_decode_process, tmp_path)
    second = None
    try:
        assert tokens_of(child.answer(handoff(1))) == expected(1)
        child.asked.put(handoff(2, "fault:decode_dies"))
        child.died()
        assert pool.gauges()["leased"] > 0, "nobody has released it"
        wait_until(lambda: not pool.leases, 5)
        assert pool.gauges()["free"] + pool.gauges()["cached"] == pool.total
        second = Child(_decode_process, tmp_path)
        assert tokens_of(second.answer(handoff(1))) == expected(1)
    finally:
        for process in (child, second):
            if process is not None:
                process.kill()
        prefill.stop()
