"""What the engine asks of its kernels: one protocol, implemented natively and in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class RopeTable:
    """Cosines and sines by position, both float32 [positions, head_dim / 2], contiguous; attention scaling included."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class HeadNorm:
    """RMS norm over each query and key head (Qwen3): two weights [head_dim] of the activation dtype."""

    q: Tensor
    k: Tensor
    eps: float


@dataclass(frozen=True)
class PackedWeight:
    """A weight matrix [out_features, in_features] in the layout of the kernels that packed it, of ``dtype``."""

    data: Tensor
    out_features: int
    in_features: int
    dtype: torch.dtype


@dataclass(frozen=True)
class QuantizedPages:
    """KV pages of e4m3: ``codes`` float8_e4m3fn, shaped as other pages; ``scales`` float32 [layers, 2, kv_heads], > 0;
    ``offsets`` float32 [layers, kv_heads, head_dim], which keys are without (None: 0).

    A value is its code times its head's scale. Conversion rounds ``x / scale`` to the nearest code, ties to even, and
    saturates at +-448; no number and no infinity becomes NaN, and a NaN stays one, which attention passes on.

    Keys lose their offset first. All keys of a sequence lose the same, so that all scores of a query change by one number
    and its attention does not; what is left is smaller, and so is its error.

    Keys are mixed then: a Hadamard transform over ``mixed_width`` neighbours, times ``key_factor``; ``rope_append`` mixes
    the queries too, so that their products are the same. A code errs in proportion to its number, and a few large numbers
    that keys and queries have in common made most of the error: mixed, it is half as much.
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None = None

    def __post_init__(self) -> None:
        layers, _, heads, _, head_dim = self.codes.shape[1:]
        if self.codes.dtype != torch.float8_e4m3fn or self.scales.dtype != torch.float32:
            raise ValueError("QuantizedPages: float8_e4m3fn codes with float32 scales")
        if self.scales.shape != (layers, 2, heads) or not self.scales.is_contiguous():
            raise ValueError(f"QuantizedPages: contiguous scales of shape {[layers, 2, heads]}")
        if self.offsets is not None and (self.offsets.dtype != torch.float32 or not self.offsets.is_contiguous()):
            raise ValueError("QuantizedPages: contiguous float32 offsets")
        if self.offsets is not None and self.offsets.shape != (layers, heads, head_dim):
            raise ValueError(f"QuantizedPages: offsets of shape {[layers, heads, head_dim]}")

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.codes.dtype


def mixed_width(head_dim: int) -> int:
    """How many neighbours are mixed: the largest power of two that divides ``head_dim``."""
    return head_dim & -head_dim


def key_factor(width: int) -> float:
    """The factor of mixed keys. That of queries, and of the way back, is 1 / (width * this); all are powers of two."""
    return 2.0 ** -((width.bit_length() - 1) // 2)


KV = Tensor | QuantizedPages
"""A pool of KV pages [pages, layers, 2, kv_heads, page_size, head_dim]."""


def same_offsets(one: KV, other: KV) -> bool:
    """Whether both are e4m3 pages whose keys lack the same."""
    if not isinstance(one, QuantizedPages) or not isinstance(other, QuantizedPages):
        return False
    if one.offsets is None or other.offsets is None:
        return one.offsets is other.offsets
    return torch.equal(one.offsets, other.offsets)


def check_pages(source: Tensor, blocks: Sequence[int], held: Tensor, pages: Sequence[int], tokens: int) -> None:
    """The conditions of ``convert_pages``: pages alike, one target a source, room for the tokens, all within the pools."""
    if source.shape[1:] != held.shape[1:]:
        raise ValueError(f"convert_pages: pages of shape {list(source.shape[1:])} into {list(held.shape[1:])}")
    used = -(-tokens // held.shape[4])
    if tokens < 1 or used > min(len(blocks), len(pages)):
        raise IndexError(f"convert_pages: {tokens} tokens do not fit into {len(blocks)} pages read, {len(pages)} written")
    for name, numbers, total in (("read", blocks, source.shape[0]), ("written", pages, held.shape[0])):
        if min(numbers) < 0 or max(numbers) >= total:
            raise IndexError(f"convert_pages: a page {name} is outside the {total} allowed")


class Kernels(Protocol):
    """Activations are float32 or bfloat16; KV pages are float32, bfloat16 or e4m3, independently of them.

    ``kv`` is the pool [pages, layers, 2, kv_heads, page_size, head_dim] with 0 = key and 1 = value on its third axis. Its
    last two axes are contiguous, the others may have any stride. ``page_size`` is a multiple of 16, at most 64.
    A row's numbers depend on that row alone: not on its neighbours in the batch, nor on how many there are.
    """

    name: str

    def add_rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """RMS norm of ``x + residual``, both [T, n]; gives (normed, sum).

        The sum is written into ``residual`` and rounded to its dtype before the norm; without a residual it is ``x``
        itself. The normed value is rounded before it is multiplied by ``weight`` [n], as in the reference models.
        """
        ...

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
        """Norm and rotate the queries and keys in ``qkv``, in place, and write keys and values into the pages.

        ``qkv`` [T, q_heads + 2 * kv_heads, head_dim], ``positions`` int32 [T], ``slots`` int64 [T] = physical page *
        page_size + offset in it. With e4m3 pages the queries come back mixed, as the keys in the pages are.
        Raises ``IndexError`` for a slot outside the pool or a position outside the table.
        """
        ...

    def paged_attention(
        self, q: Tensor, kv: KV, layer: int, page_table: Tensor, starts: Tensor, context_lens: Tensor, scale: float
    ) -> Tensor:
        """Causal attention of new tokens over the pages of their own sequences, accumulated in float32.

        ``q`` [T, q_heads, head_dim], rows may be strided; ``page_table`` int32 [S, max_pages]; ``starts`` int32 [S + 1]:
        sequence s owns the rows starts[s] to starts[s + 1], its last tokens; ``context_lens`` int32 [S] counts them in.
        Gives [T, q_heads, head_dim] of q's dtype. A token gets the same bits whether it comes alone or inside a chunk
        (native kernels). A NaN among a token's keys, values or scores makes its result NaN. Raises ``IndexError`` for an
        empty sequence, a context that its pages cannot hold or a page outside the pool.
        """
        ...

    def convert_pages(self, source: KV, blocks: Sequence[int], kv: KV, pages: Sequence[int], tokens: int) -> int | None:
        """Copy the first ``tokens`` tokens that lie in pages ``blocks`` of ``source`` into pages ``pages`` of ``kv``.

        Both pools are contiguous and of the same page shape, their types may differ. Rows past ``tokens`` stay as they
        are. Gives the index of the first page in which a NaN was made a code, or None.
        Raises ``IndexError`` for a page outside its pool or too few pages.
        """
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """``silu(gate) * up`` of ``gate_up`` [T, 2 n], gate first; gives [T, n]."""
        ...

    def pack(self, weight: Tensor) -> PackedWeight:
        """Copy a weight [out_features, in_features] of an activation dtype into the layout that ``linear`` reads fastest."""
        ...

    def linear(self, x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
        """``x @ weight.T + bias`` of x [T, in_features] and the weight's dtype; gives [T, out_features]."""
        ...
