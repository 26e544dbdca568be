"""Reads a safetensors checkpoint tensor by tensor, after checking all names and shapes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from tritone.errors import bad

Progress = Callable[[int, int], None]
_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


class Checkpoint:
    """``model.safetensors``, or the files of ``model.safetensors.index.json``, in a directory; a context manager.

    ``expected`` maps tensor names to shapes. ``ignored`` says which other names may lie in the files. Raises
    ``InvalidArgument`` naming the first tensor that is missing, unexpected, of another shape or not floating point.
    ``progress`` gets (bytes done, bytes in all), in bytes of the files' own dtypes.
    """

    def __init__(
        self,
        directory: str | Path,
        expected: Mapping[str, tuple[int, ...]],
        ignored: Callable[[str], bool] = lambda name: False,
        progress: Progress | None = None,
    ) -> None:
        self._files: list[Any] = []
        self._where: dict[str, Any] = {}
        self._bytes: dict[str, int] = {}
        self._progress = progress
        self._done = 0
        try:
            for path in _files(Path(directory)):
                self._open(path)
            self._check(expected, ignored)
        except BaseException:
            self.close()
            raise
        self._total = sum(self._bytes[name] for name in expected)

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """One tensor as ``dtype``, in memory of its own."""
        tensor: Tensor = self._where[name].get_tensor(name).to(dtype)
        self._done += self._bytes[name]
        if self._progress is not None:
            self._progress(self._done, self._total)
        return tensor

    def close(self) -> None:
        """Let go of the files; tensors already read stay valid."""
        self._where.clear()
        self._files.clear()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _open(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            file: Any = safe_open(str(path), framework="pt")
        except (OSError, SafetensorError) as error:
            raise bad("checkpoint file", str(path), f"a whole safetensors file ({error})") from error
        self._files.append(file)
        self._where.update(dict.fromkeys(file.keys(), file))

    def _check(self, expected: Mapping[str, tuple[int, ...]], ignored: Callable[[str], bool]) -> None:
        for name, shape in expected.items():
            if name not in self._where:
                raise bad(f"tensor {name}", "missing", f"shape {list(shape)}")
            piece = self._where[name].get_slice(name)
            found = tuple(piece.get_shape())
            if found != tuple(shape):
                raise bad(f"tensor {name}", list(found), f"shape {list(shape)}")
            if piece.get_dtype() not in _FLOATS:
                raise bad(f"tensor {name}", piece.get_dtype(), ", ".join(_FLOATS))
            self._bytes[name] = _FLOATS[piece.get_dtype()] * torch.Size(found).numel()
        for name in self._where:
            if name not in expected and not ignored(name):
                shape = tuple(self._where[name].get_slice(name).get_shape())
                raise bad(f"tensor {name}", list(shape), "only the tensors that config.json implies")


def _files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        single = directory / "model.safetensors"
        if not single.exists():
            raise bad("checkpoint", str(directory), "a folder with model.safetensors or model.safetensors.index.json")
        return [single]
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise bad("checkpoint index", str(index), f"JSON with a weight_map ({error!r})") from error
    for name in names:
        if Path(name).name != name or not (directory / name).is_file():
            raise bad("checkpoint index", name, f"a file in {directory}")
    return [directory / name for name in names]
