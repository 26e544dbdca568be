"""Speech to a file."""

from __future__ import annotations

import os
import wave
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from tritone.client import SAMPLE_RATE
from tritone.errors import TritoneError


class WaveFile:
    """A 16-bit mono WAV at 24 kHz, written as the audio arrives; the file appears, complete, when it is closed.

    What is written before an interruption is kept: the header is made to match when the file is closed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.samples = 0
        self._work = path.with_name(f".{path.name}.new")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = wave.open(str(self._work), "wb")  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise TritoneError(f"{path} cannot be written: {error.strerror}", "INVALID_ARGUMENT") from None
        self._file.setnchannels(1)
        self._file.setsampwidth(2)
        self._file.setframerate(SAMPLE_RATE)

    @property
    def seconds(self) -> float:
        return self.samples / SAMPLE_RATE

    def write(self, audio: npt.NDArray[np.float32]) -> None:
        self._file.writeframes(to_pcm16(audio).tobytes())
        self.samples += audio.size

    def close(self) -> None:
        self._file.close()
        os.replace(self._work, self.path)

    def __enter__(self) -> WaveFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and not self.samples:
            self._file.close()
            self._work.unlink(missing_ok=True)
        else:
            self.close()


def to_pcm16(audio: npt.NDArray[np.float32]) -> npt.NDArray[np.int16]:
    """[samples] float between -1 and 1 to little-endian 16-bit integers; louder is clipped."""
    samples: npt.NDArray[np.int16] = np.rint(np.clip(audio, -1.0, 1.0) * 32767.0).astype("<i2")
    return samples
