"""The content parts of messages that carry media, in the forms that clients of OpenAI, vLLM and transformers send."""

from __future__ import annotations

import base64
import binascii
from typing import Any

from tritone.errors import InvalidArgument, bad
from tritone.media.audio import MAX_SECONDS, AudioClip, clip_of_samples, decode_audio, samples_of_bytes
from tritone.media.images import Picture, decode_picture

Medium = AudioClip | Picture
TYPES = ("text", "audio", "input_audio", "audio_url", "image", "image_url")
FORMATS = ("wav", "flac", "float32")
MAX_PIXELS_IN_ALL = 200_000_000
"""Of one request: 600 MB as RGB."""


class MediaParts:
    """Reads the parts of one request. ``media`` are those read so far, in order; audio is at ``rate`` samples a second."""

    def __init__(self, rate: int) -> None:
        self.media: list[Medium] = []
        self._rate = rate
        self._seconds = 0.0
        self._pixels = 0

    def read(self, field: str, part: Any) -> dict[str, Any]:
        """What the chat template gets for ``part``, which is not text: ``{"type": "audio"}`` or ``{"type": "image"}``.

        Raises ``InvalidArgument`` naming ``field`` and the part's key.
        """
        if not isinstance(part, dict):
            raise bad(field, part, 'an object such as {"type": "text", "text": "..."}')
        kind = part.get("type")
        if isinstance(kind, str) and "video" in kind:
            raise bad(f"{field}.type", kind, f"{', '.join(TYPES)} (video is not supported)")
        if kind == "text":
            raise bad(f"{field}.text", part.get("text"), "text")
        if kind not in TYPES:
            raise bad(f"{field}.type", kind, ", ".join(TYPES))
        value = part.get(kind)
        field = f"{field}.{kind}"
        if kind == "input_audio":
            return self._add_audio(field, self._input_audio(field, value))
        if kind.endswith("_url") and isinstance(value, dict):
            field, value = f"{field}.url", value.get("url")
        data = _bytes(field, value)
        if kind.startswith("audio"):
            return self._add_audio(field, decode_audio(field, data, self._rate))
        return self._add_picture(field, decode_picture(field, data))

    def _input_audio(self, field: str, value: Any) -> AudioClip:
        if not isinstance(value, dict):
            raise bad(field, value, 'an object such as {"data": "<base64>", "format": "wav"}')
        kind = value.get("format", "wav")
        if kind not in FORMATS:
            raise bad(f"{field}.format", kind, ", ".join(FORMATS))
        data = _bytes(f"{field}.data", value.get("data"))
        if kind != "float32":
            return decode_audio(f"{field}.data", data, self._rate)
        samples = samples_of_bytes(f"{field}.data", data, _integer(f"{field}.channels", value.get("channels", 1)))
        return clip_of_samples(f"{field}.data", samples, _integer(f"{field}.sample_rate", value.get("sample_rate")), self._rate)

    def _add_audio(self, field: str, clip: AudioClip) -> dict[str, Any]:
        self._seconds += clip.seconds
        if self._seconds > MAX_SECONDS + 0.1:  # each clip is rounded to whole samples
            raise bad(field, f"{self._seconds:.1f} s of audio with those before", f"{MAX_SECONDS} s in one request")
        self.media.append(clip)
        return {"type": "audio"}

    def _add_picture(self, field: str, picture: Picture) -> dict[str, Any]:
        height, width, _ = picture.pixels.shape
        self._pixels += height * width
        if self._pixels > MAX_PIXELS_IN_ALL:
            raise bad(field, f"{self._pixels} pixels with those before", f"{MAX_PIXELS_IN_ALL} in one request")
        self.media.append(picture)
        return {"type": "image"}


def _integer(field: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise bad(field, value, "an integer")
    return value


def _bytes(field: str, value: Any) -> bytes:
    """The bytes of base64 text or of a ``data:`` URL; nothing is fetched."""
    allowed = "base64, or a URL of the form data:TYPE;base64,DATA"
    if not isinstance(value, str):
        raise bad(field, value, allowed)
    head, comma, _ = value[:256].partition(",")
    if head[:5].lower() == "data:":
        if not comma or not head.lower().endswith(";base64"):
            raise bad(field, head, allowed)
        value = value[len(head) + 1 :]
    elif "://" in head[:32] or head[:5].lower() == "file:":
        raise bad(field, value[:100], f"{allowed}; the server fetches nothing")
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidArgument(f"{field}: {value[:40]!r} is not base64 ({error}); allowed: {allowed}") from None
