"""One step's input: the new tokens of several sequences and where their KV lies."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Deepstack:
    """``layers`` [L, V, hidden] are added to the outputs of the first L layers at the tokens ``rows`` int64 [V]."""

    rows: Tensor
    layers: Tensor


@dataclass(frozen=True)
class Media:
    """Audio and images among the new tokens of a step: ``embeddings`` [M, hidden] replace the tokens ``rows`` int64 [M]."""

    rows: Tensor
    embeddings: Tensor
    deepstack: Deepstack | None = None


@dataclass(frozen=True)
class Batch:
    """New tokens of S sequences, one after the other; T in all.

    ``tokens`` int64 [T]; ``positions`` int32 [T], each token's place in its sequence; ``query_starts`` S + 1 bounds:
    sequence s owns tokens query_starts[s] to query_starts[s + 1]; ``context_lens`` int32 [S], lengths with the new tokens;
    ``page_table`` int32 [S, max_pages], physical pages in order (entries past the context are not looked at).
    The engine puts sequences with a single new token first.
    ``rotary`` int32 [3, T]: time, height and width that the tokens are rotated by, where those are not ``positions``.
    ``handed`` [pages, page_size, hidden] gets, where the tokens lie, what a Talker is given of them (see ``Handed``).
    """

    tokens: Tensor
    positions: Tensor
    query_starts: list[int]
    context_lens: Tensor
    page_table: Tensor
    rotary: Tensor | None = None
    media: Media | None = None
    handed: Tensor | None = None

    @property
    def num_decodes(self) -> int:
        """How many sequences at the front have exactly one new token."""
        starts = self.query_starts
        count = 0
        while count + 1 < len(starts) and starts[count + 1] - starts[count] == 1:
            count += 1
        return count

    def slots(self, page_size: int) -> Tensor:
        """Where each new token's KV goes: physical page * page_size + offset, int64 [T].

        Raises ``IndexError`` for a position that its row of the page table cannot hold.
        """
        sequences = len(self.query_starts) - 1
        tokens = self.positions.shape[0]
        rows = torch.arange(sequences, device=self.positions.device)
        if tokens != sequences:
            bounds = torch.tensor(self.query_starts, device=self.positions.device)
            rows = torch.repeat_interleave(rows, bounds.diff(), output_size=tokens)
        positions = self.positions.long()
        return self.page_table[rows, positions // page_size].long() * page_size + positions % page_size
