"""What the Talker hands to the VoiceBox."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Frames:
    """Consecutive acoustic frames of one clause, 80 a second.

    features: float32 [F, W], the decoder's input (W is 130 for hibari: 128 of text, log-f0, energy).
    f0: float32 [F], pitch in Hz; 0 (below 40) where unvoiced.
    text: the clause these frames speak; kept through :meth:`slice` so that a listener's position can be
    mapped to text. Raises ValueError when the two lengths differ or the ranks are wrong.
    """

    features: Float32Array
    f0: Float32Array
    text: str = ""

    def __post_init__(self) -> None:
        if self.features.ndim != 2 or self.f0.ndim != 1 or len(self.features) != len(self.f0):
            shapes = f"{self.features.shape} and {self.f0.shape}"
            raise ValueError(f"features and f0 have shapes {shapes}; they must be [F, W] and [F]")

    def __len__(self) -> int:
        return len(self.f0)

    def slice(self, start: int, stop: int) -> Frames:
        """Frames start..stop-1, as views."""
        return Frames(self.features[start:stop], self.f0[start:stop], self.text)

    @staticmethod
    def empty(width: int, text: str = "") -> Frames:
        """No frames: what an unspeakable clause gives."""
        return Frames(np.zeros((0, width), np.float32), np.zeros(0, np.float32), text)

    @staticmethod
    def concatenate(parts: list[Frames], width: int, text: str = "") -> Frames:
        """The parts one after the other, as one clause."""
        if not parts:
            return Frames.empty(width, text)
        return Frames(np.concatenate([p.features for p in parts]), np.concatenate([p.f0 for p in parts]), text)
