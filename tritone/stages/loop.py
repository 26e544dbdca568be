"""The thread that drives an engine: commands come in from any thread, everything else happens here."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from tritone.fatal import end_process

IDLE_SECONDS = 0.02
"""How often the loop looks at leases, cancellations and beats while nothing is computed but something is held."""


class Driven(Protocol):
    """What the loop drives."""

    def step(self) -> bool:
        """Do one unit of work; False when there was none."""

    def tend(self, now: float) -> bool:
        """Leases, cancellations, beats; False when nothing is held, so that the loop may sleep until a command."""


class EngineLoop:
    """One thread; ``post`` runs a command in it before the next step.

    Whoever is driven ends the requests that fail; what still reaches the loop goes to ``fatal``, which ends the process:
    nobody knows what state the engine is in.
    """

    def __init__(self, driven: Driven, name: str, fatal: Callable[[str, BaseException], None] = end_process) -> None:
        self._driven = driven
        self._name = name
        self._fatal = fatal
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def post(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def stop(self) -> None:
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        try:
            while not self._stopping:
                while self._commands:
                    self._commands.popleft()()
                held = self._driven.tend(time.monotonic())
                if self._driven.step():
                    continue
                with self._wake:
                    if not self._commands and not self._stopping:
                        self._wake.wait(IDLE_SECONDS if held else None)
        except Exception as error:
            self._fatal(f"{self._name}: the engine's loop", error)
