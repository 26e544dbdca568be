"""From the decoder's five spectra to samples: one complex spectrum a frame, and its inverse transform in
pieces.

S = exp(lh) e^{i pi tanh(theta)} STFT(pulses) + exp(ln) noise + exp(lr) e^{i phi}, as in hibari's dsp.py
(Apache-2.0).
"""

from __future__ import annotations

import torch

_LARGEST_LOG_GAIN = 7.0


def combine(heads: torch.Tensor, pulses: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """The spectrum of each frame, complex64 [T, bins].

    heads: float32 [T, 5 * bins] from the decoder; pulses: complex64 [T, bins], the excitation's transform;
    noise: the same shape, unit variance.
    """
    harmonic, phase, hiss, free, free_phase = heads.chunk(5, dim=1)
    spectrum = _polar(_gain(harmonic), torch.tanh(phase) * torch.pi) * pulses
    spectrum += _gain(hiss) * noise
    spectrum += _polar(_gain(free), free_phase)
    return spectrum


def _gain(log_gain: torch.Tensor) -> torch.Tensor:
    return log_gain.clamp(max=_LARGEST_LOG_GAIN).exp_()


def _polar(magnitude: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    return torch.complex(magnitude * torch.cos(angle), magnitude * torch.sin(angle))


class OverlapAdd:
    """The inverse short-time Fourier transform of one segment, in pieces, for a window of four hops.

    Equal to torch.istft(center=True, length=F * hop) with a periodic Hann window. What it gives lags what it
    gets by two frames. The division by the summed squared windows tapers at the segment's ends.
    """

    OVERLAP = 4

    def __init__(self, n_fft: int) -> None:
        self._n_fft = n_fft
        self._hop = n_fft // self.OVERLAP
        self._window = torch.hann_window(n_fft)
        self._energy = self._window.square().reshape(self.OVERLAP, self._hop)
        self._tail = torch.zeros(self.OVERLAP - 1, self.OVERLAP, self._hop)  # frames whose quarters are still due
        self._received = 0  # frames

    def push(self, spectrum: torch.Tensor, last: bool) -> torch.Tensor:
        """complex64 [N > 0, bins] -> float32 [M * hop], the next M frames of sound; last ends the segment."""
        count = len(spectrum)
        frames = torch.fft.irfft(spectrum, n=self._n_fft) * self._window
        frames = frames.reshape(count, self.OVERLAP, self._hop)
        # Block j of the padded output sums quarter q of frame j - q; blocks 0 and 1 lie before the segment.
        first_block = self._received
        self._received += count
        beyond = self.OVERLAP - 2 if last else 0
        padded = torch.cat([self._tail, frames, frames.new_zeros(beyond, self.OVERLAP, self._hop)])
        self._tail = padded[1 - self.OVERLAP :].clone()
        blocks = count + beyond
        total = padded[3:, 0] + padded[2:-1, 1] + padded[1:-2, 2] + padded[:-3, 3]  # [blocks, hop]
        block = torch.arange(first_block, first_block + blocks)[:, None]
        index = block - torch.arange(self.OVERLAP)  # [blocks, 4], the frames summed
        present = ((index >= 0) & (index < self._received)).to(torch.float32)
        sound = total / (present @ self._energy).clamp(min=1e-11)
        return sound[max(0, 2 - first_block) :].reshape(-1)
