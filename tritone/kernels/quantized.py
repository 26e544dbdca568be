"""Products by quantised weights: INT4 by groups, INT8 by channels, FP8 e4m3 by channels or blocks.

Two ways to multiply, fixed for a matrix when it is packed:

- ``integers``: activations are rounded to INT8 (one scale for each row, from that row alone) and the products are exact
  integers. Both INT4 and INT8 weights can do this; it is the fastest way at any number of rows.
- otherwise weights are widened to the activations' own dtype, which is exact, and their scales come afterwards, in
  float32. This is the only way of FP8.

Sums and scales are float32 throughout. With the native kernels a row's bits depend on that row alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from tritone.errors import bad
from tritone.kernels.build import build_library
from tritone.kernels.interface import Kernels
from tritone.kernels.memory import HugeMemory

_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_SIGNATURES = {
    "quantized_bytes": (_LONG, [_LONG] * 3 + [_INT] * 3),
    "quantized_pack": (None, [_POINTER] * 4 + [_LONG] * 3 + [_INT] * 3),
    "linear_int_scratch": (_LONG, [_LONG] * 3),
    "linear_int": (None, [_POINTER] * 5 + [_LONG] * 4 + [_INT] * 5),
    "linear_wide": (None, [_POINTER] * 4 + [_LONG] * 4 + [_INT] * 5),
    "packed_bytes": (_LONG, [_LONG] * 2 + [_INT]),
}
_TYPES = {torch.float32: 0, torch.bfloat16: 1}
_SCALE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_INT4, _INT8, _E4M3 = 0, 1, 2
_INT4_ZERO, _INT8_ZERO = 8, 128
_UNIT = 8
# Inputs whose integer products are summed before a scale is applied: what float32 holds exactly. As in linear_int.c.
_PIECE = 256
_LARGEST_INT8 = 127.0
_LEAST_AMAX = 1e-30
# Below this many weights a second thread costs more than it saves.
_PARALLEL_FROM = 1 << 16


@dataclass(frozen=True)
class QuantizedWeight:
    """A matrix [out_features, in_features] in the layout of the kernels that packed it.

    ``group`` inputs share a scale. ``data`` is one tensor of bytes (native) or codes, scales and, perhaps, zeros (torch).
    """

    data: tuple[Tensor, ...]
    out_features: int
    in_features: int
    group: int
    code: int
    scale_type: torch.dtype
    asymmetric: bool
    integers: bool

    @property
    def nbytes(self) -> int:
        """What it takes in memory."""
        return sum(tensor.nbytes for tensor in self.data)


class QuantizedKernels(Protocol):
    """Packs plain codes and scales once and multiplies by them; activations are float32 or bfloat16."""

    name: str

    def pack_int4(
        self, codes: Tensor, scales: Tensor, zeros: Tensor | None, group: int, integers: bool = True
    ) -> QuantizedWeight:
        """``(code - zero) * scale``: codes uint8 [N, K] of 0 to 15, scales [N, G], zeros uint8 [N, G] or None for 8.

        ``group`` is a multiple of 8 (above 256, of 256) or at least K; G = ceil(K / group), the last group may be short.
        """
        ...

    def pack_int8(self, codes: Tensor, scales: Tensor, integers: bool = True) -> QuantizedWeight:
        """``code * scale``: codes int8 [N, K], scales [N]."""
        ...

    def pack_float8(self, codes: Tensor, scales: Tensor, block: tuple[int, int] | None = None) -> QuantizedWeight:
        """``code * scale``: codes float8_e4m3fn [N, K]; scales [N], or [ceil(N / rows), ceil(K / columns)] of a block."""
        ...

    def linear(self, x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
        """``x @ weight.T + bias`` of x [T, in_features]; gives [T, out_features] of x's dtype, which is bias's too.

        With integer products a row that holds NaN or infinity gives NaN.
        """
        ...


class _Packing:
    """Checks and brings into one form what the three kinds of weights are made of."""

    def pack_int4(
        self, codes: Tensor, scales: Tensor, zeros: Tensor | None, group: int, integers: bool = True
    ) -> QuantizedWeight:
        _check(codes, torch.uint8, "INT4 codes")
        if codes.numel() and int(codes.max()) > 15:
            raise bad("INT4 codes", int(codes.max()), "0 to 15")
        if zeros is not None:
            _check(zeros, torch.uint8, "INT4 zeros", tuple(scales.shape))
            if zeros.numel() and int(zeros.max()) > 15:
                raise bad("INT4 zeros", int(zeros.max()), "0 to 15")
        return self._pack(codes, scales, zeros, _group(group, codes.shape[1]), _INT4, integers)

    def pack_int8(self, codes: Tensor, scales: Tensor, integers: bool = True) -> QuantizedWeight:
        _check(codes, torch.int8, "INT8 codes")
        if scales.ndim == 1:
            scales = scales[:, None]
        unsigned = codes.contiguous().view(torch.uint8) ^ _INT8_ZERO
        return self._pack(unsigned, scales, None, _group(codes.shape[1], codes.shape[1]), _INT8, integers)

    def pack_float8(self, codes: Tensor, scales: Tensor, block: tuple[int, int] | None = None) -> QuantizedWeight:
        _check(codes, torch.float8_e4m3fn, "FP8 codes")
        columns = codes.shape[1]
        raw = codes.contiguous().view(torch.uint8)
        if bool(((raw & 0x7F) == 0x7F).any()):
            raise bad("FP8 codes", "NaN", "numbers")
        if block is None:
            scales = scales[:, None] if scales.ndim == 1 else scales
        else:
            rows = -(-codes.shape[0] // block[0])
            if scales.ndim != 2 or scales.shape[0] != rows:
                raise bad("FP8 scales", list(scales.shape), f"{rows} rows of blocks")
            scales = scales.repeat_interleave(block[0], 0)[: codes.shape[0]]
        group = columns if block is None else block[1]
        return self._pack(raw, scales, None, _group(group, columns), _E4M3, False)

    def _pack(
        self, codes: Tensor, scales: Tensor, zeros: Tensor | None, group: int, code: int, integers: bool
    ) -> QuantizedWeight:
        raise NotImplementedError


class NativeQuantized(_Packing):
    """``QuantizedKernels`` in C for CPU tensors; bfloat16 activations of widened weights need an even in_features."""

    def __init__(self, instruction_set: str) -> None:
        loaded = ctypes.CDLL(str(build_library()))
        self.name = f"native-{instruction_set}"
        functions = {name: _bind(loaded, name, instruction_set) for name in _SIGNATURES}
        self._bytes, self._pack_into = functions["quantized_bytes"], functions["quantized_pack"]
        self._scratch, self._linear_int = functions["linear_int_scratch"], functions["linear_int"]
        self._linear_wide, self._dense_bytes = functions["linear_wide"], functions["packed_bytes"]
        self._memory = HugeMemory()

    def linear(self, x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
        rows, columns = x.shape
        outputs, kind = weight.out_features, _TYPES.get(x.dtype)
        if kind is None or columns != weight.in_features or not x.is_contiguous():
            raise ValueError("linear: x must be float32 or bfloat16, contiguous and as wide as the weight")
        if bias is not None and (bias.numel() != outputs or bias.dtype != x.dtype):
            raise ValueError("linear: bias must match the weight and x")
        threads = torch.get_num_threads() if outputs * columns >= _PARALLEL_FROM else 1
        out = torch.empty((rows, outputs), dtype=x.dtype)
        pointers = [x.data_ptr(), weight.data[0].data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr()]
        form = (weight.code, weight.asymmetric, _SCALE_TYPES[weight.scale_type], kind, threads)
        if weight.integers:
            scratch = torch.empty(self._scratch(rows, columns, weight.group), dtype=torch.uint8)
            self._linear_int(*pointers, scratch.data_ptr(), rows, outputs, columns, weight.group, *form)
        else:
            if not self._dense_bytes(1, columns, kind):
                raise ValueError("linear: bfloat16 activations need an even in_features")
            self._linear_wide(*pointers, rows, outputs, columns, weight.group, *form)
        return out

    def _pack(
        self, codes: Tensor, scales: Tensor, zeros: Tensor | None, group: int, code: int, integers: bool
    ) -> QuantizedWeight:
        outputs, columns = codes.shape
        scales = _smallest(_scales(scales, outputs, columns, group))
        kind = _SCALE_TYPES[scales.dtype]
        data = self._memory.take(self._bytes(outputs, columns, group, code, zeros is not None, kind))
        codes, zeros = codes.contiguous(), None if zeros is None else zeros.contiguous()
        self._pack_into(
            codes.data_ptr(),
            scales.data_ptr(),
            None if zeros is None else zeros.data_ptr(),
            data.data_ptr(),
            outputs,
            columns,
            group,
            code,
            kind,
            torch.get_num_threads(),
        )
        return QuantizedWeight((data,), outputs, columns, group, code, scales.dtype, zeros is not None, integers)


class TorchQuantized(_Packing):
    """``QuantizedKernels`` from torch operations, several times slower than a dense product; any device.

    Integer products are exact here too, so that they differ from the native ones by float32 rounding only.
    """

    name = "torch"

    def linear(self, x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
        if weight.integers:
            codes, scale = quantize_rows(x)
            total = self._sum(codes, weight, min(weight.group, _PIECE)) * scale
        else:
            total = self._sum(x.float(), weight, weight.group)
        if bias is not None:
            total += bias.float()
        return total.to(x.dtype)

    def _sum(self, x: Tensor, weight: QuantizedWeight, piece: int) -> Tensor:
        codes, scales, *zeros = weight.data
        total = torch.zeros((x.shape[0], weight.out_features), dtype=torch.float32, device=x.device)
        for begin in range(0, weight.in_features, piece):
            group, part = begin // weight.group, slice(begin, begin + piece)
            if weight.code == _E4M3:
                values = codes[:, part].view(torch.float8_e4m3fn).float()
            else:
                zero = zeros[0][:, group, None].float() if zeros else float(_INT4_ZERO if weight.code == _INT4 else _INT8_ZERO)
                values = codes[:, part].float() - zero
            total += (x[:, part] @ values.T) * scales[:, group]
        return total

    def _pack(
        self, codes: Tensor, scales: Tensor, zeros: Tensor | None, group: int, code: int, integers: bool
    ) -> QuantizedWeight:
        outputs, columns = codes.shape
        scales = _scales(scales, outputs, columns, group)
        data = (codes, scales) if zeros is None else (codes, scales, zeros)
        return QuantizedWeight(data, outputs, columns, group, code, scales.dtype, zeros is not None, integers)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Activations [T, K] as the integer products see them: codes -127 to 127 (as float32) and scales float32 [T, 1].

    The code is x * (127 / amax), rounded to even where it is a tie; the scale is amax / 127. A row with NaN or infinity has
    zeros and the scale NaN.
    """
    wide = x.float()
    most = wide.abs().amax(-1, keepdim=True) if x.shape[1] else wide.new_zeros(x.shape[0], 1)
    finite = most.isfinite()
    most = most.clamp_min(_LEAST_AMAX)
    codes = (wide * (_LARGEST_INT8 / most)).round()
    return torch.where(finite, codes, 0.0), torch.where(finite, most / _LARGEST_INT8, float("nan"))


