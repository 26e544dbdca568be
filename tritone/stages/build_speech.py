"""Makes Talker and VoiceBox of a resolved deployment, of the kind that its ``voice`` is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tritone.deployment import DENSE_NAMES, OWN_VOICE, Deployment, EngineStage
from tritone.metrics import Metrics
from tritone.models.talker.config import is_talker
from tritone.pools import CancelBoard, Views
from tritone.progress import LoadProgress

if TYPE_CHECKING:
    from tritone.stages.code_talker import CodeTalkerStage
    from tritone.stages.talker import TalkerStage
    from tritone.stages.voicebox import VoiceBoxStage


def build_talker(
    deployment: Deployment, directory: Path, metrics: Metrics, restarted: bool
) -> TalkerStage | CodeTalkerStage:
    assert deployment.voice is not None
    if deployment.voice == OWN_VOICE or is_talker(Path(deployment.voice)):
        return _code_talker(deployment, directory, metrics, restarted)
    from tritone.models.voice.talker import HibariTalker
    from tritone.stages.talker import TalkerStage

    talker = HibariTalker(Path(deployment.voice), deployment.talker.threads)
    talker.warm_up()
    return TalkerStage(talker, Views(directory), CancelBoard(directory), metrics, deployment.talker.max_queue, restarted)


def build_voicebox(deployment: Deployment, directory: Path, metrics: Metrics, restarted: bool) -> VoiceBoxStage:
    import torch

    from tritone.models.omni.voicebox.loading import load_voicebox
    from tritone.models.talker.files import load_codec
    from tritone.models.voice.voicebox import VoiceBox
    from tritone.stages.sounds import CodecSounds, CodeSounds, FeatureSounds, SoundMaker
    from tritone.stages.voicebox import VoiceBoxStage

    sounds: SoundMaker
    assert deployment.voice is not None
    if deployment.voice == OWN_VOICE:
        torch.set_num_threads(deployment.voicebox.threads)
        loading = LoadProgress(directory, "voicebox")
        sounds = CodeSounds(load_voicebox(deployment.checkpoint, progress=loading, slots=deployment.voicebox.batch))
    elif deployment.voicebox.voice is not None:
        box = VoiceBox(Path(deployment.voicebox.voice), deployment.voicebox.threads)
        sounds = CodecSounds(box, load_codec(Path(deployment.voice)))
    else:
        sounds = FeatureSounds(VoiceBox(Path(deployment.voice), deployment.voicebox.threads))
    return VoiceBoxStage(sounds, CancelBoard(directory), metrics, deployment.voicebox.max_queue, restarted)


def _code_talker(deployment: Deployment, directory: Path, metrics: Metrics, restarted: bool) -> CodeTalkerStage:
    from tritone.stages.build_talker import build_code_talker

    checkpoint = deployment.checkpoint if deployment.voice == OWN_VOICE else deployment.voice
    part = EngineStage.model_validate(
        deployment.talker.model_dump(exclude={"hidden_blocks"})
        | {"checkpoint": checkpoint, "kv": DENSE_NAMES[deployment.talker.dtype]}
    )
    return build_code_talker(deployment, part, directory, metrics, restarted)
