"""The trained voice as the Talkers' engine runs it."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from tritone.engine.talker import SpeechPrompt
from tritone.kernels import KV
from tritone.models.code_predictor import CodePredictor
from tritone.models.decoder import Batch, Decoder, load_decoder
from tritone.models.decoder.linear import DenseLinear
from tritone.models.talker.config import END, PREDICTOR, READ, REST, TALKER, TalkerConfig, load_config
from tritone.models.talker.context import TokenTrack
from tritone.models.talker.model import TextEncoder
from tritone.models.talker.text import ClauseText, TextReader
from tritone.models.voice.clauses import ClauseSplitter
from tritone.options import Sampling
from tritone.voices import Voices

PASSAGE_UNITS = 200
"""Units of text that one sequence speaks at most, if its clauses are no longer: training's rows have 512 places, and two units
go with about three frames."""


class VoiceTalker:
    """A ``TalkerModel``. ``tables`` are the text side's tensors, with the network's names; it stays in float32."""

    stops: frozenset[int] = frozenset()
    penalised: frozenset[int] = frozenset()

    def __init__(self, config: TalkerConfig, decoder: Decoder, predictor: CodePredictor, tables: dict[str, Tensor]) -> None:
        self.decoder = decoder
        self.codebooks = config.codebooks
        self.voices = Voices.of(config.speakers, config.speakers[0])
        self.reader = TextReader()
        self._predictor = predictor
        self._encoder = TextEncoder(config).eval()
        self._encoder.load_state_dict(_under(tables, "text_encoder."))
        self._context, self._speakers = tables["context_projection.weight"], tables["speaker_embedding.weight"]
        self._speaker_names = config.speakers
        with torch.inference_mode():
            self._read = decoder.embed(torch.tensor([READ]))[0].float()

    def script(self, voice: str) -> VoiceScript:
        """Raises ``InvalidArgument`` for a voice that is none; "" is the default."""
        speaker = self._speakers[self._speaker_names.index(self.voices.pick(voice))]
        return VoiceScript(self, speaker.to(self.decoder.dtype))

    @torch.inference_mode()
    def units(self, text: ClauseText, contexts: Tensor) -> Tensor:
        """Rows [U, width] of a clause's units; contexts float [U, hidden] are the Thinker's states, zeros where there are
        none."""
        vectors: Tensor = self._encoder(torch.from_numpy(text.ids)[None])[0][torch.from_numpy(text.picks)]
        known = functional.linear(functional.rms_norm(contexts, contexts.shape[-1:]), self._context)
        return (vectors + self._read + known).to(self.decoder.dtype)

    @property
    def context_size(self) -> int:
        """The width of the Thinker's hidden states."""
        return self._context.shape[1]

    def forward(self, batch: Batch, kv: KV, inputs: Tensor | None = None) -> Tensor:
        return self.decoder.forward(batch, kv, inputs)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.decoder.logits(hidden)
        logits[:, END] = -torch.inf
        return logits

    def is_code(self, token: int) -> bool:
        return token < READ

    @torch.inference_mode()
    def frames(self, hidden: Tensor, first: list[int], draws: list[tuple[Sampling, int]]) -> Tensor:
        codes = torch.tensor(first)
        return torch.stack([codes, *self._predictor.predict(hidden, self.decoder.embed(codes), draws)], dim=1)

    def embed(self, frames: Tensor) -> Tensor:
        return self._predictor.embed(self.decoder.embed(frames[:, 0]), frames)


