"""How far BigVGAN sees: the mel frames on either side that a sample depends on."""

from __future__ import annotations

from typing import Any

_EDGE = 3  # inputs on either side that the first and the last convolution, of seven taps, see
_ACTIVATION = 5  # and an anti-aliased activation: twelve taps up to twice the rate, twelve down again


def reach(config: Any) -> int:
    """Mel frames before or after its own that a sample of ``Qwen2_5OmniToken2WavBigVGANModel`` depends on, at most.

    Walks back from one frame's samples, [low, high] in the rate of each layer. Outside the reach no sample changes in one
    bit, so a window with that much context gives the samples of the whole, but for rounding.
    """
    hop = 1
    for rate in config.upsample_rates:
        hop *= rate
    widest = max(
        sum((taps - 1) // 2 * (dilation + 1) + 2 * _ACTIVATION for dilation in dilations)
        for taps, dilations in zip(config.resblock_kernel_sizes, config.resblock_dilation_sizes, strict=True)
    )
    low, high = -_EDGE - _ACTIVATION, hop - 1 + _EDGE + _ACTIVATION
    for rate, taps in reversed(list(zip(config.upsample_rates, config.upsample_kernel_sizes, strict=True))):
        padding = (taps - rate) // 2
        low, high = low - widest + padding, high + widest + padding
        low, high = -((taps - 1 - low) // rate), high // rate
    return max(_EDGE - low, high + _EDGE)
