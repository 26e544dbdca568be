"""Frames at another pace: what each place must be, in any pieces."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tritone.models.codec.stretch import Stretch
from tritone.models.voice.frames import Frames


def ramp(count: int) -> Frames:
    """A first feature that counts, and the pitch 100 + 10 i with a gap."""
    features = np.zeros((count, 2), np.float32)
    features[:, 0] = np.arange(count)
    f0 = 100 + 10 * np.arange(count, dtype=np.float32)
    f0[4:6] = 0
    return Frames(features, f0)


def stretched(speed: float, frames: Frames, cuts: list[int]) -> Frames:
    stretch = Stretch(speed, 2)
    borders = [0, *cuts, len(frames)]
    parts = [
        stretch.push(frames.slice(start, stop), stop == len(frames) and number == len(borders) - 2)
        for number, (start, stop) in enumerate(itertools.pairwise(borders))
    ]
    return Frames.concatenate(parts, 2)


@pytest.mark.parametrize(("speed", "count"), [(0.5, 20), (0.7, 15), (0.8, 13), (1.0, 10), (1.3, 8), (2.0, 5)])
def test_every_frame_is_that_of_its_place(speed: float, count: int) -> None:
    made = stretched(speed, ramp(10), [])
    assert len(made) == count
    places = np.minimum(np.arange(len(made)) * speed, 9)
    np.testing.assert_allclose(made.features[:, 0], places, rtol=0, atol=1e-5)
    voiced = (places <= 3) | (places >= 6)
    np.testing.assert_allclose(made.f0[voiced], 100 + 10 * places[voiced], rtol=1e-6)
    silent = (places > 3.5) & (places < 5.5)
    assert not made.f0[silent].any()


@pytest.mark.parametrize("speed", [0.5, 0.73, 1.0, 1.9])
def test_pieces_and_a_second_segment_change_nothing(speed: float) -> None:
    whole = stretched(speed, ramp(10), [])
    for cuts in ([1, 2, 3, 4, 5, 6, 7, 8, 9], [4, 8], [9], [3, 3, 10]):
        made = stretched(speed, ramp(10), cuts)
        np.testing.assert_array_equal(made.features, whole.features)
        np.testing.assert_array_equal(made.f0, whole.f0)
    stretch = Stretch(speed, 2)
    for _ in range(2):
        np.testing.assert_array_equal(stretch.push(ramp(10), True).features, whole.features)


def test_a_segment_without_frames_gives_none() -> None:
    assert len(Stretch(0.5, 2).push(Frames.empty(2), True)) == 0


def test_places_are_not_moved_by_rounding() -> None:
    """9 / 0.9 is above 10 for a computer."""
    made = stretched(0.9, ramp(9), [3])
    assert len(made) == 10
    np.testing.assert_array_equal(stretched(0.1, ramp(10), []).features[::10], ramp(10).features)


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan")])
def test_no_pace_is_refused(speed: float) -> None:
    with pytest.raises(ValueError, match="speed"):
        Stretch(speed, 2)
