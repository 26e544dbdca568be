"""The fair worker: order within a session, turns between sessions, and it outlives what its tasks raise."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator

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

    def task() -> Iterator[None]:
        begun.set()
        assert gate.wait(5)
        return
        yield

    worker.submit(-1, task)
    assert begun.wait(5)
    return gate


def slices(log: list[str], name: str, count: int) -> Iterator[None]:
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

    def endless() -> Iterator[None]:
        while not done.is_set():
            log.append("long")
            started.set()
            yield

    worker.submit(1, endless)
    assert started.wait(5)
    finished = threading.Event()

    def short() -> Iterator[None]:
        finished.set()
        return
        yield

    worker.submit(2, short)
    assert finished.wait(5)
    done.set()
    wait_until(lambda: len(worker) == 0)


def test_an_exception_ends_its_task_only(worker: FairWorker) -> None:
    log: list[str] = []

    def broken() -> Iterator[None]:
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
    def broken() -> Iterator[None]:
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

    def task(session: int, number: int, count: int) -> Iterator[None]:
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


def test_stop_does_not_wait_for_the_queue() -> None:
    worker = FairWorker("test")
    gate = hold(worker)
    log: list[str] = []
    worker.submit(1, lambda: slices(log, "a", 1))
    threading.Timer(0.05, gate.set).start()
    worker.stop()
    assert log == []
