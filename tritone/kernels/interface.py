"""What the engine asks of its kernels: one protocol, implemented natively and in plain torch."""

from __future__ import annotations

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


class Kernels(Protocol):
    """Activations are float32 or bfloat16; so are KV pages, independently of them.

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
        kv: Tensor,
        layer: int,
        norm: HeadNorm | None = None,
    ) -> None:
        """Norm and rotate the queries and keys in ``qkv``, in place, and write keys and values into the pages.

        ``qkv`` [T, q_heads + 2 * kv_heads, head_dim], ``positions`` int32 [T], ``slots`` int64 [T] = physical page *
        page_size + offset in it. Raises ``IndexError`` for a slot outside the pool or a position outside the table.
        """
        ...

    def paged_attention(
        self, q: Tensor, kv: Tensor, layer: int, page_table: Tensor, starts: Tensor, context_lens: Tensor, scale: float
    ) -> Tensor:
        """Causal attention of new tokens over the pages of their own sequences, accumulated in float32.

        ``q`` [T, q_heads, head_dim], rows may be strided; ``page_table`` int32 [S, max_pages]; ``starts`` int32 [S + 1]:
        sequence s owns the rows starts[s] to starts[s + 1], its last tokens; ``context_lens`` int32 [S] counts them in.
        Gives [T, q_heads, head_dim] of q's dtype. A token gets the same bits whether it comes alone or inside a chunk
        (native kernels). Raises ``IndexError`` for an empty sequence, a context that its pages cannot hold or a page
        outside the pool.
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
