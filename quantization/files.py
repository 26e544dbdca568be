"""Safetensors checkpoints: reading tensor by tensor, writing shard by shard."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Size, Tensor, cat

from quantization.errors import bad

INDEX = "model.safetensors.index.json"
_LAYER = re.compile(r"(.*\.layers\.\d+)\.")
_SMALL_UNIT = 64 << 20
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


class TensorFiles:
    """Safetensors files, mapped into memory; a context manager.

    ``shapes`` and ``kinds`` (safetensors names, such as BF16) hold every tensor by name; ``paths`` are the files.
    """

    def __init__(self, paths: list[Path]) -> None:
        from safetensors import SafetensorError, safe_open

        self.paths = paths
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.kinds: dict[str, str] = {}
        self._where: dict[str, Any] = {}
        for path in self.paths:
            try:
                file: Any = safe_open(str(path), framework="pt")
            except (OSError, SafetensorError) as error:
                raise bad("checkpoint file", str(path), f"a whole safetensors file ({error})") from error
            for name in file.keys():
                piece = file.get_slice(name)
                self.shapes[name] = tuple(piece.get_shape())
                self.kinds[name] = piece.get_dtype()
                self._where[name] = file

    @classmethod
    def of(cls, checkpoint: Path) -> TensorFiles:
        """Those of a checkpoint's folder: ``model.safetensors``, or the files of its index."""
        return cls(_paths(checkpoint))

    def read(self, name: str) -> Tensor:
        """One tensor in the dtype it is stored in."""
        if name not in self._where:
            raise bad(f"tensor {name}", "missing", "a tensor of the checkpoint")
        tensor: Tensor = self._where[name].get_tensor(name)
        return tensor

    def read_rows(self, name: str, rows: list[int]) -> Tensor:
        """Some rows of a matrix, [len(rows), columns], without reading the others."""
        if name not in self._where:
            raise bad(f"tensor {name}", "missing", "a tensor of the checkpoint")
        piece = self._where[name].get_slice(name)
        return cat([piece[row : row + 1] for row in rows])

    def nbytes(self, name: str) -> int:
        """Bytes of a tensor in the file."""
        return Size(self.shapes[name]).numel() * _BYTES.get(self.kinds[name], 1)

    def close(self) -> None:
        """Let go of the files; tensors already read stay valid."""
        self._where.clear()

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


@dataclass(frozen=True)
class Unit:
    """Tensors that are read, quantised and written together: a decoder layer, or small or single other ones."""

    name: str
    tensors: tuple[str, ...]


def units(files: TensorFiles) -> list[Unit]:
    """All tensors of the checkpoint; the layers in order, then the rest, at most 64 MiB or one tensor at a time."""
    layers: dict[str, list[str]] = {}
    rest: list[list[str]] = []
    room = 0
    for name in sorted(files.shapes):
        match = _LAYER.match(name)
        if match:
            layers.setdefault(match[1], []).append(name)
        else:
            if not rest or files.nbytes(name) > room:
                rest.append([])
                room = _SMALL_UNIT
            rest[-1].append(name)
            room -= files.nbytes(name)
    ordered = sorted(layers.items(), key=lambda item: (item[0].rsplit(".", 1)[0], int(item[0].rsplit(".", 1)[1])))
    return [Unit(name, tuple(names)) for name, names in ordered] + [
        Unit(names[0].removesuffix(".weight"), tuple(names)) for names in rest
    ]


def write_shard(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Either the whole file is there afterwards, or none of that name."""
    from safetensors.torch import save_file

    partial = path.with_suffix(".partial")
    save_file(dict(tensors), str(partial), metadata={"format": "pt"})
    os.replace(partial, path)


def write_json(path: Path, content: object) -> None:
    """Either the whole file is there afterwards, or what was there before."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)


def _paths(directory: Path) -> list[Path]:
    index = directory / INDEX
    if not index.exists():
        single = directory / "model.safetensors"
        if not single.exists():
            raise bad("checkpoint", str(directory), f"a folder with model.safetensors or {INDEX}")
        return [single]
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise bad("checkpoint index", str(index), f"JSON with a weight_map ({error!r})") from error
    for name in names:
        if Path(name).name != name or not (directory / name).is_file():
            raise bad("checkpoint index", name, f"a file in {directory}")
    return [directory / name for name in names]
