"""The fair worker: order within a session, turns between sessions, and it outlives what its tasks raise."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from helpers import wait_until

from tritone.stages.fair import FairWorker


@pytest.fixture
def worker() -> Iterator[FairWorker]:
    made = FairWorker("test")
    yield made
    made.stop()
    assert not any(thread.name == "test" for thread in threading.enumerate())


def hold(worker: FairWorker) -> threading.Event:
    """Keeps the worker busy until the event is set, so that what is submitted meanwhile queues."""
    begun, gate = threading.Event(), threading.Event()

    def task() -> Generator[None, None, None]:
        begun.set()
        assert gate.wait(5)
        return
        yield

    worker.submit(-1, task)
    assert begun.wait(5)
    return gate


def slices(log: list[str], name: str, count: int) -> Generator[None, None, None]:
    for number in range(count):
        log.append(f"{name}{number}")
        yield


def test_sessions_take_turns_and_keep_their_order(worker: FairWorker) -> None:
    log: list[str] = []
    gate = hold(worker)
    worker.submit(1, lambda: slices(log, "a", 4))
    worker.submit(1, lambda: slices(log, "b", 1))
    worker.submit(2, lambda: slices(log, "c", 2))
    worker.submit(3, lambda: slices(log, "d", 1))
    assert len(worker) == 5
    gate.set()
    wait_until(lambda: len(worker) == 0)
    assert [entry for entry in log if entry[0] in "ab"] == ["a0", "a1", "a2", "a3", "b0"]
    assert log[:3] == ["a0", "c0", "d0"]
    assert log.index("c1") < log.index("a2")


def test_a_long_session_does_not_keep_a_new_one_waiting(worker: FairWorker) -> None:
    log: list[str] = []
    started = threading.Event()
    done = threading.Event()

    def endless() -> Generator[None, None, None]:
        while not done.is_set():
            log.append("long")
            started.set()
            yield

    worker.submit(1, endless)
    assert started.wait(5)
    finished = threading.Event()

    def short() -> Generator[None, None, None]:
        finished.set()
        return
        yield

    worker.submit(2, short)
    assert finished.wait(5)
    done.set()
    wait_until(lambda: len(worker) == 0)


def test_an_exception_ends_its_task_only(worker: FairWorker) -> None:
    log: list[str] = []

    def broken() -> Generator[None, None, None]:
        log.append("broken")
        yield
        raise RuntimeError("expected by the test")

    gate = hold(worker)
    worker.submit(1, broken)
    worker.submit(1, lambda: slices(log, "a", 1))
    worker.submit(2, lambda: slices(log, "b", 1))
    gate.set()
    wait_until(lambda: len(worker) == 0)
    assert sorted(log) == ["a0", "b0", "broken"]


def test_a_task_that_cannot_even_begin_does_not_stop_the_worker(worker: FairWorker) -> None:
    def broken() -> Generator[None, None, None]:
        raise RuntimeError("expected by the test")

    with pytest.raises(RuntimeError):
        worker.submit(1, broken)
    time.sleep(0.05)  # time for the worker to look
    log: list[str] = []
    worker.submit(2, lambda: slices(log, "a", 1))
    worker.submit(1, lambda: slices(log, "b", 1))
    wait_until(lambda: len(log) == 2)


def test_random_traffic_from_several_threads(worker: FairWorker) -> None:
    log: list[tuple[int, int, int]] = []

    def task(session: int, number: int, count: int) -> Generator[None, None, None]:
        for part in range(count):
            log.append((session, number, part))
            yield

    def submit(session: int) -> None:
        chance = random.Random(session)
        for number in range(100):
            count = chance.randint(0, 3)
            worker.submit(session, lambda number=number, count=count: task(session, number, count))

    threads = [threading.Thread(target=submit, args=(session,)) for session in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until(lambda: len(worker) == 0)
    for session in range(4):
        ours = [(number, part) for owner, number, part in log if owner == session]
        assert ours == sorted(ours)
        chance = random.Random(session)
        assert len(ours) == sum(chance.randint(0, 3) for _ in range(100))


@dataclass(frozen=True)
class Wanted:
    kind: str
    value: int

    @property
    def urgent(self) -> bool:
        return self.value < 0


class Batches:
    """A worker that computes squares, and what it computed together."""

    def __init__(self, width: int) -> None:
        self.made: list[list[int]] = []
        self.worker = FairWorker("test", compute=self.compute, width=width)

    def compute(self, wanted: Sequence[Wanted]) -> list[int]:
        self.made.append([one.value for one in wanted])
        assert len({one.kind for one in wanted}) == 1
        if any(one.value == 13 for one in wanted):
            raise RuntimeError("expected by the test")
        return [one.value**2 for one in wanted]

    def ask(self, session: int, log: list[Any], kind: str, *values: int) -> None:
        def task() -> Generator[Wanted, Any, None]:
            for value in values:
                try:
                    log.append((session, (yield Wanted(kind, value))))
                except RuntimeError as error:
                    log.append((session, str(error)))

        self.worker.submit(session, task)


def test_what_sessions_want_is_computed_together() -> None:
    batches, log = Batches(width=3), list[Any]()
    gate = hold(batches.worker)
    for session in range(1, 6):
        batches.ask(session, log, "even" if session == 2 else "odd", session, session + 20)
    batches.ask(1, log, "odd", 6)
    gate.set()
    wait_until(lambda: len(batches.worker) == 0)
    batches.worker.stop()
    # Full batches of the kind that waited longest; what its sessions ask next stands behind those who wait already.
    assert batches.made == [[1, 3, 4], [2], [5, 21, 23], [24, 25, 6], [22]]
    answers = {session: [answer for owner, answer in log if owner == session] for session in range(1, 6)}
    assert answers == {1: [1, 441, 36], 2: [4, 484], 3: [9, 529], 4: [16, 576], 5: [25, 625]}


def test_what_is_urgent_goes_first_and_else_who_waited_longest() -> None:
    batches, log = Batches(width=2), list[Any]()
    gate = hold(batches.worker)
    batches.ask(1, log, "odd", 1, 11)
    batches.ask(2, log, "even", 2, 22)
    batches.ask(3, log, "even", -3, 33)
    batches.ask(4, log, "odd", -4, 44)
    batches.ask(5, log, "odd", -5, -55)
    gate.set()
    wait_until(lambda: len(batches.worker) == 0)
    batches.worker.stop()
    assert batches.made == [[-3, 2], [-4, -5], [-55, 1], [33, 22], [44, 11]]
    assert len(log) == 10


def test_a_failed_batch_fails_its_sessions_and_no_other() -> None:
    batches, log = Batches(width=2), list[Any]()
    gate = hold(batches.worker)
    batches.ask(1, log, "a", 13, 2)
    batches.ask(2, log, "a", 3, 4)
    batches.ask(3, log, "b", 5)
    gate.set()
    wait_until(lambda: len(batches.worker) == 0)
    batches.worker.stop()
    assert sorted(log, key=str) == [
        (1, "expected by the test"), (1, 4), (2, "expected by the test"), (2, 16), (3, 25),
    ]


def test_turns_go_before_batches() -> None:
    """So that what could share a batch is known when it is computed."""
    batches, log = Batches(width=8), list[Any]()
    gate = hold(batches.worker)
    batches.ask(1, log, "a", 1)
    batches.worker.submit(2, lambda: slices(log, "slice", 5))
    batches.ask(3, log, "a", 3)
    gate.set()
    wait_until(lambda: len(batches.worker) == 0)
    batches.worker.stop()
    assert log == [*(f"slice{number}" for number in range(5)), (1, 1), (3, 9)]
    assert batches.made == [[1, 3]]


def test_stop_does_not_wait_for_the_queue() -> None:
    worker = FairWorker("test")
    gate = hold(worker)
    log: list[str] = []
    worker.submit(1, lambda: slices(log, "a", 1))
    threading.Timer(0.05, gate.set).start()
    worker.stop()
    assert log == []
