"""The tritonserver child process: dies with its supervisor, logs into a file, stops in time."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1
POLL_SECONDS = 0.1
MOMENT_SECONDS = 1.5
"""Triton looks once a second whether all its models have ended."""


class ChildProcess:
    """A child in a session of its own (Ctrl-C in the terminal reaches the supervisor alone).

    The kernel sends a parent-death signal when the *thread* that forked ends, so the child is started by a thread that
    lives exactly as long as the child: it waits for it.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path, directory: Path) -> None:
        self.log = log
        self._ended = threading.Event()
        self._started = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._error: OSError | None = None
        self._thread = threading.Thread(
            target=self._run, args=(list(command), dict(environment), directory), name="tritonserver", daemon=True
        )
        self._thread.start()
        self._started.wait()
        if self._error is not None:
            raise self._error

    def _run(self, command: list[str], environment: dict[str, str], directory: Path) -> None:
        try:
            with self.log.open("wb") as log:
                self._process = subprocess.Popen(
                    command,
                    env=environment,
                    cwd=directory,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=_die_with_parent(),
                )
        except OSError as error:
            self._error = error
            self._ended.set()
            return
        finally:
            self._started.set()
        self._process.wait()
        self._ended.set()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative is the signal that ended it."""
        return self._process.returncode if self._process is not None and self._ended.is_set() else None

    def wait(self, timeout: float | None = None) -> int | None:
        """Waits for the end and returns the exit code, or None after ``timeout`` seconds."""
        self._ended.wait(timeout)
        return self.exit_code

    def stop(self, timeout: float, is_over: Callable[[], bool]) -> int:
        """SIGTERM; SIGKILL after ``timeout`` seconds, or a moment after ``is_over`` said that nothing is left for it to end.
        Returns the exit code."""
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + timeout
        while self.wait(POLL_SECONDS) is None and time.monotonic() < deadline:
            if is_over():
                deadline = min(deadline, time.monotonic() + MOMENT_SECONDS)
        if self.exit_code is None:
            self._signal(signal.SIGKILL)
            self._ended.wait()
        code = self.exit_code
        assert code is not None
        return code

    def kill(self) -> None:
        """SIGKILL, without waiting for the end."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self.exit_code is None:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                pass


def _die_with_parent() -> Callable[[], None] | None:
    try:
        prctl = ctypes.CDLL(None).prctl
    except (OSError, AttributeError):
        return None
    parent = os.getpid()

    def set_signal() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return set_signal
