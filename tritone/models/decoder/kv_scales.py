"""The scales of e4m3 keys and values, from a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantization.checkpoints import detect, read_kv_scales
from tritone.errors import bad
from tritone.kernels.interface import key_factor, mixed_width
from tritone.models.decoder.checkpoint import readable
from tritone.models.decoder.config import DecoderConfig


def load_kv_scales(path: str | Path, config: DecoderConfig) -> Tensor:
    """Float32 [layers, 2, kv_heads], keys first: made of what the checkpoint holds, or 1 where it holds and declares none.

    Keys and values lie well inside +-448, and e4m3 is as fine for large numbers as for small ones: 1 measured no worse than
    calibrated scales. Where a checkpoint has some, keys get such a multiple that, mixed, none saturates that did not before.
    Raises ``InvalidArgument`` naming layer and value for a scale that is missing, <= 0, infinite or NaN.
    """
    from safetensors import safe_open

    where: dict[str, Any] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(Path(path).glob("model*.safetensors")):
        opened: Any = safe_open(str(file), framework="pt")
        for name in opened.keys():
            if name.endswith("_scale") and ".self_attn." in name:
                where[name], shapes[name] = opened, tuple(opened.get_slice(name).get_shape())

    def read(name: str) -> Tensor:
        tensor: Tensor = where[name].get_tensor(name)
        return tensor

    with readable():
        scheme = detect(json.loads((Path(path) / "config.json").read_text(encoding="utf-8")))
        layers = range(config.layers)
        found = [read_kv_scales(f"{config.part.model}.layers.{n}", read, shapes, scheme, config.kv_heads) for n in layers]
    scales = [torch.stack(pair) for pair in found if pair is not None]
    if not scales:
        return torch.ones(config.layers, 2, config.kv_heads)
    if len(scales) < config.layers:
        raise bad(f"tensor {config.part.model}.layers.{found.index(None)}.self_attn.k_scale", "missing", "a scale above 0")
    width = mixed_width(config.head_dim)
    return torch.stack(scales) * torch.tensor([width * key_factor(width), 1.0])[:, None]
