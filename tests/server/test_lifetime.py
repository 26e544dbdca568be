"""A server over time: request after request the same, and an error for every client when it dies."""

from __future__ import annotations

import os
import signal
import statistics
import time
from pathlib import Path

import numpy as np
import psutil

from tests.server.helpers import Request, ask, refusal, shared_memory, stage_processes, wait_until
from tests.server.serving import make_deployment
from tritone.supervisor import Server

SENTENCE = "The library closes at nine in the evening."


def test_20_speeches_in_a_row_are_the_same(server: Server, unharmed: None) -> None:
    answers = [ask(server, "speech", SENTENCE, seed=4) for _ in range(20)]
    for answer in answers:
        answer.check_complete()
        assert np.array_equal(answer.audio, answers[0].audio)
    first = [answer.first("audio") or 0.0 for answer in answers]
    early, late = statistics.median(first[:10]), statistics.median(first[10:])
    print(f"time to first audio: {early * 1000:.0f} ms, then {late * 1000:.0f} ms")
    # A drift would go on growing; the 20 ms are for a noisy machine.
    assert late < 1.2 * early + 0.02


def test_the_death_of_the_server_reaches_its_clients_and_leaves_nothing() -> None:
    """A server of its own, killed while it answers: an error within 10 s, no process, no shared memory."""
    engine = {"dtype": "float32", "threads": 1, "pool_tokens": 2048}
    ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0, "drain_seconds": 2}
    with Server(make_deployment(voice=None, prefill=engine, decode=engine, server=ports)) as own:
        request = Request(own, "chat", "Tell me a story.", ignore_eos=True, max_tokens=1500)
        assert request.wait_for("text").kind == "text"
        # First it is drained: what runs may end, in a limited time, and nothing new begins.
        short = Request(own, "chat", "Tell me a story.", ignore_eos=True, max_tokens=8)
        assert short.wait_for("text").kind == "text"
        begun = time.monotonic()
        own.drain()
        assert own.deployment.server.drain_seconds <= time.monotonic() - begun < 5
        assert short.finish().usage["completion_tokens"] == 8
        assert "UNAVAILABLE: the server is stopping" in refusal(own, "chat", "Hello.")
        assert not own.is_ready()
        assert request.next(timeout=5) is not None, "the long one still runs"
        stages, folder, files = stage_processes(own), own.run_directory, shared_memory(own)
        regions = [path for path in map(Path, files) if path.name.startswith("triton_")]
        assert len(stages) == 5
        assert len(regions) >= 5
        begun = time.monotonic()
        os.kill(own.pid, signal.SIGKILL)
        answer = request.finish(timeout=10)
        assert time.monotonic() - begun < 10
        assert answer.error is not None
        assert not own.is_ready()
        own.stop()
    assert not folder.exists()
    # The kernel may still be taking a process's memory apart when nothing of it can be seen any more.
    wait_until(lambda: not [name for name, process in stages.items() if runs(process)], "no process is left", 5)
    assert not [path for path in regions if path.exists()]


def runs(process: psutil.Process) -> bool:
    """Whether it still does anything: one that has ended may wait for init to collect it."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
