"""The units of text that a Talker reads: phonemes, each with the marks before it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tritone.models.voice.phonemes import Phonemiser, pieces

SPACE = 16
"""The id between two words' phonemes, in hibari's vocabulary."""

LONGEST_CLAUSE = 200
"""Ids of a clause that the Talker was trained on, at most."""

_LEADING = " ˈˌ"


@dataclass(frozen=True, eq=False)
class ClauseText:
    """One clause: ids int64 [L] of all its phonemes and marks; picks int64 [U], ascending indexes of those that are units.

    A space or a stress mark belongs to the unit after it, which begins where the one before ends. The end marks around the
    clause are units too: its pauses.
    """

    ids: npt.NDArray[np.int64]
    picks: npt.NDArray[np.int64]

    def starts(self, durations: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """When each unit begins, int64 [U], given how long each id lasts, int64 [L]."""
        ends = np.cumsum(durations)
        return np.concatenate([[0], ends[self.picks[:-1]]])


class TextReader:
    """Clauses to units. Raises ImportError without the hibari-tts package. Not thread-safe."""

    def __init__(self) -> None:
        self._phonemiser = Phonemiser()
        self._leading = [self._phonemiser.ids(f"a{mark}")[2] for mark in _LEADING]

    def read(self, clause: str, longest: int = LONGEST_CLAUSE) -> list[ClauseText]:
        """The units of a clause, in pieces of at most ``longest`` ids; none when nothing can be pronounced."""
        texts = []
        for piece in pieces(self._phonemiser.phonemes(clause), longest - 2):
            ids = np.array(self._phonemiser.ids(piece), np.int64)
            if len(ids):
                texts.append(ClauseText(ids, np.flatnonzero(~np.isin(ids, self._leading))))
        return texts
