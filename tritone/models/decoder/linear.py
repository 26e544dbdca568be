"""Matrix products by constant weights, behind one small interface."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

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
    """INT4, INT8 or FP8 weights; made by one of its class methods, which ``tritone.kernels.quantized`` describes.

    ``integers`` rounds activations to INT8, row by row, and multiplies integers; otherwise, and always with FP8, activations
    stay as they are.
    """

    def __init__(self, kernels: QuantizedKernels, weight: QuantizedWeight, bias: Tensor | None = None) -> None:
        self._kernels = kernels
        self._weight = weight
        self._bias = bias
        self.out_features, self.in_features = weight.out_features, weight.in_features
        self.nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    @classmethod
    def int4(
        cls,
        kernels: Kernels,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        group: int,
        bias: Tensor | None = None,
        integers: bool = True,
    ) -> QuantizedLinear:
        """``(code - zero) * scale``: codes uint8 [N, K], scales [N, G], zeros uint8 [N, G] or None for 8."""
        own = quantized_kernels(kernels)
        return cls(own, own.pack_int4(codes, scales, zeros, group, integers), bias)

    @classmethod
    def int8(
        cls, kernels: Kernels, codes: Tensor, scales: Tensor, bias: Tensor | None = None, integers: bool = True
    ) -> QuantizedLinear:
        """``code * scale``: codes int8 [N, K], scales [N]."""
        own = quantized_kernels(kernels)
        return cls(own, own.pack_int8(codes, scales, integers), bias)

    @classmethod
    def float8(
        cls,
        kernels: Kernels,
        codes: Tensor,
        scales: Tensor,
        block: tuple[int, int] | None = None,
        bias: Tensor | None = None,
    ) -> QuantizedLinear:
        """``code * scale``: codes float8_e4m3fn [N, K], scales [N], or one for each block (rows, columns)."""
        own = quantized_kernels(kernels)
        return cls(own, own.pack_float8(codes, scales, block), bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self._kernels.linear(x, self._weight, self._bias)
