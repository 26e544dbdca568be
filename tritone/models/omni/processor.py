"""Messages with media -> ids and features, as the processor of transformers makes them, but without its video part.

The tokenizer, the feature extractor and the image processor are those of transformers, made from the checkpoint's own files
(``processor_config.json``, or ``preprocessor_config.json`` with the fields of both). What the processor's class adds to them
is done here, on ids instead of text: that class cannot be made without a video processor, which needs torchvision.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tritone.errors import InvalidArgument
from tritone.media import AudioClip, Medium, Picture
from tritone.models.omni.families import read_config

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Expanded:
    """ids: int32 [T], each placeholder as often as its medium has embeddings. ``audio_tokens``, ``image_tokens``: of them."""

    ids: npt.NDArray[np.int32]
    audio_tokens: int
    image_tokens: int


@dataclass(frozen=True)
class OmniInput:
    """What the towers and positions of one prompt are computed from.

    ids: int32 [T]. audio: for each clip float32 [mel bins, frames]. images: for each picture float32 [patches, values].
    grids: int64 [images, 3], patches in time, height, width. digest: of the decoded media, in order; empty without media.
    """

    ids: npt.NDArray[np.int32]
    audio: tuple[Floats, ...]
    images: tuple[Floats, ...]
    grids: npt.NDArray[np.int64]
    digest: bytes


class OmniProcessor:
    """The input side of a checkpoint directory; ``sample_rate`` is what its feature extractor takes."""

    def __init__(self, directory: str | Path) -> None:
        from transformers import AutoTokenizer, WhisperFeatureExtractor
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        directory = Path(directory)
        config, self._family = read_config(directory)
        self._config = config.thinker_config
        self.tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        legacy = directory / "chat_template.json"
        if legacy.is_file() and not (directory / "chat_template.jinja").is_file():
            self.tokenizer.chat_template = json.loads(legacy.read_text(encoding="utf-8"))["chat_template"]
        try:
            self._extractor: Any = WhisperFeatureExtractor.from_pretrained(directory, local_files_only=True)
            self._images: Any = Qwen2VLImageProcessorPil.from_pretrained(directory, local_files_only=True)
        except OSError as error:
            raise InvalidArgument(f"{directory}: {error}; allowed: a checkpoint with its preprocessor_config.json") from None
        self.sample_rate = int(self._extractor.sampling_rate)

    def expand(self, messages: list[dict[str, Any]], media: Sequence[Medium], tools: Sequence[Any] = ()) -> Expanded:
        """The prompt's ids, from sizes alone: cheap, so that a prompt that is too long costs no features.

        ``messages`` hold ``{"type": "audio"}`` and ``{"type": "image"}`` where ``media``, in order, belong.
        Raises ``InvalidArgument`` where the template refuses, or where text holds the tokens that stand for media.
        """
        try:
            encoded: Any = self.tokenizer.apply_chat_template(
                messages, tools=list(tools) or None, add_generation_prompt=True, tokenize=True, return_dict=True
            )
        except Exception as error:  # templates are code of the checkpoint and raise what they like
            raise InvalidArgument(f"messages: refused by the checkpoint's chat template: {error}") from None
        ids = np.asarray(encoded["input_ids"], np.int32)
        audio = [self._family.audio_tokens(n, self._config.audio_config) for n in self._frames(_clips(media))]
        images = [self._image_tokens(picture) for picture in _pictures(media)]
        self._check_placeholders(ids, len(audio), len(images))
        repeats = np.ones(len(ids), np.int64)
        repeats[ids == self._config.audio_token_id] = audio
        repeats[ids == self._config.image_token_id] = images
        return Expanded(np.repeat(ids, repeats), sum(audio), sum(images))

    def features(self, expanded: Expanded, media: Sequence[Medium]) -> OmniInput:
        """The spectrograms and patches of ``media``, those that ``expanded`` was made with."""
        clips, pictures = _clips(media), _pictures(media)
        patches = [self._images(images=picture.pixels, input_data_format="channels_last") for picture in pictures]
        return OmniInput(
            expanded.ids,
            self._spectrograms(clips),
            tuple(np.asarray(each["pixel_values"], np.float32) for each in patches),
            np.concatenate([each["image_grid_thw"] for each in patches]) if patches else np.zeros((0, 3), np.int64),
            _digest(media),
        )

    def _spectrograms(self, clips: list[AudioClip]) -> tuple[Floats, ...]:
        """One clip at a time, followed by as much silence as its last window sees, and not by all that the processor adds."""
        hop, longest = self._extractor.hop_length, max((len(clip.samples) for clip in clips), default=0)
        made = []
        for clip, frames in zip(clips, self._frames(clips), strict=True):
            silent = -(-(len(clip.samples) + self._extractor.n_fft) // hop) * hop
            found = self._extractor(
                clip.samples,
                sampling_rate=self.sample_rate,
                padding="max_length",
                max_length=silent if self._family.pads else min(silent, longest),
                truncation=False,
                return_tensors="np",
            )
            made.append(np.ascontiguousarray(found["input_features"][0, :, :frames]))
        return tuple(made)

    def _frames(self, clips: list[AudioClip]) -> list[int]:
        """Mel frames of each clip: one for each hop begun, less the last one of the longest if nothing follows it."""
        hop = self._extractor.hop_length
        frames = [-(-len(clip.samples) // hop) for clip in clips]
        if self._family.pads or not clips:
            return frames
        most = max(len(clip.samples) for clip in clips) // hop
        return [min(each, most) for each in frames]

    def _image_tokens(self, picture: Picture) -> int:
        height, width, _ = picture.pixels.shape
        return int(self._images.get_number_of_image_patches(height, width)) // int(self._images.merge_size) ** 2

    def _check_placeholders(self, ids: npt.NDArray[np.int32], audio: int, images: int) -> None:
        config = self._config
        wanted = (
            (config.audio_token_id, audio),
            (config.audio_start_token_id, audio),
            (config.image_token_id, images),
            (config.vision_start_token_id, images),
            (config.video_token_id, 0),
        )
        for token, count in wanted:
            found = int((ids == token).sum())
            if found != count:
                name = self.tokenizer.convert_ids_to_tokens(token)
                raise InvalidArgument(
                    f"messages: the prompt holds {name} {found} times; allowed: {count} times, as its parts of audio and "
                    "images put it there (text must not hold it)"
                )


def _clips(media: Sequence[Medium]) -> list[AudioClip]:
    return [medium for medium in media if isinstance(medium, AudioClip)]


def _pictures(media: Sequence[Medium]) -> list[Picture]:
    return [medium for medium in media if isinstance(medium, Picture)]


def _digest(media: Sequence[Medium]) -> bytes:
    """SHA-256: a digest that can be made to collide would let a request read what another one cached."""
    if not media:
        return b""
    whole = hashlib.sha256()
    for medium in media:
        values = medium.samples if isinstance(medium, AudioClip) else medium.pixels
        whole.update(f"{type(medium).__name__} {values.shape} ".encode())
        whole.update(np.ascontiguousarray(values).data)
    return whole.digest()
