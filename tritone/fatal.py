"""Faults that a stage's process does not outlive: it says why and ends, and the supervisor loads the stage again.

What one request did ends that request. What leaves the process in a state nobody has thought of (an exception in the loop
that drives an engine, memory that cannot be had) ends the process: its requests get an error within a second, where a
damaged stage would answer wrongly or not at all.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable

from tritone.errors import TritoneError

EXIT_STATUS = 70
WORDS = ("can't allocate memory", "Cannot allocate memory", "Failed to allocate memory", "bad_alloc")
"""Of torch and onnxruntime, which have no exception of their own for it."""

log = logging.getLogger(__name__)

before_end: list[Callable[[str], None]] = []
"""Called with the reason before the process ends."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory could not be had."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, (TritoneError, ValueError)):
        return False  # their texts may hold what a client sent
    return isinstance(error, MemoryError) or any(word in str(error) for word in WORDS)


def end_process(where: str, error: BaseException) -> None:
    """Ends this process now, whatever its threads do."""
    reason = f"{where}: out of memory: {error}" if is_out_of_memory(error) else f"{where}: {error!r}"
    try:
        log.critical("%s; this process ends", reason, exc_info=error)
        for call in before_end:
            call(reason)
    finally:
        os._exit(EXIT_STATUS)


def end_if_out_of_memory(where: str, error: BaseException) -> None:
    """For those who catch what one request raised."""
    if is_out_of_memory(error):
        end_process(where, error)
