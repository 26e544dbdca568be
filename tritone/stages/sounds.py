"""What the VoiceBox stage needs of a vocoder, and the kinds it runs: from features, from codes of features, from codes."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from tritone.messages import Event
from tritone.models.codec.codec import WIDTH, Codec
from tritone.models.codec.stretch import Stretch
from tritone.models.omni.voicebox.batch import Steps
from tritone.models.omni.voicebox.box import OmniStream, OmniVoiceBox
from tritone.models.voice.frames import Frames
from tritone.models.voice.voicebox import VoiceBox, VoiceBoxStream
from tritone.options import Options

Floats = npt.NDArray[np.float32]


class Sound(Protocol):
    """The running sound of one session."""

    def push(self, event: Event) -> Steps[Floats]:
        """Adds the frames of an event; the samples that became certain, [M]. ``info.last`` ends the segment. What sessions can
        share is yielded, the rest computed on the way."""


class SoundMaker(Protocol):
    """A vocoder, warmed up; ``sample_rate`` in samples a second, ``slots`` sessions in a batch."""

    @property
    def sample_rate(self) -> int: ...

    @property
    def slots(self) -> int: ...

    def open(self, options: Options) -> Sound: ...


class FeatureSounds:
    """The hibari voice: a frame is its features and, last, its fundamental frequency in Hz."""

    slots = 1

    def __init__(self, box: VoiceBox) -> None:
        box.warm_up()
        self._box = box
        self.sample_rate = box.sample_rate

    def open(self, options: Options) -> Sound:
        return _FeatureSound(VoiceBoxStream(self._box, options.sampling.seed, options.audio_mode))


class CodecSounds:
    """The trained voice: a frame is three codes, which stand for four frames of the hibari voice's VoiceBox. A segment is a
    clause; ``speed`` stretches its frames."""

    slots = 1

    def __init__(self, box: VoiceBox, codec: Codec) -> None:
        box.warm_up()
        self._box = box
        self._codec = codec
        self.sample_rate = box.sample_rate

    def open(self, options: Options) -> Sound:
        stream = VoiceBoxStream(self._box, options.sampling.seed, options.audio_mode)
        return _CodecSound(self._codec, Stretch(options.speed, WIDTH), stream)


class CodeSounds:
    """An omni checkpoint's vocoder: a frame is a code of each group."""

    def __init__(self, box: OmniVoiceBox) -> None:
        box.warm_up()
        self._box = box
        self.sample_rate = box.sample_rate
        self.slots = box.slots

    def open(self, options: Options) -> Sound:
        # Where the codes decide the voice, the vocoder knows none.
        voice = options.voice if self._box.voices else None
        return _CodeSound(self._box.stream(options.audio_mode, options.sampling.seed, voice))


class _FeatureSound:
    def __init__(self, stream: VoiceBoxStream) -> None:
        self._stream = stream

    def push(self, event: Event) -> Steps[Floats]:
        yield from ()
        assert event.frames is not None
        return self._stream.push(Frames(event.frames[:, :-1], event.frames[:, -1]), event.info["last"])


class _CodecSound:
    def __init__(self, codec: Codec, stretch: Stretch, stream: VoiceBoxStream) -> None:
        self._codec = codec
        self._stretch = stretch
        self._stream = stream

    def push(self, event: Event) -> Steps[Floats]:
        yield from ()
        assert event.codes is not None
        last = event.info["last"]
        return self._stream.push(self._stretch.push(self._codec.decode(event.codes.astype(np.int64)), last), last)


class _CodeSound:
    def __init__(self, stream: OmniStream) -> None:
        self._stream = stream

    def push(self, event: Event) -> Steps[Floats]:
        assert event.codes is not None
        return self._stream.steps(event.codes, event.info["last"])
