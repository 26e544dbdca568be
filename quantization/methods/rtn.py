"""Round to nearest: no data, every form."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quantization.formats import Quantized
from quantization.rounding import nvfp4_divisor, quantize_fp8, quantize_int4, quantize_int8, quantize_nvfp4

# Projections that engines fuse into one matrix; NVFP4 needs one divisor for all of it.
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def quantize_linears(
    weights: str, linears: Mapping[str, Tensor], group: int, symmetric: bool, block: tuple[int, int] | None
) -> dict[str, Quantized]:
    """``linears``: matrices [N, K] by the names of their modules. Scales are of the dtype of each matrix."""
    found: dict[str, Quantized] = {}
    divisors = _divisors(linears) if weights == "nvfp4" else {}
    for name, weight in linears.items():
        if weights == "int4":
            found[name] = quantize_int4(weight, group, symmetric, weight.dtype, name)
        elif weights == "int8":
            found[name] = quantize_int8(weight, weight.dtype, name)
        elif weights == "fp8":
            found[name] = quantize_fp8(weight, block, weight.dtype, name, search=True)
        else:
            found[name] = quantize_nvfp4(weight, divisors[name], name)
    return found


def _divisors(linears: Mapping[str, Tensor]) -> dict[str, Tensor]:
    largest = {name: weight.abs().amax().to(torch.float32) for name, weight in linears.items()}
    found = {}
    for name in linears:
        parent, _, leaf = name.rpartition(".")
        fused = next((names for names in _FUSED if leaf in names), (leaf,))
        together = [largest[key] for key in (f"{parent}.{part}" if parent else part for part in fused) if key in largest]
        found[name] = nvfp4_divisor(torch.stack(together).amax())
    return found
