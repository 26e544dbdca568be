"""The engine of a Talker: sequences of speech codes whose input is still streaming.

A sequence's inputs are rows, not tokens: first its prompt, then one row for each token of codebook 0, made of what was
spoken last and of the text that has arrived. Where that text is missing the sequence waits: it keeps its pages and is in no
step. Everything else (batches, pages, preemption) is the engine's.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from tritone.engine.engine import Engine
from tritone.engine.sampling import choose
from tritone.engine.scheduler import Scheduler
from tritone.engine.sequence import Sequence
from tritone.errors import TritoneError
from tritone.kernels import KV
from tritone.messages import TokenInfo
from tritone.models.decoder import Batch
from tritone.options import Sampling


@dataclass(frozen=True)
class SpeechPrompt:
    """The first rows of a sequence, [P, width]. ``positions`` int32 [3, P] where they are not 0 to P - 1; the rows after them
    have their place plus ``delta``."""

    rows: Tensor
    positions: Tensor | None = None
    delta: int = 0


class Script(Protocol):
    """What one sequence is to say, as far as it has arrived; a family of Talkers has its own."""

    @property
    def silent(self) -> bool:
        """Whether the text has ended without anything to say."""

    @property
    def over(self) -> bool:
        """Whether ``next`` was asked for text when it had ended: that ends the speech, without a stop token."""

    def prompt(self) -> SpeechPrompt | None:
        """None while too little has arrived."""

    def next(self, token: int, frame: Tensor | None) -> Tensor | None:
        """The row [width] after ``token``, the embedding of whose codes is ``frame`` [width] (None where it is no code).
        None while its text has not arrived, and after a stop token. Asked again with the same token until it gives a row."""


class TalkerModel(Protocol):
    """A Talker's network. A row's numbers depend on that row alone, as everywhere."""

    codebooks: int
    stops: frozenset[int]
    """The tokens of codebook 0 that end the speech."""
    penalised: frozenset[int]
    """Those that the repetition penalty is about from the beginning."""

    def forward(self, batch: Batch, kv: KV, inputs: Tensor | None = None) -> Tensor:
        """Hidden states [T, hidden] of ``inputs`` [T, width], which are always given."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 [N, tokens of codebook 0]; minus infinity for those that are never chosen."""

    def is_code(self, token: int) -> bool:
        """Whether the token is a code, the first of a frame, and not another sign."""

    def frames(self, hidden: Tensor, first: list[int], draws: list[tuple[Sampling, int]]) -> Tensor:
        """All codes int64 [N, codebooks] of frames that begin with ``first``; the others are drawn with each frame's
        sampling and number."""

    def embed(self, frames: Tensor) -> Tensor:
        """[N, width] of frames int64 [N, codebooks]."""


@dataclass(eq=False)
class TalkerSequence(Sequence):
    """``tokens`` are those of codebook 0, after a placeholder for each row of the prompt. ``rows`` are the inputs known so
    far: one fewer than tokens while the sequence waits. ``codes`` int64 [codebooks] of the last token, if it is a code."""

    script: Script = field(kw_only=True)
    penalised: frozenset[int] = frozenset()
    rows: list[Tensor] = field(default_factory=list)
    positions: Tensor | None = None
    delta: int = 0
    codes: Tensor | None = None
    frame: Tensor | None = None
    spoken: int = 0
    """Frames so far."""

    @property
    def pending(self) -> int:
        return len(self.rows) - self.computed

    @property
    def due(self) -> bool:
        return self.pending == 0 and len(self.rows) == len(self.tokens)

    @property
    def seen(self) -> set[int]:
        return {*self.penalised, *self.counts}

    def append(self, token: int) -> None:
        super().append(token)
        self.proceed()

    def proceed(self) -> bool:
        """Take in the next rows if their text is there; whether any is."""
        if not self.rows:
            prompt = self.script.prompt()
            if prompt is None:
                return False
            self.rows = list(prompt.rows)
            self.tokens = [0] * len(self.rows)
            self.prompt_length = len(self.rows)
            self.positions, self.delta = prompt.positions, prompt.delta
        elif len(self.rows) < len(self.tokens):
            row = self.script.next(self.tokens[-1], self.frame)
            if row is None:
                return False
            self.rows.append(row)
        return True


@dataclass(frozen=True)
class Spoken:
    """What a step made for a sequence: ``codes`` int64 [codebooks] of a frame, or None where the token is none.

    ``finish``: ``stop`` (its stop token, or nothing to say), ``length`` (``max_tokens`` frames), or None: it goes on. The
    sequence is out of the engine once ``finish`` or ``error`` is set.
    """

    sequence: TalkerSequence
    codes: Tensor | None = None
    finish: str | None = None
    error: TritoneError | None = None