class VoiceScript:
    """A ``Script``: text in pieces, whose units are given one by one, each when the model asks for it.

    A clause's units are there once the clause is whole, and are made when they are wanted, so that a long text costs a clause
    at a time. Text of more than ``PASSAGE_UNITS`` is spoken in passages, each by a sequence of its own: the model has not
    learned to speak longer ones. How it is cut depends on the text alone.
    """

    def __init__(self, model: VoiceTalker, speaker: Tensor) -> None:
        self._model = model
        self._speaker = speaker
        self._splitter = ClauseSplitter()
        self._track = TokenTrack()
        self._hidden: list[Tensor] = []
        self._clauses: deque[str] = deque()
        """Those whose units are not made."""
        self._pieces: deque[Tensor] = deque()
        """Units [U, width] of clauses that are not spoken yet; a long clause has several pieces."""
        self._units: deque[Tensor] = deque()
        """What is left of the piece that is spoken, each [width]."""
        self._length = 0
        """Units of the passage so far."""
        self._ended = False
        self.over = False
        self.paused = False
        """Whether a piece has been spoken to its end, and nothing of what follows."""

    def feed(self, text: str, rows: Tensor | None = None) -> None:
        """Further text; rows [T, N] are the hidden states that its tokens were chosen from. Those of another width than
        ``context_size`` are another Thinker's, and are not read."""
        tokens = 0
        if rows is not None and rows.shape[1] == self._model.context_size:
            self._hidden += rows.float()
            tokens = len(rows)
        self._track.feed(text, tokens)
        self._clauses += self._splitter.feed(text)

    def finish(self) -> None:
        """The text has ended."""
        self._clauses += self._splitter.flush()
        self._ended = True

    @property
    def silent(self) -> bool:
        return self._ended and not self._ready()

    def resume(self) -> bool:
        """After ``over``: whether there is another passage, for another sequence."""
        self._length, self.over = 0, False
        return self._ready()

    def prompt(self) -> SpeechPrompt | None:
        return SpeechPrompt(self._speaker[None]) if self._ready() else None

    def next(self, token: int, frame: Tensor | None) -> Tensor | None:
        self.paused = token == READ and not self._units and self._length > 0
        if token != READ:
            return frame
        if not self._units and not self._proceed():
            return None
        return self._units.popleft()

    def _proceed(self) -> bool:
        """Go on to the next piece; not where there is none yet, or the passage is over."""
        if not self._ready():
            self.over = self._ended
            return False
        if self._length and self._length + len(self._pieces[0]) > PASSAGE_UNITS:
            self.over = True
            return False
        self._units += self._pieces.popleft()
        self._length += len(self._units)
        return True

    def _ready(self) -> bool:
        """Whether there is another piece."""
        while self._clauses and not self._pieces:
            clause = self._clauses.popleft()
            texts = self._model.reader.read(clause)
            for text, tokens in zip(texts, self._track.take(clause, texts), strict=True):
                self._pieces.append(self._model.units(text, self._states(tokens)))
        return bool(self._pieces)

    def _states(self, tokens: npt.NDArray[np.int64]) -> Tensor:
        """[U, context_size] of the tokens with these indexes; zeros for -1."""
        unknown = torch.zeros(self._model.context_size)
        return torch.stack([unknown if token < 0 else self._hidden[token] for token in tokens])


def load_voice(directory: Path, dtype: torch.dtype = torch.float32, max_positions: int | None = None) -> VoiceTalker:
    """From a directory that ``save_talker`` wrote. Raises ``InvalidArgument`` where there is none, ImportError without
    hibari-tts."""
    config = load_config(directory)
    decoder = load_decoder(directory / TALKER, dtype, max_positions=max_positions)
    predictor = load_decoder(directory / PREDICTOR, dtype, max_positions=config.codebooks)
    tables = {name: value.float() for name, value in load_file(directory / REST).items()}
    books = range(1, config.codebooks - 1)
    embeddings = [tables[f"code_predictor.model.codec_embedding.{index}.weight"].to(dtype) for index in books]
    heads = [tables[f"code_predictor.lm_head.{index}.weight"].to(dtype) for index in books]
    first = load_file(directory / PREDICTOR / "model.safetensors")
    return VoiceTalker(
        config,
        decoder,
        CodePredictor(
            predictor,
            [first["model.embed_tokens.weight"].to(dtype), *embeddings],
            [predictor.head, *(DenseLinear(predictor.kernels, head) for head in heads)],
        ),
        tables,
    )


def _under(tables: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tables.items() if name.startswith(prefix)}
