"""Hidden states on their way to the Talker: written into pool blocks, sent as references."""

from __future__ import annotations

from typing import Protocol

import torch

from tritone.messages import BlockRefs
from tritone.models.decoder import Decoder
from tritone.pools import BlockPool
from tritone.pools.pool import torch_view
from tritone.sizes import HIDDEN_ROWS


class HiddenWriter:
    """Writes rows [hidden] into blocks [HIDDEN_ROWS, hidden] and lends them to the Talker, each call's with one lease."""

    def __init__(self, pool: BlockPool, lease_seconds: float) -> None:
        self._pool = pool
        self._lease_seconds = lease_seconds
        self._blocks: torch.Tensor = torch_view(pool.data, pool.header.dtype, pool.header.shape)

    def lend(self, rows: torch.Tensor) -> BlockRefs:
        """A reference to ``rows`` [N, hidden] in order, N at least 1; raises :class:`PoolExhausted` with nothing taken."""
        needed = -(-len(rows) // HIDDEN_ROWS)
        if needed > self._pool.available:
            self._pool.collect()
        blocks = self._pool.allocate(needed)
        for number, block in enumerate(blocks):
            part = rows[number * HIDDEN_ROWS : (number + 1) * HIDDEN_ROWS]
            self._blocks[block, : len(part)] = part
        return self._pool.lend(blocks, self._lease_seconds)


class AnswerRows(Protocol):
    """What the Talker gets of an answer: rows [N, hidden], in the order of the tokens; ``token`` None ends the answer."""

    def first(self, hidden: torch.Tensor, token: int | None) -> torch.Tensor | None:
        """After the prompt, whose last state ``hidden`` [hidden] ``token`` was chosen from."""
        ...

    def next(self, hidden: torch.Tensor, fed: int, token: int | None) -> torch.Tensor | None:
        """After a step that took in the token ``fed``; ``token`` was chosen from its state ``hidden`` [hidden]."""
        ...


class StateRows:
    """The states that the tokens were chosen from, where the checkpoint has no Talker of its own."""

    def first(self, hidden: torch.Tensor, token: int | None) -> torch.Tensor | None:
        return hidden[None]

    def next(self, hidden: torch.Tensor, fed: int, token: int | None) -> torch.Tensor | None:
        return None if token is None else hidden[None]


class EmbeddingRows:
    """The embedding of each token as soon as it is chosen (Qwen3-Omni)."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def first(self, hidden: torch.Tensor, token: int | None) -> torch.Tensor | None:
        return None if token is None else self._decoder.embed(torch.tensor([token]))

    def next(self, hidden: torch.Tensor, fed: int, token: int | None) -> torch.Tensor | None:
        return self.first(hidden, token)


class SummedRows:
    """Final state plus embedding of each token, once it was taken in: not of the last one (Qwen2.5-Omni)."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def first(self, hidden: torch.Tensor, token: int | None) -> torch.Tensor | None:
        return None

    def next(self, hidden: torch.Tensor, fed: int, token: int | None) -> torch.Tensor | None:
        return hidden + self._decoder.embed(torch.tensor([fed]))


def answer_rows(decoder: Decoder) -> AnswerRows:
    """The rows that the Talker of ``decoder``'s checkpoint takes."""
    handed = decoder.config.handed
    if handed is None:
        return StateRows()
    return SummedRows(decoder) if handed.summed else EmbeddingRows(decoder)
