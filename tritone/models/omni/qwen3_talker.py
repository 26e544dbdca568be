"""Qwen3-Omni's Talker: what it is told, and its network as the Talker's engine runs it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tritone.kernels import KV, Kernels
from tritone.models.code_predictor import CodePredictor
from tritone.models.decoder import Batch, Decoder, Linear
from tritone.models.omni.heard import Heard
from tritone.models.omni.script import StreamedScript
from tritone.options import Sampling
from tritone.voices import Voices

RESIDUAL = Sampling(temperature=1.0, top_k=50, top_p=0.8)
"""How residual codes are drawn, whatever codebook 0 has; only a greedy sequence has greedy ones."""
_HEADER = 3
"""Tokens of a turn's beginning: its mark, its role, a line break."""


@dataclass(frozen=True)
class Ids:
    """Signs of codebook 0, by ``config.json``: ``before`` the speaker's and the two ``after`` it; ``speakers``: those of the
    voices."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    stop: int
    special: int
    """How many of the last ids are signs, never chosen but for ``stop``."""
    speakers: dict[str, int]


@dataclass(frozen=True)
class Projection:
    """A small network from the Thinker's width to the Talker's."""

    kernels: Kernels
    first: Linear
    second: Linear

    def __call__(self, x: Tensor) -> Tensor:
        inner = self.first(x)
        # The kernel's SiLU, times one: torch's would give a row other bits at another place of the batch.
        return self.second(self.kernels.silu_mul(torch.cat((inner, torch.ones_like(inner)), dim=-1)))


class Qwen3Talker:
    """A ``TalkerModel``. ``signs`` [3, thinker hidden]: the Thinker's embeddings of the text's begin, end and pad."""

    def __init__(
        self,
        ids: Ids,
        decoder: Decoder,
        predictor: CodePredictor,
        text: Projection,
        media: Projection,
        signs: Tensor,
        voices: Voices,
    ) -> None:
        self.ids = ids
        self.decoder = decoder
        self.text = text
        self.media = media
        self.voices = voices
        self.codebooks = len(predictor.tables) + 1
        self.stops = frozenset((ids.stop,))
        self.penalised: frozenset[int] = frozenset()
        self.codebooks = 1 + len(predictor.tables)
        self.thinker_size = signs.shape[1]
        with torch.inference_mode():
            self.begin, self.end, self.pad = text(signs.to(decoder.dtype))
        self._predictor = predictor
        codes = decoder.config.vocab_size - ids.special
        self._suppressed = torch.tensor([token for token in range(codes, codes + ids.special) if token != ids.stop])

    def script(self, heard: Heard, voice: str) -> Qwen3Script:
        """For a prompt of which ``heard`` is read. Raises ``InvalidArgument`` for a voice that is none."""
        return Qwen3Script(self, heard, self.ids.speakers[self.voices.pick(voice)])

    def forward(self, batch: Batch, kv: KV, inputs: Tensor | None = None) -> Tensor:
        return self.decoder.forward(batch, kv, inputs)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.decoder.logits(hidden)
        logits[:, self._suppressed] = -torch.inf
        return logits

    def is_code(self, token: int) -> bool:
        return token not in self.stops

    @torch.inference_mode()
    def frames(self, hidden: Tensor, first: list[int], draws: list[tuple[Sampling, int]]) -> Tensor:
        codes = torch.tensor(first)
        residual = [
            (replace(RESIDUAL, temperature=RESIDUAL.temperature if sampling.temperature else 0.0, seed=sampling.seed), number)
            for sampling, number in draws
        ]
        return torch.stack([codes, *self._predictor.predict(hidden, self.decoder.embed(codes), residual)], dim=1)

    def embed(self, frames: Tensor) -> Tensor:
        return self._predictor.embed(self.decoder.embed(frames[:, 0]), frames)


class Qwen3Script(StreamedScript):
    """The Thinker's rows are embeddings of text, and hidden states of media."""

    def __init__(self, model: Qwen3Talker, heard: Heard, speaker: int) -> None:
        super().__init__(heard, model.decoder.dtype, model.end, model.pad)
        self._model = model
        self._speaker = speaker
        self._opening = model.begin[:0]
        """[read + 3, hidden]"""

    def open(self, prompt: Tensor) -> None:
        model, heard = self._model, self.heard
        turn = model.text(prompt[heard.opening :])
        parts = []
        for begin, end in heard.spans:
            part = model.text(prompt[begin:end])
            for first, last in heard.media:
                if begin <= first < end:
                    part[first - begin : last - begin] = model.media(prompt[first:last])
            parts.append(part)
        self._opening = torch.cat((*parts, turn[:_HEADER]))
        self.texts += turn[_HEADER:]

    def told(self, answer: Tensor) -> Tensor:
        return self._model.text(answer)

    def rows(self) -> Tensor:
        model, ids = self._model, self._model.ids
        signs = model.decoder.embed(torch.tensor([*ids.before, self._speaker, *ids.after]))
        texts = torch.stack((*[model.pad] * (len(signs) - 2), model.begin, self.texts[0]))
        opening, self._opening = self._opening, self._opening[:0]
        return torch.cat((opening, texts + signs))
