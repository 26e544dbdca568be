"""Which of the Thinker's tokens a unit of text was written by."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tritone.models.talker.text import SPACE, ClauseText


class TokenTrack:
    """Counts the letters and figures of an answer on both its sides: as the Thinker's tokens, and as clauses.

    A clause holds the letters and figures of plain text in order, though not its marks, so they tell the tokens.
    """

    def __init__(self) -> None:
        self._owners: list[int] = []  # the token of each letter that no clause has taken
        self._tokens = 0

    def feed(self, text: str, tokens: int) -> None:
        """Further text, written by so many further tokens; what one of several wrote is taken to be an even part."""
        letters = _letters(text)
        self._owners += [self._tokens + index * tokens // letters for index in range(letters if tokens else 0)]
        self._tokens += tokens

    def take(self, clause: str, texts: Sequence[ClauseText]) -> list[npt.NDArray[np.int64]]:
        """For each unit of the next clause the index of its word's last token, int64 [U]; -1 where none is known.

        ``texts`` are what is read of the clause: one, or the pieces of a long one.
        """
        ends = np.cumsum([_letters(word) for word in clause.split()] or [0])
        known = np.array([*self._owners[: ends[-1]], -1], np.int64)
        del self._owners[: ends[-1]]
        words = [np.cumsum(text.ids == SPACE) for text in texts]
        total = sum(own[-1] + 1 for own in words)  # a number has more of them than the clause
        found, before = [], 0
        for text, own in zip(texts, words, strict=True):
            word = (before + own[text.picks]) * len(ends) // total
            found.append(known[np.minimum(np.maximum(ends[word] - 1, 0), len(known) - 1)])
            before += own[-1] + 1
        return found


def _letters(text: str) -> int:
    return sum(character.isalnum() for character in text)
