"""The voices of a Qwen2.5-Omni checkpoint: ``spk_dict.pt``."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tritone.errors import bad

FILE = "spk_dict.pt"
DEFAULT = "Chelsie"
"""transformers' default; where a checkpoint lacks it, the first voice of the file."""


def read_speakers(directory: Path, condition: int, mel: int) -> dict[str, tuple[Tensor, Tensor]]:
    """By name, the default first: a vector, float32 [1, condition], and a recording's mel, float32 [1, T, mel].

    The file is read as data only; none of it is run. Raises ``InvalidArgument`` naming what of it is wrong.
    """
    path = directory / FILE
    try:
        found: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise bad(FILE, str(path), f"a readable dictionary of voices ({error})") from error
    if not isinstance(found, dict) or not found:
        raise bad(FILE, type(found).__name__, "a dictionary of at least one voice")
    speakers = {
        str(name): (_tensor(name, parts, "cond", (1, condition)), _tensor(name, parts, "ref_mel", (1, None, mel)))
        for name, parts in found.items()
    }
    if DEFAULT in speakers:
        speakers = {DEFAULT: speakers[DEFAULT], **speakers}
    return speakers


def _tensor(name: object, parts: Any, key: str, shape: tuple[int | None, ...]) -> Tensor:
    field = f"{FILE}: {name}.{key}"
    tensor = parts.get(key) if isinstance(parts, dict) else None
    wanted = "a finite tensor [" + ", ".join("T" if size is None else str(size) for size in shape) + "]"
    if not isinstance(tensor, Tensor):
        raise bad(field, tensor, wanted)
    fits = tensor.dim() == len(shape) and all(size in (None, have) for size, have in zip(shape, tensor.shape, strict=True))
    if not fits or not tensor.numel():
        raise bad(field, list(tensor.shape), wanted)
    if not torch.isfinite(tensor).all():
        raise bad(field, "a value that is not finite", wanted)
    return tensor.float()
