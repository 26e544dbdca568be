"""The cancel board: a flag per session in shared memory, without allocation and without clean-up.

Triton shows a client's cancellation only to step calls of an ensemble that begin after it; the stage that computes never
sees it. So whichever stage sees it posts the session here, and every stage looks here. The word of a session holds the
session's own 63-bit number, so an old entry means nothing to a new session; of two live sessions that share a word the
later post wins, and the earlier is posted again by its next event or beat.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from tritone.pools import files

WORDS = 1 << 16
FILE = "cancelled.board"

FAILED = 1 << 63
"""Beside the number, which has 63 bits, of a session that a stage or the guard ended with an error."""

PURGE_SECONDS = 1.0
"""Triton drops a cancelled request that waits between two stages. What a stage holds of a session whose client has left and
that has been silent for so long will not be asked for any more."""
FAILED_PURGE_SECONDS = 30.0
"""The same of a session that failed: its error is on the way to a client that listens, and may take long on a busy machine."""


class CancelBoard:
    def __init__(self, directory: Path) -> None:
        """Map the board of a run directory; the first stage that looks for it makes it."""
        path = directory / FILE
        if not path.exists():
            _create(path)
        self._words = files.map_array(path, "u8", "r+")

    def post(self, session: int) -> None:
        """Its client has left."""
        self._words[session % WORDS] = session

    def fail(self, session: int) -> None:
        """Its error is on the way."""
        if not self._has_left(session):
            self._words[session % WORDS] = session | FAILED

    def is_cancelled(self, session: int) -> bool:
        """Whether work for it must stop, for either reason."""
        return int(self._words[session % WORDS]) & ~FAILED == session

    def is_over(self, session: int, silent: float) -> bool:
        """Whether nothing more will come for a session that has been silent for so many seconds."""
        return (silent > PURGE_SECONDS and self._has_left(session)) or (
            silent > FAILED_PURGE_SECONDS and self.is_cancelled(session)
        )

    def _has_left(self, session: int) -> bool:
        return int(self._words[session % WORDS]) == session


def _create(path: Path) -> None:
    # Stages start at the same time: the file appears whole, and the first one stays.
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        files.create(temporary, WORDS * files.WORD)
        os.link(temporary, path)
    except FileExistsError:
        pass
    finally:
        temporary.unlink(missing_ok=True)
