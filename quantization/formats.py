"""Quantised weights in memory, whatever the file they came from.

Every form is a matrix of N rows (output features) and K columns (input features). ``dequantize`` gives the float32
values that a kernel must reproduce, computed in float32 as written in each docstring.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quantization.errors import bad

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NVFP4_BLOCK = 16
INT4_OFFSET = 8


@dataclass(frozen=True)
class GroupedInt4:
    """``(code - zero) * scale`` with a scale and a zero for each row and ``group`` columns.

    ``codes`` uint8 [N, K], 0 to 15; ``scales`` float32 [N, G]; ``zeros`` uint8 [N, G], 0 to 15, or None, which is 8
    everywhere. ``group`` columns share a scale, K of them per channel; G = ceil(K / group): where ``group`` does not divide K
    the last group is the K % group columns that are left, as if the missing columns were zeros (code = zero).
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    group: int

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)"""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of packed codes, float32 scales and byte zeros."""
        return self.codes.numel() // 2 + self.scales.nbytes + (0 if self.zeros is None else self.zeros.nbytes)

    def dequantize(self) -> Tensor:
        """Float32 [N, K]."""
        columns = self.shape[1]
        zeros: Tensor | float = float(INT4_OFFSET)
        if self.zeros is not None:
            zeros = spread(self.zeros.to(torch.float32), self.group, columns)
        return (self.codes.to(torch.float32) - zeros) * spread(self.scales, self.group, columns)


@dataclass(frozen=True)
class ChannelInt8:
    """``code * scale`` with a scale for each row: ``codes`` int8 [N, K], ``scales`` float32 [N]."""

    codes: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)"""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def dequantize(self) -> Tensor:
        """Float32 [N, K]."""
        return self.codes.to(torch.float32) * self.scales[:, None]


@dataclass(frozen=True)
class Float8:
    """``code * scale``: ``codes`` float8_e4m3fn [N, K].

    ``scales`` float32 [N] with ``block`` None (per channel), or [ceil(N / rows), ceil(K / columns)] with ``block``
    (rows, columns); blocks at the right and lower edge may be partial.
    """

    codes: Tensor
    scales: Tensor
    block: tuple[int, int] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)"""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def dequantize(self) -> Tensor:
        """Float32 [N, K]."""
        values = self.codes.to(torch.float32)
        if self.block is None:
            return values * self.scales[:, None]
        by_row = self.scales.repeat_interleave(self.block[0], 0)[: self.shape[0]]
        return values * spread(by_row, self.block[1], self.shape[1])


@dataclass(frozen=True)
class NvFp4:
    """NVIDIA's FP4: ``value(code) * (scale / divisor)`` with a scale for each row and 16 columns.

    ``codes`` uint8 [N, K], 0 to 15: e2m1, the sign in bit 3, magnitudes ``E2M1_VALUES``; ``scales`` float8_e4m3fn
    [N, K / 16]; ``divisor`` float32 [], which compressed-tensors calls ``weight_global_scale``.
    """

    codes: Tensor
    scales: Tensor
    divisor: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)"""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of packed codes, scales and divisor."""
        return self.codes.numel() // 2 + self.scales.nbytes + self.divisor.nbytes

    def dequantize(self) -> Tensor:
        """Float32 [N, K]."""
        table = torch.tensor(E2M1_VALUES + tuple(-value for value in E2M1_VALUES), device=self.codes.device)
        scales = self.scales.to(torch.float32) / self.divisor
        return table[self.codes.long()] * spread(scales, NVFP4_BLOCK, self.shape[1])


Quantized = GroupedInt4 | ChannelInt8 | Float8 | NvFp4


def moved(weight: Quantized, device: torch.device) -> Quantized:
    """The same matrix on ``device``."""
    held: dict[str, Any] = {
        name: value.to(device) if isinstance(value, Tensor) else value for name, value in vars(weight).items()
    }
    return type(weight)(**held)


def spread(values: Tensor, group: int, columns: int) -> Tensor:
    """[N, G] to [N, columns]: each value ``group`` times, the last one as often as there are columns left."""
    if values.shape[1] == 1:
        return values.expand(values.shape[0], columns)
    return values.repeat_interleave(group, 1)[:, :columns]


def stack_rows(parts: list[Quantized]) -> Quantized:
    """One matrix of the rows of all parts, as fused projections need it; the parts have one form, width and group.

    Zeros are added to symmetric INT4 that meets asymmetric. FP8 blocks whose edges do not fall on the borders between
    the parts become blocks of one row. NVFP4 needs the same divisor in all parts.
    """
    first = parts[0]
    if any(type(part) is not type(first) or part.shape[1] != first.shape[1] for part in parts):
        raise bad("fused projections", [(type(part).__name__, part.shape) for part in parts], "one form and one width")
    codes = torch.cat([part.codes for part in parts])
    if isinstance(first, Float8):
        return _stack_float8([part for part in parts if isinstance(part, Float8)], codes)
    grouped = [part for part in parts if isinstance(part, GroupedInt4)]
    if any(part.group != grouped[0].group for part in grouped):
        raise bad("groups of fused projections", [part.group for part in grouped], "one value")
    scales = torch.cat([part.scales for part in parts])
    if isinstance(first, ChannelInt8):
        return ChannelInt8(codes, scales)
    if isinstance(first, NvFp4):
        divisors = [part.divisor for part in parts if isinstance(part, NvFp4)]
        if any(not torch.equal(divisor, divisors[0]) for divisor in divisors):
            raise bad("global scales of fused projections", [float(d) for d in divisors], "one value")
        return NvFp4(codes, scales, divisors[0])
    if all(part.zeros is None for part in grouped):
        return GroupedInt4(codes, scales, None, first.group)
    zeros = [
        torch.full_like(part.scales, INT4_OFFSET, dtype=torch.uint8) if part.zeros is None else part.zeros for part in grouped
    ]
    return GroupedInt4(codes, scales, torch.cat(zeros), first.group)


def split_rows(whole: Quantized, counts: list[int]) -> list[Quantized]:
    """Inverse of ``stack_rows`` for everything but FP8 blocks; ``counts`` are the rows of each part."""
    if isinstance(whole, Float8) and whole.block is not None:
        raise bad("block of rows to split", whole.block, "none")
    parts: list[Quantized] = []
    start = 0
    for count in counts:
        rows = slice(start, start + count)
        part = replace(whole, codes=whole.codes[rows], scales=whole.scales[rows])
        if isinstance(part, GroupedInt4) and part.zeros is not None:
            part = replace(part, zeros=part.zeros[rows])
        parts.append(part)
        start += count
    return parts


def _stack_float8(parts: list[Float8], codes: Tensor) -> Float8:
    blocks = [part.block for part in parts]
    if all(block is None for block in blocks):
        return Float8(codes, torch.cat([part.scales for part in parts]))
    if any(block is None or blocks[0] is None or block[1] != blocks[0][1] for block in blocks):
        raise bad("blocks of fused projections", blocks, "one block width")
    rows, columns = blocks[0] or (1, 1)
    if all(block == (rows, columns) for block in blocks) and all(part.shape[0] % rows == 0 for part in parts[:-1]):
        return Float8(codes, torch.cat([part.scales for part in parts]), (rows, columns))
    by_row = [
        part.scales.repeat_interleave(block[0], 0)[: part.shape[0]]
        for part, block in zip(parts, blocks, strict=True)
        if block is not None
    ]
    return Float8(codes, torch.cat(by_row), (1, columns))
