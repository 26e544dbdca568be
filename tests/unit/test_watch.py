"""The watch over stage processes, with real processes: a death is told once, and the stage is loaded again."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers import wait_until

from tritone.processes import ProcessRecord, read_records
from tritone.supervisor.backoff import LONGEST_SECONDS, STABLE_SECONDS, Backoff
from tritone.supervisor.watch import StageState, StageWatch, unready_models


class Stages:
    """Stage processes that do nothing; ``loading`` makes a new one, or raises."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.processes: list[subprocess.Popen[bytes]] = []
        self.log: list[str] = []
        self.seen: list[dict[str, str]] = []
        self.loading: Callable[[str], None] = self.start
        self.now = 1000.0
        self.watch: StageWatch | None = None

    def start(self, stage: str) -> None:
        process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        self.processes.append(process)
        ProcessRecord(stage, process.pid).write(self.run)

    def kill(self, number: int = -1) -> int:
        process = self.processes[number]
        process.kill()
        process.wait()
        return process.pid

    def end_in_order(self, number: int) -> None:
        next(r for r in read_records(self.run) if r.pid == self.processes[number].pid).path(self.run).unlink()
        self.kill(number)

    def load(self, stage: str) -> None:
        self.log.append(f"load {stage}")
        self.loading(stage)

    def changed(self, states: dict[str, StageState]) -> None:
        self.seen.append({stage: state.state for stage, state in states.items()})

    def begin(self) -> StageWatch:
        self.watch = StageWatch(
            self.run,
            lambda stage: self.log.append(f"end {stage}"),
            self.load,
            self.changed,  # type: ignore[arg-type]
            clock=lambda: self.now,
        )
        return self.watch


@pytest.fixture
def stages(tmp_path: Path) -> Iterator[Stages]:
    made = Stages(tmp_path)
    yield made
    if made.watch is not None:
        made.watch.stop()
    for process in made.processes:
        process.kill()
        process.wait()
    assert not any(thread.name == "stage-watch" for thread in threading.enumerate())


def test_a_killed_stage_is_ended_and_loaded_again_and_no_other(stages: Stages) -> None:
    stages.start("talker")
    stages.start("decode")
    watch = stages.begin()
    assert {stage: state.state for stage, state in watch.states.items()} == {"talker": "ready", "decode": "ready"}
    pid = stages.kill()
    wait_until(lambda: stages.log == ["end decode", "load decode"] and watch.states["decode"].state == "ready")
    state = watch.states["decode"]
    assert (state.deaths, state.pid) == (1, stages.processes[-1].pid)
    assert str(pid) in state.reason
    assert [seen["decode"] for seen in stages.seen[-3:]] == ["waiting", "loading", "ready"]
    assert watch.states["talker"].deaths == 0
    assert [record.stage for record in read_records(stages.run)].count("decode") == 1


def test_the_reason_is_the_stages_own(stages: Stages) -> None:
    stages.start("decode")
    watch = stages.begin()
    ProcessRecord("decode", stages.processes[0].pid, reason="decode: out of memory").write(stages.run)
    stages.kill()
    wait_until(lambda: watch.states["decode"].deaths)
    assert watch.states["decode"].reason == "decode: out of memory"


def test_a_process_that_ends_in_order_has_not_died(stages: Stages) -> None:
    """As the old one does when a stage is loaded anew."""
    stages.start("decode")
    watch = stages.begin()
    stages.start("decode")
    wait_until(lambda: len(watch._watched) == 2)
    stages.end_in_order(0)
    wait_until(lambda: len(watch._watched) == 1)
    assert stages.log == []
    stages.kill()
    wait_until(lambda: stages.log[:1] == ["end decode"])


def test_one_that_dies_at_once_is_loaded_with_growing_pauses(stages: Stages) -> None:
    stages.start("decode")
    watch = stages.begin()

    def dies(stage: str) -> None:
        stages.start(stage)
        stages.kill()

    stages.loading = dies
    stages.kill()
    wait_until(lambda: watch.states["decode"].deaths == 2)
    assert watch.states["decode"].state == "waiting"
    loads = stages.log.count("load decode")
    wait_until(lambda: watch._due)
    assert (loads, watch._due["decode"]) == (1, stages.now + 1)
    stages.now += 1
    wait_until(lambda: watch.states["decode"].deaths == 3 and watch._due)
    assert watch._due["decode"] == stages.now + 2
    stages.loading = stages.start
    stages.now += 2
    wait_until(lambda: watch.states["decode"].state == "ready")
    assert stages.log.count("load decode") == 3


def test_a_load_that_fails_is_tried_again(stages: Stages) -> None:
    stages.start("decode")
    watch = stages.begin()

    def fails(stage: str) -> None:
        raise RuntimeError("no weights")

    stages.loading = fails
    stages.kill()
    wait_until(lambda: watch.states["decode"].failed_loads == 1)
    assert "no weights" in watch.states["decode"].reason
    stages.loading = stages.start
    stages.now += 1
    wait_until(lambda: watch.states["decode"].state == "ready")


def test_after_stop_deaths_are_the_servers_own(stages: Stages) -> None:
    stages.start("decode")
    watch = stages.begin()
    watch.stop()
    stages.kill()
    watch._thread.join()
    assert stages.log == []


def test_backoff() -> None:
    backoff = Backoff()
    assert [backoff.failed(0.0) for _ in range(8)] == [0, 1, 2, 4, 8, 16, LONGEST_SECONDS, LONGEST_SECONDS]
    backoff.served(100.0)
    assert backoff.failed(100.0 + STABLE_SECONDS - 1) == LONGEST_SECONDS
    backoff.served(200.0)
    assert backoff.failed(200.0 + STABLE_SECONDS) == 0
    assert backoff.failed(200.0 + STABLE_SECONDS) == 1


def test_an_ensemble_is_ready_when_all_its_stages_are() -> None:
    steps = {"chat": ("prefill", "decode"), "omni": ("prefill", "decode", "talker"), "speech": ("talker",)}
    states = {"prefill": StageState(), "decode": StageState(), "talker": StageState(state="loading")}
    assert unready_models(states, steps) == {"talker", "omni", "speech"}
    assert unready_models({name: StageState() for name in states}, steps) == set()
