"""Prefill's second thread: computes the media of prompts beside the engine, so that prompts of text do not wait for them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator
from typing import Protocol

from tritone.errors import TritoneError
from tritone.fatal import end_if_out_of_memory
from tritone.media.features import MediaFeatures
from tritone.messages import GenerateRequest
from tritone.models.omni.prompt import Ints, MediaPrompt
from tritone.stages.fair import FairWorker

log = logging.getLogger(__name__)


Done = Callable[[MediaPrompt | TritoneError], None]

MAX_HELD_BYTES = 2_000_000_000
"""Of features that wait or are being computed. Half an hour of audio takes 92 MB."""


class MediaTowers(Protocol):
    """:class:`tritone.models.omni.towers.Towers`."""

    def prompt(self, ids: Ints, media: MediaFeatures) -> MediaPrompt: ...


class MediaWorker:
    """First come, first served, one prompt at a time."""

    def __init__(self, towers: MediaTowers) -> None:
        self._towers = towers
        self._worker = FairWorker("prefill-media")
        self._lock = threading.Lock()
        self._held = 0

    def has_room(self, media: MediaFeatures) -> bool:
        """Whether these may wait, too; those of one request always may."""
        return not self._held or self._held + media.nbytes <= MAX_HELD_BYTES

    def compute(self, request: GenerateRequest, wanted: Callable[[], bool], done: Done) -> None:
        """Calls ``done`` in the worker's thread, unless the request is no longer ``wanted`` at its turn."""
        assert request.media is not None
        self._hold(request.media.nbytes)
        self._worker.submit(request.session, lambda: self._run(request, wanted, done))

    def stop(self) -> None:
        self._worker.stop()

    def _run(self, request: GenerateRequest, wanted: Callable[[], bool], done: Done) -> Generator[None, None, None]:
        yield from ()
        assert request.media is not None
        try:
            if wanted():
                self._see(request, request.media, done)
        finally:
            self._hold(-request.media.nbytes)

    def _hold(self, nbytes: int) -> None:
        with self._lock:
            self._held += nbytes

    def _see(self, request: GenerateRequest, media: MediaFeatures, done: Done) -> None:
        try:
            done(self._towers.prompt(request.ids, media))
        except Exception as error:  # one request's fault ends that request
            end_if_out_of_memory("prefill", error)
            log.exception("prefill")
            done(error if isinstance(error, TritoneError) else TritoneError(f"prefill: {error!r}"))
