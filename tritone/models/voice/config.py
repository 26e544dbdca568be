"""voice.json: what a prepared voice directory says about itself."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

VOICE_FORMAT = 1
CONFIG_FILE = "voice.json"
FRONT_FILE = "front.onnx"
DECODER_FILE = "decoder.safetensors"


@dataclass(frozen=True)
class VoiceSource:
    """Where the weights came from and what was done to them."""

    package: str
    version: str
    file: str
    sha256: str
    changes: str


@dataclass(frozen=True)
class VoiceConfig:
    """Sizes and origin of a voice. hop and n_fft are in samples; receptive_field is in frames on either
    side."""

    name: str
    voices: tuple[str, ...]
    default_voice: str
    sample_rate: int
    hop: int
    n_fft: int
    frame_rate: int
    feature_width: int
    max_phonemes: int
    receptive_field: int
    layer_norm_epsilon: float
    source: VoiceSource
    files: dict[str, str]  # file name -> sha256
    format: int = VOICE_FORMAT

    def save(self, directory: Path) -> None:
        """Writes voice.json into the directory."""
        text = json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False)
        (directory / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")

    @staticmethod
    def load(directory: Path) -> VoiceConfig:
        """Reads voice.json. Raises FileNotFoundError without one, ValueError when it is another format or
        incomplete."""
        path = Path(directory) / CONFIG_FILE
        if not path.is_file():
            raise FileNotFoundError(f"{directory} holds no {CONFIG_FILE}: prepare the voice first (prepare_voice)")
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            found = values.get("format")
            if found != VOICE_FORMAT:
                raise ValueError(f"format is {found!r}, this program reads format {VOICE_FORMAT}")
            values["voices"] = tuple(values["voices"])
            values["source"] = VoiceSource(**values["source"])
            return VoiceConfig(**values)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path}: {error}; prepare the voice again") from error
