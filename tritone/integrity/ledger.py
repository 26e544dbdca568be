"""What an engine's process tells the auditor about itself: a row of words in shared memory beside its pool."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tritone.integrity.kinds import KINDS
from tritone.pools import files

STATES = ("free", "used", "cached", "leased")
FIELDS = ("steps", "checks", "pages_checked", "last_check_ns", *STATES, *KINDS)
_AT = {name: number for number, name in enumerate(FIELDS)}


@dataclass(frozen=True)
class Reading:
    """One look at a ledger. ``last_check`` in seconds of the monotonic clock, 0 before the first."""

    steps: int
    checks: int
    pages_checked: int
    last_check: float
    blocks: dict[str, int]
    mismatches: dict[str, int]


class Ledger:
    """``<pool>.ledger``: one uint64 per entry of :data:`FIELDS`, written by the pool's owner only. A word is written in one
    piece; two words may be of different moments."""

    def __init__(self, directory: Path, pool: str, *, owner: bool = False) -> None:
        path = directory / f"{pool}.ledger"
        if owner:
            # A reader of an earlier owner keeps its old file.
            path.unlink(missing_ok=True)
            files.create(path, len(FIELDS) * files.WORD)
        # A memoryview costs a tenth of an array where single words are set at every step.
        self._words = files.map_array(path, "u8", "r+" if owner else "r").data

    def checked(self, pages: int) -> None:
        """One check of ``pages`` pages was run."""
        words = self._words
        words[_AT["checks"]] += 1
        words[_AT["pages_checked"]] += pages
        words[_AT["last_check_ns"]] = time.monotonic_ns()

    def stepped(self, steps: int) -> None:
        """The engine has computed so many steps since its start."""
        self._words[_AT["steps"]] = steps

    def blocks(self, states: Mapping[str, float]) -> None:
        for state in STATES:
            self._words[_AT[state]] = int(states[state])

    def mismatch(self, kind: str) -> None:
        self._words[_AT[kind]] += 1

    def read(self) -> Reading:
        words = dict(zip(FIELDS, self._words.tolist(), strict=True))
        return Reading(
            steps=words["steps"],
            checks=words["checks"],
            pages_checked=words["pages_checked"],
            last_check=words["last_check_ns"] / 1e9,
            blocks={state: words[state] for state in STATES},
            mismatches={kind: words[kind] for kind in KINDS},
        )
