"""The matrices of a decoder in the precision that a stage asks for."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quantization.formats import ChannelInt8, Float8, GroupedInt4, NvFp4, Quantized, moved, stack_rows
from quantization.rounding import quantize_fp8, quantize_int4, quantize_int8
from tritone.errors import bad
from tritone.kernels import Kernels
from tritone.models.decoder.checkpoint import Checkpoint, readable
from tritone.models.decoder.linear import DenseLinear, Linear, QuantizedLinear

DENSE = {"bf16": torch.bfloat16, "float32": torch.float32}
QUANTIZED = ("fp8", "int8", "int4")
WEIGHTS = ("auto", *DENSE, *QUANTIZED)
_NAMES: dict[type, str] = {GroupedInt4: "int4", ChannelInt8: "int8", Float8: "fp8", NvFp4: "nvfp4"}


class LinearReader:
    """Reads matrices of ``checkpoint`` and makes them ready to multiply.

    ``weights``: ``auto`` keeps what the checkpoint stores; ``bf16`` and ``float32`` (which must be ``dtype``) make everything
    dense; ``fp8``, ``int8`` and ``int4`` round dense matrices to nearest and keep those that are stored so already.
    ``group`` inputs share a scale of INT4 that is made here, -1 for whole rows; the last group of a row may be short.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        weights: str,
        group: int,
        integers: bool,
    ) -> None:
        check_weights(weights, dtype)
        self._checkpoint = checkpoint
        self._kernels = kernels
        self._dtype = dtype
        self._device = device
        self._weights = weights
        self._group = group
        self._integers = integers

    def linear(self, names: list[str], bias: Tensor | None) -> Linear:
        """One product by the matrices ``names``, stacked along their outputs.

        Parts that are stored in different forms, some of them dense perhaps, cannot share a kernel and become dense.
        """
        return self.product({name: self._checkpoint.read_linear(name) for name in names}, bias)

    def product(self, matrices: Mapping[str, Quantized | Tensor], bias: Tensor | None) -> Linear:
        """The same of matrices that were read already; errors call them by their names."""
        parts = [self._in_precision(name, weight) for name, weight in matrices.items()]
        quantized = [part for part in parts if not isinstance(part, Tensor)]
        if len(quantized) == len(parts) and len({type(part) for part in parts}) == 1:
            with readable():
                whole = stack_rows(quantized)
            return self._quantized(whole, bias)
        return self._dense(parts, bias)

    def head(self, name: str) -> Linear:
        """The product that gives logits: dense, unless the checkpoint stores it otherwise and ``weights`` keeps that."""
        weight = self._checkpoint.read_linear(name)
        if isinstance(weight, Tensor) or self._weights in DENSE:
            return self._dense([weight], None)
        return self._quantized(weight, None)

    def _dense(self, parts: list[Quantized | Tensor], bias: Tensor | None) -> DenseLinear:
        rows = [(part if isinstance(part, Tensor) else part.dequantize()).to(self._device, self._dtype) for part in parts]
        return DenseLinear(self._kernels, rows[0].contiguous() if len(rows) == 1 else torch.cat(rows), bias)

    def _quantized(self, weight: Quantized, bias: Tensor | None) -> QuantizedLinear:
        return QuantizedLinear(self._kernels, moved(weight, self._device), bias, self._integers)

    def _in_precision(self, name: str, weight: Quantized | Tensor) -> Quantized | Tensor:
        if self._weights == "auto":
            return weight
        if self._weights in DENSE:
            return weight if isinstance(weight, Tensor) else weight.dequantize()
        if not isinstance(weight, Tensor):
            stored = _NAMES[type(weight)]
            if stored != self._weights:
                raise bad("weights", self._weights, f"auto, {stored} or a dense type: {name} is stored as {stored}")
            return weight
        with readable():
            if self._weights == "int4":
                # Scales of 16 bits: at groups of 64 they are 1/16 less to read than those of 32.
                return quantize_int4(weight, self._group, scale_dtype=torch.bfloat16, name=name, pad=True)
            if self._weights == "int8":
                return quantize_int8(weight, name=name)
            return quantize_fp8(weight, name=name, search=True)


def check_weights(weights: str, dtype: torch.dtype, field: str = "weights") -> None:
    """Refuses unknown names, and dense weights of another type than the activations."""
    if weights not in WEIGHTS:
        raise bad(field, weights, ", ".join(WEIGHTS))
    if DENSE.get(weights, dtype) != dtype:
        raise bad(field, weights, f"dense weights of the activations' type, {dtype}, or {', '.join(QUANTIZED)}")
