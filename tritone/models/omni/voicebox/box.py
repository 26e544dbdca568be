"""What all VoiceBoxes of omni checkpoints share: checks, chunks, streams."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tritone.errors import bad
from tritone.models.omni.voicebox.batch import Steps, alone
from tritone.models.omni.voicebox.plan import ChunkPlan
from tritone.options import AUDIO_MODES

Float32Array = npt.NDArray[np.float32]
Codes = npt.NDArray[np.integer[Any]]


class Segment(Protocol):
    """The state of one answer's synthesis."""

    def run(self, codes: Tensor, last: bool) -> Steps[Float32Array]:
        """Adds codes, int64 [groups, N], and returns the samples that became certain; ``last`` returns all that remain."""


class OmniVoiceBox(ABC):
    """A loaded vocoder, shared by all sessions of a process; the sessions' states are ``OmniStream``s.

    groups: codes a frame. code_count: codes are 0 to code_count - 1. hop: samples a frame. voices: the names that ``stream``
    takes, default first; empty where the Talker's codes alone decide the voice. slots: sessions in a batch, see ``batch``; the
    bits of a session's samples depend on it.
    """

    sample_rate = 24000

    def __init__(
        self,
        groups: int,
        code_count: int,
        hop: int,
        plans: Mapping[str, ChunkPlan],
        device: torch.device,
        slots: int,
        voices: tuple[str, ...] = (),
    ) -> None:
        self.groups, self.code_count, self.hop = groups, code_count, hop
        self.plans, self.device, self.slots, self.voices = plans, device, slots, voices

    @abstractmethod
    def segment(self, mode: str, seed: int, index: int, voice: str | None) -> Segment:
        """A new segment; ``index`` counts those of its stream."""

    @abstractmethod
    def _whole(self, codes: Tensor, seed: int, voice: str | None) -> Float32Array:
        """All samples of int64 [groups, N], N > 0, in one pass."""

    def stream(self, mode: str = "latency", seed: int = 0, voice: str | None = None) -> OmniStream:
        """The sound of a new session. Raises ``InvalidArgument`` for an unknown mode or voice."""
        if mode not in AUDIO_MODES:
            raise bad("mode", mode, ", ".join(AUDIO_MODES))
        return OmniStream(self, mode, seed, self.known_voice(voice))

    def oneshot(self, codes: Codes, seed: int = 0, voice: str | None = None) -> Float32Array:
        """A whole answer in one pass of the whole model, float32 [N * hop]: what the chunks of a stream add up to.

        codes: integers [N, groups]. Raises ``InvalidArgument`` for codes out of range or an unknown voice.
        """
        tensor, voice = self.checked(codes), self.known_voice(voice)
        if not tensor.shape[1]:
            return silence(0)
        with torch.inference_mode():
            return self._whole(tensor, seed, voice)

    def warm_up(self) -> None:
        """Runs every size of chunk of both modes on made-up codes, so that no request pays for lazy initialisation."""
        for mode, plan in self.plans.items():
            self.stream(mode).push(np.zeros((plan.warm_frames(), self.groups), np.int64), last=True)

    def known_voice(self, voice: str | None) -> str | None:
        """``voice``, or the default for None. Raises ``InvalidArgument`` with the list of voices for another."""
        if voice is None:
            return self.voices[0] if self.voices else None
        if voice not in self.voices:
            raise bad("voice", voice, ", ".join(self.voices) or "none: the Talker's codes decide the voice")
        return voice

    def checked(self, codes: Codes) -> Tensor:
        """Codes [N, groups] as int64 [groups, N] on the device. Raises ``InvalidArgument`` for other shapes, dtypes, values."""
        if codes.ndim != 2 or codes.shape[1] != self.groups:
            raise bad("codes", list(codes.shape), f"shape [frames, {self.groups}]")
        if not np.issubdtype(codes.dtype, np.integer):
            raise bad("codes", str(codes.dtype), "integers")
        outside = np.argwhere((codes < 0) | (codes >= self.code_count))
        if len(outside):
            frame, group = outside[0]
            raise bad(f"codes[{frame}, {group}]", int(codes[frame, group]), f"0 to {self.code_count - 1}")
        return torch.from_numpy(np.array(codes.T, np.int64, order="C")).to(self.device)


class OmniStream:
    """The running sound of one session. Not thread-safe; the streams of one VoiceBox are independent of one another.

    The samples do not depend, in one bit, on how the codes were cut into pushes or on other sessions: codes are computed in
    chunks that start at fixed places (see ``ChunkPlan``), in batches of a fixed size (see ``batch``).
    """

    def __init__(self, box: OmniVoiceBox, mode: str, seed: int, voice: str | None) -> None:
        self._box, self._mode, self._seed, self._voice = box, mode, seed, voice
        self._plan = box.plans[mode]
        self._segments = 0
        self._segment, self._codes, self._chunk = self._begin()

    def push(self, codes: Codes, last: bool) -> Float32Array:
        """``steps``, computed at once and without other sessions."""
        return alone(self.steps(codes, last), self._box.slots)

    def steps(self, codes: Codes, last: bool) -> Steps[Float32Array]:
        """Adds integers [N, groups] and returns the samples that became certain, float32 [M], perhaps none.

        ``last`` ends the segment: what remains of it is returned, so that it has given frames x hop samples in all, and the
        next push begins another with noise of its own. An ended segment without a frame gives nothing and does not count.
        Steps must be run to their end before the next begin.
        Raises ``InvalidArgument``, and leaves the stream as it was, for codes of another shape, dtype or range.
        """
        self._codes = torch.cat([self._codes, self._box.checked(codes)], dim=1)
        sound = []
        while self._codes.shape[1] >= (frames := self._plan.frames(self._chunk)):
            sound.append((yield from self._compute(frames, last=False)))
        if last:
            if self._chunk or self._codes.shape[1]:
                sound.append((yield from self._compute(self._codes.shape[1], last=True)))
                self._segments += 1
            self._segment, self._codes, self._chunk = self._begin()
        return np.concatenate(sound) if sound else silence(0)

    def _begin(self) -> tuple[Segment, Tensor, int]:
        """A segment, no codes that wait for their chunk, and the index of its first chunk."""
        segment = self._box.segment(self._mode, self._seed, self._segments, self._voice)
        return segment, torch.zeros((self._box.groups, 0), dtype=torch.int64, device=self._box.device), 0

    def _compute(self, frames: int, last: bool) -> Steps[Float32Array]:
        chunk, self._codes = self._codes[:, :frames], self._codes[:, frames:]
        self._chunk += 1
        return self._segment.run(chunk, last)


def silence(samples: int) -> Float32Array:
    """Zeros, float32 [samples]."""
    return np.zeros(samples, np.float32)
