"""Codes to acoustic frames and back, by vector quantisation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tritone.models.codec.nearest import nearest
from tritone.models.voice.frames import Float32Array, Frames

GROUP = 4
"""Acoustic frames (80 a second) in one code frame (20 a second)."""

CODEBOOKS = 3
ENTRIES = 1024
TEXT_WIDTH = 128
WIDTH = TEXT_WIDTH + 2

_PITCH_SCALE = 200.0  # Hz; brings f0 to the size of the other two
_WEIGHTS = np.array([1.0, 0.6, 1.2], np.float32)  # what an error of log-f0, energy and f0 counts
_LOWEST_PITCH = 60.0  # Hz; below, a mean of voiced and unvoiced frames is unvoiced

Codes = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Codec:
    """Codebook 0 holds four frames' text features; codebooks 1 and 2 hold their pitch and energy, 2 what 1 leaves over.

    text: float32 [1024, 4 * 128]. prosody: float32 [2, 1024, 4 * 3], log-f0, energy and f0 weighted. Raises ValueError for
    other shapes.
    """

    text: Float32Array
    prosody: Float32Array

    def __post_init__(self) -> None:
        found, expected = (self.text.shape, self.prosody.shape), ((ENTRIES, GROUP * TEXT_WIDTH), (2, ENTRIES, GROUP * 3))
        if found != expected:
            raise ValueError(f"codebooks have shapes {found}; they must be {expected}")

    def encode(self, frames: Frames) -> Codes:
        """int64 [ceil(F / 4), 3], each 0 to 1023, of F frames; a short last group repeats the last frame."""
        text, prosody = grouped(frames)
        first = nearest(prosody, self.prosody[0])
        second = nearest(prosody - self.prosody[0][first], self.prosody[1])
        return np.stack([nearest(text, self.text), first, second], axis=1)

    def decode(self, codes: Codes) -> Frames:
        """4 N frames of int64 codes [N, 3]: features float32 [4 N, 130], f0 float32 [4 N] in Hz.

        Each code frame stands for itself: pieces decode as the whole does. Raises IndexError for a code outside 0..1023.
        """
        text = self.text[codes[:, 0]].reshape(-1, TEXT_WIDTH)
        prosody = self.prosody[0][codes[:, 1]] + self.prosody[1][codes[:, 2]]
        prosody = prosody.reshape(-1, 3) / _WEIGHTS
        pitch = prosody[:, 2] * np.float32(_PITCH_SCALE)
        pitch[pitch < _LOWEST_PITCH] = 0.0
        return Frames(np.concatenate([text, prosody[:, :2]], axis=1), pitch)


def grouped(frames: Frames) -> tuple[Float32Array, Float32Array]:
    """Text features [N, 4 * 128] and weighted prosody [N, 4 * 3] of the groups of four; the last frame fills the last one."""
    missing = -len(frames) % GROUP
    features = np.concatenate([frames.features, np.repeat(frames.features[-1:], missing, axis=0)])
    pitch = np.concatenate([frames.f0, np.repeat(frames.f0[-1:], missing)]) / np.float32(_PITCH_SCALE)
    prosody = np.concatenate([features[:, TEXT_WIDTH:], pitch[:, None]], axis=1) * _WEIGHTS
    text = features[:, :TEXT_WIDTH].reshape(-1, GROUP * TEXT_WIDTH)
    return np.ascontiguousarray(text), np.ascontiguousarray(prosody.reshape(-1, GROUP * 3))
