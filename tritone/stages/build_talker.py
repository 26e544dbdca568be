"""Makes the stage of a Talker that speaks in codes: loads its weights and creates its page pool in the run directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tritone.deployment import Deployment, EngineStage
from tritone.engine.scheduler import Scheduler
from tritone.engine.talker import Script, SpeechPrompt, TalkerEngine, TalkerSequence
from tritone.errors import bad
from tritone.metrics import Metrics
from tritone.models.omni.heard import Heard
from tritone.models.omni.script import StreamedScript
from tritone.models.omni.talker_config import SpeechDefaults, declared, speech_defaults
from tritone.models.omni.talker_loading import OmniTalker, load_talker
from tritone.models.talker.config import is_talker, load_config
from tritone.models.talker.served import VoiceScript, VoiceTalker, load_voice
from tritone.options import Options, Sampling
from tritone.pools import CancelBoard, Views
from tritone.pools.pool import torch_view
from tritone.progress import LoadProgress
from tritone.stages.build import page_pool
from tritone.stages.code_talker import CodeTalkerStage, Opener

CHUNK = 64
"""The most rows of prompts that are computed in a step in which others speak."""

WARM_STEPS = 12


def build_code_talker(
    deployment: Deployment, part: EngineStage, directory: Path, metrics: Metrics, restarted: bool = False
) -> CodeTalkerStage:
    """The Talker of ``part.checkpoint``: an omni checkpoint, or a trained voice (``tritone.models.talker``); the sizes of its
    engine are ``part``'s.

    Raises ``InvalidArgument`` naming the field, what was found and what is allowed.
    """
    if part.kv == "fp8":
        raise bad("talker.kv", part.kv, "auto, bf16, float32")
    torch.set_num_threads(part.threads)
    assert part.checkpoint is not None
    talker = _trained(part) if is_talker(Path(part.checkpoint)) else _omni(part, LoadProgress(directory, "talker"))
    pages, tracker = page_pool(deployment, part, directory, "talker", talker.model.decoder.config)
    scheduler = Scheduler(
        pages,
        deployment.page_size,
        part.max_sequences,
        part.max_batch_tokens,
        tracker=tracker,
        max_chunk_tokens=CHUNK,
    )
    kv = torch_view(pages.data, pages.header.dtype, pages.header.shape)
    engine = TalkerEngine(talker.model, kv, scheduler, talker.positions)
    for script in talker.warming:
        warm_up(engine, script)
    return CodeTalkerStage(
        engine,
        pages,
        talker.opener,
        talker.defaults,
        Views(directory),
        CancelBoard(directory),
        metrics,
        part.max_queue,
        restarted,
    )


@dataclass(frozen=True)
class _Talker:
    """``positions`` is the longest sequence; ``warming`` are scripts to warm up with."""

    model: OmniTalker | VoiceTalker
    positions: int
    opener: Opener
    defaults: SpeechDefaults
    warming: Sequence[Script]


def _omni(part: EngineStage, progress: LoadProgress) -> _Talker:
    checkpoint = str(part.checkpoint)
    positions = min(int(_text_config(checkpoint)["max_position_embeddings"]), part.pool_tokens - 1)
    model = load_talker(
        checkpoint,
        getattr(torch, part.dtype),
        progress=progress,
        max_positions=positions,
        weights=part.weights,
        group=part.group,
    )
    row = model.embed(torch.zeros(1, model.codebooks, dtype=torch.int64))
    warming = [_Hum(row.expand(length, -1)) for length in (1, 2, 48)]
    return _Talker(model, positions, opener(model), speech_defaults(checkpoint), warming)


def _trained(part: EngineStage) -> _Talker:
    directory = Path(str(part.checkpoint))
    positions = min(load_config(directory).max_positions, part.pool_tokens - 1)
    model = load_voice(directory, getattr(torch, part.dtype), positions)

    def opened(options: Options, heard: Heard | None) -> VoiceScript:
        return model.script(options.voice or "")

    warming = model.script("")
    warming.feed("Ready, tritonelike.")  # one word is unknown: reading such is lazy
    warming.finish()
    return _Talker(model, positions, opened, SpeechDefaults(Sampling(temperature=0.0), positions), [warming])


def opener(model: OmniTalker) -> Opener:
    """Scripts of an omni checkpoint's Talker."""

    def opened(options: Options, heard: Heard | None) -> StreamedScript:
        if heard is None:
            raise bad("heard", None, "the answer of a Thinker: this Talker cannot read text alone")
        return model.script(heard, options.voice)

    return opened


class _Hum:
    """A script that speaks without text."""

    silent = over = False

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    def prompt(self) -> SpeechPrompt:
        return SpeechPrompt(self._rows)

    def next(self, token: int, frame: Tensor | None) -> Tensor | None:
        return frame


def warm_up(engine: TalkerEngine, script: Script) -> None:
    """A prompt and a few frames, so that the first request finds everything made."""
    sequence = TalkerSequence(session=0, tokens=[], prompt_length=0, sampling=Sampling(), max_tokens=4, script=script)
    engine.add(sequence)
    engine.arrived(sequence)
    for _ in range(WARM_STEPS):
        if any(spoken.finish for spoken in engine.speak()):
            return
    engine.remove(sequence)


def _text_config(checkpoint: str) -> Mapping[str, Any]:
    section: Mapping[str, Any] = declared(checkpoint)["talker_config"]
    return section.get("text_config", section)  # type: ignore[no-any-return]
