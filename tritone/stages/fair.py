"""One worker thread shared fairly: sessions take turns, the work of one session keeps its order, and what several sessions need
of the same kind is computed together."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Any, Protocol

log = logging.getLogger(__name__)


class Computed(Protocol):
    """Something that a task needs, and that can be computed with others of the same kind."""

    @property
    def kind(self) -> Hashable: ...

    @property
    def urgent(self) -> bool:
        """Whether it goes before what is not. A session may want that a few times, or the others would starve."""


Task = Callable[[], Generator[Computed | None, Any, None]]
"""Work in slices: ``yield`` lets another session have its turn; ``yield`` with something to compute is sent what came of it, or
gets the error. A task must handle its own errors."""


class FairWorker:
    """Runs the tasks of each session in order, and one slice of each session in turn.

    What tasks want computed waits until no session has a turn to take, so that as many as can share a batch: the one that
    waited longest, of those that are urgent if any is, and up to ``width`` of its kind.

    ``finished`` is called by the worker's thread when a task has ended and is no longer counted. ``compute`` gets one batch and
    returns a result for each; if it raises, all of the batch do.
    """

    def __init__(
        self,
        name: str,
        finished: Callable[[], None] = lambda: None,
        compute: Callable[[Sequence[Any]], Sequence[Any]] | None = None,
        width: int = 1,
    ) -> None:
        self._finished = finished
        self._compute = compute
        self._width = width
        self._queues: dict[int, deque[Generator[Computed | None, Any, None]]] = {}
        self._turns: deque[tuple[int, Any]] = deque()  # sessions, and what their task is to be sent
        self._waiting: list[tuple[int, Computed]] = []
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
                self._turns.append((session, None))
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
                while not self._turns and not self._waiting and not self._stopping:
                    self._wake.wait()
                if self._stopping:
                    return
                turn = self._turns.popleft() if self._turns else None
            if turn is None:
                self._batch()
            else:
                self._turn(*turn)

    def _turn(self, session: int, answer: Any) -> None:
        finished, wanted = self._slice(self._queues[session][0], answer)
        with self._wake:
            queue = self._queues[session]
            if finished:
                queue.popleft()
            if wanted is not None:
                self._waiting.append((session, wanted))
            elif queue:
                self._turns.append((session, None))
            else:
                del self._queues[session]
        if finished:
            self._finished()

    def _batch(self) -> None:
        self._waiting.sort(key=lambda entry: not entry[1].urgent)
        kind = self._waiting[0][1].kind
        batch: list[tuple[int, Computed]] = []
        others: list[tuple[int, Computed]] = []
        for entry in self._waiting:
            fits = len(batch) < self._width and entry[1].kind == kind
            (batch if fits else others).append(entry)
        self._waiting = others
        answers: Sequence[Any]
        assert self._compute is not None
        try:
            answers = self._compute([wanted for _, wanted in batch])
        except Exception as error:  # each task says what it means for its session
            answers = [error] * len(batch)
        with self._wake:
            self._turns.extend((session, answer) for (session, _), answer in zip(batch, answers, strict=True))

    @staticmethod
    def _slice(running: Generator[Computed | None, Any, None], answer: Any) -> tuple[bool, Computed | None]:
        """Whether the task has ended, and what it wants computed."""
        try:
            return False, running.throw(answer) if isinstance(answer, Exception) else running.send(answer)
        except StopIteration:
            return True, None
        except Exception:  # the thread serves every session
            log.exception("task")
            return True, None
