"""A request's audio: WAV or FLAC bytes, or float32 samples, checked, mixed down and resampled once.

Files are decoded in blocks, each mixed and resampled at once, so that the memory needed is that of the result (115 MB for
half an hour at 16 kHz) whatever rate and channel count a small file claims.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import soundfile
import soxr

from tritone.errors import bad

MIN_SECONDS, MAX_SECONDS = 0.1, 1800
MIN_RATE, MAX_RATE = 1_000, 768_000
MAX_CHANNELS = 64
MAX_VALUES = 700_000_000
"""Frames x channels of one file: half an hour of stereo at 192 kHz. Bounds the time that a well compressed file can cost."""
MAX_MAGNITUDE = 32_768.0
"""Full scale is 1; powers of much larger numbers leave float32's range in the spectrogram."""
CONTAINERS = "WAV or FLAC"
BLOCK = 1 << 20
"""Values decoded at once."""
_OPEN_ENDED = 0xFFFFFFFF
"""What a writer that could not seek back leaves as the length of a WAV's data."""

Samples = npt.NDArray[np.float32]


@dataclass(frozen=True)
class AudioClip:
    """One audio, ready for the feature extractor. ``samples`` float32 [n], mono, at ``rate`` samples a second."""

    samples: Samples
    rate: int

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.rate


def decode_audio(field: str, data: bytes, rate: int) -> AudioClip:
    """The clip of a WAV or FLAC file's bytes, at ``rate``; channels are averaged. ``InvalidArgument`` names ``field``."""
    if not data:
        raise bad(field, "0 bytes", f"the bytes of a {CONTAINERS} file")
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        _check_wav_is_whole(field, data)
    elif data[:4] != b"fLaC":
        raise bad(field, data[:12], f"the bytes of a {CONTAINERS} file")
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            if file.frames > 1 << 62:
                raise bad(field, "a FLAC stream that does not state its length", "a file that does")
            _check_shape(field, file.frames, file.channels, file.samplerate)
            return AudioClip(_resampled(_mixed(field, _blocks(file)), file.samplerate, rate), rate)
    except soundfile.LibsndfileError as error:
        raise bad(field, error.error_string, f"a {CONTAINERS} file that is whole") from None


def clip_of_samples(field: str, samples: npt.NDArray[np.generic], sample_rate: int, rate: int) -> AudioClip:
    """The clip of ``samples``, float32 [n] or [n, channels], taken at ``sample_rate``; raises like :func:`decode_audio`."""
    if samples.dtype != np.float32 or samples.ndim not in (1, 2):
        raise bad(field, f"{samples.dtype} {list(samples.shape)}", "float32 of shape [samples] or [samples, channels]")
    frames = samples.reshape(len(samples), -1) if samples.size else samples.reshape(0, 1)
    _check_shape(field, len(frames), frames.shape[1], sample_rate)
    rows = max(1, BLOCK // frames.shape[1])
    blocks = (frames[start : start + rows].astype(np.float32) for start in range(0, len(frames), rows))
    return AudioClip(_resampled(_mixed(field, blocks), sample_rate, rate), rate)


def _check_shape(field: str, frames: int, channels: int, rate: int) -> None:
    if not MIN_RATE <= rate <= MAX_RATE:
        raise bad(f"{field} sample rate", rate, f"{MIN_RATE} to {MAX_RATE} Hz")
    _check_channels(field, channels)
    seconds = frames / rate
    if not MIN_SECONDS <= seconds <= MAX_SECONDS:
        raise bad(field, f"{frames} samples ({seconds:.3f} s)", f"{MIN_SECONDS} to {MAX_SECONDS} s")
    if frames * channels > MAX_VALUES:
        raise bad(field, f"{frames} samples of {channels} channels", f"samples x channels at most {MAX_VALUES}")


def _check_channels(field: str, channels: int) -> None:
    if not 1 <= channels <= MAX_CHANNELS:
        raise bad(f"{field} channels", channels, f"1 to {MAX_CHANNELS}")


def _check_wav_is_whole(field: str, data: bytes) -> None:
    """libsndfile plays what there is of a cut file; a request that lost its end must not be answered as if it had not."""
    at = 12
    while at + 8 <= len(data):
        name, size = data[at : at + 4], struct.unpack_from("<I", data, at + 4)[0]
        if name == b"data":
            if size != _OPEN_ENDED and at + 8 + size > len(data):
                raise bad(field, f"a WAV file with {len(data) - at - 8} of its {size} data bytes", "a file that is whole")
            return
        at += 8 + size + size % 2
    raise bad(field, f"{len(data)} bytes of a WAV file without samples", "a file that is whole")


def _blocks(file: soundfile.SoundFile) -> Iterator[Samples]:
    """float32 [frames, channels] blocks, exactly as many frames as the header states."""
    left = file.frames
    rows = max(1, BLOCK // file.channels)
    while left:
        block = file.read(min(left, rows), dtype="float32", always_2d=True)
        if not len(block):
            raise soundfile.LibsndfileError(0, f"{left} samples are missing: ")
        left -= len(block)
        yield block


def _mixed(field: str, blocks: Iterable[Samples]) -> Iterator[Samples]:
    """The mean of the channels, block by block. A number that is not finite, in any channel, is still none in the mean."""
    start = 0
    for block in blocks:
        mono = block[:, 0] if block.shape[1] == 1 else block.mean(axis=1, dtype=np.float32)
        wrong = ~(np.abs(mono) <= MAX_MAGNITUDE)
        if wrong.any():
            at = int(wrong.argmax())
            value = block[at][int((~(np.abs(block[at]) <= MAX_MAGNITUDE)).argmax())]
            allowed = f"finite samples of at most {MAX_MAGNITUDE:g} (full scale is 1)"
            raise bad(f"{field} sample {start + at}", float(value), allowed)
        start += len(mono)
        yield np.ascontiguousarray(mono)


def _resampled(blocks: Iterator[Samples], source: int, target: int) -> Samples:
    """All blocks in one array, at ``target`` samples a second."""
    if source == target:
        return np.concatenate(list(blocks))
    stream = soxr.ResampleStream(source, target, 1, dtype="float32", quality="HQ")
    parts = [stream.resample_chunk(block) for block in blocks]
    parts.append(stream.resample_chunk(np.zeros(0, np.float32), last=True))
    return np.concatenate(parts)


def samples_of_bytes(field: str, data: bytes, channels: int) -> Samples:
    """float32 [n, channels] of little-endian, interleaved float32 bytes."""
    _check_channels(field, channels)
    if len(data) % (4 * channels):
        raise bad(field, f"{len(data)} bytes", f"a whole number of float32 samples of {channels} channels")
    return np.frombuffer(data, "<f4").reshape(-1, channels)
