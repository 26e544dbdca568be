"""Codebooks by k-means."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tritone.models.codec.codec import ENTRIES, Codec, grouped
from tritone.models.codec.nearest import nearest
from tritone.models.voice.frames import Float32Array, Frames

ROUNDS = 25
SAMPLE = 40_000


def fit_codec(clauses: Sequence[Frames], seed: int = 0, progress: Callable[[], None] = lambda: None) -> Codec:
    """A codec for frames like those of ``clauses``, at least 1024 groups of four; the same for the same seed.

    ``progress`` is called 3 * ROUNDS times.
    """
    parts = [grouped(frames) for frames in clauses if len(frames)]
    text = _k_means(np.concatenate([part[0] for part in parts]), seed, progress)
    prosody = np.concatenate([part[1] for part in parts])
    first = _k_means(prosody, seed + 1, progress)
    rest = prosody - first[nearest(prosody, first)]
    return Codec(text, np.stack([first, _k_means(rest, seed + 2, progress)]))


def _k_means(vectors: Float32Array, seed: int, progress: Callable[[], None]) -> Float32Array:
    """ENTRIES centres [ENTRIES, D] of vectors [N, D]; an entry that is nobody's nearest moves to a vector drawn anew."""
    draw = np.random.default_rng(seed)
    centres: Float32Array = vectors[draw.choice(len(vectors), ENTRIES, replace=False)].copy()
    for _ in range(ROUNDS):
        sample = vectors[draw.permutation(len(vectors))[:SAMPLE]]
        owner = nearest(sample, centres)
        order = np.argsort(owner, kind="stable")
        owners, starts = np.unique(owner[order], return_index=True)
        sums = np.add.reduceat(sample[order], starts, axis=0)
        centres[owners] = sums / np.diff([*starts, len(sample)])[:, None].astype(np.float32)
        empty = np.setdiff1d(np.arange(ENTRIES), owners)
        centres[empty] = sample[draw.choice(len(sample), len(empty), replace=False)]
        progress()
    return centres
