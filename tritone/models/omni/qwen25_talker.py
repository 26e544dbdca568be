"""Qwen2.5-Omni's Talker: what it is told, and its network as the Talker's engine runs it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tritone.kernels import KV
from tritone.models.decoder import Batch, Decoder, Linear
from tritone.models.omni.heard import Heard
from tritone.models.omni.script import StreamedScript
from tritone.options import Sampling
from tritone.voices import Voices


@dataclass(frozen=True)
class Codes:
    """Signs of the codebook, by ``config.json``."""

    pad: int
    begin: int
    end: int
    mask: int


class Qwen25Talker:
    """A ``TalkerModel`` of one codebook; rows are as wide as the Thinker's, and projected in every step.

    ``begins`` [thinker hidden]: for each voice the embedding that begins its text. ``end`` and ``pad`` [thinker hidden]:
    the embeddings of the text's end and of what comes after.
    """

    def __init__(
        self,
        codes: Codes,
        decoder: Decoder,
        projection: Linear,
        begins: dict[str, Tensor],
        end: Tensor,
        pad: Tensor,
        voices: Voices,
    ) -> None:
        self.codes = codes
        self.decoder = decoder
        self.end = end
        self.pad = pad
        self.voices = voices
        self.codebooks = 1
        # The pad sign ends the speech too, as in the reference's own call.
        self.stops = frozenset((codes.pad, codes.end))
        # The reference counts its placeholders of the prompt.
        self.penalised = frozenset((codes.mask, codes.pad, codes.begin))
        self.codebooks = 1
        self.thinker_size = decoder.config.embedding_size
        self._projection = projection
        self._begins = begins

    def script(self, heard: Heard, voice: str) -> Qwen25Script:
        """For a prompt of which ``heard`` is read. Raises ``InvalidArgument`` for a voice that is none."""
        return Qwen25Script(self, heard, self._begins[self.voices.pick(voice)])

    def forward(self, batch: Batch, kv: KV, inputs: Tensor | None = None) -> Tensor:
        assert inputs is not None
        return self.decoder.forward(batch, kv, self._projection(inputs))

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.decoder.logits(hidden)
        logits[:, self.codes.begin] = -torch.inf
        return logits

    def is_code(self, token: int) -> bool:
        return token not in self.stops

    def frames(self, hidden: Tensor, first: list[int], draws: list[tuple[Sampling, int]]) -> Tensor:
        return torch.tensor(first)[:, None]

    def embed(self, frames: Tensor) -> Tensor:
        return self.decoder.embed(frames[:, 0])


class Qwen25Script(StreamedScript):
    """The Thinker's rows are hidden states + embeddings."""

    def __init__(self, model: Qwen25Talker, heard: Heard, begin: Tensor) -> None:
        super().__init__(heard, model.decoder.dtype, model.end, model.pad)
        self._model = model
        self._begin = begin
        self._prompt = begin[:0]

    def open(self, prompt: Tensor) -> None:
        self._prompt = prompt

    def told(self, answer: Tensor) -> Tensor:
        return answer

    def rows(self) -> Tensor:
        codes = self._model.codes
        signs = self._model.decoder.embed(torch.tensor([codes.pad, codes.begin]))
        prompt, self._prompt = self._prompt, self._begin[:0]
        return torch.cat((prompt, torch.stack((self._begin, self.texts[0])) + signs))
