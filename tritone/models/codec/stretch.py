"""Acoustic frames at another pace, while they arrive."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tritone.models.voice.frames import Frames

Float64Array = npt.NDArray[np.float64]


class Stretch:
    """Frame ``i`` of what it gives is the one at ``i * speed`` of what it takes: linear between two frames, but of the two
    pitches the nearer one where either has none.

    Each segment is stretched from its beginning; the frames do not depend on how they were cut into pushes.
    """

    def __init__(self, speed: float, width: int) -> None:
        """``width`` is that of the features. Raises ValueError unless speed is above 0."""
        if not speed > 0:
            raise ValueError(f"speed is {speed}; it must be above 0")
        self._speed = speed
        self._empty = Frames.empty(width)
        self._held = self._empty
        """Frames that are still needed, the last of ``_taken``."""
        self._taken = self._given = 0
        """Frames of the segment, in and out."""

    def push(self, frames: Frames, last: bool) -> Frames:
        """Further frames [N] of a segment; those that are certain. ``last`` ends the segment: N frames in all become
        ceil(N / speed)."""
        if self._speed == 1.0:
            return frames
        held = Frames.concatenate([self._held, frames], frames.features.shape[1])
        self._taken += len(frames)
        places = self._places(int(self._taken / self._speed) + 2)
        # Without the frame after it a place is certain only where it falls on a frame.
        places = places[places < self._taken if last else places <= self._taken - 1]
        made = _between(held, places - (self._taken - len(held)))
        self._given += len(made)
        next_place = min(self._taken, int(self._places(self._given + 1)[0]))
        self._held = held.slice(len(held) - (self._taken - next_place), len(held))
        if last:
            self._held, self._taken, self._given = self._empty, 0, 0
        return made

    def _places(self, stop: int) -> Float64Array:
        """Those of the frames from the next one to ``stop`` - 1; rounded, for 10 times 0.9 must be 9."""
        return np.round(np.arange(self._given, stop) * self._speed, 6)


def _between(frames: Frames, places: Float64Array) -> Frames:
    """The frames at ``places`` float64 [M], from 0; behind the last frame is the last."""
    if not len(places):
        return frames.slice(0, 0)
    left = places.astype(np.int64)
    right = np.minimum(left + 1, len(frames) - 1)
    share = (places - left).astype(np.float32)
    features = frames.features[left] * (1 - share[:, None]) + frames.features[right] * share[:, None]
    before, after = frames.f0[left], frames.f0[right]
    nearer = np.where(share < 0.5, before, after)
    f0 = np.where((before > 0) & (after > 0), before * (1 - share) + after * share, nearer)
    return Frames(features, f0.astype(np.float32))
