"""The voices of a resolved deployment."""

from __future__ import annotations

import json
from pathlib import Path

from tritone.deployment import OWN_VOICE, Deployment
from tritone.models.omni.voices import Voices


def known_voices(deployment: Deployment) -> Voices | None:
    """None where the deployment has no voice. Reads configuration alone."""
    if deployment.voice is None:
        return None
    if deployment.voice == OWN_VOICE:
        from tritone.models.omni.talker_config import voices_of

        return voices_of(deployment.checkpoint)
    voice = json.loads((Path(deployment.voice) / "voice.json").read_text(encoding="utf-8"))
    return Voices(tuple(voice["voices"]), voice["default_voice"])
