"""Prefill: computes the prompt's KV and the first token, and hands both over."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace

import torch

from tritone.engine.engine import Engine, Output
from tritone.engine.media import media_key
from tritone.engine.scheduler import Scheduler
from tritone.engine.sequence import Sequence
from tritone.errors import InvalidArgument, TritoneError
from tritone.fatal import end_if_out_of_memory
from tritone.integrity.faults import Faults
from tritone.messages import BlockRefs, Failure, GenerateRequest, Handoff, Prefilled
from tritone.metrics import Metrics
from tritone.models.omni.heard import Heard, Hearing
from tritone.models.omni.prompt import MediaPrompt
from tritone.pools import BlockPool, CancelBoard, PoolExhausted
from tritone.pools.board import PURGE_SECONDS
from tritone.stages.hidden import AnswerRows, HiddenWriter, StateRows
from tritone.stages.loop import EngineLoop
from tritone.stages.media import MAX_HELD_BYTES, MediaTowers, MediaWorker
from tritone.stages.outbox import Outbox
from tritone.stages.pace import Pace
from tritone.stages.reply import Reply

log = logging.getLogger(__name__)

BEAT_SECONDS = 0.2


@dataclass
class _Job:
    request: GenerateRequest
    prompt: MediaPrompt | None
    reply: Reply[Prefilled]
    arrived: float
    beat: float
    started: float | None = None
    announced: bool = False
    """Whether a beat has carried the request."""


class PrefillStage:
    """One engine whose sequences end with their first token.

    ``pages`` is this stage's KV pool, ``hidden`` its pool of hidden-state blocks (shape [rows, hidden]). With
    ``engine.handed`` the Talker gets rows of the prompt's tokens too.
    """

    def __init__(
        self,
        engine: Engine,
        pages: BlockPool,
        hidden: BlockPool | None,
        board: CancelBoard,
        metrics: Metrics,
        *,
        max_queue: int,
        max_wait_seconds: float = 30.0,
        lease_seconds: float,
        checksum: bool = False,
        faults: Faults | None = None,
        rows: AnswerRows | None = None,
        hearing: Hearing | None = None,
        towers: MediaTowers | None = None,
    ) -> None:
        """``checksum``: a hand-over carries digests of its pages. ``rows``: what the Talker gets of the first token (default:
        the state it was chosen from). ``hearing``: what the checkpoint's Talker reads of a prompt. ``towers``: computes the
        media of prompts, where the checkpoint takes some."""
        self._engine = engine
        self._scheduler: Scheduler = engine.scheduler
        self._pages = pages
        self._hidden = hidden
        self._writer = HiddenWriter(hidden, lease_seconds) if hidden else None
        self._rows = rows or StateRows()
        self._hearing = hearing
        self._media = MediaWorker(towers) if towers is not None else None
        self._board = board
        self._metrics = metrics
        self._max_queue = max_queue
        self._max_wait_seconds = max_wait_seconds
        self._pace = Pace()
        self._lease_seconds = lease_seconds
        self._checksum = checksum
        self._faults = faults or Faults((), pages, 0.0)
        self._jobs: dict[int, tuple[_Job, Sequence]] = {}
        self._seeing: dict[int, _Job] = {}
        """Requests whose media are computed, or wait for that."""
        self._lent: dict[BlockRefs, tuple[int, float]] = {}
        self._lent_hidden: dict[int, BlockRefs] = {}
        # Beats come from there: a step may take longer than a client that left should wait.
        self._outbox = Outbox("prefill-out", self._beat, BEAT_SECONDS)
        self._loop = EngineLoop(self, "prefill")

    def submit(self, request: GenerateRequest, reply: Reply[Prefilled], prompt: MediaPrompt | None = None) -> None:
        """``prompt``: the media among the request's ids, which are the prompt's, where they are computed already."""
        now = time.monotonic()
        if reply.is_cancelled():
            self._board.post(request.session)
        job = _Job(request, prompt, reply, now, now)
        if request.media is None or prompt is not None:
            self._loop.post(lambda: self._add(job))
        else:
            self._loop.post(lambda: self._see(job))

    def stop(self) -> None:
        if self._media is not None:
            self._media.stop()
        self._loop.stop()
        self._outbox.stop()

    def _see(self, job: _Job) -> None:
        """Have a request's media computed, beside the engine; then it is added."""
        if self._media is None:
            message = "media: audio or images; allowed: text alone, the checkpoint takes nothing else"
            self._answer(job, failure=Failure("error", "INVALID_ARGUMENT", message))
            return
        request = job.request
        assert request.media is not None
        refused = ""
        if len(self._seeing) >= self._max_queue:
            refused = f"prefill.max_queue: {self._max_queue} requests with media wait already"
        elif not self._media.has_room(request.media):
            refused = f"media: {request.media.nbytes} bytes beside those that wait; allowed: {MAX_HELD_BYTES} in all"
        if refused:
            self._answer(job, failure=Failure("error", "UNAVAILABLE", f"{refused}; try again in 1 s"))
            return
        self._seeing[request.session] = job
        self._media.compute(
            request, lambda: request.session in self._seeing, lambda made: self._loop.post(lambda: self._seen(job, made))
        )

    def _seen(self, job: _Job, made: MediaPrompt | TritoneError) -> None:
        if self._seeing.pop(job.request.session, None) is None:
            return
        if isinstance(made, TritoneError):
            self._answer(job, failure=Failure("error", made.code, made.message))
            return
        job.prompt = made
        job.request = replace(job.request, media=None)  # seen, so their memory is free
        self._add(job)

    def _add(self, job: _Job) -> None:
        wait = self._pace.seconds(self._tokens_left())
        refused = ""
        if len(self._scheduler.waiting) >= self._max_queue:
            refused = f"prefill.max_queue: {self._max_queue} requests wait already"
        elif wait > self._max_wait_seconds:
            refused = f"max_wait_seconds: about {wait:.0f} s until this request's turn; allowed: {self._max_wait_seconds:g}"
        if refused:
            message = f"{refused}; try again in {max(1, round(wait - self._max_wait_seconds / 2))} s"
            self._answer(job, failure=Failure("error", "UNAVAILABLE", message))
            return
        request = job.request
        try:
            media = media_key(job.prompt) if job.prompt is not None else None
        except InvalidArgument as error:
            self._answer(job, failure=Failure("error", error.code, error.message))
            return
        sequence = Sequence(
            session=request.session,
            tokens=request.ids.tolist(),
            prompt_length=len(request.ids),
            sampling=request.options.sampling,
            max_tokens=1,
            logprobs=request.options.logprobs,
            salt=request.options.cache_salt,
            media=media,
            prompt=job.prompt,
        )
        self._jobs[request.session] = (job, sequence)
        self._scheduler.add(sequence)

    def step(self) -> bool:
        begun = time.monotonic()
        before = self._tokens_left()
        outputs = self._engine.step()
        self._pace.add(before - self._tokens_left(), time.monotonic() - begun)
        for job, sequence in self._jobs.values():
            if job.started is None and (sequence.computed or sequence.pages):
                job.started = begun
                self._metrics.observe("tritone_queue_seconds", begun - job.arrived)
        for output in outputs:
            job, _ = self._jobs.pop(output.sequence.session)
            try:
                if output.error is not None:
                    self._answer(job, failure=Failure("error", output.error.code, output.error.message))
                else:
                    self._hand_over(job, output)
            except Exception as error:  # a stream that broke must not keep the others from their hand-over
                end_if_out_of_memory("prefill", error)
                log.exception("prefill")
        return bool(self._scheduler.running) or bool(outputs)

    def _tokens_left(self) -> int:
        """Tokens of the prompts under way that are still to be computed."""
        return sum(max(0, sequence.prompt_length - sequence.computed) for _, sequence in self._jobs.values())

    def tend(self, now: float) -> bool:
        self._faults.tend(now)
        expired = self._pages.collect() + (self._hidden.collect() if self._hidden else 0)
        if expired:
            self._metrics.count("tritone_leases_expired_total", expired)
        for refs, (session, lent) in list(self._lent.items()):
            self._tend_lent(refs, session, now - lent)
        for job, sequence in list(self._jobs.values()):
            session = job.request.session
            if self._board.is_cancelled(session):
                del self._jobs[session]
                self._scheduler.remove(sequence)
                self._answer(job, failure=Failure("cancelled"))
        for session, job in list(self._seeing.items()):
            if self._board.is_cancelled(session):
                del self._seeing[session]
                self._answer(job, failure=Failure("cancelled"))
        self._metrics.gauge("tritone_queue_requests", len(self._scheduler.waiting) + len(self._seeing))
        self._metrics.gauge("tritone_running_requests", len(self._scheduler.running))
        blocks = self._pages.gauges()
        self._metrics.gauges("tritone_pages", blocks)
        self._scheduler.tracker.publish(blocks, self._engine.steps)
        if self._hidden:
            self._metrics.gauges("tritone_hidden_blocks", self._hidden.gauges())
        leases = self._pages.leases or (self._hidden is not None and self._hidden.leases)
        return bool(self._jobs) or bool(self._seeing) or bool(leases)

    def _tend_lent(self, refs: BlockRefs, session: int, seconds: float) -> None:
        hidden = self._lent_hidden.get(session)
        if seconds > PURGE_SECONDS and self._board.is_cancelled(session):
            # Triton may have dropped the hand-over of a cancelled request; its reader will not come.
            self._pages.take_back(refs.slot, refs.nonce)
            if self._hidden is not None and hidden is not None:
                self._hidden.take_back(hidden.slot, hidden.nonce)
        if not self._pages.is_lent(refs) and not (self._hidden and hidden and self._hidden.is_lent(hidden)):
            del self._lent[refs]
            self._lent_hidden.pop(session, None)

    def _hand_over(self, job: _Job, output: Output) -> None:
        sequence, request = output.sequence, job.request
        assert output.info is not None and output.hidden is not None
        hidden, count = None, 0
        if request.options.speech:
            assert self._writer is not None
            rows = self._rows_of(sequence, output.hidden, output.info.token, request.stop_ids)
            try:
                hidden, count = self._writer.lend(rows), len(rows)
            except PoolExhausted as error:
                self._scheduler.remove(sequence)
                self._answer(job, failure=Failure("error", "RESOURCE_EXHAUSTED", f"prefill: hidden-state pool: {error}"))
                return
        self._scheduler.remove(sequence, keep_pages=True)
        # Admission took a page for the first token; the prompt alone is handed over.
        used = -(-sequence.prompt_length // self._scheduler.page_size)
        self._pages.free(sequence.pages[used:])
        now = time.monotonic()
        started = job.started if job.started is not None else job.arrived
        handoff = Handoff(
            first=output.info,
            pages=self._pages.lend(sequence.pages[:used], self._lease_seconds),
            page_size=self._scheduler.page_size,
            hidden=hidden,
            hidden_rows=count,
            heard=self._heard(job) if hidden is not None else None,
            media=sequence.media,
            cached_tokens=sequence.cached,
            timings={"queue": started - job.arrived, "prefill": now - started, "handed_over": now},
            digests=self._pages.digests(sequence.pages[:used]) if self._checksum else (),
        )
        self._faults.handed_over(sequence.salt, handoff.pages.slot)
        self._metrics.observe("tritone_stage_seconds", now - started)
        self._metrics.count("tritone_tokens_total", sequence.prompt_length, kind="prompt")
        self._metrics.count("tritone_cached_tokens_total", sequence.cached)
        self._lent[handoff.pages] = (request.session, now)
        if hidden is not None:
            self._lent_hidden[request.session] = hidden
        self._answer(job, handoff=handoff)

    def _rows_of(self, sequence: Sequence, hidden: torch.Tensor, first: int, stop_ids: tuple[int, ...]) -> torch.Tensor:
        """The Talker's rows of the prompt, where its checkpoint has such, and of the first token."""
        row = self._rows.first(hidden, None if first in stop_ids else first)
        rows = [] if row is None else [row]
        if self._engine.handed is not None:
            rows.insert(0, self._engine.handed_rows(sequence, sequence.prompt_length))
        return torch.cat(rows)

    def _heard(self, job: _Job) -> Heard | None:
        if self._hearing is None or self._engine.handed is None:
            return None
        return self._hearing(job.request.ids, job.prompt.positions if job.prompt is not None else None)

    def _answer(self, job: _Job, *, handoff: Handoff | None = None, failure: Failure | None = None) -> None:
        if failure is not None:
            self._metrics.count("tritone_requests_total", outcome=failure.kind)
        # The media go no further; a request that was refused has them still.
        request = replace(job.request, media=None)
        self._outbox.put(job.reply, Prefilled(request, request.session, handoff, failure), last=True)

    def _beat(self) -> None:
        """Called by the outbox. A job leaves ``_jobs`` before its answer is put there, so no beat comes after it."""
        now = time.monotonic()
        for job in [*(job for job, _ in list(self._jobs.values())), *list(self._seeing.values())]:
            if now - job.beat >= BEAT_SECONDS:
                job.beat = now
                request = None if job.announced else replace(job.request, ids=job.request.ids[:0], media=None)
                job.announced = True
                job.reply.send(Prefilled(request, job.request.session))
