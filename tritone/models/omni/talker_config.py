"""What a checkpoint's files say of its Talker: which one it is, its voices, how it is sampled. No weights are read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tritone.errors import bad
from tritone.models.omni.families import QWEN3, QWEN25, read_config
from tritone.models.omni.heard import Hearing, hear_all, hear_user
from tritone.models.omni.voicebox.speakers import DEFAULT, read_text_begins
from tritone.options import Sampling
from tritone.voices import Voices

_CALLS = {
    QWEN3.name: {"temperature": 0.9, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.05, "max_new_tokens": 4096},
    QWEN25.name: {"temperature": 0.9, "top_k": 40, "top_p": 0.8, "repetition_penalty": 1.05, "max_new_tokens": 4096},
}
"""The defaults of the reference's own calls."""


@dataclass(frozen=True)
class SpeechDefaults:
    """``sampling`` but for its seed; ``max_frames`` is the most that one answer speaks."""

    sampling: Sampling
    max_frames: int


def declared(path: str | Path) -> Mapping[str, Any]:
    """``config.json`` of an omni checkpoint, completed with the defaults of its classes. Raises ``InvalidArgument``."""
    config: dict[str, Any] = read_config(Path(path))[0].to_dict()
    if not config.get("enable_audio_output", True):
        raise bad("enable_audio_output", False, "true: a checkpoint with a Talker")
    return config


def voices_of(path: str | Path) -> Voices:
    """The voices of an omni checkpoint; its default is that of the reference's own call, where there is such a voice."""
    config = declared(path)
    if config["model_type"] == QWEN25.name:
        return Voices.of(read_text_begins(Path(path)), DEFAULT)
    return Voices.of(config["talker_config"]["speaker_id"], "ethan")


def hearer_of(path: str | Path) -> Hearing:
    """What the Talker of an omni checkpoint reads of a prompt: a function of ids int32 [T] and, where it has media, their
    positions int32 [3, T]."""
    config = declared(path)
    if config["model_type"] == QWEN25.name:
        return hear_all
    return partial(
        hear_user,
        turn=config["im_start_token_id"],
        user=config["user_token_id"],
        assistant=config["assistant_token_id"],
        media=frozenset(config["thinker_config"][f"{kind}_token_id"] for kind in ("audio", "image", "video")),
    )


def speech_defaults(path: str | Path) -> SpeechDefaults:
    """What the checkpoint's ``generation_config.json`` says of its Talker (``talker_...``), else what the reference does."""
    values: dict[str, Any] = dict(_CALLS[declared(path)["model_type"]])
    file = Path(path) / "generation_config.json"
    if file.exists():
        given = json.loads(file.read_text(encoding="utf-8"))
        values |= {name: given[f"talker_{name}"] for name in values if given.get(f"talker_{name}") is not None}
        if given.get("talker_do_sample") is False:
            values["temperature"] = 0.0
    frames = int(values.pop("max_new_tokens"))
    return SpeechDefaults(Sampling(**values), frames)
