"""What a layer does after attention: a gated product, or a mixture of such products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tritone.kernels import Kernels
from tritone.models.decoder.linear import Linear


class Mlp(Protocol):
    """Rows [T, hidden] of the activation dtype to rows of the same shape; a row's bits depend on that row alone.

    ``nbytes`` is what the weights take in memory.
    """

    @property
    def nbytes(self) -> int: ...
    def __call__(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class DenseMlp:
    """``down(silu(gate) * up)``; ``gate_up`` is fused in this order along its outputs."""

    kernels: Kernels
    gate_up: Linear
    down: Linear

    @property
    def nbytes(self) -> int:
        return self.gate_up.nbytes + self.down.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.kernels.silu_mul(self.gate_up(x)))


@dataclass(frozen=True)
class SharedExpert:
    """An expert for every token, times the sigmoid of ``gate``, whose output is a single number."""

    mlp: DenseMlp
    gate: Linear

    @property
    def nbytes(self) -> int:
        return self.mlp.nbytes + self.gate.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """Float32 [T, hidden]."""
        logits = self.gate(x).float()
        # As a softmax of two: a sigmoid's bits would depend on the place in the batch (vector or remainder).
        gates = torch.cat((logits, torch.zeros_like(logits)), dim=-1).softmax(-1)[:, :1]
        return self.mlp(x).float() * gates


@dataclass(frozen=True)
class SparseMlp:
    """A mixture of experts: each token goes to the ``per_token`` that ``router`` [experts, hidden] likes best.

    The router is float32 throughout; its weights are rounded to the activation dtype, as in the reference models. One product
    for each expert in use, over all of its tokens; a token's results are summed in float32, best expert first. Nothing of a
    token depends on the others.
    """

    router: Linear
    experts: tuple[DenseMlp, ...]
    per_token: int
    normalized: bool
    shared: SharedExpert | None = None

    @property
    def nbytes(self) -> int:
        shared = 0 if self.shared is None else self.shared.nbytes
        return self.router.nbytes + sum(expert.nbytes for expert in self.experts) + shared

    def __call__(self, x: Tensor) -> Tensor:
        weights, chosen = self._route(x)
        pairs = chosen.flatten()
        order = pairs.argsort(stable=True)
        inputs = x.index_select(0, order // self.per_token)  # grouped by expert
        results = torch.empty_like(inputs)
        begin = 0
        for expert, count in enumerate(torch.bincount(pairs).tolist()):
            if count:
                results[begin : begin + count] = self.experts[expert](inputs[begin : begin + count])
                begin += count
        by_token = torch.empty_like(results)
        by_token[order] = results
        parts = by_token.view(len(x), self.per_token, -1).float() * weights.float().unsqueeze(-1)
        total = _in_order(parts)
        if self.shared is not None:
            total = total + self.shared(x)
        return total.to(x.dtype)

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights of x's dtype and experts int64, both [T, per_token], best first."""
        weights, chosen = self.router(x.float()).softmax(-1).topk(self.per_token, dim=-1)
        if self.normalized:
            weights = weights / _in_order(weights).unsqueeze(-1)
        return weights.to(x.dtype), chosen


def _in_order(parts: Tensor) -> Tensor:
    """The sum over the second dimension, first to last: torch's own order depends on the shape."""
    total = parts[:, 0]
    for rank in range(1, parts.shape[1]):
        total = total + parts[:, rank]
    return total
