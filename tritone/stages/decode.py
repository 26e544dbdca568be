"""Decode: takes hand-overs into its own pages and generates, many answers at once."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from tritone.engine.engine import Engine, Output
from tritone.engine.scheduler import Scheduler
from tritone.engine.sequence import Sequence
from tritone.errors import TritoneError
from tritone.fatal import end_if_out_of_memory
from tritone.integrity import IntegrityError
from tritone.integrity.faults import Faults
from tritone.messages import BlockRefs, Event, Failure, GenerateRequest, Prefilled, TokenInfo, failure_event, start_event
from tritone.metrics import Metrics
from tritone.pools import BlockPool, CancelBoard, PoolExhausted, Views
from tritone.stages.answer import Answer
from tritone.stages.hidden import AnswerRows, HeldRows, HiddenWriter, StateRows
from tritone.stages.loop import EngineLoop
from tritone.stages.outbox import Outbox
from tritone.stages.prefill import BEAT_SECONDS
from tritone.stages.pull import Puller
from tritone.stages.reply import Reply
from tritone.stages.saved import saver

log = logging.getLogger(__name__)

LEASE_LOOK_SECONDS = 0.5
"""How often requests that wait make sure that prefill still holds their pages."""


@dataclass
class _Running:
    answer: Answer
    reply: Reply[Event]
    refs: BlockRefs | None
    """Prefill's leased pages, until they are copied or given back."""
    rows: HeldRows | None = None
    """The Talker's, of speech requests."""
    due: float = 0.0
    """Until then the pages are on their way (an injected fault), and the scheduler does not know the sequence."""


