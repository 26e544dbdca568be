"""The Talker: clauses in, acoustic frames out. Needs numpy, onnxruntime and hibari-tts; no torch."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tritone.models.voice.clauses import ClauseSplitter
from tritone.models.voice.config import FRONT_FILE, VoiceConfig
from tritone.models.voice.frames import Frames
from tritone.models.voice.pauses import trim_pauses
from tritone.models.voice.phonemes import Phonemiser, pieces

SLOWEST, FASTEST = 0.5, 2.0


class HibariTalker:
    """Loads the front half of the voice and hibari's text-to-phoneme rules; shared by all sessions of a
    process.

    threads: onnxruntime's threads for one call. Not thread-safe.
    Raises FileNotFoundError or ValueError when the directory holds no readable voice, ImportError without
    hibari-tts.
    """

    def __init__(self, directory: Path, threads: int = 1) -> None:
        if threads < 1:
            raise ValueError(f"threads is {threads}; it must be at least 1")
        self.config = VoiceConfig.load(directory)
        # onnxruntime carries no types; importing it by name makes it Any under every mypy configuration.
        runtime: Any = importlib.import_module("onnxruntime")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = threads
        options.log_severity_level = 3
        path = str(Path(directory) / FRONT_FILE)
        self._front = runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self._phonemiser = Phonemiser()

    @property
    def voices(self) -> tuple[str, ...]:
        """The names a session may ask for."""
        return self.config.voices

    @property
    def default_voice(self) -> str:
        """The voice of a session that asks for none."""
        return self.config.default_voice

    def check_voice(self, voice: str | None) -> str:
        """The voice's name, the default for None. Raises ValueError, with the list, for a name that is not in
        `voices`."""
        if voice is None:
            return self.default_voice
        if voice not in self.voices:
            raise ValueError(f"voice {voice!r} is not available; available voices: {', '.join(self.voices)}")
        return voice

    def speak(self, clause: str, speed: float = 1.0) -> Frames:
        """The frames of one clause at 80 a second: features float32 [F, 130], f0 float32 [F] in Hz.

        speed 1 is the voice's own pace, 2 twice as fast. A clause with nothing to pronounce gives no frames.
        One that is longer than the model's 400 phonemes is spoken in pieces cut between words, joined into
        one Frames. Raises ValueError for a speed outside 0.5..2.
        """
        check_speed(speed)
        parts = []
        for piece in pieces(self._phonemiser.phonemes(clause), self.config.max_phonemes):
            ids = self._phonemiser.ids(piece)
            if not ids:
                continue
            feed = {"ids": np.array([ids], np.int64), "speed": np.array([speed], np.float32)}
            features, f0 = self._front.run(["features", "f0"], feed)
            parts.append(Frames(np.ascontiguousarray(features[0].T), f0[0]))
        return Frames.concatenate(parts, self.config.feature_width, clause)

    def warm_up(self) -> None:
        """Speaks once, with an unknown word, so that the first request does not pay for lazy
        initialisation."""
        self.speak("Ready, tritonelike.")


class TalkerSession:
    """Speaks one answer while its text still arrives; each Frames it gives is a clause, a segment for the
    VoiceBox.

    voice: a name from `talker.voices`, or None for the default. speed: 0.5 to 2. Raises ValueError for
    another.
    """

    def __init__(self, talker: HibariTalker, voice: str | None = None, speed: float = 1.0) -> None:
        self.voice = talker.check_voice(voice)
        self.speed = check_speed(speed)
        self._talker = talker
        self._splitter = ClauseSplitter()

    def feed(self, text: str) -> Iterator[Frames]:
        """Takes the next piece of text at once; the iterator speaks the clauses it completed, one at each
        step."""
        return self._speak(self._splitter.feed(text))

    def finish(self) -> Iterator[Frames]:
        """Ends the text; the iterator speaks what was left. Afterwards the session can speak another
        answer."""
        return self._speak(self._splitter.flush())

    def _speak(self, clauses: list[str]) -> Iterator[Frames]:
        for clause in clauses:
            frames = trim_pauses(self._talker.speak(clause, self.speed))
            if len(frames):
                yield frames


def check_speed(speed: float) -> float:
    """The speed. Raises ValueError unless it is a number from 0.5 to 2."""
    if not (math.isfinite(speed) and SLOWEST <= speed <= FASTEST):
        raise ValueError(f"speed is {speed}; it must be between {SLOWEST} and {FASTEST}")
    return float(speed)
