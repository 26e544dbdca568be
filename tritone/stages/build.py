"""Makes the stages of a resolved deployment: loads weights and creates the pools in the run directory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tritone.deployment import Deployment, EngineStage
from tritone.metrics import Metrics
from tritone.pools import BlockPool, CancelBoard, Views
from tritone.pools.pool import torch_view
from tritone.progress import LoadProgress
from tritone.sizes import HIDDEN_ROWS, ITEM_SIZES, page_count

if TYPE_CHECKING:
    from tritone.engine.engine import Engine
    from tritone.models.decoder import DecoderConfig
    from tritone.stages.decode import DecodeStage
    from tritone.stages.prefill import PrefillStage
    from tritone.stages.talker import TalkerStage
    from tritone.stages.voicebox import VoiceBoxStage

def build_prefill(deployment: Deployment, directory: Path, metrics: Metrics) -> PrefillStage:
    from tritone.stages.prefill import PrefillStage

    engine, pages, hidden = build_engine(deployment, deployment.prefill, directory, "prefill")
    _warm_up(engine)
    return PrefillStage(
        engine,
        pages,
        hidden,
        CancelBoard(directory),
        metrics,
        max_queue=deployment.prefill.max_queue,
        lease_seconds=deployment.lease_seconds,
    )


def build_decode(deployment: Deployment, directory: Path, metrics: Metrics) -> DecodeStage:
    from tritone.stages.decode import DecodeStage
    from tritone.text.detokenizer import load_tokenizer

    engine, pages, hidden = build_engine(deployment, deployment.decode, directory, "decode")
    _warm_up(engine)
    return DecodeStage(
        engine,
        load_tokenizer(Path(deployment.checkpoint)),
        pages,
        hidden,
        Views(directory),
        CancelBoard(directory),
        metrics,
        max_queue=deployment.decode.max_queue,
        lease_seconds=deployment.lease_seconds,
    )


def build_talker(deployment: Deployment, directory: Path, metrics: Metrics) -> TalkerStage:
    from tritone.models.voice.talker import HibariTalker
    from tritone.stages.talker import TalkerStage

    assert deployment.voice is not None
    talker = HibariTalker(Path(deployment.voice), deployment.talker.threads)
    talker.warm_up()
    return TalkerStage(talker, Views(directory), CancelBoard(directory), metrics, deployment.talker.max_queue)


def build_voicebox(deployment: Deployment, directory: Path, metrics: Metrics) -> VoiceBoxStage:
    from tritone.models.voice.voicebox import VoiceBox
    from tritone.stages.voicebox import VoiceBoxStage

    assert deployment.voice is not None
    box = VoiceBox(Path(deployment.voice), deployment.voicebox.threads)
    box.warm_up()
    return VoiceBoxStage(box, CancelBoard(directory), metrics, deployment.voicebox.max_queue)


def build_engine(
    deployment: Deployment, part: EngineStage, directory: Path, name: str
) -> tuple[Engine, BlockPool, BlockPool | None]:
    """An engine with its page pool and, where a voice is loaded, its hidden-state pool; files begin with ``name``."""
    import torch

    from tritone.engine.engine import Engine
    from tritone.engine.scheduler import Scheduler
    from tritone.models.decoder import load_decoder

    torch.set_num_threads(part.threads)
    model = load_decoder(
        deployment.checkpoint,
        dtype=getattr(torch, part.dtype),
        progress=LoadProgress(directory, name),
        max_positions=deployment.max_context,
    )
    config: DecoderConfig = model.config
    itemsize = ITEM_SIZES[part.dtype]
    shape = config.page_shape(deployment.page_size)
    pages = BlockPool(directory, f"{name}_pages", page_count(deployment, part), shape, part.dtype, itemsize)
    hidden = None
    if deployment.voice:
        blocks = deployment.talker.hidden_blocks
        hidden = BlockPool(directory, f"{name}_hidden", blocks, (HIDDEN_ROWS, config.hidden_size), part.dtype, itemsize)
    scheduler = Scheduler(pages, deployment.page_size, part.max_sequences, part.max_batch_tokens)
    kv: torch.Tensor = torch_view(pages.data, part.dtype, shape)
    return Engine(model, kv, scheduler), pages, hidden


def _warm_up(engine: Engine) -> None:
    """Run a prompt and a few tokens through the engine, so that the first request finds everything made."""
    from tritone.engine.sequence import Sequence
    from tritone.options import Sampling

    greedy = Sampling(temperature=0.0)
    for length in (1, 2, 48):
        sequence = Sequence(session=0, tokens=[1] * length, prompt_length=length, sampling=greedy, max_tokens=4)
        engine.scheduler.add(sequence)
        for _ in range(3):
            engine.step()
        engine.scheduler.remove(sequence)
