"""The excitation of a voice: a pulse train that follows the pitch, and noise, both by frame position.

The formulas are those of hibari's dsp.py (Apache-2.0); here they run on chunks and give the same samples for
any chunking.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tritone.models.voice.frames import Float32Array

VOICED_FROM = 40.0  # Hz; below, a sample is unvoiced and silent
HIGHEST_HARMONIC = 11000.0  # Hz
_SINGULAR = 2e-3  # |2 sin(t/2)| below which the pulse formula takes its limit


class PulseSource:
    """The pulse train of one segment as windowed frames for a short-time Fourier transform.

    Frame k is the train's samples [k*hop - n_fft/2, k*hop + n_fft/2), reflected at the segment's ends, times
    a periodic Hann window over n_fft/4 (a unit cosine then peaks at 1). Frames lag the pitch: take(n) needs
    two more frames of pitch than it returns, three for the first, unless the segment has ended.
    """

    def __init__(self, sample_rate: int, hop: int, n_fft: int) -> None:
        self._rate, self._hop, self._half = sample_rate, hop, n_fft // 2
        hann = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(n_fft) / n_fft)).astype(np.float32)
        self._window = hann / np.float32(n_fft / 4)
        # Linear interpolation (align_corners=False): sample j of frame k lies at k + (j + 0.5)/hop - 0.5.
        self._toward_next = (((np.arange(hop) + 0.5) / hop - 0.5) % 1.0).astype(np.float32)
        self._pitch = np.zeros(0, np.float32)  # Hz, from the frame before the first one not yet sounded
        self._sounded = 0  # frames turned into samples
        self._phase = 0.0  # sum of Hz over the samples so far; never wrapped, to equal one long sum
        self._samples = np.zeros(0, np.float32)  # from the first sample frame _taken needs
        self._taken = 0  # frames handed out
        self._known = 0  # frames of pitch received
        self._ended = False

    def push(self, f0: Float32Array, last: bool) -> None:
        """Adds the pitch of further frames, Hz, float32 [N]; last ends the segment."""
        if self._known == 0 and len(f0):
            self._pitch = f0[:1]  # the pitch before the first frame is that of the first frame
        self._pitch = np.concatenate([self._pitch, f0])
        self._known += len(f0)
        self._ended = last
        if last and self._known:
            self._pitch = np.concatenate([self._pitch, self._pitch[-1:]])

    def take(self, count: int) -> Float32Array:
        """The next `count` windowed frames, float32 [count, n_fft]; the pitch they need must be there."""
        first, stop = self._taken, self._taken + count
        overlap = self._half // self._hop
        target = max(stop - 1 + overlap, overlap + 1 if first == 0 else 0)
        self._sound(min(target, self._known) if self._ended else target)
        begins, ends = first == 0, self._ended and stop - 1 + overlap > self._known
        if begins or ends:
            self._samples = np.pad(self._samples, (begins * self._half, ends * self._half), mode="reflect")
        views = np.lib.stride_tricks.sliding_window_view(self._samples, 2 * self._half)[:: self._hop][:count]
        frames: Float32Array = views * self._window
        self._samples = self._samples[count * self._hop :]
        self._taken = stop
        return frames

    def _sound(self, target: int) -> None:
        """Makes samples up to the end of frame `target` - 1."""
        count = target - self._sounded
        if count <= 0:
            return
        pitch = self._pitch[: count + 2, None]
        half = self._hop // 2
        up, down = self._toward_next, np.float32(1.0) - self._toward_next
        early = pitch[:-2] * down[:half] + pitch[1:-1] * up[:half]
        late = pitch[1:-1] * down[half:] + pitch[2:] * up[half:]
        hertz = np.concatenate([early, late], axis=1).reshape(-1)
        voiced = hertz > VOICED_FROM
        hertz = np.maximum(hertz, np.float32(VOICED_FROM))
        # The carried sum is the first addend: the additions are those of one sum over the whole segment.
        sums = np.cumsum(np.concatenate([[self._phase], hertz]), dtype=np.float64)[1:]
        self._phase = float(sums[-1])
        self._samples = np.concatenate([self._samples, pulse_train(sums / self._rate, hertz, voiced)])
        self._pitch = self._pitch[count:]
        self._sounded = target


def pulse_train(cycles: npt.NDArray[np.float64], hertz: Float32Array, voiced: npt.NDArray[np.bool_]) -> Float32Array:
    """Every harmonic below 11 kHz at unit amplitude; 0 where unvoiced.

    cycles: float64 [N], the phase in periods; hertz: float32 [N], the pitch; voiced: bool [N]. Returns
    float32 [N]. Dirichlet's kernel: sum_{h<=H} cos(h t) = sin((H + 1/2) t) / (2 sin(t/2)) - 1/2.
    """
    angle = ((cycles % 1.0) * (2 * np.pi)).astype(np.float32)
    order = np.floor(np.float32(HIGHEST_HARMONIC) / hertz) + np.float32(0.5)
    below = np.sin(angle * np.float32(0.5)) * np.float32(2.0)
    singular = np.abs(below) <= _SINGULAR
    below[singular] = 1.0
    train: Float32Array = np.sin(order * angle) / below
    train[singular] = order[singular]
    train -= np.float32(0.5)
    train[~voiced] = 0.0
    return train


def frame_noise(seed: int, segment: int, first: int, count: int, bins: int) -> npt.NDArray[np.complex64]:
    """Complex noise, complex64 [count, bins], of unit variance in either part, for frames first, first + 1,
    ...

    Each frame has its own place in a Philox stream keyed by (seed, segment), so its noise depends on nothing
    else. seed and segment: integers, taken modulo 2**64.
    """
    key = np.array([seed % 2**64, segment % 2**64], np.uint64)
    noise = np.empty((count, 2 * bins), np.float32)
    for row in range(count):
        counter = np.array([0, first + row, 0, 0], np.uint64)
        generator = np.random.Generator(np.random.Philox(key=key, counter=counter))
        generator.standard_normal(dtype=np.float32, out=noise[row])
    return noise.view(np.complex64)
