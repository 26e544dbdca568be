"""Preprocess's queues: requests are read one after another, and one that cannot be read soon is refused at once.

The stage's thread must be free for that: what Triton itself queues in front of a model nobody can see or refuse.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tritone.errors import InvalidArgument, TritoneError, Unavailable
from tritone.fatal import end_if_out_of_memory
from tritone.media.parts import TYPES
from tritone.messages import Tensors
from tritone.metrics import Metrics
from tritone.options import Role
from tritone.stages.pace import Pace
from tritone.stages.preprocess import PreprocessStage
from tritone.stages.reply import RefusableReply

log = logging.getLogger(__name__)

WAIT_SHARE = 0.1
"""Of ``max_wait_seconds``: the rest is for prefill's queue, where the real work is."""
MEDIA_MARKS = tuple(f'"{kind}"'.encode() for kind in TYPES if kind != "text")
"""A request with media has one of them; text that has one, too, is read in the media's lane, to no harm."""
REQUEST_BYTES = 512
"""A request, however short, is as much work as so many bytes of text."""


class _Waiting(NamedTuple):
    role: Role
    raw: bytes
    parameters: Mapping[str, Any]
    reply: RefusableReply[Tensors]
    arrived: float
    work: int


class _Lane:
    """One thread that reads requests first in, first out."""

    def __init__(self, stage: PreprocessStage, name: str, metrics: Metrics, count: Callable[[int], None]) -> None:
        self._stage = stage
        self._metrics = metrics
        self._count_requests = count
        self._pace = Pace()
        self._work = 0
        """Bytes of what waits or is being read."""
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wait(self) -> float:
        """Seconds until a new request would be read."""
        return self._pace.seconds(self._work)

    def put(self, waiting: _Waiting) -> None:
        self._count(1, waiting.work)
        self._queue.put(waiting)

    def stop(self) -> None:
        self._queue.put(None)
        self._thread.join(timeout=5)

    def _count(self, requests: int, work: int) -> None:
        with self._lock:
            self._work += work
        self._count_requests(requests)

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


class Intake:
    """Text in one lane; audio and images, seconds of decoding at worst, in another, so that text does not wait for them."""

    def __init__(
        self, stage: PreprocessStage, metrics: Metrics, max_wait_seconds: float, media: PreprocessStage | None = None
    ) -> None:
        """``media`` reads requests with media, for a checkpoint that takes them: another object, since a tokenizer is not
        to be used by two threads. :meth:`submit` is called by one thread."""
        self._max_bytes = stage.max_bytes
        self._max_wait_seconds = max_wait_seconds
        self._metrics = metrics
        self._requests = 0
        self._lock = threading.Lock()
        self._count(0)
        self._text = _Lane(stage, "intake", metrics, self._count)
        self._media = _Lane(media, "intake-media", metrics, self._count) if media else None

    def submit(self, role: Role, raw: bytes, parameters: Mapping[str, Any], reply: RefusableReply[Tensors]) -> None:
        """Raises :class:`InvalidArgument` for a request too large to be valid, :class:`Unavailable` where too many wait."""
        size = len(raw) + sum(len(value) for value in parameters.values() if isinstance(value, str))
        if size > self._max_bytes:
            raise InvalidArgument(f"request: {size} bytes of text and options; allowed: at most {self._max_bytes}")
        lane = self._media if self._media and any(mark in raw for mark in MEDIA_MARKS) else self._text
        wait, most = lane.wait(), WAIT_SHARE * self._max_wait_seconds
        if wait > most:
            raise Unavailable(
                f"max_wait_seconds: about {wait:.0f} s until this request is read; allowed: {most:g}, a tenth of it; "
                f"try again in {max(1, round(wait - most / 2))} s"
            )
        lane.put(_Waiting(role, raw, parameters, reply, time.monotonic(), size + REQUEST_BYTES))

    def stop(self) -> None:
        for lane in (self._text, self._media):
            if lane is not None:
                lane.stop()

    def _count(self, requests: int) -> None:
        with self._lock:
            self._requests += requests
            self._metrics.gauge("tritone_queue_requests", self._requests)
