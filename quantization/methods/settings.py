"""What the methods that need data have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quantization.formats import Quantized


@dataclass(frozen=True)
class MethodSettings:
    """``weights``: int4, int8, fp8 or nvfp4. INT4 has ``group`` columns to a scale (or ``PER_CHANNEL``). ``scale_dtype`` is
    what the checkpoint stores scales in; ``head_dim`` is needed to scale values by heads."""

    weights: str
    group: int
    symmetric: bool
    scale_dtype: torch.dtype
    head_dim: int


@dataclass(frozen=True)
class QuantizedLayer:
    """A decoder layer: ``linears`` by module name, and other tensors of the layer that had to change."""

    linears: Mapping[str, Quantized]
    changed: Mapping[str, Tensor]
