"""Messages with media -> ids and features, as the processor of transformers makes them, but without its video part.

The tokenizer, the feature extractor and the image processor are those of transformers; what the processor's class adds to
them is done here, on ids instead of text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tritone.errors import InvalidArgument
from tritone.media.audio import AudioClip
from tritone.media.features import Expanded, MediaFeatures
from tritone.media.images import Picture
from tritone.media.parts import MediaParts, Medium
from tritone.models.omni.extractors import feature_extractor, image_processor
from tritone.models.omni.families import read_config
from tritone.text.tokenizer import prompt_tokenizer

Ids = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


class OmniProcessor:
    """The input side of a checkpoint directory; ``sample_rate`` is what its feature extractor takes."""

    def __init__(self, directory: str | Path) -> None:
        from transformers.image_utils import SizeDict

        directory = Path(directory)
        config, self._family = read_config(directory)
        self._config = config.thinker_config
        self.tokenizer = prompt_tokenizer(directory)
        legacy = directory / "chat_template.json"
        if legacy.is_file() and not (directory / "chat_template.jinja").is_file():
            self.tokenizer.chat_template = json.loads(legacy.read_text(encoding="utf-8"))["chat_template"]
        self._extractor = feature_extractor(directory)
        self._images = image_processor(directory)
        self._size = SizeDict(**dict(self._images.size))
        self.sample_rate = int(self._extractor.sampling_rate)

    def parts(self) -> MediaParts:
        """Reads the media of one request's messages."""
        return MediaParts(self.sample_rate)

    def expand(self, ids: Sequence[int], media: Sequence[Medium]) -> Expanded:
        """The prompt's ids, from sizes alone: cheap, so that a prompt that is too long costs no features.

        ``ids`` hold one placeholder where each of ``media`` belongs, in order. Raises ``InvalidArgument`` where they hold more
        or fewer, since text can spell them too.
        """
        given = np.asarray(ids, np.int32)
        audio = [self._family.audio_tokens(n, self._config.audio_config) for n in self._frames(_clips(media))]
        images = [self._image_tokens(picture) for picture in _pictures(media)]
        self._check_placeholders(given, len(audio), len(images))
        repeats = np.ones(len(given), np.int64)
        repeats[given == self._config.audio_token_id] = audio
        repeats[given == self._config.image_token_id] = images
        return Expanded(np.repeat(given, repeats), sum(audio), sum(images))

    def features(self, media: Sequence[Medium]) -> MediaFeatures:
        return MediaFeatures(self._spectrograms(_clips(media)), tuple(self._resized(each) for each in _pictures(media)))

    def _resized(self, picture: Picture) -> npt.NDArray[np.uint8]:
        """uint8 [height, width, 3], sides multiples of a merged patch."""
        factor = self._images.patch_size * self._images.merge_size
        planes = np.moveaxis(picture.pixels, -1, 0)
        found = self._images.resize(planes, size=self._size, resample=self._images.resample, factor=factor)
        return np.ascontiguousarray(np.moveaxis(found, 0, -1), np.uint8)

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

    def _check_placeholders(self, ids: Ids, audio: int, images: int) -> None:
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
