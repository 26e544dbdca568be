"""The compiled kernels, called through ctypes (which releases the interpreter lock for the call)."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from tritone.errors import bad
from tritone.kernels.build import INSTRUCTION_SETS
from tritone.kernels.interface import KV, HeadNorm, PackedWeight, QuantizedPages, RopeTable, check_pages, same_offsets
from tritone.kernels.memory import HugeMemory

_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_SIGNATURES = {
    "add_rms_norm": (None, [_POINTER] * 4 + [_LONG] * 2 + [_FLOAT] + [_INT] * 2),
    "rope_append": (_LONG, [_POINTER] * 10 + [_LONG] * 11 + [_FLOAT] + [_INT] * 3),
    "paged_attention": (_LONG, [_POINTER] * 7 + [_LONG] * 11 + [_FLOAT] + [_INT] * 3),
    "convert_pages": (_LONG, [_POINTER] * 8 + [_LONG] * 5 + [_INT] * 3),
    "silu_mul": (None, [_POINTER] * 2 + [_LONG] * 2 + [_INT] * 2),
    "linear": (None, [_POINTER] * 4 + [_LONG] * 3 + [_INT] * 2),
    "pack": (None, [_POINTER] * 2 + [_LONG] * 2 + [_INT] * 2),
    "packed_bytes": (_LONG, [_LONG] * 2 + [_INT]),
}
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float8_e4m3fn: 2}
_MAX_HEAD_DIM = 512
# Below this many elements a second thread costs more than it saves.
_PARALLEL_FROM = 1 << 16


class NativeKernels:
    """``Kernels`` in C for CPU tensors; head_dim must be even and at most 512.

    ``instruction_set`` is one of plain, avx2, avx512, avx512bf16; by default ``$TRITONE_ISA``, or the best that the CPU runs.
    """

    def __init__(self, library: Path, instruction_set: str | None = None) -> None:
        loaded = ctypes.CDLL(str(library))
        level = int(loaded.tritone_isa_level())
        able = [
            name
            for rank, name in enumerate(INSTRUCTION_SETS)
            if rank <= level and hasattr(loaded, f"tritone_add_rms_norm_{name}")
        ]
        chosen = instruction_set or os.environ.get("TRITONE_ISA") or able[-1]
        if chosen not in able:
            raise bad("TRITONE_ISA", chosen, ", ".join(able))
        self.name = f"native-{chosen}"
        functions = {name: _bind(loaded, name, chosen) for name in _SIGNATURES}
        self._norm, self._rope = functions["add_rms_norm"], functions["rope_append"]
        self._attention, self._convert = functions["paged_attention"], functions["convert_pages"]
        self._silu = functions["silu_mul"]
        self._linear, self._pack, self._packed_bytes = functions["linear"], functions["pack"], functions["packed_bytes"]
        self._memory = HugeMemory()

    def add_rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        rows, n = x.shape
        out = torch.empty_like(x)
        _require(x.is_contiguous() and weight.is_contiguous(), "add_rms_norm: x and weight must be contiguous")
        _require(weight.dtype == x.dtype and weight.numel() == n, "add_rms_norm: weight must match x")
        if residual is not None:
            same = residual.shape == x.shape and residual.dtype == x.dtype and residual.is_contiguous()
            _require(same, "add_rms_norm: residual must match x")
        self._norm(
            x.data_ptr(),
            None if residual is None else residual.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            rows,
            n,
            eps,
            _TYPES[x.dtype],
            _threads(rows * n),
        )
        return out, x if residual is None else residual

    def rope_append(
        self,
        qkv: Tensor,
        positions: Tensor,
        slots: Tensor,
        rope: RopeTable,
        kv: KV,
        layer: int,
        norm: HeadNorm | None = None,
    ) -> None:
        tokens, heads, head_dim = qkv.shape
        held, scales = _parts(kv, layer)
        pages, _, _, kv_heads, page_size, _ = held.shape
        page_stride, layer_stride, kv_stride, head_stride = _kv_strides(held, head_dim)
        _require(qkv.stride(1) == head_dim and qkv.stride(2) == 1, "rope_append: qkv rows must be contiguous")
        _require(positions.dtype == torch.int32 and slots.dtype == torch.int64, "rope_append: int32 positions, int64 slots")
        _require(positions.is_contiguous() and slots.is_contiguous(), "rope_append: positions and slots must be contiguous")
        _require(positions.numel() == tokens == slots.numel(), "rope_append: one position and slot a token")
        if norm is not None:
            _require(norm.q.dtype == norm.k.dtype == qkv.dtype, "rope_append: norm weights must be of qkv's dtype")
        failed = self._rope(
            qkv.data_ptr(),
            positions.data_ptr(),
            slots.data_ptr(),
            rope.cos.data_ptr(),
            rope.sin.data_ptr(),
            held.data_ptr() + layer * layer_stride * held.element_size(),
            None if norm is None else norm.q.data_ptr(),
            None if norm is None else norm.k.data_ptr(),
            scales,
            _offsets(kv, layer),
            tokens,
            qkv.stride(0),
            heads - 2 * kv_heads,
            kv_heads,
            head_dim,
            page_size,
            pages,
            rope.cos.shape[0],
            page_stride,
            kv_stride,
            head_stride,
            0.0 if norm is None else norm.eps,
            _TYPES[qkv.dtype],
            _TYPES[held.dtype],
            _threads(tokens * heads * head_dim),
        )
        if failed:
            slot, position = int(slots[failed - 1]), int(positions[failed - 1])
            raise IndexError(
                f"token {failed - 1}: slot {slot} or position {position} is outside "
                f"the {pages * page_size} slots or {rope.cos.shape[0]} positions allowed"
            )

    def paged_attention(
        self, q: Tensor, kv: KV, layer: int, page_table: Tensor, starts: Tensor, context_lens: Tensor, scale: float
    ) -> Tensor:
        tokens, q_heads, head_dim = q.shape
        held, scales = _parts(kv, layer)
        pages, _, _, kv_heads, page_size, _ = held.shape
        page_stride, layer_stride, kv_stride, head_stride = _kv_strides(held, head_dim)
        _require(q.stride(1) == head_dim and q.stride(2) == 1, "paged_attention: q rows must be contiguous")
        _require(q_heads % kv_heads == 0, "paged_attention: kv_heads must divide q_heads")
        for index in (page_table, starts, context_lens):
            _require(index.dtype == torch.int32 and index.is_contiguous(), "paged_attention: indices must be int32")
        _require(page_table.shape[0] == context_lens.numel() == starts.numel() - 1, "paged_attention: one row a sequence")
        out = torch.empty((tokens, q_heads, head_dim), dtype=q.dtype)
        failed = self._attention(
            q.data_ptr(),
            held.data_ptr() + layer * layer_stride * held.element_size(),
            page_table.data_ptr(),
            starts.data_ptr(),
            context_lens.data_ptr(),
            scales,
            out.data_ptr(),
            page_table.shape[0],
            q.stride(0),
            q_heads,
            kv_heads,
            head_dim,
            page_size,
            pages,
            page_table.shape[1],
            page_stride,
            kv_stride,
            head_stride,
            scale,
            _TYPES[q.dtype],
            _TYPES[held.dtype],
            torch.get_num_threads(),
        )
        if failed < 0:
            raise MemoryError("paged_attention: no memory for its scratch")
        if failed:
            raise IndexError(
                f"sequence {failed - 1}: its context of {int(context_lens[failed - 1])} tokens does not fit its new tokens "
                f"or its {page_table.shape[1]} pages, or a page is outside the {pages} allowed"
            )
        return out

    def convert_pages(self, source: KV, blocks: Sequence[int], kv: KV, pages: Sequence[int], tokens: int) -> int | None:
        (read, read_scales), (held, held_scales) = _parts(source), _parts(kv)
        check_pages(read, blocks, held, pages, tokens)
        _require(read.is_contiguous() and held.is_contiguous(), "convert_pages: pools must be contiguous")
        same = same_offsets(source, kv)
        found = self._convert(
            read.data_ptr(),
            (_LONG * len(blocks))(*blocks),
            read_scales,
            None if same else _offsets(source),
            held.data_ptr(),
            (_LONG * len(pages))(*pages),
            held_scales,
            None if same else _offsets(kv),
            tokens,
            held[0].numel() // (held.shape[4] * held.shape[5]),
            held.shape[3],
            held.shape[4],
            held.shape[5],
            _TYPES[read.dtype],
            _TYPES[held.dtype],
            _threads(tokens * held[0].numel() // held.shape[4]),
        )
        return found - 1 if found else None

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        rows, n = gate_up.shape
        _require(gate_up.is_contiguous(), "silu_mul: gate_up must be contiguous")
        out = torch.empty((rows, n // 2), dtype=gate_up.dtype)
        self._silu(gate_up.data_ptr(), out.data_ptr(), rows, n // 2, _TYPES[gate_up.dtype], _threads(rows * n))
        return out

    def pack(self, weight: Tensor) -> PackedWeight:
        rows, columns = weight.shape
        kind = _TYPES[weight.dtype]
        size = self._packed_bytes(rows, columns, kind)
        _require(size > 0, "pack: bfloat16 weights need an even in_features")
        packed = self._memory.take(size)
        self._pack(weight.contiguous().data_ptr(), packed.data_ptr(), rows, columns, kind, torch.get_num_threads())
        return PackedWeight(packed, rows, columns, weight.dtype)

    def linear(self, x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
        rows, columns = x.shape
        _require(columns == weight.in_features and x.dtype == weight.dtype, "linear: x must match the weight")
        _require(x.is_contiguous(), "linear: x must be contiguous")
        if bias is not None:
            _require(bias.numel() == weight.out_features and bias.dtype == x.dtype, "linear: bias must match the weight")
        out = torch.empty((rows, weight.out_features), dtype=x.dtype)
        self._linear(
            x.data_ptr(),
            weight.data.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            rows,
            weight.out_features,
            columns,
            _TYPES[x.dtype],
            _threads(weight.out_features * columns),
        )
        return out


def _bind(library: ctypes.CDLL, name: str, instruction_set: str) -> Callable[..., int]:
    function = getattr(library, f"tritone_{name}_{instruction_set}")
    function.restype, function.argtypes = _SIGNATURES[name]
    return function  # type: ignore[no-any-return]


def _threads(elements: int) -> int:
    return torch.get_num_threads() if elements >= _PARALLEL_FROM else 1


def _parts(kv: KV, layer: int = 0) -> tuple[Tensor, int | None]:
    """The elements of the pages, and where the layer's scales lie (null: they have none)."""
    if isinstance(kv, QuantizedPages):
        return kv.codes, kv.scales.data_ptr() + layer * kv.scales.stride(0) * 4
    _require(kv.dtype != torch.float8_e4m3fn, "kv: e4m3 pages need their scales (QuantizedPages)")
    return kv, None


def _offsets(kv: KV, layer: int = 0) -> int | None:
    """Where the offsets of the layer's keys lie (null: they have none)."""
    if not isinstance(kv, QuantizedPages) or kv.offsets is None:
        return None
    return kv.offsets.data_ptr() + layer * kv.offsets.stride(0) * 4


def _kv_strides(kv: Tensor, head_dim: int) -> tuple[int, int, int, int]:
    page, layer, half, head, token, element = kv.stride()
    _require(kv.shape[5] == head_dim and token == head_dim and element == 1, "kv: its last two axes must be contiguous")
    _require(kv.shape[4] % 16 == 0 and kv.shape[4] <= 64, "kv: page_size must be 16, 32, 48 or 64")
    _require(head_dim % 2 == 0 and head_dim <= _MAX_HEAD_DIM, "kv: head_dim must be even and at most 512")
    return page, layer, half, head


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
