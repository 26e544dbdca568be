"""The numbers that a row's weights may become, for methods that round column by column."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from quantization.e4m3 import E4M3_MAX, to_e4m3
from quantization.formats import (
    E2M1_VALUES,
    INT4_OFFSET,
    NVFP4_BLOCK,
    ChannelInt8,
    Float8,
    GroupedInt4,
    NvFp4,
    Quantized,
)
from quantization.methods.search import search_range
from quantization.rounding import fp8_scales, nvfp4_divisor, nvfp4_scales, round_to_e2m1


class Grid(Protocol):
    """``width`` columns share a scale; ``start`` fixes it when their turn comes."""

    width: int

    def start(self, values: Tensor, metric: Tensor) -> None:
        """``values`` float32 [N, width] as they are now; ``metric``: their block [width, width] of the Gram matrix."""

    def round(self, column: Tensor) -> tuple[Tensor, Tensor]:
        """``column`` float32 [N]: codes [N] as numbers that ``finish`` understands, and their values float32 [N]."""

    def finish(self, codes: Tensor) -> Quantized:
        """``codes`` float32 [N, K]."""


class Int4Grid:
    def __init__(self, width: int, symmetric: bool, scale_dtype: torch.dtype) -> None:
        self.width, self._symmetric, self._dtype = width, symmetric, scale_dtype
        self._scales: list[Tensor] = []
        self._zeros: list[Tensor] = []
        self._offset: Tensor | float = float(INT4_OFFSET)

    def start(self, values: Tensor, metric: Tensor) -> None:
        scales, zeros = search_range(values, metric, self.width, self._symmetric, self._dtype)
        self._scales.append(scales)
        if zeros is not None:
            self._zeros.append(zeros)
            self._offset = zeros[:, 0].to(torch.float32)

    def round(self, column: Tensor) -> tuple[Tensor, Tensor]:
        scales = self._scales[-1][:, 0]
        codes = ((column / scales).round_() + self._offset).clamp_(0, 15)
        return codes, (codes - self._offset) * scales

    def finish(self, codes: Tensor) -> Quantized:
        zeros = None if self._symmetric else torch.cat(self._zeros, 1)
        return GroupedInt4(codes.to(torch.uint8), torch.cat(self._scales, 1), zeros, self.width)


class Float8Grid:
    def __init__(self, columns: int, scale_dtype: torch.dtype) -> None:
        self.width, self._dtype = columns, scale_dtype
        self._scales = torch.empty(0)

    def start(self, values: Tensor, metric: Tensor) -> None:
        self._scales = fp8_scales(values, self._dtype, search=True)

    def round(self, column: Tensor) -> tuple[Tensor, Tensor]:
        codes = to_e4m3(column / self._scales).to(torch.float32)
        return codes, codes * self._scales

    def finish(self, codes: Tensor) -> Quantized:
        return Float8(codes.to(torch.float8_e4m3fn), self._scales)


class Int8Grid:
    def __init__(self, columns: int, scale_dtype: torch.dtype) -> None:
        self.width, self._dtype = columns, scale_dtype
        self._scales = torch.empty(0)

    def start(self, values: Tensor, metric: Tensor) -> None:
        scales = (values.abs().amax(1) / 127).to(self._dtype).to(torch.float32)
        self._scales = torch.where(scales > 0, scales, torch.ones_like(scales))

    def round(self, column: Tensor) -> tuple[Tensor, Tensor]:
        codes = (column / self._scales).round_().clamp_(-127, 127)
        return codes, codes * self._scales

    def finish(self, codes: Tensor) -> Quantized:
        return ChannelInt8(codes.to(torch.int8), self._scales)


class NvFp4Grid:
    def __init__(self, weight: Tensor) -> None:
        self.width = NVFP4_BLOCK
        self._divisor = nvfp4_divisor(weight.abs().amax())
        self._scales: list[Tensor] = []
        self._table = torch.tensor(E2M1_VALUES + tuple(-value for value in E2M1_VALUES))

    def start(self, values: Tensor, metric: Tensor) -> None:
        self._scales.append(nvfp4_scales(values.abs().amax(1), self._divisor).clamp_max(E4M3_MAX))

    def round(self, column: Tensor) -> tuple[Tensor, Tensor]:
        scales = self._scales[-1] / self._divisor
        codes = round_to_e2m1(column / scales)
        return codes.to(torch.float32), self._table[codes.long()] * scales

    def finish(self, codes: Tensor) -> Quantized:
        scales = torch.stack(self._scales, 1).to(torch.float8_e4m3fn)
        return NvFp4(codes.to(torch.uint8), scales, self._divisor)
