"""The engine loop: everything happens on its one thread, in order, until stop() or a fault."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from helpers import wait_until

from tritone.stages.loop import EngineLoop


class Work:
    """A thing to drive: ``todo`` steps to do, ``held`` as long as something must be looked after."""

    def __init__(self) -> None:
        self.todo = 0
        self.held = False
        self.log: list[str] = []
        self.tended: list[float] = []
        self.threads: set[int] = set()
        self.raising: Callable[[], None] = lambda: None

    def step(self) -> bool:
        self.threads.add(threading.get_ident())
        self.raising()
        if self.todo == 0:
            return False
        self.todo -= 1
        self.log.append("step")
        return True

    def tend(self, now: float) -> bool:
        self.threads.add(threading.get_ident())
        self.tended.append(now)
        return self.held


@pytest.fixture
def work() -> Work:
    return Work()


@pytest.fixture
def loop(work: Work) -> Iterator[EngineLoop]:
    made = EngineLoop(work, "test-loop")
    yield made
    made.stop()
    assert not any(thread.name == "test-loop" for thread in threading.enumerate())


def test_commands_run_in_order_on_the_loops_thread(work: Work, loop: EngineLoop) -> None:
    threads: set[int] = set()

    def command(number: int) -> None:
        threads.add(threading.get_ident())
        work.log.append(f"command {number}")

    for number in range(100):
        loop.post(lambda number=number: command(number))
    wait_until(lambda: len(work.log) == 100)
    assert work.log == [f"command {number}" for number in range(100)]
    assert threads == work.threads
    assert threading.get_ident() not in threads


def test_it_steps_until_there_is_no_work_and_tends_between(work: Work, loop: EngineLoop) -> None:
    loop.post(lambda: setattr(work, "todo", 50))
    wait_until(lambda: work.log.count("step") == 50)
    assert len(work.tended) >= 50
    assert work.tended == sorted(work.tended)


def test_a_command_comes_before_the_next_step(work: Work, loop: EngineLoop) -> None:
    ready = threading.Event()

    def slow() -> None:
        assert ready.wait(5)

    loop.post(slow)
    work.todo = 3
    loop.post(lambda: work.log.append("command"))
    ready.set()
    wait_until(lambda: len(work.log) == 4)
    assert work.log == ["command", "step", "step", "step"]


def test_it_sleeps_while_nothing_is_held(work: Work, loop: EngineLoop) -> None:
    wait_until(lambda: work.tended)
    time.sleep(0.05)
    before = len(work.tended)
    time.sleep(0.2)
    assert len(work.tended) == before


def test_it_looks_around_while_something_is_held(work: Work, loop: EngineLoop) -> None:
    loop.post(lambda: setattr(work, "held", True))
    before = len(work.tended)
    wait_until(lambda: len(work.tended) >= before + 5)
    start, count = time.monotonic(), len(work.tended)
    time.sleep(0.2)
    # Every 20 ms, not as fast as it can.
    assert len(work.tended) - count <= (time.monotonic() - start) / 0.02 + 2


@pytest.mark.parametrize("part", ["command", "step", "tend"])
def test_an_exception_is_fatal(part: str, work: Work) -> None:
    """What no request could be ended for leaves an engine in a state that nobody knows."""
    ends: list[tuple[str, BaseException]] = []
    error = RuntimeError("expected by the test")

    def broken(*_: object) -> bool:
        raise error

    if part == "tend":
        work.tend = broken  # type: ignore[method-assign]
    elif part == "step":
        work.raising = broken  # type: ignore[assignment]
    loop = EngineLoop(work, "test-loop", lambda where, error: ends.append((where, error)))
    loop.post(broken if part == "command" else lambda: None)  # type: ignore[arg-type]
    wait_until(lambda: ends)
    assert ends == [("test-loop: the engine's loop", error)]
    loop.stop()
    work.todo = 1
    loop.post(lambda: None)
    time.sleep(0.05)
    assert work.log == [], "it does nothing more"


def test_it_stops_at_once_while_asleep_and_while_busy() -> None:
    for todo in (0, 10**9):
        work = Work()
        work.todo = todo
        loop = EngineLoop(work, "test-loop")
        start = time.monotonic()
        loop.stop()
        assert time.monotonic() - start < 2
        assert not any(thread.name == "test-loop" for thread in threading.enumerate())
