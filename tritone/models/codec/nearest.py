"""The nearest entry of a codebook."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tritone.models.voice.frames import Float32Array

_ROWS = 8192


def nearest(vectors: Float32Array, entries: Float32Array) -> npt.NDArray[np.int64]:
    """Index int64 [N] of the entry [K, D] closest to each vector [N, D], by Euclidean distance; the first of equals."""
    half_squares = 0.5 * np.square(entries).sum(axis=1)
    found = np.empty(len(vectors), np.int64)
    for start in range(0, len(vectors), _ROWS):
        part = slice(start, start + _ROWS)
        found[part] = (half_squares - vectors[part] @ entries.T).argmin(axis=1)
    return found
