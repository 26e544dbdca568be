"""One worker thread shared fairly: sessions take turns, and the work of one session keeps its order."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator

log = logging.getLogger(__name__)

Task = Callable[[], Iterator[None]]
"""Work in slices: each ``yield`` lets another session have its turn. A task must handle its own errors."""


class FairWorker:
    """Runs the tasks of each session in order, and one slice of each session in turn.

    ``finished`` is called by the worker's thread when a task has ended and is no longer counted.
    """

    def __init__(self, name: str, finished: Callable[[], None] = lambda: None) -> None:
        self._finished = finished
        self._queues: dict[int, deque[Iterator[None]]] = {}
        self._turns: deque[int] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """Tasks waiting or running."""
        with self._wake:
            return sum(len(queue) for queue in self._queues.values())

    def submit(self, session: int, task: Task) -> None:
        made = task()
        with self._wake:
            queue = self._queues.get(session)
            if queue is None:
                queue = self._queues[session] = deque()
                self._turns.append(session)
                self._wake.notify()
            queue.append(made)

    def stop(self) -> None:
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._turns and not self._stopping:
                    self._wake.wait()
                if self._stopping:
                    return
                session = self._turns.popleft()
                running = self._queues[session][0]
            finished = self._slice(running)
            with self._wake:
                queue = self._queues[session]
                if finished:
                    queue.popleft()
                if queue:
                    self._turns.append(session)
                else:
                    del self._queues[session]
            if finished:
                self._finished()

    @staticmethod
    def _slice(running: Iterator[None]) -> bool:
        try:
            next(running)
        except StopIteration:
            return True
        except Exception:  # the thread serves every session
            log.exception("task")
            return True
        return False
