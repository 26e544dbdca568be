"""Answers leave on a thread of their own, so that the engine never waits for the server."""

from __future__ import annotations

import logging
import queue
import threading
from typing import Any

from tritone.stages.reply import Reply

log = logging.getLogger(__name__)


class Outbox:
    """First in, first out over all sessions; so the order within a session is the order of :meth:`put`."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[tuple[Reply[Any], Any, bool] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, reply: Reply[Any], message: Any, *, last: bool = False) -> None:
        self._queue.put((reply, message, last))

    def stop(self) -> None:
        self._queue.put(None)
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            reply, message, last = item
            try:
                reply.send(message, last=last)
            except Exception:  # one broken stream must not stop the others
                log.exception("send")
