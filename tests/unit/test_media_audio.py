"""A request's audio becomes mono samples at one rate, or is refused by name before much is done."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest
from media_files import noise, sound_file, tone

from tritone.errors import InvalidArgument
from tritone.media.audio import MAX_CHANNELS, clip_of_samples, decode_audio, samples_of_bytes

RATE = 16_000


def refusal(data: bytes) -> str:
    with pytest.raises(InvalidArgument) as caught:
        decode_audio("here", data, RATE)
    return caught.value.message


@pytest.mark.parametrize(
    ("container", "subtype", "error"),
    [
        ("WAV", "PCM_16", 2**-15),
        ("WAV", "PCM_24", 2**-23),
        ("WAV", "FLOAT", 0),
        ("WAVEX", "FLOAT", 0),
        ("FLAC", "PCM_16", 2**-15),
    ],
)
def test_files_hold_their_samples(container: str, subtype: str, error: float) -> None:
    samples = noise(5000)
    clip = decode_audio("here", sound_file(samples, RATE, container, subtype), RATE)
    assert clip.samples.dtype == np.float32 and clip.rate == RATE
    assert np.abs(clip.samples - samples).max() <= error


@pytest.mark.parametrize("rate", [1000, 8000, 11_025, 22_050, 44_100, 48_000, 96_000, 768_000])
def test_any_rate_becomes_the_models(rate: int) -> None:
    heard = decode_audio("here", sound_file(tone(2, rate, 200), rate, subtype="FLOAT"), RATE)
    assert len(heard.samples) == 2 * RATE
    assert np.abs(heard.samples - tone(2, hertz=200))[1600:-1600].max() < 1e-3


@pytest.mark.parametrize("channels", [2, 6, MAX_CHANNELS])
def test_channels_are_averaged(channels: int) -> None:
    samples = tone(0.2, channels=channels)
    from_file = decode_audio("here", sound_file(samples, subtype="FLOAT"), RATE)
    given = clip_of_samples("here", samples, RATE, RATE)
    assert np.abs(from_file.samples - tone(0.2) / channels).max() < 1e-6
    assert np.array_equal(given.samples, from_file.samples)


def test_the_blocks_of_a_long_file_join_without_a_seam() -> None:
    # 48 s of stereo are more than one block.
    samples = tone(48, 44_100, channels=2)
    heard = decode_audio("here", sound_file(samples, 44_100, subtype="FLOAT"), RATE).samples
    assert len(heard) == 48 * RATE
    assert np.abs(heard - tone(48) / 2)[800:-800].max() < 1e-3


def test_a_small_file_of_many_samples_costs_the_memory_of_its_result() -> None:
    packed = sound_file(np.zeros((96_000 * 60, 2), np.float32), 96_000, "FLAC")
    assert len(packed) < 200_000
    tracemalloc.start()
    clip = decode_audio("here", packed, RATE)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert clip.seconds == 60
    assert peak < 20 << 20  # all of its samples would be 46 MB


@pytest.mark.parametrize(("seconds", "allowed"), [(0.0999, False), (0.1, True), (1800, True), (1800.001, False)])
def test_the_limits_of_length(seconds: float, allowed: bool) -> None:
    data = sound_file(np.zeros(round(seconds * 8000), np.float32), 8000, "FLAC")
    if allowed:
        assert abs(decode_audio("here", data, 8000).seconds - seconds) < 1e-3
    else:
        assert "0.1 to 1800 s" in refusal(data)


def test_what_is_cut_is_refused() -> None:
    wav, flac = sound_file(noise(8000)), sound_file(noise(8000), container="FLAC")
    wavs = [wav[:count] for count in (-1, len(wav) // 2, 50, 40, 20, 12)]
    for cut in wavs + [flac[:count] for count in (len(flac) // 2, 50, 4)]:
        assert refusal(cut).startswith("here: ")
    decode_audio("here", wav, RATE)


def test_a_wav_that_was_streamed_states_no_length() -> None:
    wav = bytearray(sound_file(noise(8000)))
    struct.pack_into("<I", wav, wav.index(b"data") + 4, 0xFFFFFFFF)
    assert len(decode_audio("here", bytes(wav), RATE).samples) == 8000


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e9])
def test_samples_that_are_no_sound_are_named(value: float) -> None:
    samples = np.zeros((3000, 2), np.float32)
    samples[1234, 1] = value
    message = refusal(sound_file(samples, subtype="FLOAT"))
    assert message.startswith(f"here sample 1234: {value!r} is not allowed; allowed: finite samples")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "here: '0 bytes' is not allowed; allowed: the bytes of a WAV or FLAC file"),
        (b"ID3\x04 some mp3 file", "here: b'ID3"),
        (sound_file(np.zeros(0, np.float32)), "here: '0 samples (0.000 s)'"),
        (sound_file(tone(0.5, 800), 800), "here sample rate: 800 is not allowed; allowed: 1000 to 768000 Hz"),
        (sound_file(tone(0.2, channels=MAX_CHANNELS + 1)), "here channels: 65 is not allowed; allowed: 1 to 64"),
    ],
)
def test_wrong_files_are_named(data: bytes, reason: str) -> None:
    assert refusal(data).startswith(reason)


def test_a_header_that_promises_too_much_is_refused_at_once() -> None:
    # A FLAC header of 64 hours; nothing of them is in the file.
    flac = bytearray(sound_file(noise(8000), container="FLAC"))
    flac[21:26] = bytes([flac[21] & 0xF0 | 0x0, *struct.pack(">I", 64 * 3600 * RATE)])
    assert "0.1 to 1800 s" in refusal(bytes(flac))


def test_raw_samples_need_a_whole_number_of_frames() -> None:
    raw = noise(8).tobytes()
    assert samples_of_bytes("here", raw, 4).shape == (2, 4)
    for channels in (0, -1, 65):
        with pytest.raises(InvalidArgument, match=f"here channels: {channels} is not allowed"):
            samples_of_bytes("here", raw, channels)
    with pytest.raises(InvalidArgument, match="'32 bytes' is not allowed; allowed: a whole number of float32 samples of 3"):
        samples_of_bytes("here", raw, 3)
    with pytest.raises(InvalidArgument, match=r"here: 'int16 \[3200\]'"):
        clip_of_samples("here", np.zeros(3200, np.int16), RATE, RATE)


def test_damaged_files_are_refusals_never_crashes() -> None:
    chance = np.random.default_rng(3)
    files = [sound_file(noise(4000)), sound_file(noise(4000), container="FLAC")]
    files.append(sound_file(tone(0.3, channels=2), subtype="FLOAT"))
    for number in range(300):
        data = bytearray(files[number % 3])
        for place in chance.integers(0, min(len(data), 200), 4):
            data[place] = chance.integers(0, 256)
        try:
            clip = decode_audio("here", bytes(data[: chance.integers(1, len(data) + 1)]), RATE)
        except InvalidArgument as error:
            assert error.message.startswith("here")
        else:
            assert np.isfinite(clip.samples).all() and 0 < clip.seconds < 1801
