"""The feature extractor and the image processor of transformers, made from a checkpoint's own files.

Those are ``processor_config.json``, or ``preprocessor_config.json`` with the fields of both. The processor that holds the two
cannot be made: it wants a video processor, which needs torchvision.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tritone.errors import InvalidArgument


def feature_extractor(directory: Path) -> Any:
    from transformers import WhisperFeatureExtractor

    return _load(WhisperFeatureExtractor, directory)


def image_processor(directory: Path) -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return _load(Qwen2VLImageProcessorPil, directory)


def _load(cls: Any, directory: Path) -> Any:
    try:
        return cls.from_pretrained(directory, local_files_only=True)
    except OSError as error:
        raise InvalidArgument(f"{directory}: {error}; allowed: a checkpoint with its preprocessor_config.json") from None
