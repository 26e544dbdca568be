"""AWQ: input channels that matter are scaled up before rounding, and down again in the module that makes them.

J. Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration", arXiv 2306.00978. The
loss of equation 4, |Q(W diag(s)) diag(s)^-1 X - W X|^2, is computed from the Gram matrix of X: with the error E of the
weights it is the trace of E X X^T E^T. Ranges are clipped as in the paper's implementation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantization.calibration import INPUTS, InputStatistics
from quantization.formats import Quantized
from quantization.methods.search import search_range
from quantization.methods.settings import MethodSettings, QuantizedLayer
from quantization.rounding import encode_int4, group_width, quantize_int4

_RATIOS = 20


def quantize_layer(
    tensors: Mapping[str, Tensor], statistics: Mapping[str, InputStatistics], settings: MethodSettings
) -> QuantizedLayer:
    """``tensors`` of a decoder layer by their names inside it; norms and biases change along with the weights."""
    values = {name: tensor.to(torch.float32) for name, tensor in tensors.items()}
    grams: dict[str, Tensor] = {}
    changed: set[str] = set()
    for readers, producer in INPUTS:
        seen = statistics[readers[0]]
        weights = [values[f"{name}.weight"] for name in readers]
        heads = HeadSharing(values[f"{producer}.weight"].shape[0], weights[0].shape[1], settings.head_dim)
        made = search_scales(weights, seen, settings, heads)
        if values[f"{producer}.weight"].ndim == 1:
            # The norm is stored rounded: the weights take up what it really became.
            old = values[f"{producer}.weight"]
            new = (old / made).to(tensors[f"{producer}.weight"].dtype).to(torch.float32)
            usable = (new != 0) & (old != 0)
            values[f"{producer}.weight"] = torch.where(usable, new, old)
            made = torch.where(usable, old / new, torch.ones_like(new))
            changed.add(f"{producer}.weight")
        else:
            values[f"{producer}.weight"] = values[f"{producer}.weight"] / made[:, None]
            if f"{producer}.bias" in values:
                values[f"{producer}.bias"] = values[f"{producer}.bias"] / made
                changed.add(f"{producer}.bias")
        scales = heads.spread(made)
        for name in readers:
            values[f"{name}.weight"] = values[f"{name}.weight"] * scales
        grams[readers[0]] = seen.gram / scales[:, None] / scales
    linears: dict[str, Quantized] = {}
    for readers, _ in INPUTS:
        for name in readers:
            weight = values[f"{name}.weight"]
            width = group_width(weight.shape[1], settings.group, name)
            found = search_range(weight, grams[readers[0]], width, settings.symmetric, settings.scale_dtype)
            linears[name] = encode_int4(weight, *found, width)
    return QuantizedLayer(linears, {name: values[name].to(tensors[name].dtype) for name in changed})


@dataclass(frozen=True)
class HeadSharing:
    """``made`` channels that a module makes become ``read`` channels where several query heads read one value head."""

    made: int
    read: int
    head_dim: int

    def spread(self, channels: Tensor) -> Tensor:
        """[made] to [read]."""
        if self.made == self.read:
            return channels
        return channels.reshape(-1, self.head_dim).repeat_interleave(self.read // self.made, 0).flatten()

    def mean(self, channels: Tensor) -> Tensor:
        """[read] to [made]."""
        if self.made == self.read:
            return channels
        return channels.reshape(-1, self.read // self.made, self.head_dim).mean(1).flatten()


def search_scales(weights: Sequence[Tensor], seen: InputStatistics, settings: MethodSettings, heads: HeadSharing) -> Tensor:
    """Scales float32 [made] with the smallest loss over all ``weights`` float32 [N, K], which read the same input.

    Tried are x^r and x^r / w^(1 - r) for r from 0 to 0.95, x and w the mean magnitudes of a channel's inputs and (as a part of
    the largest in their group) weights; r = 0 of the first is no scaling at all.
    """
    inputs = heads.mean(seen.magnitude).clamp_min(1e-8)
    together = torch.cat(list(weights))
    width = group_width(together.shape[1], settings.group)
    largest = together.abs().reshape(together.shape[0], -1, width).amax(-1, keepdim=True).clamp_min(1e-12)
    parts = together.abs().reshape(together.shape[0], -1, width) / largest
    sizes = heads.mean(parts.mean(0).flatten()).clamp_min(1e-8)
    best, chosen = float("inf"), torch.ones_like(inputs)
    for step in range(_RATIOS):
        ratio = step / _RATIOS
        for scales in (inputs**ratio, inputs**ratio / sizes ** (1 - ratio)):
            scales = scales / (scales.max() * scales.min()).sqrt()
            loss = _loss(together, seen.gram, heads.spread(scales), settings)
            if loss < best:
                best, chosen = loss, scales
    return chosen


def _loss(weight: Tensor, gram: Tensor, scales: Tensor, settings: MethodSettings) -> float:
    rounded = quantize_int4(weight * scales, settings.group, settings.symmetric, settings.scale_dtype).dequantize()
    error = rounded / scales - weight
    return float(((error @ gram) * error).sum())
