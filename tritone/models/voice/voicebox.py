"""The VoiceBox: acoustic frames in, 24 kHz samples out, chunk by chunk without a seam."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from tritone.models.voice.chunks import block_frames
from tritone.models.voice.config import VoiceConfig
from tritone.models.voice.decoder import Decoder, DecoderStream
from tritone.models.voice.frames import Float32Array, Frames
from tritone.models.voice.source import PulseSource, frame_noise
from tritone.models.voice.spectrum import OverlapAdd, combine
from tritone.options import AUDIO_MODES


class VoiceBox:
    """The loaded voice, shared by all sessions of a process; the sessions' states are VoiceBoxStreams.

    threads sets torch's intra-op threads, which is a setting of the whole process.
    Raises FileNotFoundError or ValueError when the directory holds no readable voice.
    """

    def __init__(self, directory: Path, threads: int = 1) -> None:
        if threads < 1:
            raise ValueError(f"threads is {threads}; it must be at least 1")
        torch.set_num_threads(threads)
        self.config = VoiceConfig.load(directory)
        if self.config.n_fft != OverlapAdd.OVERLAP * self.config.hop:
            raise ValueError(f"n_fft is {self.config.n_fft}; it must be four times hop, {self.config.hop}")
        self.decoder = Decoder(directory, self.config)

    @property
    def sample_rate(self) -> int:
        """Samples a second."""
        return self.config.sample_rate

    @property
    def hop(self) -> int:
        """Samples a frame."""
        return self.config.hop

    def oneshot(self, frames: Frames, seed: int, segment: int = 0) -> Float32Array:
        """A whole segment at once, float32 [F * hop]: what the chunks of a stream add up to.

        segment is the index of this segment among those of its stream that had frames.
        """
        check_frames(frames, self.config.feature_width)
        if not len(frames):
            return _silence()
        return _Segment(self, seed, segment).run(frames.features, frames.f0, last=True)

    def warm_up(self) -> None:
        """Runs each mode on made-up frames, so that the first request does not pay for lazy initialisation."""
        for mode in AUDIO_MODES:
            count = block_frames(0, mode) + block_frames(1, mode)
            frames = Frames(np.zeros((count, self.config.feature_width), np.float32), np.full(count, 200, np.float32))
            VoiceBoxStream(self, seed=0, mode=mode).push(frames, last=True)


class VoiceBoxStream:
    """The running sound of one session. Not thread-safe; the streams of one VoiceBox are independent of one
    another.

    A clause is a segment, synthesised independently of its neighbours. Within a segment the result does not
    depend on how the frames were cut into pushes, not in one bit: frames are computed in blocks that start at
    fixed places of the segment (see `chunks.block_frames`). It differs from `VoiceBox.oneshot` by at most
    1e-4 at a peak of about 1.
    """

    def __init__(self, box: VoiceBox, seed: int, mode: str = "latency") -> None:
        self._box, self._seed, self._mode = box, seed, mode
        self._segment_index = 0
        self._segment, self._block_index = _Segment(box, seed, 0), 0
        self._features = np.zeros((0, box.config.feature_width), np.float32)  # frames not yet computed
        self._f0 = np.zeros(0, np.float32)

    def push(self, frames: Frames, last: bool) -> Float32Array:
        """Adds frames to the segment and returns the samples that became certain, float32 [N * hop], perhaps
        none.

        last ends the segment: what remains of it is returned, so that it has given frames x hop samples in
        all, and the next push begins another. An ended segment without a frame gives nothing and does not
        count. Raises ValueError, and leaves the stream as it was, for frames of another width or with a value
        that is not finite.
        """
        check_frames(frames, self._box.config.feature_width)
        self._features = np.concatenate([self._features, frames.features])
        self._f0 = np.concatenate([self._f0, frames.f0])
        sound = []
        while len(self._f0) >= (block := block_frames(self._block_index, self._mode)):
            sound.append(self._compute(block, last=False))
        if last:
            if self._block_index or len(self._f0):
                sound.append(self._compute(len(self._f0), last=True))
                self._segment_index += 1
            self._segment, self._block_index = _Segment(self._box, self._seed, self._segment_index), 0
        return np.concatenate(sound) if sound else _silence()

    def _compute(self, count: int, last: bool) -> Float32Array:
        sound = self._segment.run(self._features[:count], self._f0[:count], last)
        self._features, self._f0 = self._features[count:], self._f0[count:]
        self._block_index += 1
        return sound


class _Segment:
    """The state of one segment: decoder, pulse train, noise position and overlap-add."""

    def __init__(self, box: VoiceBox, seed: int, segment: int) -> None:
        config = box.config
        self._decoder = DecoderStream(box.decoder)
        self._source = PulseSource(config.sample_rate, config.hop, config.n_fft)
        self._overlap = OverlapAdd(config.n_fft)
        self._bins = box.decoder.bins
        self._seed, self._segment, self._frame = seed, segment, 0

    @torch.inference_mode()
    def run(self, features: Float32Array, f0: Float32Array, last: bool) -> Float32Array:
        heads = self._decoder.push(torch.from_numpy(np.array(features)), last)
        self._source.push(f0, last)
        count = len(heads)
        if count == 0:
            return _silence()
        pulses = torch.fft.rfft(torch.from_numpy(self._source.take(count)))
        noise = torch.from_numpy(frame_noise(self._seed, self._segment, self._frame, count, self._bins))
        self._frame += count
        sound: Float32Array = self._overlap.push(combine(heads, pulses, noise), last).numpy()
        return sound


def check_frames(frames: Frames, width: int) -> None:
    """Raises ValueError unless the frames have this width, are float32 and finite."""
    if frames.features.shape[1] != width:
        raise ValueError(f"features have width {frames.features.shape[1]}, this voice takes {width}")
    for name, values in (("features", frames.features), ("f0", frames.f0)):
        if values.dtype != np.float32:
            raise ValueError(f"{name} have dtype {values.dtype}, float32 is needed")
        if not np.isfinite(values).all():
            raise ValueError(f"{name} hold a value that is not finite")


def _silence() -> Float32Array:
    return np.zeros(0, np.float32)
