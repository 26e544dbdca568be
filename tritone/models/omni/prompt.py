"""A prompt with media, as the thinker's engine takes it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True)
class MediaPrompt:
    """A prompt whose placeholders stand for audio and images.

    ids: int32 [T], placeholders expanded to one id for each embedding. positions: int32 [3, T] (time, height, width).
    delta: the answer's token i (the sequence's index n = T + i) has position n + delta in all three.
    places: int32 [M], ascending indexes of ids that embeddings replace. embeddings: float [M, hidden].
    visual: int32 [V], the places that are images'. deepstack: float [L, V, hidden], added to the output of the
    first L layers there.
    digest: bytes that differ where any medium differs; goes into the prefix cache's key.
    """

    ids: Ints
    positions: Ints
    delta: int
    places: Ints
    embeddings: Tensor
    visual: Ints
    deepstack: Tensor
    digest: bytes
