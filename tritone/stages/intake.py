"""Preprocess's queue: requests are read one after another, and one that cannot be read soon is refused at once.

The stage's thread must be free for that: what Triton itself queues in front of a model nobody can see or refuse.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from tritone.errors import InvalidArgument, TritoneError, Unavailable
from tritone.fatal import end_if_out_of_memory
from tritone.messages import Tensors
from tritone.metrics import Metrics
from tritone.options import Role
from tritone.stages.pace import Pace
from tritone.stages.preprocess import PreprocessStage
from tritone.stages.reply import RefusableReply

log = logging.getLogger(__name__)

WAIT_SHARE = 0.1
"""Of ``max_wait_seconds``: the rest is for prefill's queue, where the real work is."""
REQUEST_BYTES = 512
"""A request, however short, is as much work as so many bytes of text."""


class _Waiting(NamedTuple):
    role: Role
    raw: bytes
    parameters: Mapping[str, Any]
    reply: RefusableReply[Tensors]
    arrived: float
    work: int


class Intake:
    """One thread that reads requests first in, first out; :meth:`submit` is called by another."""

    def __init__(self, stage: PreprocessStage, metrics: Metrics, max_wait_seconds: float) -> None:
        self._stage = stage
        self._metrics = metrics
        self._max_wait_seconds = max_wait_seconds
        self._pace = Pace()
        self._requests = self._work = 0
        """Waiting or being read, and the bytes of all of them."""
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._count(0, 0)
        self._thread = threading.Thread(target=self._run, name="intake", daemon=True)
        self._thread.start()

    def submit(self, role: Role, raw: bytes, parameters: Mapping[str, Any], reply: RefusableReply[Tensors]) -> None:
        """Raises :class:`InvalidArgument` for a request too large to be valid, :class:`Unavailable` where too many wait."""
        size = len(raw) + sum(len(value) for value in parameters.values() if isinstance(value, str))
        allowed = self._stage.max_bytes
        if size > allowed:
            raise InvalidArgument(f"request: {size} bytes of text and options; allowed: at most {allowed}")
        wait, most = self._pace.seconds(self._work), WAIT_SHARE * self._max_wait_seconds
        if wait > most:
            raise Unavailable(
                f"max_wait_seconds: about {wait:.0f} s until this request is read; allowed: {most:g}, a tenth of it; "
                f"try again in {max(1, round(wait - most / 2))} s"
            )
        waiting = _Waiting(role, raw, parameters, reply, time.monotonic(), size + REQUEST_BYTES)
        self._count(1, waiting.work)
        self._queue.put(waiting)

    def stop(self) -> None:
        self._queue.put(None)
        self._thread.join(timeout=5)

    def _count(self, requests: int, work: int) -> None:
        with self._lock:
            self._requests += requests
            self._work += work
            self._metrics.gauge("tritone_queue_requests", self._requests)

    def _run(self) -> None:
        while (waiting := self._queue.get()) is not None:
            begun = time.monotonic()
            self._metrics.observe("tritone_queue_seconds", begun - waiting.arrived)
            try:
                self._answer(waiting)
            except Exception:  # one broken stream must not stop the others
                log.exception("send")
            self._pace.add(waiting.work, time.monotonic() - begun)
            self._count(-1, -waiting.work)

    def _answer(self, waiting: _Waiting) -> None:
        try:
            tensors = self._stage.read(waiting.role, waiting.raw, waiting.parameters, waiting.arrived)
        except Exception as error:  # one request's fault ends that request
            end_if_out_of_memory("preprocess", error)
            if not isinstance(error, TritoneError):
                log.exception("preprocess")
                error = TritoneError(f"preprocess: {error!r}")
            waiting.reply.fail(error)
            return
        waiting.reply.send(tensors, last=True)
