"""What a quantised checkpoint says about its linear layers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from quantization.rounding import PER_CHANNEL

Layout = Literal["packed", "plain", "nvfp4", "awq", "gptq", "scale_inv"]


@dataclass(frozen=True)
class Storage:
    """How the tensors of a linear layer are laid out.

    ``weights`` is int4, int8, fp8 or nvfp4. ``layout``: "packed" and "plain" are compressed-tensors' pack-quantized and
    int-quantized or float-quantized; "scale_inv" is FP8 whose blocks have a ``weight_scale_inv``. ``group`` columns share
    a scale; ``per_tensor``: all do. ``block``: (rows, columns) that share one. ``version`` of GPTQ's zeros.
    """

    layout: Layout
    weights: str
    group: int = PER_CHANNEL
    symmetric: bool = True
    per_tensor: bool = False
    block: tuple[int, int] | None = None
    version: int = 1


@dataclass(frozen=True)
class Target:
    """Layers that share a storage: "Linear" (all), exact names, or regular expressions after "re:"."""

    names: tuple[str, ...]
    storage: Storage


@dataclass(frozen=True)
class Scheme:
    """``method`` is "none" or the checkpoint's quant_method; the first target that matches a layer counts.

    ``ignore`` holds names and "re:" expressions; with ``ignore_parts``, parts of names (AWQ, GPTQ and FP8 checkpoints).
    ``kv`` says whether the checkpoint declares FP8 scales of keys and values.
    """

    method: str
    targets: tuple[Target, ...] = ()
    ignore: tuple[str, ...] = ()
    ignore_parts: bool = False
    kv: bool = False

    def storage_of(self, name: str) -> Storage | None:
        """Of the linear layer ``name`` (``model.layers.0.self_attn.q_proj``); None where it is floating point."""
        if any(matches(name, pattern) or (self.ignore_parts and pattern in name) for pattern in self.ignore):
            return None
        for target in self.targets:
            if any(pattern == "Linear" or matches(name, pattern) for pattern in target.names):
                return target.storage
        return None


def matches(name: str, pattern: str) -> bool:
    """compressed-tensors' rule: the whole name, or a regular expression from its start."""
    return re.match(pattern[3:], name) is not None if pattern.startswith("re:") else name == pattern
