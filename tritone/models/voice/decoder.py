"""hibari's ConvNeXt decoder in torch: frames in, five spectra a frame out; whole or in pieces.

A stream keeps, for each convolution, the last six frames of that convolution's own input. Every frame is
computed once, and a piece costs no repeated context.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tritone.models.voice.config import DECODER_FILE, VoiceConfig

_TAPS = 7
_REACH = _TAPS // 2


class Decoder:
    """The weights, shared by all streams and never written.

    dec_in Conv(W -> C, 7 taps); blocks x + gamma * pw2(gelu(pw1(norm(depthwise(x))))) with 7 taps; norm; head
    C -> 5 * bins. Raises ValueError when a tensor is missing or the sizes are not those of voice.json.
    """

    def __init__(self, directory: Path, config: VoiceConfig) -> None:
        weights = load_file(str(Path(directory) / DECODER_FILE))
        try:
            inlet = weights["dec_in.weight"]  # [C, W, 7]
            self.channels, self.width = inlet.shape[0], inlet.shape[1]
            self._inlet = (inlet.reshape(self.channels, -1).contiguous(), weights["dec_in.bias"])
            count = sum(name.endswith(".gamma") for name in weights)
            self._blocks = [_Block(weights, f"dec.{i}.", config.layer_norm_epsilon) for i in range(count)]
            self._norm = (weights["dec_norm.weight"], weights["dec_norm.bias"])
            self._head = (weights["head.weight"], weights["head.bias"])
        except KeyError as error:
            raise ValueError(f"{DECODER_FILE} has no tensor {error}; prepare the voice again") from error
        self.bins = self._head[0].shape[0] // 5
        self._epsilon = config.layer_norm_epsilon
        expected = (config.feature_width, config.n_fft // 2 + 1, config.receptive_field)
        found = (self.width, self.bins, _REACH * (1 + count))
        if found != expected:
            raise ValueError(f"width, bins and receptive field are {found}, voice.json says {expected}")

    @property
    def layers(self) -> int:
        """The number of convolutions: the inlet and one a block."""
        return 1 + len(self._blocks)

    def layer_input_width(self, layer: int) -> int:
        """Channels that convolution `layer` reads."""
        return self.width if layer == 0 else self.channels

    def layer(self, layer: int, window: torch.Tensor) -> torch.Tensor:
        """One convolution without padding, with all up to the next: [T + 6, channels in] -> [T, C]."""
        if layer == 0:
            taps = window.unfold(0, _TAPS, 1).reshape(len(window) - _TAPS + 1, -1)  # [T, W * 7]
            return _linear(taps, *self._inlet)
        return self._blocks[layer - 1](window)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, C] -> [T, 5 * bins]: log harmonic gain, its phase, log noise gain, log free gain, its phase."""
        normed = F.layer_norm(hidden, (self.channels,), *self._norm, self._epsilon)
        return _linear(normed, *self._head)


class _Block:
    def __init__(self, weights: dict[str, torch.Tensor], prefix: str, epsilon: float) -> None:
        part = {name.removeprefix(prefix): t for name, t in weights.items() if name.startswith(prefix)}
        self._depthwise = part["dw.weight"][:, 0].T.contiguous()  # [7, C]
        self._depthwise_bias = part["dw.bias"]
        self._norm = (part["norm.weight"], part["norm.bias"])
        self._widen = (part["pw1.weight"], part["pw1.bias"])
        gamma = part["gamma"]  # folded into the second linear layer
        self._narrow = (part["pw2.weight"] * gamma[:, None], part["pw2.bias"] * gamma)
        self._epsilon = epsilon

    def __call__(self, window: torch.Tensor) -> torch.Tensor:
        count, channels = len(window) - _TAPS + 1, window.shape[1]
        row = window.stride(0)
        taps = window.as_strided((count, _TAPS, channels), (row, row, 1))
        hidden = (taps * self._depthwise).sum(1) + self._depthwise_bias
        hidden = F.layer_norm(hidden, (channels,), *self._norm, self._epsilon)
        hidden = _linear(F.gelu(_linear(hidden, *self._widen)), *self._narrow)
        return window[_REACH:-_REACH] + hidden


class DecoderStream:
    """The decoder over one segment; what it gives lags what it gets by the receptive field of 27 frames."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._history = [torch.zeros(_REACH, decoder.layer_input_width(i)) for i in range(decoder.layers)]

    def push(self, features: torch.Tensor, last: bool) -> torch.Tensor:
        """float32 [N, W] -> float32 [M, 5 * bins], the next M frames; last ends the segment for good.

        Each convolution sees zeros beyond the segment's ends, as in the whole-segment model.
        """
        x = features
        for layer, history in enumerate(self._history):
            parts = [history, x, x.new_zeros(_REACH, x.shape[1])] if last else [history, x]
            window = torch.cat(parts)
            if len(window) < _TAPS:
                self._history[layer] = window
                x = window.new_zeros(0, self._decoder.channels)
                continue
            self._history[layer] = window[1 - _TAPS :].clone()
            x = self._decoder.layer(layer, window)
        return self._decoder.head(x)


_FEWEST_ROWS = 8


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """A linear layer whose every row is rounded alike however many rows there are.

    BLAS takes other kernels, with other rounding, for a few rows; padding keeps streamed audio equal to the
    whole segment's.
    """
    rows = len(x)
    if 0 < rows < _FEWEST_ROWS:
        return F.linear(F.pad(x, (0, 0, 0, _FEWEST_ROWS - rows)), weight, bias)[:rows]
    return F.linear(x, weight, bias)
