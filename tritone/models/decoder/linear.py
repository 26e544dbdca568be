"""Matrix products by constant weights, behind one small interface."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from quantization.formats import ChannelInt8, Float8, GroupedInt4, Quantized
from tritone.errors import bad
from tritone.kernels import Kernels
from tritone.kernels.quantized import QuantizedKernels, QuantizedWeight, quantized_kernels


class Linear(Protocol):
    """``y = x @ weight.T + bias`` for x [rows, in_features] of the activation dtype; gives [rows, out_features].

    ``nbytes`` is what the weights take in memory.
    """

    in_features: int
    out_features: int
    nbytes: int

    def __call__(self, x: Tensor) -> Tensor: ...


class DenseLinear:
    """Float32 or bfloat16 weights [out_features, in_features], packed once by the kernels."""

    def __init__(self, kernels: Kernels, weight: Tensor, bias: Tensor | None = None) -> None:
        self._kernels = kernels
        self._weight = kernels.pack(weight)
        self._bias = bias
        self.out_features, self.in_features = weight.shape
        self.nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        return self._kernels.linear(x, self._weight, self._bias)


class QuantizedLinear:
    """INT4, INT8 or FP8 weights, as ``tritone.kernels.quantized`` multiplies them.

    ``integers`` rounds activations to INT8, row by row, and multiplies integers; otherwise, and always with FP8, activations
    stay as they are. Raises ``InvalidArgument`` for NVFP4, which no kernel multiplies.
    """

    def __init__(self, kernels: Kernels, weight: Quantized, bias: Tensor | None = None, integers: bool = True) -> None:
        self._kernels = quantized_kernels(kernels)
        self._weight = _packed(self._kernels, weight, integers)
        self._bias = bias
        self.out_features, self.in_features = weight.shape
        self.nbytes = self._weight.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        return self._kernels.linear(x, self._weight, self._bias)


def _packed(kernels: QuantizedKernels, weight: Quantized, integers: bool) -> QuantizedWeight:
    if isinstance(weight, GroupedInt4):
        return kernels.pack_int4(weight.codes, weight.scales, weight.zeros, weight.group, integers)
    if isinstance(weight, ChannelInt8):
        return kernels.pack_int8(weight.codes, weight.scales, integers)
    if isinstance(weight, Float8):
        return kernels.pack_float8(weight.codes, weight.scales, weight.block)
    raise bad("weights", "nvfp4", "fp8, int8, int4 (nvfp4 can be evaluated, or loaded with weights bf16)")
