"""Conversion to float8 e4m3fn, and the scales that go with it.

The format (OCP 8-bit floating point specification, "E4M3"): sign, 4 exponent bits with bias 7, 3 mantissa bits, no
infinity; 0x7f and 0xff are NaN, the largest number is 448.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from quantization.errors import bad

E4M3_MAX = 448.0
_WIDE = (torch.float32, torch.bfloat16, torch.float16)


def to_e4m3(values: Tensor, nan: Literal["refuse", "propagate"] = "refuse", name: str = "values") -> Tensor:
    """Float32, bfloat16 or float16 of any shape to float8_e4m3fn, to nearest, ties to even, saturating at +-448.

    No finite or infinite input becomes NaN (torch's own conversion makes NaN of everything above 464). A NaN is refused
    by ``name``, or kept as NaN where ``nan`` is "propagate", which saves one pass over the values.
    """
    if values.dtype not in _WIDE:
        raise bad(f"{name} dtype", values.dtype, ", ".join(map(str, _WIDE)))
    if nan == "refuse" and bool(values.isnan().any()):
        raise bad(name, float("nan"), "numbers and infinities")
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def check_scales(scales: Tensor | None, name: str) -> Tensor:
    """``scales`` as float32 if every one is finite and above zero; refused by ``name`` if missing, <= 0, NaN or infinite."""
    if scales is None:
        raise bad(name, None, "a scale above 0")
    values = scales.to(torch.float32)
    wrong = ~(values.isfinite() & (values > 0))
    if values.numel() == 0 or bool(wrong.any()):
        raise bad(name, float(values[wrong].flatten()[0]) if values.numel() else [], "finite scales above 0")
    return values


def scales_from_amax(amax: Tensor, name: str = "amax") -> Tensor:
    """Float32 scales that map ``amax`` to 448; a head that was zero throughout calibration gets 1. NaN and inf refused."""
    values = amax.to(torch.float32)
    if not bool(values.isfinite().all()) or bool((values < 0).any()):
        raise bad(name, values.flatten().tolist(), "finite values of at least 0")
    return torch.where(values > 0, (values / E4M3_MAX).clamp_min(torch.finfo(torch.float32).tiny), torch.ones_like(values))
