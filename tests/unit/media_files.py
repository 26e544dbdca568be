"""Audio and image files made in memory, for the tests of media."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import numpy.typing as npt
import soundfile
from PIL import Image

Floats = npt.NDArray[np.float32]


def tone(seconds: float, rate: int = 16_000, hertz: float = 440.0, channels: int = 1) -> Floats:
    """float32 [samples], or [samples, channels] with the tone in the first channel only."""
    wave = (0.5 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)).astype(np.float32)
    if channels == 1:
        return wave
    frames = np.zeros((len(wave), channels), np.float32)
    frames[:, 0] = wave
    return frames


def noise(samples: int, seed: int = 0) -> Floats:
    return (np.random.default_rng(seed).standard_normal(samples) * 0.1).astype(np.float32)


def sound_file(samples: Floats, rate: int = 16_000, container: str = "WAV", subtype: str = "PCM_16") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=container, subtype=subtype)
    return file.getvalue()


def pixels(width: int, height: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def image_file(image: Image.Image | npt.NDArray[np.uint8], kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(file, kind, **options)
    return file.getvalue()


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()
