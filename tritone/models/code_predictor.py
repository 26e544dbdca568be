"""A code predictor: the residual codes of a frame, one codebook after the other."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tritone.engine.sampling import draw
from tritone.models.decoder import Batch, Decoder, Linear
from tritone.options import Sampling

_PAGE_STEP = 16


class CodePredictor:
    """``decoder`` runs over what a frame is made of so far: the Talker's hidden state, then code after code.

    ``tables`` [codes, hidden] and ``heads`` are of codebooks 1, 2, ...: codebook ``n`` is chosen by ``heads[n - 1]``. A
    frame's keys and values live for that frame alone, in a page of its own.
    """

    def __init__(self, decoder: Decoder, tables: list[Tensor], heads: list[Linear]) -> None:
        self._decoder = decoder
        self.tables = tables
        self._heads = heads
        self._page_size = -(-(len(tables) + 1) // _PAGE_STEP) * _PAGE_STEP
        self._kv = torch.empty(0)

    @torch.inference_mode()
    def predict(self, hidden: Tensor, first: Tensor, draws: list[tuple[Sampling, int]]) -> list[Tensor]:
        """Codes of codebooks 1, 2, ..., each int64 [N], of frames with hidden states [N, hidden], whose codes of codebook 0
        are embedded as ``first`` [N, hidden]. Where a frame's sampling is greedy its codes are the likeliest; else they are
        drawn, and the frame's number in its sequence is the counter."""
        count = len(hidden)
        kv = self._pages(count)
        inputs = torch.stack((hidden, first), dim=1).flatten(0, 1)
        codes: list[Tensor] = []
        for index, head in enumerate(self._heads):
            out = self._decoder.forward(self._batch(count, 2 if index == 0 else 1, index + 2), kv, inputs)
            logits = head(out.view(count, -1, out.shape[-1])[:, -1].contiguous()).float()
            codes.append(_chosen(logits, draws, index + 1))
            if index + 1 < len(self._heads):
                inputs = functional.embedding(codes[-1], self.tables[index])
        return codes

    @torch.inference_mode()
    def embed(self, first: Tensor, codes: Tensor) -> Tensor:
        """What frames with codes int64 [N, codebooks] are as inputs of the Talker, in the dtype of ``first`` [N, hidden], which
        is codebook 0's part: the sum over their codebooks, in float32."""
        total = first.float()
        for index, table in enumerate(self.tables):
            total = total + functional.embedding(codes[:, index + 1], table).float()
        return total.to(first.dtype)

    def _batch(self, count: int, new: int, length: int) -> Batch:
        """``new`` rows of each frame, ``length`` with those before."""
        return Batch(
            tokens=torch.zeros(count * new, dtype=torch.int64),
            positions=torch.arange(length - new, length, dtype=torch.int32).repeat(count),
            query_starts=list(range(0, count * new + 1, new)),
            context_lens=torch.full((count,), length, dtype=torch.int32),
            page_table=torch.arange(count, dtype=torch.int32)[:, None],
        )

    def _pages(self, count: int) -> Tensor:
        if len(self._kv) < count:
            shape = self._decoder.config.page_shape(self._page_size)
            self._kv = torch.zeros(count, *shape, dtype=self._decoder.dtype)
        return self._kv


def _chosen(logits: Tensor, draws: list[tuple[Sampling, int]], codebook: int) -> Tensor:
    codes = logits.argmax(dim=-1)
    for row, (sampling, number) in enumerate(draws):
        if sampling.temperature:
            # Each codebook has counters of its own, above those of codebook 0.
            codes[row] = draw(logits[row], sampling, number + (codebook << 64))
    return codes
