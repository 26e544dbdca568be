"""Makes the stage of a Talker that speaks in codes: loads its weights and creates its page pool in the run directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tritone.deployment import Deployment, EngineStage
from tritone.engine.scheduler import Scheduler
from tritone.engine.talker import SpeechPrompt, TalkerEngine, TalkerModel, TalkerSequence
from tritone.errors import bad
from tritone.metrics import Metrics
from tritone.models.omni.heard import Heard
from tritone.models.omni.script import StreamedScript
from tritone.models.omni.talker_config import declared, speech_defaults
from tritone.models.omni.talker_loading import OmniTalker, load_talker
from tritone.options import Options, Sampling
from tritone.pools import CancelBoard, Views
from tritone.pools.pool import torch_view
from tritone.progress import LoadProgress
from tritone.stages.build import page_pool
from tritone.stages.code_talker import CodeTalkerStage, Opener

CHUNK = 64
"""The most rows of prompts that are computed in a step in which others speak."""


def build_code_talker(
    deployment: Deployment, part: EngineStage, directory: Path, metrics: Metrics, restarted: bool = False
) -> CodeTalkerStage:
    """The Talker of ``part.checkpoint``, an omni checkpoint; the sizes of its engine are ``part``'s.

    Raises ``InvalidArgument`` naming the field, what was found and what is allowed.
    """
    if part.kv == "fp8":
        raise bad("talker.kv", part.kv, "auto, bf16, float32")
    torch.set_num_threads(part.threads)
    assert part.checkpoint is not None
    positions = min(int(_text_config(part.checkpoint)["max_position_embeddings"]), part.pool_tokens - 1)
    model = load_talker(
        part.checkpoint,
        getattr(torch, part.dtype),
        progress=LoadProgress(directory, "talker"),
        max_positions=positions,
        weights=part.weights,
        group=part.group,
    )
    pages, tracker = page_pool(deployment, part, directory, "talker", model.decoder.config)
    scheduler = Scheduler(
        pages,
        deployment.page_size,
        part.max_sequences,
        part.max_batch_tokens,
        tracker=tracker,
        max_chunk_tokens=CHUNK,
    )
    engine = TalkerEngine(model, torch_view(pages.data, pages.header.dtype, pages.header.shape), scheduler, positions)
    warm_up(engine)
    return CodeTalkerStage(
        engine,
        pages,
        opener(model),
        speech_defaults(part.checkpoint),
        Views(directory),
        CancelBoard(directory),
        metrics,
        part.max_queue,
        restarted,
    )


def opener(model: OmniTalker) -> Opener:
    """Scripts of an omni checkpoint's Talker."""

    def opened(options: Options, heard: Heard | None) -> StreamedScript:
        if heard is None:
            raise bad("heard", None, "the answer of a Thinker: this Talker cannot read text alone")
        return model.script(heard, options.voice)

    return opened


class _Hum:
    """A script that speaks without text."""

    silent = False

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    def prompt(self) -> SpeechPrompt:
        return SpeechPrompt(self._rows)

    def next(self, token: int, frame: Tensor | None) -> Tensor | None:
        return frame


def warm_up(engine: TalkerEngine) -> None:
    """Prompts and a few frames, so that the first request finds everything made."""
    model: TalkerModel = engine.model
    row = model.embed(torch.zeros(1, model.codebooks, dtype=torch.int64))
    for length in (1, 2, 48):
        sequence = TalkerSequence(
            session=0, tokens=[], prompt_length=0, sampling=Sampling(), max_tokens=4, script=_Hum(row.expand(length, -1))
        )
        engine.add(sequence)
        engine.arrived(sequence)
        for _ in range(3):
            if any(spoken.finish for spoken in engine.speak()):
                break
        else:
            engine.remove(sequence)


def _text_config(checkpoint: str) -> Mapping[str, Any]:
    section: Mapping[str, Any] = declared(checkpoint)["talker_config"]
    return section.get("text_config", section)  # type: ignore[no-any-return]
