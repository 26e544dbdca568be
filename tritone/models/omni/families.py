"""Which of the two families a checkpoint is, and where they differ in their input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tritone.errors import InvalidArgument, bad


@dataclass(frozen=True)
class Family:
    """``audio_tokens``: embeddings that the audio tower makes of so many mel frames, given ``audio_config``.

    ``pads``: whether silence follows the audio in its spectrogram. Otherwise its end is mirrored at the edge, that of the
    longest audio of a prompt; the shorter ones are followed by silence up to there.
    """

    name: str
    audio_tokens: Callable[[int, Any], int]
    pads: bool


def _qwen3_audio_tokens(frames: int, config: Any) -> int:
    """Three convolutions of stride 2, over chunks of ``2 * n_window`` frames, of which each whole one gives 13."""
    chunks, rest = divmod(frames, 2 * int(config.n_window))
    for _ in range(3):
        rest = (rest - 1) // 2 + 1
    return chunks * 13 + rest


def _qwen25_audio_tokens(frames: int, config: Any) -> int:
    """A convolution of stride 2, then the mean of each pair; what is left over is dropped."""
    return ((frames - 1) // 2 + 1) // 2


QWEN3 = Family("qwen3_omni_moe", _qwen3_audio_tokens, False)
QWEN25 = Family("qwen2_5_omni", _qwen25_audio_tokens, True)
FAMILIES = {family.name: family for family in (QWEN3, QWEN25)}


def read_config(directory: Path) -> tuple[Any, Family]:
    """The ``config.json`` of transformers and its family; raises ``InvalidArgument`` for any other kind of checkpoint."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # transformers checks fields with exceptions of several libraries
        told = " ".join(str(error).split())
        raise InvalidArgument(f"{directory}: config.json cannot be read: {told}; allowed: {', '.join(FAMILIES)}") from None
    if config.model_type not in FAMILIES:
        raise bad("model_type", config.model_type, ", ".join(FAMILIES))
    return config, FAMILIES[config.model_type]
