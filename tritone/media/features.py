"""What preprocess makes of a prompt's media, what prefill's towers read, and the tensor that carries it.

numpy only, and nothing of the decoders: every stage imports it with the messages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Expanded:
    """ids: int32 [T], each placeholder as often as its medium has embeddings. ``audio_tokens``, ``image_tokens``: of them."""

    ids: npt.NDArray[np.int32]
    audio_tokens: int = 0
    image_tokens: int = 0


@dataclass(frozen=True)
class MediaFeatures:
    """The media of one prompt, each kind in order.

    audio: for each clip its log-mel spectrogram, float32 [mel bins, frames]. images: for each picture uint8 [height, width, 3],
    RGB, already of the size that the vision tower takes (an eighth of the bytes of its patches).
    """

    audio: tuple[npt.NDArray[np.float32], ...] = ()
    images: tuple[Bytes, ...] = ()

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all of it: a digest that can be made to collide would let a request read what another one cached."""
        whole = hashlib.sha256(repr(self.layout()).encode())
        for array in (*self.audio, *self.images):
            whole.update(np.ascontiguousarray(array).data)
        return whole.hexdigest()

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.audio) + sum(array.nbytes for array in self.images)

    def layout(self) -> dict[str, Any]:
        """The shapes, as JSON: what :meth:`unpack` needs beside the bytes."""
        return {
            "audio": [list(spectrogram.shape) for spectrogram in self.audio],
            "images": [list(image.shape) for image in self.images],
        }

    def pack(self) -> Bytes:
        """uint8 [bytes]: the arrays one after another, audio first."""
        parts = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (*self.audio, *self.images)]
        return np.concatenate(parts) if parts else np.zeros(0, np.uint8)

    @classmethod
    def unpack(cls, layout: Mapping[str, Any], packed: Bytes) -> MediaFeatures:
        """The inverse of :meth:`pack`, in memory of its own: ``packed`` may be Triton's."""
        data = packed.tobytes()
        at, found = 0, dict[str, list[Any]]()
        for name, kind in (("audio", np.dtype(np.float32)), ("images", np.dtype(np.uint8))):
            found[name] = []
            for shape in layout[name]:
                found[name].append(np.frombuffer(data, kind, prod(shape), at).reshape(shape))
                at += prod(shape) * kind.itemsize
        if at != len(data):
            raise ValueError(f"media: {len(data)} bytes where the layout has {at}")
        return cls(tuple(found["audio"]), tuple(found["images"]))
