"""The processors of transformers for the tiny omni checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers

from tritone.models.omni.extractors import feature_extractor, image_processor

RATE = 16_000


def reference_processor(cls: Any, directory: Path) -> Any:
    """The processor of transformers, which without torchvision refuses its video part: it gets another and is not asked."""

    class Unchecked(cls):  # type: ignore[misc]
        def check_argument_for_proper_class(self, name: str, argument: Any) -> None:
            pass

    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    images, extractor = image_processor(directory), feature_extractor(directory)
    # Qwen2.5's pads every audio to this: 40 s instead of 300 are quicker, and as long as it is silence no value changes.
    extractor.n_samples = 40 * RATE
    return Unchecked(images, images, extractor, tokenizer, chat_template=tokenizer.chat_template)
