"""Prefill, integrity and decode in one process (or decode and prefill in others), with a model whose answers show which
memory they were made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.unit.helpers import FakeReply, byte_level_tokenizer, request
from tritone.deployment import Deployment
from tritone.engine.engine import Engine
from tritone.engine.prefix_cache import PrefixCache
from tritone.engine.scheduler import Scheduler
from tritone.integrity import Ledger, NoTracker, Tracker
from tritone.integrity.faults import Faults
from tritone.messages import Event, GenerateRequest, Prefilled
from tritone.metrics import Metrics
from tritone.models.decoder import Batch
from tritone.options import Sampling
from tritone.pools import BlockPool, CancelBoard, Views
from tritone.pools.pool import torch_view
from tritone.stages.build import _warm_up
from tritone.stages.decode import DecodeStage
from tritone.stages.integrity import IntegrityStage
from tritone.stages.prefill import PrefillStage

PAGE = 16
SHAPE = (1, 1, 1, PAGE, 1)
PERIOD = 21
"""Length of every prompt: two pages, the second one not full."""
VOCABULARY = 320
PAGES = 64


class EchoModel:
    """Answers a prompt of :data:`PERIOD` tokens with itself, over and over, read from the KV pages: a page of someone else
    shows as someone else's token."""

    def forward(self, batch: Batch, kv: torch.Tensor) -> torch.Tensor:
        flat = kv[:, 0, 0, 0, :, 0]
        slots = batch.slots(PAGE)
        flat[slots // PAGE, slots % PAGE] = batch.tokens.float()
        rows = []
        for row in range(len(batch.query_starts) - 1):
            start, stop = batch.query_starts[row : row + 2]
            for position in batch.positions[start:stop].tolist():
                place = max(position + 1 - PERIOD, 0)
                token = int(flat[batch.page_table[row, place // PAGE].long(), place % PAGE])
                rows.append(torch.nn.functional.one_hot(torch.tensor(token % VOCABULARY), VOCABULARY).float())
        return torch.stack(rows)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def deployment(**integrity: Any) -> Deployment:
    values = {"mode": "raise", "checksum": True, "audit_seconds": 0.2, "transfer_seconds": 0.6} | integrity
    engine = {"kv": "float32", "pool_tokens": PAGES * PAGE}
    return Deployment.parse(
        {"voice": None, "page_size": PAGE, "max_context": 512, "prefill": engine, "decode": engine, "integrity": values}, "t"
    )


def make_engine(given: Deployment, directory: Path, name: str) -> tuple[Engine, BlockPool]:
    mode = given.integrity.mode
    ledger = None if mode == "off" else Ledger(directory, f"{name}_pages", owner=True)
    pool = BlockPool(directory, f"{name}_pages", PAGES, SHAPE, "float32", 4, seal=given.integrity.checksum)
    tracker = Tracker(pool, ledger, log_only=mode == "log") if ledger else NoTracker()
    scheduler = Scheduler(pool, PAGE, 32, 256, cache=PrefixCache(pool, PAGE), tracker=tracker)
    engine = Engine(EchoModel(), torch_view(pool.data, "float32", SHAPE), scheduler)
    _warm_up(engine)
    return engine, pool


def make_prefill(given: Deployment, directory: Path, lease_seconds: float = 60.0) -> tuple[PrefillStage, BlockPool]:
    engine, pool = make_engine(given, directory, "prefill")
    stage = PrefillStage(
        engine, pool, None, CancelBoard(directory), Metrics("prefill"), max_queue=64, lease_seconds=lease_seconds,
        checksum=given.integrity.checksum, faults=Faults(given.integrity.faults, pool, given.integrity.transfer_seconds),
    )
    return stage, pool


def make_decode(given: Deployment, directory: Path, lease_seconds: float = 60.0) -> tuple[DecodeStage, BlockPool]:
    engine, pool = make_engine(given, directory, "decode")
    stage = DecodeStage(
        engine, byte_level_tokenizer(), pool, None, Views(directory), CancelBoard(directory), Metrics("decode"),
        max_queue=64, lease_seconds=lease_seconds, transfer_seconds=given.integrity.transfer_seconds,
        faults=Faults(given.integrity.faults, pool, given.integrity.transfer_seconds),
    )
    return stage, pool


def prompt(session: int) -> list[int]:
    """Tokens that no other session up to 29 has: its marker."""
    return [10 + 10 * session + place % 10 for place in range(PERIOD)]


def ask(session: int, salt: str = "", tokens: int = 40) -> GenerateRequest:
    return request(
        session, tuple(prompt(session)), sampling=Sampling(temperature=0.0), max_tokens=tokens, logprobs=0, cache_salt=salt
    )


def tokens_of(events: list[Event]) -> list[int]:
    return [entry["token_id"] for event in events for entry in event.info.get("logprobs", ())]


class ThroughIntegrity(FakeReply):
    """Takes prefill's answer to the integrity stage and on to decode."""

    def __init__(self, integrity: IntegrityStage, decode: DecodeStage, last: FakeReply) -> None:
        super().__init__()
        self._integrity, self._decode, self._last = integrity, decode, last

    def send(self, message: Prefilled, *, last: bool = False) -> None:
        if message.handoff is not None or message.failure is not None:
            there = Prefilled.from_tensors(message.to_tensors())
            self._decode.submit(self._integrity.check(there, False), self._last)
        super().send(message, last=last)


class Cascade:
    """The stages with their threads. ``decode`` may come later, as after a restart."""

    def __init__(self, directory: Path, lease_seconds: float = 60.0, **integrity: Any) -> None:
        self.deployment = deployment(**integrity)
        self.directory = directory
        self.prefill, self.prefill_pool = make_prefill(self.deployment, directory, lease_seconds)
        self.decode, self.decode_pool = make_decode(self.deployment, directory, lease_seconds)
        self.integrity = IntegrityStage(self.deployment, directory, CancelBoard(directory), Metrics("integrity"))

    def submit(self, asked: GenerateRequest) -> FakeReply:
        reply = FakeReply()
        self.prefill.submit(asked, ThroughIntegrity(self.integrity, self.decode, reply))
        return reply

    def pools(self) -> list[dict[str, float]]:
        return [pool.gauges() for pool in (self.prefill_pool, self.decode_pool)]

    def idle(self) -> bool:
        """Every block is free or cached, and no lease stands."""
        return all(found["free"] + found["cached"] == PAGES for found in self.pools())

    def stop(self) -> None:
        for stage in (self.prefill, self.decode, self.integrity):
            stage.stop()
