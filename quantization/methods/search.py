"""The range that each INT4 group should cover, found by trying."""

from __future__ import annotations

import torch
from torch import Tensor

from quantization.rounding import encode_int4, grouped, int4_scales

# Multiples of the range that round-to-nearest would cover.
SHRINKS = tuple(1.1 - 0.025 * step for step in range(25))


def search_range(
    values: Tensor, metric: Tensor, width: int, symmetric: bool, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Scales float32 and zeros uint8 (None if symmetric), [N, G], for ``values`` float32 [N, K].

    Of the ``SHRINKS`` the one with the smallest e M e^T for each row and group, where e is the group's rounding error and M
    its block on the diagonal of ``metric`` [K, K]: with the Gram matrix of the inputs that is the mean squared error of the
    group's part of the output (AWQ's weight clipping, arXiv 2306.00978, without sampling tokens).
    """
    groups = grouped(values, width)
    count = groups.shape[1]
    blocks = torch.stack([metric[i : i + width, i : i + width] for i in range(0, count * width, width)])
    best: Tensor | None = None
    scales, zeros = int4_scales(groups, symmetric, scale_dtype)
    for shrink in SHRINKS:
        new_scales, new_zeros = int4_scales(groups, symmetric, scale_dtype, shrink)
        rounded = encode_int4(values, new_scales, new_zeros, width).dequantize()
        error = (grouped(rounded, width) - groups).transpose(0, 1)
        loss = (torch.bmm(error, blocks) * error).sum(-1).t()
        if best is None:
            best, scales, zeros = loss, new_scales, new_zeros
            continue
        better = loss < best
        best = torch.where(better, loss, best)
        scales = torch.where(better, new_scales, scales)
        if zeros is not None and new_zeros is not None:
            zeros = torch.where(better, new_zeros, zeros)
    return scales, zeros
