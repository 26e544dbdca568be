"""What a pairing costs in perplexity: prompts through prefill's decoder, the rest through decode's, as a request is served."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from tritone.evaluation.bootstrap import Figure
from tritone.evaluation.build import Sizes, Texts, build_tasks
from tritone.evaluation.reference import Reference
from tritone.evaluation.runner import CHUNK, PAGE_SIZE, Runner
from tritone.evaluation.tasks import Likelihood, Raw
from tritone.evaluation.tasks.likelihood import Document
from tritone.kernels import KV, default_kernels
from tritone.measure.pairings import Pairing
from tritone.models.decoder import Decoder, key_offsets, load_decoder
from tritone.text.tokenizer import load_tokenizer

TOKENS = 16384
"""Tokens of real text; half of them are prompts."""
_PARTS = 8
Report = Callable[[int, int], None]


class PairRunner(Runner):
    """``prompt`` computes each document up to the first token that is scored; its keys and values are handed over to
    ``decoder``, which computes the rest; ``scales`` and ``offsets`` are those of its pages, see ``Runner``."""

    def __init__(
        self,
        prompt: Decoder,
        decoder: Decoder,
        dtype: torch.dtype,
        scales: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None:
        super().__init__(decoder, dtype, scales, offsets)
        self._prompt = Runner(prompt, dtype)

    @torch.inference_mode()
    def hidden(self, ids: Sequence[int], first: int) -> Tensor:
        pages = list(range(-(-len(ids) // PAGE_SIZE)))
        source, kv = self._prompt._room(len(ids)), self._room(len(ids))
        parts = [self._prompt._forward([list(ids[:first])], 0, [pages], source)[-1:]]
        self._take_over(source, kv, pages, first)
        rest = list(ids[first:-1])
        for begin in range(0, len(rest), CHUNK):
            parts.append(self._forward([rest[begin : begin + CHUNK]], first + begin, [pages], kv))
        return torch.cat(parts)

    def _take_over(self, source: KV, kv: KV, pages: list[int], tokens: int) -> None:
        default_kernels().convert_pages(source, pages, kv, pages, tokens)


class Accuracy:
    """Compares pairings of decoders, named in ``prefill`` and ``decode``, with ``checkpoint`` in float32, on the same tokens of
    real text. ``scales`` are those of e4m3 keys and values, by decode's decoder.

    A pairing that loses more than ``limit`` percent of perplexity on an eighth of the text, by the whole of its 95 %
    interval, is not run on the rest.
    """

    def __init__(
        self,
        checkpoint: Path,
        prefill: Mapping[str, Decoder],
        decode: Mapping[str, Decoder],
        scales: Mapping[str, Tensor],
        limit: float,
        work: Path,
        progress: Report,
    ) -> None:
        self._prefill, self._decode, self._scales = prefill, decode, scales
        self._limit = limit
        self._tokenizer = load_tokenizer(checkpoint)
        (text,) = build_tasks(["text"], Texts(checkpoint), Sizes(TOKENS, 0, 0, 0, 0), 0, None)
        windows = [ids for _, *ids in text.items]
        documents = [Document(tuple(ids), len(ids) // 2) for ids in windows if len(ids) > 3]
        self.source = text.source
        self._tasks = [
            Likelihood("part", text.source, documents[: -(-len(documents) // _PARTS)]),
            Likelihood("whole", text.source, documents),
        ]
        self._reference = Reference(checkpoint, work, {task.name: "pairings" for task in self._tasks})
        positions = max(task.longest for task in self._tasks)
        plain = Runner(load_decoder(checkpoint, dtype=torch.float32, max_positions=positions, weights="float32"), torch.float32)
        self._plain: dict[str, Raw] = {task.name: task.run(plain, self._reference, True, progress) for task in self._tasks}

    def increase(self, pairing: Pairing, progress: Report) -> Figure:
        """Percent of perplexity more than the reference has, with its 95 % interval."""
        prompt, decoder = self._prefill[pairing.prefill], self._decode[pairing.decode]
        runner = PairRunner(prompt, decoder, decoder.dtype)
        if pairing.kv == "fp8":
            scales = self._scales[pairing.decode]
            offsets = key_offsets(decoder, self._tokenizer, scales)
            runner = PairRunner(prompt, decoder, decoder.dtype, scales, offsets)
        for task in self._tasks:
            raw = task.run(runner, self._reference, False, progress)
            found = task.figures(raw, self._plain[task.name], 0)["perplexity_increase_percent"]
            if found.low > self._limit:
                break
        return found


def work_directory() -> tempfile.TemporaryDirectory[str]:
    """Where the reference's hidden states lie while pairings are compared."""
    return tempfile.TemporaryDirectory(prefix="tritone-accuracy-")