class DecodeStage:
    """``pages`` is this stage's KV pool; ``hidden`` carries hidden states to the Talker (None: text only)."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        pages: BlockPool,
        hidden: BlockPool | None,
        views: Views,
        board: CancelBoard,
        metrics: Metrics,
        *,
        max_queue: int,
        lease_seconds: float,
        transfer_seconds: float = 10.0,
        faults: Faults | None = None,
        prefill_scales: torch.Tensor | None = None,
        rows: AnswerRows | None = None,
    ) -> None:
        """``prefill_scales`` are those of prefill's pages, if they are e4m3. ``rows``: what the Talker gets (default: the
        states that tokens were chosen from)."""
        self._engine = engine
        self._scheduler: Scheduler = engine.scheduler
        self._tokenizer = tokenizer
        self._pages = pages
        self._hidden_pool = hidden
        self._save_kv = saver(pages, self._scheduler.page_size)
        self._writer = HiddenWriter(hidden, lease_seconds) if hidden else None
        self._rows = rows or StateRows()
        self._views = views
        self._board = board
        self._metrics = metrics
        self._max_queue = max_queue
        self._lease_seconds = lease_seconds
        self._tracker = self._scheduler.tracker
        self._faults = faults or Faults((), pages, transfer_seconds)
        self._leases_looked = 0.0
        self._puller = Puller(engine, pages, views, self._faults, seconds=transfer_seconds, scales=prefill_scales)
        self._running: dict[int, tuple[_Running, Sequence]] = {}
        self._announced: dict[int, float] = {}
        """Sessions whose start has left while prefill still works on them, and when their last message came."""
        self._outbox = Outbox("decode-out")
        self._loop = EngineLoop(self, "decode")

    def submit(self, prefilled: Prefilled, reply: Reply[Event]) -> None:
        """One message of integrity. Start and first token leave here, before the engine looks at the request."""
        if reply.is_cancelled():
            self._board.post(prefilled.session)
        request = prefilled.request
        announced = prefilled.session in self._announced
        if request is not None and not announced:
            self._outbox.put(reply, start_event(request))
        if request is not None or announced:
            self._announced[prefilled.session] = time.monotonic()
        if request is None or (prefilled.handoff is None and prefilled.failure is None):
            self._outbox.put(reply, Event(prefilled.session, "beat"), last=True)
            return
        self._announced.pop(request.session, None)
        if prefilled.handoff is None:
            assert prefilled.failure is not None
            self._outbox.put(reply, failure_event(request.session, prefilled.failure), last=True)
            return
        now = time.monotonic()
        handoff = prefilled.handoff
        running = _Running(Answer(request, handoff, self._tokenizer, now), reply, handoff.pages)
        self._metrics.observe("tritone_time_to_first_token_seconds", now - request.created)
        text = running.answer.accept(handoff.first)
        if handoff.hidden is not None:
            assert self._writer is not None
            first = None if handoff.first.token in request.stop_ids else handoff.first.token
            running.rows = HeldRows(self._rows, self._writer, first, handoff.hidden_rows, running.answer.spoken > 0)
        self._send_text(running, text, extra=handoff.hidden)
        if running.answer.finish_reason is not None:
            self._views.release(handoff.pages)
            self._finish(running)
            return
        self._loop.post(lambda: self._add(running, request, handoff.first))

    def purge(self) -> None:
        """Forget cancelled sessions whose hand-over will not come."""
        now = time.monotonic()
        for session, seen in list(self._announced.items()):
            if self._board.is_over(session, now - seen):
                self._announced.pop(session, None)

    def stop(self) -> None:
        self._loop.stop()
        self._outbox.stop()

    def _add(self, running: _Running, request: GenerateRequest, first: TokenInfo) -> None:
        if len(self._scheduler.waiting) >= self._max_queue:
            message = f"decode.max_queue: {self._max_queue} requests wait already; try again in 1 s"
            self._fail(running, Failure("error", "UNAVAILABLE", message))
            return
        prompt = request.ids.tolist()
        sequence = Sequence(
            session=request.session,
            tokens=prompt,
            prompt_length=len(prompt),
            sampling=request.options.sampling,
            max_tokens=request.options.max_tokens,
            logprobs=request.options.logprobs,
            imported=len(prompt),
            import_kv=self._import_kv,
            save_kv=self._save_kv,
            foreign=len(prompt),
            media=running.answer.handoff.media,
            salt=request.options.cache_salt,
            state=running,
        )
        sequence.append(first.token)
        self._running[request.session] = (running, sequence)
        if delay := self._faults.delay(sequence.salt):
            running.due = time.monotonic() + delay
        else:
            self._scheduler.add(sequence)

    def _import_kv(self, sequence: Sequence) -> None:
        running: _Running = sequence.state
        running.refs = None
        self._puller.pull(running.answer.handoff, sequence)
        handed_over = running.answer.handoff.timings["handed_over"]
        self._metrics.observe("tritone_handover_seconds", time.monotonic() - handed_over)
        self._metrics.count("tritone_cached_tokens_total", sequence.cached)

    def step(self) -> bool:
        self._faults.strike(self._scheduler.running)
        outputs = self._engine.step()
        for output in outputs:
            self._take_safely(output)
        return bool(self._scheduler.running) or bool(outputs)

    def _take_safely(self, output: Output) -> None:
        """An error in one answer ends that answer; the step's other tokens are still taken."""
        try:
            self._take(output)
        except Exception as error:
            end_if_out_of_memory("decode", error)
            log.exception("decode")
            if output.sequence.session in self._running:
                self._end(output.sequence)
                known = error if isinstance(error, TritoneError) else TritoneError(f"decode: {error!r}")
                self._fail(output.sequence.state, Failure("error", known.code, known.message))

    def _take(self, output: Output) -> None:
        sequence = output.sequence
        running: _Running = sequence.state
        if output.error is not None:
            del self._running[sequence.session]
            self._count_preemptions(sequence)
            self._fail(running, Failure("error", output.error.code, output.error.message))
            return
        assert output.info is not None and output.hidden is not None
        answer = running.answer
        now = time.monotonic()
        self._metrics.observe("tritone_inter_token_latency_seconds", now - answer.last_token)
        answer.last_token = now
        if running.rows is not None:
            chosen = None if output.info.token in answer.request.stop_ids else output.info.token
            running.rows.add(output.hidden, sequence.tokens[-2], chosen)
        self._send_text(running, answer.accept(output.info))
        if answer.finish_reason is not None:
            self._end(sequence)
            self._finish(running)

    def tend(self, now: float) -> bool:
        if self._hidden_pool is not None:
            expired = self._hidden_pool.collect()
            if expired:
                self._metrics.count("tritone_leases_expired_total", expired)
            self._metrics.gauges("tritone_hidden_blocks", self._hidden_pool.gauges())
        look = now - self._leases_looked >= LEASE_LOOK_SECONDS
        if look:
            self._leases_looked = now
        for session, (running, sequence) in list(self._running.items()):
            answer = running.answer
            if self._board.is_cancelled(session):
                self._end(sequence)
                self._fail(running, Failure("cancelled"))
                continue
            if stuck := self._stuck(running, now, look):
                self._end(sequence)
                self._fail(running, Failure("error", stuck.code, stuck.message))
                continue
            if now - answer.last_sent >= BEAT_SECONDS:
                answer.last_sent = now
                self._outbox.put(running.reply, Event(session, "beat"))
            if running.due:
                if now >= running.due:
                    running.due = 0.0
                    self._scheduler.add(sequence)
            elif running.refs is not None and now - answer.arrived > 0.8 * self._lease_seconds:
                # Still queued and the lease is nearly over: give prefill its pages back and compute the prompt here.
                if sequence.media is not None:
                    message = "decode: too many requests wait, and it cannot compute a prompt with media; try again in 1 s"
                    self._end(sequence)
                    self._fail(running, Failure("error", "UNAVAILABLE", message))
                    continue
                self._views.release(running.refs)
                running.refs = None
                sequence.drop_import()
        self._metrics.gauge("tritone_queue_requests", len(self._scheduler.waiting))
        self._metrics.gauge("tritone_running_requests", len(self._scheduler.running))
        blocks = self._pages.gauges()
        self._metrics.gauges("tritone_pages", blocks)
        self._tracker.publish(blocks, self._engine.steps)
        held = self._hidden_pool is not None and self._hidden_pool.leases
        return bool(self._running) or bool(held)

    def _stuck(self, running: _Running, now: float, look: bool) -> IntegrityError | None:
        """What ends a request whose pages do not come."""
        if running.refs is None:
            return None
        late = self._puller.late(now - running.answer.arrived) if running.due else None
        return late or (self._puller.gone(running.refs) if look else None)

    def _end(self, sequence: Sequence) -> None:
        """Take a sequence out of the engine; its pages are free from here on."""
        running, _ = self._running.pop(sequence.session)
        if not running.due:
            self._scheduler.remove(sequence)
        self._count_preemptions(sequence)

    def _count_preemptions(self, sequence: Sequence) -> None:
        if sequence.preemptions:
            self._metrics.count("tritone_preemptions_total", sequence.preemptions)

    def _send_text(self, running: _Running, text: str, extra: BlockRefs | None = None) -> None:
        """A text event, if there is text, or if the answer ends with tokens that are owed to the client or the Talker.

        ``extra`` refers to the rows that prefill handed over."""
        answer = running.answer
        ended = answer.finish_reason is not None
        info = answer.take_logprobs() if text or ended else {}
        refs: tuple[BlockRefs, ...] = ()
        rows: tuple[int, ...] = ()
        if running.rows is not None and extra is not None:
            refs, rows = (extra,), (running.rows.handed,)
        elif running.rows is not None and (text or info or ended):
            refs, rows = self._lend(running.rows, answer.spoken)
        if not text and not info and not refs:
            return
        heard = answer.handoff.heard if refs and extra is not None else None
        answer.last_sent = time.monotonic()
        event = Event(answer.session, "text", text=text, info=info, hidden=refs, rows=rows, heard=heard)
        self._outbox.put(running.reply, event)

    def _lend(self, rows: HeldRows, spoken: int) -> tuple[tuple[BlockRefs, ...], tuple[int, ...]]:
        try:
            lent = rows.lend(spoken)
        except PoolExhausted as error:
            raise TritoneError(f"decode: hidden-state pool: {error}", "RESOURCE_EXHAUSTED") from None
        return ((lent[0],), (lent[1],)) if lent is not None else ((), ())

    def _finish(self, running: _Running) -> None:
        answer = running.answer
        now = time.monotonic()
        self._metrics.count("tritone_requests_total", outcome=str(answer.finish_reason))
        self._metrics.count("tritone_tokens_total", answer.tokens, kind="completion")
        self._metrics.observe("tritone_stage_seconds", now - answer.arrived)
        self._outbox.put(running.reply, Event(answer.session, "end", info=answer.end_info(now)), last=True)

    def _fail(self, running: _Running, failure: Failure) -> None:
        self._views.release(running.refs)
        running.refs = None
        answer = running.answer
        self._metrics.count("tritone_requests_total", outcome=failure.kind)
        self._metrics.count("tritone_tokens_total", answer.tokens, kind="completion")
        self._outbox.put(running.reply, failure_event(answer.session, failure, answer.usage()), last=True)
