"""Matrix products by constant weights, behind one small interface."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional


class Linear(Protocol):
    """``y = x @ weight.T + bias`` for x [rows, in_features] of the activation dtype; gives [rows, out_features].

    A row's bits do not depend on the number of rows once there are ``min_rows`` of them: a caller that keeps its
    activations that tall saves the padding that the layer otherwise does itself.
    """

    in_features: int
    out_features: int
    min_rows: int
    nbytes: int

    def __call__(self, x: Tensor) -> Tensor: ...


class DenseLinear:
    """Float32 or bfloat16 weights [out_features, in_features]; on CPU packed once for oneDNN, and the original dropped.

    oneDNN takes another summation order for a single row than for two or more, which agree; so a single row is padded to
    two. Without oneDNN (or bfloat16 support in it) this is ``torch.nn.functional.linear``, with no promise on bits.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        self.bias = bias
        self.packed = weight.device.type == "cpu" and _can_pack(weight.dtype)
        self.weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight) if self.packed else weight
        self.min_rows = 2 if self.packed else 1

    def __call__(self, x: Tensor) -> Tensor:
        if not self.packed or x.shape[0] == 0:
            if self.packed:
                return x.new_empty((0, self.out_features))
            return functional.linear(x, self.weight, self.bias)
        rows = x.shape[0]
        if rows < self.min_rows:
            x = x.repeat(self.min_rows, 1)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return y if rows >= self.min_rows else y[:rows]


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()))