class TalkerEngine(Engine):
    """``max_tokens`` of a sequence is the most frames it speaks.

    ``max_length`` is the longest sequence, prompt included: at most the positions there are, and less than the pool's tokens.
    """

    model: TalkerModel

    def __init__(self, model: TalkerModel, kv: KV, scheduler: Scheduler, max_length: int) -> None:
        super().__init__(model, kv, scheduler)
        self.max_length = max_length
        self._opening: dict[int, TalkerSequence] = {}
        """Sequences whose prompt has not arrived: the scheduler does not know them yet."""

    def add(self, sequence: TalkerSequence) -> None:
        sequence.penalised = self.model.penalised
        self._opening[sequence.session] = sequence

    def arrived(self, sequence: TalkerSequence) -> Spoken | None:
        """More of the script is there, or its end; gives what ends the sequence at once."""
        if sequence.session not in self._opening:
            sequence.proceed()
            if not sequence.script.over:
                return None
            self.scheduler.remove(sequence)
            return Spoken(sequence, finish="stop")
        if sequence.script.silent:
            del self._opening[sequence.session]
            return Spoken(sequence, finish="stop")
        if sequence.proceed():
            del self._opening[sequence.session]
            if len(sequence.rows) >= self.max_length:
                message = f"talker: a prompt of {len(sequence.rows)} rows is not allowed; allowed: {self.max_length - 1}"
                return Spoken(sequence, error=TritoneError(message, "INVALID_ARGUMENT"))
            self.scheduler.add(sequence)
        return None

    def remove(self, sequence: TalkerSequence) -> None:
        """End a sequence at any stage of its life."""
        if self._opening.pop(sequence.session, None) is None:
            self.scheduler.remove(sequence)

    def speak(self) -> list[Spoken]:
        """One step."""
        spoken = []
        for output in self.step():
            sequence = output.sequence
            assert isinstance(sequence, TalkerSequence)
            if output.info is None:
                spoken.append(Spoken(sequence, error=output.error))
                continue
            finish = self._finish(sequence, output.info.token)
            if finish is not None:
                self.scheduler.remove(sequence)
            spoken.append(Spoken(sequence, sequence.codes, finish))
        return spoken

    def _finish(self, sequence: TalkerSequence, token: int) -> str | None:
        if token in self.model.stops or sequence.script.over:
            return "stop"
        full = sequence.spoken >= sequence.max_tokens or len(sequence.tokens) > self.max_length
        return "length" if full else None

    def _forward(self, batch: Batch, spans: list[tuple[Sequence, int]]) -> Tensor:
        rows: list[Tensor] = []
        sequences = [(_own(sequence), count) for sequence, count in spans]
        for sequence, count in sequences:
            rows += sequence.rows[sequence.computed : sequence.computed + count]
        if any(sequence.positions is not None for sequence, _ in sequences):
            batch = replace(batch, rotary=torch.cat([_rotary(sequence, count) for sequence, count in sequences], dim=1))
        return self.model.forward(batch, self.kv, torch.stack(rows))

    def _choose(self, hidden: Tensor, ready: list[Sequence]) -> list[TokenInfo | TritoneError]:
        chosen = choose(self.model.logits(hidden), ready)
        speaking: list[tuple[int, int]] = []
        for row, info in enumerate(chosen):
            sequence = _own(ready[row])
            sequence.codes = sequence.frame = None
            if isinstance(info, TokenInfo) and self.model.is_code(info.token):
                speaking.append((row, info.token))
        if speaking:
            sequences = [_own(ready[row]) for row, _ in speaking]
            draws = [(sequence.sampling, sequence.answer_length) for sequence in sequences]
            frames = self.model.frames(hidden[[row for row, _ in speaking]], [token for _, token in speaking], draws)
            for sequence, codes, frame in zip(sequences, frames, self.model.embed(frames), strict=True):
                sequence.codes, sequence.frame = codes, frame
                sequence.spoken += 1
        return chosen


def _own(sequence: Sequence) -> TalkerSequence:
    assert isinstance(sequence, TalkerSequence)
    return sequence


def _rotary(sequence: TalkerSequence, count: int) -> Tensor:
    """Int32 [3, count] of the next rows."""
    begin = sequence.computed
    places = torch.arange(begin, begin + count, dtype=torch.int32) + sequence.delta
    positions = places.expand(3, count)
    if sequence.positions is not None and begin < sequence.prompt_length:
        given = sequence.positions[:, begin : begin + count]
        positions = torch.cat((given, positions[:, given.shape[1] :]), dim=1)
    return positions
