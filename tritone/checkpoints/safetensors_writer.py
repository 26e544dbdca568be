"""Writes a safetensors file one tensor at a time, so that memory holds one tensor and not the model.

The format: a little-endian u64 with the header's length, the header (JSON), then the tensors' bytes end to end.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

ALIGNMENT = 8


def write_bfloat16(
    path: Path, shapes: Sequence[tuple[str, tuple[int, ...]]], tensors: Iterable[npt.NDArray[np.float32]]
) -> None:
    """``tensors`` come in the order of ``shapes`` (name, shape) as float32 and are rounded to bfloat16."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes:
        begin, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for (name, shape), tensor in zip(shapes, tensors, strict=True):
            if tensor.shape != shape:
                raise ValueError(f"{name}: shape {tensor.shape}, expected {shape}")
            file.write(to_bfloat16(tensor).tobytes())


def to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The upper 16 bits, rounded to nearest, ties to even. Values must be finite."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
