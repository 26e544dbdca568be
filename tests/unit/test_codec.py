"""Speech tokens: codes of frames, and frames of codes."""

from __future__ import annotations

import numpy as np
import pytest

from tritone.models.codec.codec import ENTRIES, Codec, Codes
from tritone.models.codec.fit import fit_codec
from tritone.models.codec.nearest import nearest
from tritone.models.voice.frames import Frames


@pytest.fixture(scope="module")
def codec() -> Codec:
    """Entries far apart in text, whole steps in the first prosody book, small ones in the second."""
    draw = np.random.default_rng(1)
    first = np.zeros((ENTRIES, 12), np.float32)
    first[:, 0] = np.arange(ENTRIES)
    first[:, 2] = 1.2  # f0 / 200 Hz, weighted
    second = np.zeros((ENTRIES, 12), np.float32)
    second[:, 3] = np.arange(ENTRIES)
    return Codec(draw.standard_normal((ENTRIES, 512)).astype(np.float32), np.stack([first, second]))


def codes_of(count: int) -> Codes:
    return np.random.default_rng(2).integers(0, ENTRIES, (count, 3))


def test_codes_come_back_from_their_own_frames(codec: Codec) -> None:
    codes = codes_of(20)
    frames = codec.decode(codes)
    assert len(frames) == 80 and frames.features.shape == (80, 130)
    assert np.array_equal(codec.encode(frames), codes)


def test_four_frames_hold_their_entries_unweighted(codec: Codec) -> None:
    frames = codec.decode(np.array([[7, 5, 9]]))
    assert np.array_equal(frames.features[:, :128].ravel(), codec.text[7])
    assert frames.features[0, 128] == 5 and frames.features[1, 128] == 9  # log-f0 weighs 1
    assert frames.f0[0] == pytest.approx(200) and frames.f0[1] == 0


def test_pieces_decode_as_the_whole(codec: Codec) -> None:
    codes = codes_of(9)
    whole = codec.decode(codes)
    parts = [codec.decode(codes[:2]), codec.decode(codes[2:])]
    assert np.array_equal(whole.features, np.concatenate([part.features for part in parts]))
    assert np.array_equal(whole.f0, np.concatenate([part.f0 for part in parts]))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_last_frame_fills_a_short_group(codec: Codec, count: int) -> None:
    frames = codec.decode(codes_of(2)).slice(0, 4 + count)
    filled = Frames(
        np.repeat(frames.features, [1] * (3 + count) + [5 - count], 0), np.repeat(frames.f0, [1] * (3 + count) + [5 - count])
    )
    assert np.array_equal(codec.encode(frames), codec.encode(filled))


def test_a_pitch_between_voiced_and_unvoiced_is_unvoiced(codec: Codec) -> None:
    low = np.zeros((2, ENTRIES, 12), np.float32)
    low[0, 0, 2::3] = np.float32(1.2) * np.array([59, 61, 30, 200], np.float32) / 200
    assert Codec(codec.text, low).decode(np.zeros((1, 3), int)).f0 == pytest.approx([0, 61, 0, 200])


def test_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(3, 3\)"):
        Codec(np.zeros((3, 3), np.float32), np.zeros((2, ENTRIES, 12), np.float32))


def test_nearest_is_the_smallest_distance_and_the_first_of_equals() -> None:
    draw = np.random.default_rng(3)
    vectors, entries = draw.standard_normal((50, 6)).astype(np.float32), draw.standard_normal((30, 6)).astype(np.float32)
    entries[20] = entries[4]
    distances = np.linalg.norm(vectors[:, None].astype(np.float64) - entries, axis=2)
    assert np.array_equal(nearest(vectors, entries), distances.argmin(axis=1))


def test_fitted_books_find_the_clusters_there_are() -> None:
    """1024 kinds of group, each seen twice with a little noise: the codec puts both of a kind into one entry."""
    draw = np.random.default_rng(4)
    kinds = draw.standard_normal((ENTRIES, 4, 131)).astype(np.float32) * 10
    seen = np.tile(kinds, (2, 1, 1)).reshape(-1, 131) + draw.normal(0, 0.01, (8 * ENTRIES, 131)).astype(np.float32)
    frames = Frames(seen[:, :130], seen[:, 130])
    codec = fit_codec([frames, Frames.empty(130)])
    error = codec.decode(codec.encode(frames)).features[:, :128] - frames.features[:, :128]
    assert np.square(error).mean() < 0.35 * np.square(frames.features[:, :128]).mean()  # some entries begin on the same kind
    again = fit_codec([frames])
    assert np.array_equal(again.text, codec.text) and np.array_equal(again.prosody, codec.prosody)
