"""Reads a checkpoint of safetensors tensor by tensor, after checking all names and shapes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from quantization.checkpoints import detect, is_auxiliary, is_quantized, linear_tensors, read_linear, shape_fits
from quantization.errors import QuantizationError
from quantization.files import TensorFiles
from quantization.formats import Quantized
from tritone.errors import InvalidArgument, bad

Progress = Callable[[int, int], None]
_FLOATS = ("F64", "F32", "F16", "BF16")


class Checkpoint:
    """``model.safetensors``, or the files of ``model.safetensors.index.json``, in a directory; a context manager.

    ``tensors`` maps the names of floating-point tensors to shapes; ``linears`` the names of matrices (without ``.weight``),
    which the checkpoint may hold quantised, to (rows, columns). ``ignored`` says which other names may lie in the files.
    Raises ``InvalidArgument`` naming the first tensor that is missing, unexpected, of another shape or of a wrong dtype, or
    what of ``quantization_config`` cannot be read. ``progress`` gets (bytes done, bytes in all), in bytes of the files.
    """

    def __init__(
        self,
        directory: str | Path,
        tensors: Mapping[str, tuple[int, ...]],
        linears: Mapping[str, tuple[int, int]],
        ignored: Callable[[str], bool] = lambda name: False,
        progress: Progress | None = None,
    ) -> None:
        with readable():
            self._scheme = detect(json.loads((Path(directory) / "config.json").read_text(encoding="utf-8")))
            self._files = TensorFiles.of(Path(directory))
        self._progress = progress
        self._done = 0
        try:
            expected = dict(tensors)
            for name, (rows, columns) in linears.items():
                expected |= self._tensors_of(name, rows, columns)
            self._check(expected, tensors, ignored)
        except BaseException:
            self._files.close()
            raise
        self._total = sum(self._files.nbytes(name) for name in expected)

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """One floating-point tensor as ``dtype``, in memory of its own."""
        return self._read(name).to(dtype)

    def read_rows(self, name: str, rows: list[int], dtype: torch.dtype) -> Tensor:
        """Some rows of a floating-point matrix as ``dtype``, [len(rows), columns]."""
        with readable():
            return self._files.read_rows(name, rows).to(dtype)

    def read_linear(self, name: str) -> Quantized | Tensor:
        """The matrix ``name`` as the files hold it."""
        with readable():
            return read_linear(name, self._read, self._files.shapes, self._scheme)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._files.close()

    def _read(self, name: str) -> Tensor:
        tensor = self._files.read(name)
        self._done += self._files.nbytes(name)
        if self._progress is not None:
            self._progress(min(self._done, self._total), self._total)
        return tensor

    def _tensors_of(self, name: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
        storage = self._scheme.storage_of(name)
        if storage is not None and not is_quantized(name, self._files.shapes, storage):
            storage = None
        return linear_tensors(name, rows, columns, storage)

    def _check(
        self,
        expected: Mapping[str, tuple[int, ...]],
        floats: Mapping[str, tuple[int, ...]],
        ignored: Callable[[str], bool],
    ) -> None:
        shapes = self._files.shapes
        for name, shape in expected.items():
            if name not in shapes:
                raise bad(f"tensor {name}", "missing", f"shape {list(shape)}")
            if not shape_fits(shapes[name], shape):
                raise bad(f"tensor {name}", list(shapes[name]), f"shape {list(shape)}")
            if name in floats and self._files.kinds[name] not in _FLOATS:
                raise bad(f"tensor {name}", self._files.kinds[name], ", ".join(_FLOATS))
        quantised = self._scheme.method != "none"
        for name, shape in shapes.items():
            if name not in expected and not ignored(name) and not (quantised and is_auxiliary(name)):
                raise bad(f"tensor {name}", list(shape), "only the tensors that config.json implies")


def tensor_names(directory: str | Path) -> set[str]:
    """The names of all tensors of a checkpoint. Raises ``InvalidArgument`` for files that cannot be read."""
    with readable(), TensorFiles.of(Path(directory)) as files:
        return set(files.shapes)


@contextmanager
def readable() -> Iterator[None]:
    """What the quantisation library refuses is what the user of a checkpoint did wrong."""
    try:
        yield
    except QuantizationError as error:
        raise InvalidArgument(str(error)) from None
