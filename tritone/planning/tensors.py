"""What a part of a model consists of, and the bytes that it takes in each precision.

The rule is the one of ``tritone.models.decoder.weights``: the matrices of a decoder's layers have the precision that the
stage asks for; embedding, head, norms, biases, routers, and everything outside a decoder's layers stay dense.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from tritone.sizes import ITEM_SIZES, KV_DTYPES

SCALE_BYTES = {"fp8": 4, "int8": 4, "int4": 2}
"""Of one scale: float32 for each row, bfloat16 for each group of INT4."""


@dataclass(frozen=True)
class Tensors:
    """``count`` tensors of one ``shape``; ``name`` is that of the first (of a matrix without ``.weight``)."""

    name: str
    shape: tuple[int, ...]
    count: int = 1
    quantisable: bool = False
    """A matrix [rows, columns] that takes the stage's ``weights``."""

    @property
    def parameters(self) -> int:
        return self.count * math.prod(self.shape)


@dataclass(frozen=True)
class Part:
    name: str
    tensors: tuple[Tensors, ...]

    @property
    def parameters(self) -> int:
        return sum(tensors.parameters for tensors in self.tensors)

    @property
    def quantisable(self) -> int:
        """Parameters that take the stage's ``weights``."""
        return sum(tensors.parameters for tensors in self.tensors if tensors.quantisable)


@dataclass(frozen=True)
class Precision:
    """``weights`` of the quantisable matrices (bf16, float32, fp8, int8, int4), ``dense`` (bf16, float32) of all else.

    ``group`` columns share a scale of INT4, -1: the whole row. ``zeros``: each group has a zero of one byte besides.
    """

    weights: str
    dense: str
    group: int = -1
    zeros: bool = False

    def nbytes(self, tensors: Tensors) -> int:
        if not tensors.quantisable or self.weights not in SCALE_BYTES:
            return tensors.parameters * dense_bytes(self.weights if tensors.quantisable else self.dense)
        rows, columns = tensors.shape
        scales = 1 if self.weights != "int4" or self.group == -1 else -(-columns // self.group)
        codes = -(-columns // 2) if self.weights == "int4" else columns
        return tensors.count * rows * (codes + scales * (SCALE_BYTES[self.weights] + self.zeros))


def dense_bytes(name: str) -> int:
    """Bytes of one element of bf16 or float32."""
    return ITEM_SIZES[KV_DTYPES[name]]


def matrix(
    name: str, rows: int, columns: int, count: int = 1, *, bias: bool = False, quantisable: bool = False
) -> list[Tensors]:
    made = [Tensors(name, (rows, columns), count, quantisable)]
    return made + ([Tensors(f"{name}.bias", (rows,), count)] if bias else [])


def convolution(name: str, shape: tuple[int, ...], bias: int = 0, count: int = 1) -> list[Tensors]:
    """A kernel of ``shape`` and a bias of ``bias`` elements (0: none)."""
    return [Tensors(name, shape, count)] + ([Tensors(f"{name}.bias", (bias,), count)] if bias else [])


def vectors(names: Iterable[str], width: int, count: int = 1) -> list[Tensors]:
    """Norms, scales of layers and the like."""
    return [Tensors(name, (width,), count) for name in names]
