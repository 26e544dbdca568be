"""Runs tokens through the engine's decoder, over paged keys and values, as the serving stages do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from tritone.engine.engine import Engine
from tritone.engine.prefix_cache import PrefixCache
from tritone.engine.scheduler import Scheduler
from tritone.engine.sequence import Sequence as EngineSequence
from tritone.errors import TritoneError
from tritone.kernels import KV, QuantizedPages
from tritone.models.decoder import Batch, Decoder
from tritone.options import Sampling
from tritone.pools.free_list import FreeList

PAGE_SIZE = 32
CHUNK = 512
SEQUENCES = 16
"""Answers that are generated at once."""


class Runner:
    """``kv`` is the pages' dtype; ``scales`` float32 [layers, 2, kv_heads] makes them e4m3 instead, whose keys are without
    ``offsets`` float32 [layers, kv_heads, head_dim] (None: 0).

    A token's keys and values are written into the pages and read from there, its own too, so every row sees what a row of
    decode sees. With the native kernels the cut into chunks changes no bit.
    """

    def __init__(self, decoder: Decoder, kv: torch.dtype, scales: Tensor | None = None, offsets: Tensor | None = None) -> None:
        self.decoder = decoder
        self._dtype = kv
        self._scales, self._offsets = scales, offsets
        self._pages: KV | None = None

    @torch.inference_mode()
    def hidden(self, ids: Sequence[int], first: int) -> Tensor:
        """Hidden states [len(ids) - first, hidden] that tokens ``first`` (at least 1) and later are predicted from."""
        kv = self._room(len(ids))
        inputs = list(ids[:-1])
        parts = []
        table = list(range(-(-len(inputs) // PAGE_SIZE)))
        for begin in range(0, len(inputs), CHUNK):
            parts.append(self._forward([inputs[begin : begin + CHUNK]], begin, [table], kv))
        return torch.cat(parts)[first - 1 :]

    @torch.inference_mode()
    def options(self, context: Sequence[int], options: Sequence[Sequence[int]]) -> list[Tensor]:
        """For each option [len(option), hidden]: what its tokens are predicted from after ``context``.

        The context's full pages are computed once and shared by all options.
        """
        shared = (len(context) - 1) // PAGE_SIZE
        begin = shared * PAGE_SIZE
        rows = [[*context[begin:], *option[:-1]] for option in options]
        own = [-(-len(row) // PAGE_SIZE) for row in rows]
        kv = self._room((shared + sum(own)) * PAGE_SIZE)
        for start in range(0, begin, CHUNK):
            self._forward([list(context[start : min(begin, start + CHUNK)])], start, [list(range(shared))], kv)
        tables, page = [], shared
        for count in own:
            tables.append([*range(shared), *range(page, page + count)])
            page += count
        whole = self._forward(rows, begin, tables, kv)
        ends = list(accumulate(len(row) for row in rows))
        return [whole[end - len(option) : end] for end, option in zip(ends, options, strict=True)]

    @torch.inference_mode()
    def greedy(
        self, prompts: Sequence[Sequence[int]], length: int, stop: Sequence[int], progress: Callable[[int], None]
    ) -> list[list[int]]:
        """The likeliest token again and again, by the engine itself: up to ``length`` tokens for each prompt, the last one
        perhaps a ``stop`` token. ``progress`` gets the number of answers that are done."""
        longest = max(len(prompt) for prompt in prompts) + length + 1
        pages = -(-longest // PAGE_SIZE) * min(SEQUENCES, len(prompts))
        free = FreeList(pages)
        scheduler = Scheduler(free, PAGE_SIZE, SEQUENCES, CHUNK, cache=PrefixCache(free, PAGE_SIZE))
        engine = Engine(self.decoder, self._room(pages * PAGE_SIZE), scheduler)
        sequences = [EngineSequence(n, list(p), len(p), Sampling(temperature=0.0), length) for n, p in enumerate(prompts)]
        for sequence in sequences:
            scheduler.add(sequence)
        while len(scheduler):
            for output in engine.step():
                if output.error is not None or output.info is None:
                    raise output.error or TritoneError("engine step gave no token")
                if output.sequence.answer_length == length or output.info.token in stop:
                    scheduler.remove(output.sequence)
                    progress(len(sequences) - len(scheduler))
        return [sequence.tokens[sequence.prompt_length :] for sequence in sequences]

    def _room(self, tokens: int) -> KV:
        """Pages for so many tokens; what they held before is gone."""
        pages = -(-tokens // PAGE_SIZE)
        if self._pages is None or self._pages.shape[0] < pages:
            shape = (pages, *self.decoder.config.page_shape(PAGE_SIZE))
            if self._scales is None:
                self._pages = torch.zeros(shape, dtype=self._dtype)
            else:
                codes = torch.zeros(shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
                self._pages = QuantizedPages(codes, self._scales, self._offsets)
        return self._pages

    def _forward(self, rows: list[list[int]], begin: int, tables: list[list[int]], kv: KV) -> Tensor:
        """New tokens of several sequences, each from position ``begin`` on; single tokens must come first."""
        starts = [0]
        for row in rows:
            starts.append(starts[-1] + len(row))
        width = max(len(table) for table in tables)
        batch = Batch(
            tokens=torch.tensor([token for row in rows for token in row]),
            positions=torch.cat([torch.arange(begin, begin + len(row), dtype=torch.int32) for row in rows]),
            query_starts=starts,
            context_lens=torch.tensor([begin + len(row) for row in rows], dtype=torch.int32),
            page_table=torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32),
        )
        return self.decoder.forward(batch, kv)
