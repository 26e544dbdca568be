"""Whether a checkpoint's weights already lie on a 4-bit grid, where INT4 would lose next to nothing and say nothing."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from quantization.files import TensorFiles

GROUPS = (128, 64, 32, 16)
_LEVELS = 15
_MATRICES = 4
# Mean distance to the nearest of 16 equidistant levels, in steps: 0.25 for any other weights. bfloat16 makes about 0.01.
_CLOSE = 0.1


def grid_of(checkpoint: Path) -> int | None:
    """The group of the 4-bit grid that a dense checkpoint's projections lie on, or None.

    A group of columns lies on such a grid if its numbers are 16 equidistant ones from its smallest to its largest (GGUF's
    Q4_1 writes groups of 32). Looked at are a few matrices.
    """
    with TensorFiles.of(checkpoint) as files:
        names = sorted(name for name, shape in files.shapes.items() if name.endswith("_proj.weight") and len(shape) == 2)
        chosen = names[:: max(1, len(names) // _MATRICES)][:_MATRICES]
        weights = [files.read(name).float() for name in chosen if files.kinds[name] in ("F32", "F16", "BF16")]
    for group in GROUPS:
        fitting = [weight for weight in weights if weight.shape[1] % group == 0]
        if fitting and all(off_grid(weight, group) < _CLOSE for weight in fitting):
            return group
    return None


def off_grid(weight: Tensor, group: int) -> float:
    """Mean distance of float32 [N, K] to the 16 levels of its groups of columns, in steps, 0 to 0.5."""
    groups = weight.reshape(-1, group)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    steps = (groups - low) / ((high - low) / _LEVELS).clamp_min(torch.finfo(torch.float32).tiny)
    return float((steps - steps.round()).abs().mean())
