"""Answers leave on a thread of their own, so that the engine never waits for the server."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from tritone.stages.reply import Reply

log = logging.getLogger(__name__)


class Outbox:
    """First in, first out over all sessions; so the order within a session is the order of :meth:`put`.

    ``tick`` is called between two messages, about every ``seconds``, while the engine computes or sleeps.
    """

    def __init__(self, name: str, tick: Callable[[], None] | None = None, seconds: float | None = None) -> None:
        self._tick = tick
        self._seconds = seconds
        self._queue: queue.SimpleQueue[tuple[Reply[Any], Any, bool] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, reply: Reply[Any], message: Any, *, last: bool = False) -> None:
        self._queue.put((reply, message, last))

    def close(self, reply: Reply[Any]) -> None:
        """Close ``reply`` after what was put before."""
        self._queue.put((reply, None, True))

    def stop(self) -> None:
        self._queue.put(None)
        self._thread.join(timeout=5)

    def _run(self) -> None:
        due = time.monotonic()
        while True:
            try:
                item = self._queue.get(timeout=self._seconds)
                if item is None:
                    return
                reply, message, last = item
                if message is None:
                    reply.close()
                else:
                    reply.send(message, last=last)
            except queue.Empty:
                pass
            except Exception:  # one broken stream must not stop the others
                log.exception("send")
            if self._tick is not None and self._seconds is not None and time.monotonic() >= due:
                due = time.monotonic() + self._seconds
                self._guard(self._tick)

    @staticmethod
    def _guard(tick: Callable[[], None]) -> None:
        try:
            tick()
        except Exception:  # as above
            log.exception("tick")
