"""95 % intervals by drawing documents or items anew."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ROUNDS = 2000
Values = NDArray[np.float64]


@dataclass(frozen=True)
class Figure:
    """A figure and the ends of its 95 % interval (percentiles of the bootstrap)."""

    value: float
    low: float
    high: float


def estimate(statistic: Callable[..., Values], *columns: list[float] | list[int] | Values, seed: int, name: str) -> Figure:
    """``statistic`` of ``columns``, which hold one number for each document or item.

    It gets arrays [..., documents] and works along their last axis. Drawn are whole documents, the same ones in all columns:
    a difference to the reference is paired. ``seed`` and ``name`` fix the draws; columns of another length get others.
    """
    arrays = [np.asarray(column, np.float64) for column in columns]
    count = arrays[0].shape[-1]
    draw = np.random.default_rng([seed, zlib.crc32(name.encode()), count])
    chosen = draw.integers(0, count, (ROUNDS, count))
    drawn = statistic(*(array[chosen] for array in arrays))
    low, high = np.percentile(drawn, [2.5, 97.5])
    return Figure(float(statistic(*arrays)), float(low), float(high))
