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
    """What the Talker gets of an answer: a row [1, hidden] for each token, in order; ``token`` None ends the answer.

    ``early``: a token's row is there once it is chosen, the first one's in prefill.
    """

    early: bool

    def first(self, hidden: torch.Tensor, token: int | None) -> torch.Tensor | None:
        """After the prompt, whose last state ``hidden`` [hidden] ``token`` was chosen from."""
        ...

    def next(self, hidden: torch.Tensor, fed: int, token: int | None) -> torch.Tensor | None:
        """After a step that took in the token ``fed``; ``token`` was chosen from its state ``hidden`` [hidden]."""
        ...

    def again(self, token: int | None) -> torch.Tensor | None:
        """The first row, where it can be made again: it waits in decode while its token's text does."""
        ...


class StateRows:
    """The states that the tokens were chosen from, where the checkpoint has no Talker of its own."""

    early = True

    def first(self, hidden: torch.Tensor, token: int | None) -> torch.Tensor | None:
        return hidden[None]

    def next(self, hidden: torch.Tensor, fed: int, token: int | None) -> torch.Tensor | None:
        return None if token is None else hidden[None]

    def again(self, token: int | None) -> torch.Tensor | None:
        return None


class EmbeddingRows:
    """The embedding of each token as soon as it is chosen (Qwen3-Omni)."""

    early = True

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def first(self, hidden: torch.Tensor, token: int | None) -> torch.Tensor | None:
        return self.again(token)

    def next(self, hidden: torch.Tensor, fed: int, token: int | None) -> torch.Tensor | None:
        return self.again(token)

    def again(self, token: int | None) -> torch.Tensor | None:
        return None if token is None else self._decoder.embed(torch.tensor([token]))


class SummedRows:
    """Final state plus embedding of each token, once it was taken in: not of the last one (Qwen2.5-Omni)."""

    early = False

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def first(self, hidden: torch.Tensor, token: int | None) -> torch.Tensor | None:
        return None

    def next(self, hidden: torch.Tensor, fed: int, token: int | None) -> torch.Tensor | None:
        return hidden + self._decoder.embed(torch.tensor([fed]))

    def again(self, token: int | None) -> torch.Tensor | None:
        return None


def answer_rows(decoder: Decoder) -> AnswerRows:
    """The rows that the Talker of ``decoder``'s checkpoint takes."""
    handed = decoder.config.handed
    if handed is None:
        return StateRows()
    return SummedRows(decoder) if handed.summed else EmbeddingRows(decoder)


class HeldRows:
    """The rows of one answer until the text of their tokens leaves, so that no stop string is spoken."""

    def __init__(self, kind: AnswerRows, writer: HiddenWriter, first: int | None, handed: int, shown: bool) -> None:
        """Prefill handed over so many rows; ``shown``: the text of the token ``first`` leaves with them."""
        row = None if shown else kind.again(first)
        self._kind = kind
        self._writer = writer
        self._rows = [] if row is None else [row]
        self._told = 1 if kind.early and row is None else 0
        """Rows of so many tokens of the answer have left."""
        self.handed = handed - len(self._rows)
        """How many of prefill's rows the Talker is told of: not of a first one that waits."""

    def add(self, hidden: torch.Tensor, fed: int, token: int | None) -> None:
        """As ``AnswerRows.next``."""
        row = self._kind.next(hidden, fed, token)
        if row is not None:
            self._rows.append(row)

    def lend(self, spoken: int) -> tuple[BlockRefs, int] | None:
        """The rows of the first ``spoken`` tokens that have not left yet, and how many; None without any."""
        ready = self._rows[: max(0, spoken - self._told)]
        if not ready:
            return None
        refs = self._writer.lend(torch.cat(ready))
        del self._rows[: len(ready)]
        self._told += len(ready)
        return refs, len(ready)
