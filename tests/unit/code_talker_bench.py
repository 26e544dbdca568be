"""A stage of a Talker that speaks in codes, and decode's end of its sessions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.unit.helpers import FakeReply
from tritone.deployment import Deployment, EngineStage
from tritone.messages import Event
from tritone.metrics import Metrics
from tritone.pools import BlockPool
from tritone.sizes import HIDDEN_ROWS, ITEM_SIZES
from tritone.stages.build_talker import build_code_talker
from tritone.stages.code_talker import CodeTalkerStage
from tritone.stages.hidden import HiddenWriter


class CodeTalkerBench:
    """``hidden`` is the pool of the Thinker's rows, [rows, width] of ``dtype`` a block; ``log`` has all messages in order."""

    def __init__(self, checkpoint: Path, directory: Path, width: int, dtype: str, **sizes: Any) -> None:
        part = EngineStage(checkpoint=str(checkpoint), dtype="float32", kv="float32", threads=1, **sizes)
        deployment = Deployment.parse({"voice": None, "page_size": 16, "max_context": 512, "integrity": {"mode": "raise"}}, "t")
        self.stage: CodeTalkerStage = build_code_talker(deployment, part, directory, Metrics("talker"))
        self.pages = self.stage._pages
        self.hidden = BlockPool(directory, "decode_hidden", 64, (HIDDEN_ROWS, width), dtype, ITEM_SIZES[dtype])
        self._writer = HiddenWriter(self.hidden, 60.0)
        self.log: list[Event] = []

    def send(self, session: int, kind: Any, rows: torch.Tensor | None = None, **more: Any) -> FakeReply:
        if rows is not None:
            more |= {"hidden": (self._writer.lend(rows),), "rows": (len(rows),)}
        reply = FakeReply(log=self.log)
        self.stage.submit(Event(session, kind, **more), reply)
        return reply
