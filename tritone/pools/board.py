"""The cancel board: a flag per session in shared memory, without allocation and without clean-up.

Triton shows a client's cancellation only to step calls of an ensemble that begin after it; the stage that computes never
sees it. So whichever stage sees it posts the session here, and every stage looks here. The word of a session holds the
session's own 64-bit number, so an old entry means nothing to a new session; of two live sessions that share a word the
later post wins, and the earlier is posted again by its next event or beat.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from tritone.pools import files

WORDS = 1 << 16
FILE = "cancelled.board"

PURGE_SECONDS = 1.0
"""Triton drops a cancelled request that waits between two stages. What a stage holds of a cancelled session that has been
silent for so long will not be asked for any more."""


class CancelBoard:
    def __init__(self, directory: Path) -> None:
        """Map the board of a run directory; the first stage that looks for it makes it."""
        path = directory / FILE
        if not path.exists():
            _create(path)
        self._words = files.map_array(path, "u8", "r+")

    def post(self, session: int) -> None:
        self._words[session % WORDS] = session

    def is_cancelled(self, session: int) -> bool:
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
