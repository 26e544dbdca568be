"""Shortens the silence that hibari puts around every clause, which it takes for a whole utterance."""

from __future__ import annotations

import numpy as np

from tritone.models.voice.frames import Frames

_TEXT_FEATURES = 128  # the first columns: one vector a phoneme, repeated while it lasts
_SENTENCE_ENDS = (".", "!", "?", "…")
_CLOSERS = "\"'”’)"


def trim_pauses(frames: Frames) -> Frames:
    """The frames without a part of the silence at their ends, as a view.

    Dropped are the first half of the opening pause, for an earlier sound (about 0.15 s at speed 1), and, when the clause
    does not end a sentence, the last pause with half of what precedes it, lest a comma sound like a full stop. What is left
    around the words is still silent; the rest of the opening pause holds the first sound's approach.
    """
    if len(frames) == 0:
        return frames
    text = frames.features[:, :_TEXT_FEATURES]
    changes = np.flatnonzero(np.any(text[1:] != text[:-1], axis=1)) + 1
    if len(changes) < 3:
        return frames
    stop = len(frames)
    if not frames.text.rstrip(_CLOSERS).endswith(_SENTENCE_ENDS):
        stop = int(changes[-2] + (changes[-1] - changes[-2] + 1) // 2)
    # Unvoiced frames advance the pulse train by half a period each (40 Hz at 80 frames a second): an even number of them
    # leaves the phase of the voice, and so the waveform of the words, as it was.
    return frames.slice(int(changes[0]) // 4 * 2, stop)
