"""Sizes of a Talker, and how its directory says what it is. No torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tritone.errors import bad

READ = 1024
"""The token of codebook 0 that asks for the next unit of text."""

END = 1025
"""The token of codebook 0 after the end of the text. Only training has it: who speaks knows that there is no more to read,
and ends when the model asks for it."""

VOCABULARY = 1026

FORMAT = "talker-1"
"""What ``voice.json`` says of a Talker's directory; a prepared hibari voice has a format of its own."""

CONFIG_FILE = "voice.json"
TALKER, PREDICTOR, REST = "talker", "code_predictor", "voice.safetensors"

HEART = Path(__file__).parent / "heart"
"""The voice that comes along."""


@dataclass(frozen=True)
class TalkerConfig:
    """Sizes of decoder, code predictor and text encoder.

    ``context_hidden`` is the width of the Thinker's hidden states; ``max_positions`` the longest sequence it is made for.
    """

    hidden_size: int = 192
    layers: int = 5
    heads: int = 3
    head_dim: int = 64
    intermediate_size: int = 512
    predictor_layers: int = 1
    predictor_intermediate_size: int = 384
    codebooks: int = 3
    entries: int = 1024
    text_vocabulary: int = 178
    text_layers: int = 3
    text_intermediate_size: int = 384
    text_taps: int = 7
    context_hidden: int = 576
    speakers: tuple[str, ...] = ("heart",)
    rope_theta: float = 1000.0
    rms_norm_eps: float = 1e-6
    max_positions: int = 2048


def is_talker(directory: Path) -> bool:
    """Whether a directory holds a trained Talker. Raises ``InvalidArgument`` where its ``voice.json`` cannot be read."""
    return (directory / CONFIG_FILE).is_file() and _described(directory).get("format") == FORMAT


def load_config(directory: Path) -> TalkerConfig:
    """The sizes. Raises ``InvalidArgument`` where there is no ``voice.json``, or one of another format."""
    described = _described(directory)
    if described.get("format") != FORMAT:
        raise bad(f"{directory / CONFIG_FILE}: format", described.get("format"), FORMAT)
    return TalkerConfig(**described["config"] | {"speakers": tuple(described["config"]["speakers"])})


def _described(directory: Path) -> dict[str, Any]:
    file = directory / CONFIG_FILE
    try:
        described = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise bad("voice", str(file), f"a readable JSON file ({error})") from None
    if not isinstance(described, dict):
        raise bad(f"voice: {file}", described, "a JSON object")
    return described
