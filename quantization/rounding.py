"""Round-to-nearest quantisation of a weight matrix [N, K] into each form; ties go to the even code.

Scales are rounded to ``scale_dtype`` first, so that a checkpoint that stores them in bfloat16 holds exactly the scales
that the codes were chosen for.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quantization.e4m3 import E4M3_MAX, to_e4m3
from quantization.errors import bad
from quantization.formats import INT4_OFFSET, NVFP4_BLOCK, ChannelInt8, Float8, GroupedInt4, NvFp4, spread

PER_CHANNEL = -1
_E2M1_MAX = 6.0


def group_width(columns: int, group: int, name: str = "weight", pad: bool = False) -> int:
    """Columns that share a scale: ``group``, or all ``columns`` for ``PER_CHANNEL``.

    A group that does not divide ``columns`` is refused with layer, width and group, unless ``pad`` is set: then the
    last group is short, as if the columns that it lacks were zeros.
    """
    if group == PER_CHANNEL:
        return columns
    if group <= 0 or group > columns or (columns % group and not pad):
        raise bad(f"group of {name}", group, f"{PER_CHANNEL} (per channel) or a divisor of its width {columns}")
    return group


def quantize_int4(
    weight: Tensor,
    group: int,
    symmetric: bool = True,
    scale_dtype: torch.dtype = torch.float32,
    name: str = "weight",
    pad: bool = False,
) -> GroupedInt4:
    """Symmetric: codes 8 + round(w / s), s = amax / 7.5. Asymmetric: zero + round(w / s), s = (max - min) / 15.

    ``weight`` floating point [N, K]; the range always includes 0. ``group``, ``name``, ``pad``: see ``group_width``.
    """
    values = _checked(weight, name)
    width = group_width(values.shape[1], group, name, pad)
    scales, zeros = int4_scales(grouped(values, width), symmetric, scale_dtype)
    return encode_int4(values, scales, zeros, width)


def int4_scales(
    groups: Tensor, symmetric: bool, scale_dtype: torch.dtype = torch.float32, shrink: Tensor | float = 1.0
) -> tuple[Tensor, Tensor | None]:
    """Scales float32 and zeros (uint8, None if symmetric) over the last dimension of ``groups``.

    ``shrink`` multiplies the range that is covered, so that what lies outside saturates.
    """
    if symmetric:
        scales = groups.abs().amax(-1) * shrink / 7.5
        return _positive(scales, scale_dtype), None
    low, high = groups.amin(-1).clamp_max(0) * shrink, groups.amax(-1).clamp_min(0) * shrink
    scales = _positive((high - low) / 15, scale_dtype)
    return scales, (-low / scales).round().clamp(0, 15).to(torch.uint8)


def encode_int4(values: Tensor, scales: Tensor, zeros: Tensor | None, width: int) -> GroupedInt4:
    """``values`` float32 [N, K] on the grids of ``scales`` and ``zeros`` [N, G]."""
    columns = values.shape[1]
    offset: Tensor | float = float(INT4_OFFSET)
    if zeros is not None:
        offset = spread(zeros.to(torch.float32), width, columns)
    codes = ((values / spread(scales, width, columns)).round_() + offset).clamp_(0, 15)
    return GroupedInt4(codes.to(torch.uint8), scales, zeros, width)


def grouped(values: Tensor, width: int) -> Tensor:
    """[N, K] to [N, G, width], with zeros appended to the last group."""
    missing = -values.shape[1] % width
    return torch.nn.functional.pad(values, (0, missing)).reshape(values.shape[0], -1, width)


def quantize_int8(weight: Tensor, scale_dtype: torch.dtype = torch.float32, name: str = "weight") -> ChannelInt8:
    """Symmetric per row: round(w / s), s = amax / 127; -128 is not used."""
    values = _checked(weight, name)
    scales = _positive(values.abs().amax(1) / 127, scale_dtype)
    return ChannelInt8((values / scales[:, None]).round_().clamp_(-127, 127).to(torch.int8), scales)


def quantize_fp8(
    weight: Tensor,
    block: tuple[int, int] | None = None,
    scale_dtype: torch.dtype = torch.float32,
    name: str = "weight",
    search: bool = False,
) -> Float8:
    """E4M3 with s = amax / 448 per row, or per ``block`` (rows, columns), which need not divide the matrix.

    ``search``: see ``fp8_scales``; ten passes instead of one, and per row only.
    """
    values = _checked(weight, name)
    if block is None:
        scales = fp8_scales(values, scale_dtype, search)
        return Float8(to_e4m3(values / scales[:, None]), scales)
    rows, columns = block
    if rows <= 0 or columns <= 0:
        raise bad(f"block of {name}", block, "two numbers above 0")
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % columns, 0, -values.shape[0] % rows))
    blocks = padded.reshape(padded.shape[0] // rows, rows, -1, columns)
    amax = blocks.abs().amax((1, 3))
    scales = _positive(amax / E4M3_MAX, scale_dtype)
    by_row = scales.repeat_interleave(rows, 0)[: values.shape[0]]
    return Float8(to_e4m3(values / spread(by_row, columns, values.shape[1])), scales, (rows, columns))


def fp8_scales(values: Tensor, scale_dtype: torch.dtype, search: bool = False) -> Tensor:
    """Float32 [N] for ``values`` float32 [N, K]: amax / 448, or with ``search`` up to 2^1.125 times that.

    A floating-point format loses nothing by a range that is twice as wide, but where its steps fall relative to the
    weights matters: of ten scales the one with the smallest squared error of each row is taken, which lowers the error by
    9 to 15 % on SmolLM2's matrices. Rows of 1,024 and more are judged by every n-th column.
    """
    smallest = values.abs().amax(1) / E4M3_MAX
    scales = _positive(smallest, scale_dtype)
    if not search:
        return scales
    best = torch.full_like(scales, float("inf"))
    seen = values[:, :: max(1, values.shape[1] // 512)].contiguous()
    for step in range(10):
        tried = _positive(smallest * 2.0 ** (step / 8), scale_dtype)
        loss = (to_e4m3(seen / tried[:, None]).to(torch.float32) * tried[:, None] - seen).square_().sum(1)
        scales, best = torch.where(loss < best, tried, scales), torch.minimum(loss, best)
    return scales


def nvfp4_divisor(amax: Tensor) -> Tensor:
    """448 * 6 / amax, float32 []: what a block scale is multiplied with so that the largest one is 448."""
    divisor = E4M3_MAX * _E2M1_MAX / amax.to(torch.float32).reshape(()).clamp_min(torch.finfo(torch.float32).tiny)
    return torch.where(divisor.isfinite(), divisor, torch.ones_like(divisor))


def quantize_nvfp4(weight: Tensor, divisor: Tensor | None = None, name: str = "weight") -> NvFp4:
    """E2M1 in blocks of 16 columns, block scale e4m3(amax / 6 * divisor), as in NVIDIA's NVFP4 recipe.

    ``divisor`` is shared by projections that are fused later; by default the one of this matrix. A block scale that
    would be zero is 0.125, as in compressed-tensors.
    """
    values = _checked(weight, name)
    if values.shape[1] % NVFP4_BLOCK:
        raise bad(f"width of {name}", values.shape[1], f"a multiple of {NVFP4_BLOCK}")
    divisor = nvfp4_divisor(values.abs().amax()) if divisor is None else divisor
    scales = nvfp4_scales(grouped(values, NVFP4_BLOCK).abs().amax(-1), divisor)
    codes = round_to_e2m1(values / spread(scales / divisor, NVFP4_BLOCK, values.shape[1]))
    return NvFp4(codes, scales.to(torch.float8_e4m3fn), divisor)


def nvfp4_scales(amax: Tensor, divisor: Tensor) -> Tensor:
    """E4m3 values as float32, of the largest magnitudes of blocks; 0.125 where that would be zero."""
    scales = to_e4m3(divisor * (amax / _E2M1_MAX)).to(torch.float32)
    return torch.where(scales > 0, scales, torch.full_like(scales, 0.125))


def round_to_e2m1(values: Tensor) -> Tensor:
    """Codes uint8: to nearest, ties to the even code, saturating at 6; the sign of a zero is kept."""
    size = values.abs()
    codes = (size > 0.25).to(torch.uint8)
    for threshold, tie_goes_up in ((0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)):
        codes += size >= threshold if tie_goes_up else size > threshold
    return codes | (values.signbit().to(torch.uint8) << 3)


def _checked(weight: Tensor, name: str) -> Tensor:
    if weight.ndim != 2 or not weight.is_floating_point() or not all(weight.shape):
        raise bad(f"tensor {name}", f"{weight.dtype} {list(weight.shape)}", "a floating-point matrix")
    values = weight.to(torch.float32)
    if not math.isfinite(float(values.abs().amax())):
        raise bad(f"tensor {name}", "NaN or infinity", "finite values")
    return values


def _positive(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded to ``dtype``, as float32; 1 where that is zero, which only all-zero rows and sums below ``dtype`` are."""
    rounded = scales.to(dtype).to(torch.float32)
    return torch.where(rounded > 0, rounded, torch.ones_like(rounded))
