"""Makes Talker and VoiceBox of a resolved deployment, of the kind that its ``voice`` is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tritone.deployment import DENSE_NAMES, OWN_VOICE, Deployment, EngineStage
from tritone.metrics import Metrics
from tritone.pools import CancelBoard, Views
from tritone.progress import LoadProgress

if TYPE_CHECKING:
    from tritone.stages.code_talker import CodeTalkerStage
    from tritone.stages.talker import TalkerStage
    from tritone.stages.voicebox import VoiceBoxStage


def build_talker(
    deployment: Deployment, directory: Path, metrics: Metrics, restarted: bool
) -> TalkerStage | CodeTalkerStage:
    if deployment.voice == OWN_VOICE:
        return _code_talker(deployment, directory, metrics, restarted)
    from tritone.models.voice.talker import HibariTalker
    from tritone.stages.talker import TalkerStage

    assert deployment.voice is not None
    talker = HibariTalker(Path(deployment.voice), deployment.talker.threads)
    talker.warm_up()
    return TalkerStage(talker, Views(directory), CancelBoard(directory), metrics, deployment.talker.max_queue, restarted)


def build_voicebox(deployment: Deployment, directory: Path, metrics: Metrics, restarted: bool) -> VoiceBoxStage:
    import torch

    from tritone.models.omni.voicebox.loading import load_voicebox
    from tritone.models.voice.voicebox import VoiceBox
    from tritone.stages.sounds import CodeSounds, FeatureSounds
    from tritone.stages.voicebox import VoiceBoxStage

    sounds: CodeSounds | FeatureSounds
    if deployment.voice == OWN_VOICE:
        torch.set_num_threads(deployment.voicebox.threads)
        sounds = CodeSounds(load_voicebox(deployment.checkpoint, progress=LoadProgress(directory, "voicebox")))
    else:
        assert deployment.voice is not None
        sounds = FeatureSounds(VoiceBox(Path(deployment.voice), deployment.voicebox.threads))
    return VoiceBoxStage(sounds, CancelBoard(directory), metrics, deployment.voicebox.max_queue, restarted)


def _code_talker(deployment: Deployment, directory: Path, metrics: Metrics, restarted: bool) -> CodeTalkerStage:
    from tritone.stages.build_talker import build_code_talker

    part = EngineStage.model_validate(
        deployment.talker.model_dump(exclude={"hidden_blocks"})
        | {"checkpoint": deployment.checkpoint, "kv": DENSE_NAMES[deployment.talker.dtype]}
    )
    return build_code_talker(deployment, part, directory, metrics, restarted)
