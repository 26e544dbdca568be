"""The voices that a deployment speaks with."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tritone.deployment import OWN_VOICE, Deployment
from tritone.errors import bad
from tritone.models.talker.config import is_talker, load_config


@dataclass(frozen=True)
class Voices:
    """``names`` as the checkpoint writes them, in its order."""

    names: tuple[str, ...]
    default: str

    @classmethod
    def of(cls, names: Any, preferred: str) -> Voices:
        """``preferred`` is the default where there is a voice of that name, else the first."""
        ordered = tuple(names)
        if not ordered:
            raise bad("voices", list(names), "a checkpoint with at least one voice")
        found = [name for name in ordered if name.lower() == preferred.lower()]
        return cls(ordered, found[0] if found else ordered[0])

    def pick(self, voice: str) -> str:
        """The name as the checkpoint has it, upper and lower case alike; the default for "". Raises ``InvalidArgument``."""
        if not voice:
            return self.default
        for name in self.names:
            if name.lower() == voice.lower():
                return name
        raise bad("voice", voice, ", ".join(self.names))


def known_voices(deployment: Deployment) -> Voices | None:
    """None where the deployment has no voice. Reads configuration alone."""
    if deployment.voice is None:
        return None
    if deployment.voice == OWN_VOICE:
        from tritone.models.omni.talker_config import voices_of

        return voices_of(deployment.checkpoint)
    if is_talker(Path(deployment.voice)):
        speakers = load_config(Path(deployment.voice)).speakers
        return Voices(speakers, speakers[0])
    voice = json.loads((Path(deployment.voice) / "voice.json").read_text(encoding="utf-8"))
    return Voices(tuple(voice["voices"]), voice["default_voice"])
