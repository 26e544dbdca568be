"""What the demo's Talker and VoiceBox have in common: one worker that sessions take turns with."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import Any

from tritone.errors import TritoneError
from tritone.fatal import end_if_out_of_memory
from tritone.messages import Event, Failure, failure_event
from tritone.metrics import Metrics
from tritone.pools import CancelBoard
from tritone.stages.fair import Computed, FairWorker
from tritone.stages.reply import Reply
from tritone.stages.sessions import SpeechSessions, State, is_last

log = logging.getLogger(__name__)


class SpeechStage(SpeechSessions[State]):
    """One fair worker over the sessions; it does the work of each in order.

    ``compute`` and ``width`` are the worker's, for work that yields what it needs computed.
    """

    def __init__(
        self,
        name: str,
        board: CancelBoard,
        metrics: Metrics,
        max_queue: int,
        restarted: bool = False,
        compute: Callable[[Sequence[Any]], Sequence[Any]] | None = None,
        width: int = 1,
    ) -> None:
        super().__init__(name, board, metrics, restarted)
        self._max_queue = max_queue
        self._worker = FairWorker(name, self._gauge, compute, width)

    @abstractmethod
    def work(self, state: State, event: Event) -> Generator[Event | Computed, Any, None]:
        """The events that ``event`` makes, one slice of work each, and before them what has to be computed."""

    def stop(self) -> None:
        self._worker.stop()

    def _queue(self, event: Event, reply: Reply[Event]) -> None:
        if len(self._worker) >= self._max_queue and not event.terminal:
            message = f"{self.name}.max_queue: {self._max_queue} pieces of work wait already; try again in 1 s"
            self._fail(event, reply, TritoneError(message, "UNAVAILABLE"))
            return
        self._worker.submit(event.session, lambda: self._run(event, reply))

    def _run(self, event: Event, reply: Reply[Event]) -> Generator[Computed | None, Any, None]:
        session = event.session
        state = self._sessions.get(session)
        if state is None:
            # The session failed while this event waited.
            if event.terminal:
                self._failed.discard(session)
            reply.close()
            return
        try:
            yield from self._make(state, event, reply)
        except Exception as error:  # whatever a voice raises ends its own session only
            end_if_out_of_memory(self.name, error)
            log.exception("%s", self.name)
            self._fail(event, reply, error)
            return
        if session not in self._sessions:
            if event.terminal:
                self._failed.discard(session)
            reply.close()
            return
        if not is_last(event):
            reply.close()
            return
        self._sessions.pop(session, None)
        last = event if event.terminal else Event(session, "end", info={"finish_reason": "stop"})
        if self._board.is_cancelled(session) and last.kind == "end":
            last = failure_event(session, Failure("cancelled"), last.info.get("usage"))
        reply.send(last, last=True)

    def _make(self, state: State, event: Event, reply: Reply[Event]) -> Generator[Computed | None, Any, None]:
        """Sends what the work makes, until the session ends or is cancelled."""
        making = self.work(state, event)
        computed: Any = None
        while not self._board.is_cancelled(event.session):
            try:
                made = making.send(computed)
            except StopIteration:
                return
            computed = None
            if not isinstance(made, Event):
                computed = yield made
            elif event.session in self._sessions:
                reply.send(made)
                yield None
            else:
                return

    def _queued(self) -> int:
        return len(self._worker)
