"""Matrix products by constant weights, behind one small interface."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from tritone.kernels import Kernels


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
