"""What the tests of both omni vocoders share."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tritone.models.omni.voicebox.box import OmniStream

Audio = npt.NDArray[np.float32]


def draw_codes(frames: int, groups: int, count: int, seed: int) -> npt.NDArray[np.int64]:
    """Codes [frames, groups], each below ``count``."""
    return np.random.default_rng(seed).integers(0, count, (frames, groups))


def decibels(wanted: Audio, got: Audio) -> float:
    """Signal-to-noise ratio of ``got``; infinite where they are equal. Lengths must be."""
    noise = np.square(wanted.astype(np.float64) - got).sum()
    return float(10 * np.log10(np.square(wanted.astype(np.float64)).sum() / noise)) if noise else np.inf


def streamed(stream: OmniStream, codes: npt.NDArray[Any], sizes: list[int]) -> list[Audio]:
    """One answer pushed in these sizes; the last push takes what is left."""
    pieces, start = [], 0
    for size in sizes:
        if start + size >= len(codes):
            break
        pieces.append(stream.push(codes[start : start + size], last=False))
        start += size
    pieces.append(stream.push(codes[start:], last=True))
    return pieces


def assert_no_click(pieces: list[Audio]) -> None:
    """The largest step at a border is not above the 99.9th percentile of the others."""
    pieces = [piece for piece in pieces if len(piece)]
    assert len(pieces) >= 2
    steps = np.abs(np.diff(np.concatenate(pieces)))
    borders = np.cumsum([len(piece) for piece in pieces])[:-1] - 1
    assert steps[borders].max() <= np.percentile(np.delete(steps, borders), 99.9)
