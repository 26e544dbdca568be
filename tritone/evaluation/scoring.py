"""How one distribution over the next token differs from another, token by token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tritone.errors import TritoneError

ROWS = 128
"""Rows of logits that are in memory at once."""
TOP = 5


@dataclass(frozen=True)
class Scores:
    """Sums over the predicted tokens of one document: ``nll`` and ``kl`` in nats.

    ``kl`` is that of the reference's distribution to the candidate's, over the whole vocabulary. ``top1`` counts tokens
    where both find the same token likeliest; ``top5`` sums the share of the reference's five likeliest tokens that are
    among the candidate's five.
    """

    tokens: int
    nll: float
    kl: float
    top1: int
    top5: float


def compare(candidate: Tensor, reference: Tensor, targets: Tensor) -> Scores:
    """``candidate`` and ``reference`` are logits, float32 [n, vocabulary]; ``targets`` int64 [n] are the real next tokens.

    Raises ``TritoneError`` for logits that are not finite.
    """
    ours, theirs = candidate.log_softmax(-1), reference.log_softmax(-1)
    nll = -ours.gather(1, targets[:, None]).double().sum()
    kl = (theirs.exp() * (theirs - ours)).sum(-1).double().sum()
    if not bool(torch.isfinite(nll) & torch.isfinite(kl)):
        raise TritoneError("evaluation: logits are not finite")
    best, wanted = ours.topk(TOP).indices, theirs.topk(TOP).indices
    top1 = int((best[:, 0] == wanted[:, 0]).sum())
    top5 = float((best[:, :, None] == wanted[:, None, :]).sum()) / TOP
    return Scores(len(targets), float(nll), float(kl), top1, top5)


def added(parts: list[Scores]) -> Scores:
    """The sums of all parts."""
    return Scores(
        sum(part.tokens for part in parts),
        sum(part.nll for part in parts),
        sum(part.kl for part in parts),
        sum(part.top1 for part in parts),
        sum(part.top5 for part in parts),
    )