def quantized_kernels(kernels: Kernels) -> QuantizedKernels:
    """The kernels for quantised weights that go with those for dense ones: native of the same instruction set, or torch."""
    return _by_name(kernels.name)


@lru_cache(maxsize=8)
def _by_name(name: str) -> QuantizedKernels:
    kind, _, instruction_set = name.partition("-")
    return NativeQuantized(instruction_set) if kind == "native" else TorchQuantized()


def _bind(library: ctypes.CDLL, name: str, instruction_set: str) -> Callable[..., int]:
    function = getattr(library, f"tritone_{name}_{instruction_set}")
    function.restype, function.argtypes = _SIGNATURES[name]
    return function  # type: ignore[no-any-return]


def _check(tensor: Tensor, dtype: torch.dtype, name: str, shape: tuple[int, ...] | None = None) -> None:
    if tensor.dtype != dtype or tensor.ndim != 2 or (shape is not None and tuple(tensor.shape) != shape):
        wanted = "a matrix" if shape is None else f"of shape {list(shape)}"
        raise bad(name, f"{tensor.dtype} {list(tensor.shape)}", f"{dtype}, {wanted}")


def _group(group: int, columns: int) -> int:
    """``group``, or the whole row as a multiple of 8 if it is not longer."""
    if group >= columns:
        return max(_UNIT, -(-columns // _UNIT) * _UNIT)
    if group <= 0 or group % (_UNIT if group <= _PIECE else _PIECE):
        raise bad("group", group, f"a multiple of {_UNIT} (above {_PIECE}, of {_PIECE}), or at least the {columns} inputs")
    return group


def _scales(scales: Tensor, outputs: int, columns: int, group: int) -> Tensor:
    shape = (outputs, -(-columns // group))
    if tuple(scales.shape) != shape or not scales.is_floating_point():
        raise bad("scales", f"{scales.dtype} {list(scales.shape)}", f"floating point, of shape {list(shape)}")
    return scales.float().contiguous()


def _smallest(scales: Tensor) -> Tensor:
    """The scales in 16 bits if that loses nothing: files hold them so, and memory is what decoding waits for."""
    for dtype in (torch.bfloat16, torch.float16):
        small = scales.to(dtype)
        if torch.equal(small.float(), scales):
            return small
    return scales
