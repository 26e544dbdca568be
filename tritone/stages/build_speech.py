"""Makes Talker and VoiceBox of a resolved deployment, of the kind that its ``voice`` is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tritone.deployment import OWN_VOICE, Deployment
from tritone.metrics import Metrics
from tritone.pools import BlockPool, CancelBoard, Views
from tritone.progress import LoadProgress
from tritone.sizes import ITEM_SIZES

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
    import torch

    from tritone.engine.scheduler import Scheduler
    from tritone.engine.talker import TalkerEngine
    from tritone.models.omni.talker import load_talker, speech_defaults
    from tritone.pools.pool import torch_view
    from tritone.stages.code_talker import CodeTalkerStage

    part, size = deployment.talker, deployment.page_size
    torch.set_num_threads(part.threads)
    pages_held = part.pool_tokens // size
    model = load_talker(
        deployment.checkpoint,
        getattr(torch, part.dtype),
        progress=LoadProgress(directory, "talker"),
        max_positions=pages_held * size,
    )
    shape = model.decoder.config.page_shape(size)
    pages = BlockPool(directory, "talker_pages", pages_held, shape, part.dtype, ITEM_SIZES[part.dtype])
    scheduler = Scheduler(pages, size, part.max_sequences, part.max_batch_tokens)
    kv: torch.Tensor = torch_view(pages.data, part.dtype, shape)
    longest = min(model.decoder.config.max_positions, pages_held * size - 1)
    engine = TalkerEngine(model, kv, scheduler, longest)
    stage = CodeTalkerStage(
        engine,
        pages,
        Views(directory),
        CancelBoard(directory),
        metrics,
        speech_defaults(deployment.checkpoint),
        max_queue=part.max_queue,
        restarted=restarted,
    )
    stage.warm_up()
    return stage
