"""What Qwen's Talkers are told, as it arrives: the common part."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from tritone.engine.talker import SpeechPrompt
from tritone.models.omni.heard import Heard


class StreamedScript(ABC):
    """A ``Script``: with every frame goes one token of the answer, then the text's end, then pads.

    ``feed`` takes the Thinker's rows [K, thinker hidden], one for each of its tokens, the prompt's first, in any pieces (the
    text itself is not looked at); ``finish`` says that the answer's last has come. ``end`` and ``pad`` [width] are what goes
    with frames after the text.
    """

    def __init__(self, heard: Heard, dtype: torch.dtype, end: Tensor, pad: Tensor) -> None:
        self.heard = heard
        self.texts: list[Tensor] = []
        """What goes with the frames, each [width]; the first belongs to the prompt."""
        self._dtype = dtype
        self._end = end
        self._pad = pad
        self._pieces: list[Tensor] = []
        self._missing = heard.tokens
        self._frames = 0
        self._ended = False
        self.over = False
        """It has pads without end: stop tokens end it."""
        self.paused = False
        """An answer is one segment."""

    @abstractmethod
    def open(self, prompt: Tensor) -> None:
        """The whole prompt's rows [tokens, thinker hidden] are there."""

    @abstractmethod
    def told(self, answer: Tensor) -> Tensor:
        """What goes with frames, [K, width], of the answer's rows [K, thinker hidden]."""

    @abstractmethod
    def rows(self) -> Tensor:
        """The first rows of the sequence, [P, width]; asked once, when there is a first text."""

    @torch.inference_mode()
    def feed(self, text: str, rows: Tensor | None) -> None:
        if rows is None:
            return
        rows = rows.to(self._dtype)
        if self._missing:
            prompt, rows = rows[: self._missing], rows[self._missing :]
            self._pieces.append(prompt)
            self._missing -= len(prompt)
            if not self._missing:
                self.open(torch.cat(self._pieces))
                self._pieces = []
        if len(rows):
            self.texts += self.told(rows)

    def finish(self) -> None:
        self._ended = True

    def resume(self) -> bool:
        return False

    @property
    def silent(self) -> bool:
        return self._ended and not self.texts

    @torch.inference_mode()
    def prompt(self) -> SpeechPrompt | None:
        if not self.texts:
            return None
        rows = self.rows()
        if self.heard.positions is None:
            return SpeechPrompt(rows)
        heard = torch.tensor(self.heard.positions, dtype=torch.int32)
        delta = int(heard.max()) + 1 - heard.shape[1]
        rest = torch.arange(heard.shape[1], len(rows), dtype=torch.int32) + delta
        return SpeechPrompt(rows, torch.cat((heard, rest.expand(3, -1)), dim=1), delta)

    @torch.inference_mode()
    def next(self, token: int, frame: Tensor | None) -> Tensor | None:
        place = self._frames + 1
        if frame is None or (place >= len(self.texts) and not self._ended):
            return None
        self._frames += 1
        if place < len(self.texts):
            return frame + self.texts[place]
        return frame + (self._end if place == len(self.texts) else self._pad)
