"""Answers as the hibari voice speaks them: frames, and when each unit of text begins."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tritone.models.codec.codec import GROUP, TEXT_WIDTH
from tritone.models.talker.text import ClauseText, TextReader
from tritone.models.voice.frames import Frames
from tritone.models.voice.pauses import trim_pauses
from tritone.models.voice.talker import HibariTalker


@dataclass(frozen=True, eq=False)
class SpokenClause:
    """text, its frames without a part of the pauses, and how many code frames come before each unit, int64 [U]."""

    text: ClauseText
    frames: Frames
    reads: npt.NDArray[np.int64]


class Teacher:
    """Speaks clauses with the hibari voice."""

    def __init__(self, talker: HibariTalker) -> None:
        self._talker = talker
        self._reader = TextReader()

    def speak(self, clause: str) -> SpokenClause | None:
        """None for a clause that has no sound, is too long, or whose alignment is not plain."""
        texts = self._reader.read(clause)
        if len(texts) != 1:
            return None
        whole = self._talker.speak(clause)
        bounds = _bounds(whole)
        if len(bounds) != len(texts[0].ids) + 1:
            return None
        frames = trim_pauses(whole)
        first = _first_frame(frames, whole)
        starts = np.clip(texts[0].starts(np.diff(bounds)) - first, 0, len(frames))
        # A unit is read before the code frame whose middle it reaches.
        count = -(-len(frames) // GROUP)
        return SpokenClause(texts[0], frames, np.minimum((starts + GROUP // 2) // GROUP, count))


def _bounds(frames: Frames) -> npt.NDArray[np.int64]:
    """Where the ids begin, and the end: the text feature repeats while an id lasts, and no two are alike."""
    text = frames.features[:, :TEXT_WIDTH]
    changes = np.flatnonzero(np.any(text[1:] != text[:-1], axis=1)) + 1
    return np.concatenate([[0], changes, [len(frames)]])


def _first_frame(part: Frames, whole: Frames) -> int:
    """Where a view of ``whole`` begins in it."""
    offset = part.f0.__array_interface__["data"][0] - whole.f0.__array_interface__["data"][0]
    return int(offset // whole.f0.itemsize)
