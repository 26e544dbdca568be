"""Decode: takes hand-overs into its own pages and generates, many answers at once."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

import torch
from tokenizers import Tokenizer

from tritone.engine.engine import Engine, Output
from tritone.engine.scheduler import Scheduler
from tritone.engine.sequence import Sequence
from tritone.errors import TritoneError
from tritone.kernels import QuantizedPages, default_kernels
from tritone.messages import BlockRefs, Event, Failure, GenerateRequest, Prefilled, TokenInfo, failure_event, start_event
from tritone.metrics import Metrics
from tritone.pools import BlockPool, CancelBoard, PoolExhausted, Views
from tritone.pools.pool import torch_view
from tritone.stages.answer import Answer
from tritone.stages.hidden import HiddenWriter
from tritone.stages.loop import EngineLoop
from tritone.stages.outbox import Outbox
from tritone.stages.prefill import BEAT_SECONDS
from tritone.stages.reply import Reply
from tritone.stages.saved import saver

log = logging.getLogger(__name__)


@dataclass
class _Running:
    answer: Answer
    reply: Reply[Event]
    refs: BlockRefs | None
    """Prefill's leased pages, until they are copied or given back."""
    hidden: list[torch.Tensor] = field(default_factory=list)
    """Hidden states of tokens whose text has not left yet."""


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
        prefill_scales: torch.Tensor | None = None,
    ) -> None:
        """``prefill_scales`` are those of prefill's pages, if they are e4m3."""
        self._engine = engine
        self._scheduler: Scheduler = engine.scheduler
        self._tokenizer = tokenizer
        self._pages = pages
        self._hidden_pool = hidden
        self._save_kv = saver(pages, self._scheduler.page_size)
        self._hidden = HiddenWriter(hidden, lease_seconds) if hidden else None
        self._views = views
        self._board = board
        self._metrics = metrics
        self._max_queue = max_queue
        self._lease_seconds = lease_seconds
        self._prefill_scales = prefill_scales
        own = engine.kv.scales if isinstance(engine.kv, QuantizedPages) else None
        self._same_scales = prefill_scales is None or (own is not None and torch.equal(prefill_scales, own))
        self._kernels = default_kernels()
        self._running: dict[int, tuple[_Running, Sequence]] = {}
        self._announced: set[int] = set()
        """Sessions whose start has left while prefill still works on them; used by the thread of submit alone."""
        self._outbox = Outbox("decode-out")
        self._loop = EngineLoop(self, "decode")

    def submit(self, prefilled: Prefilled, reply: Reply[Event]) -> None:
        """One message of integrity. Start and first token leave here, before the engine looks at the request."""
        if reply.is_cancelled():
            self._board.post(prefilled.session)
        request = prefilled.request
        if request is not None and request.session not in self._announced:
            self._announced.add(request.session)
            self._outbox.put(reply, start_event(request))
        if request is None or (prefilled.handoff is None and prefilled.failure is None):
            self._outbox.put(reply, Event(prefilled.session, "beat"), last=True)
            return
        self._announced.discard(request.session)
        if prefilled.handoff is None:
            assert prefilled.failure is not None
            self._outbox.put(reply, failure_event(request.session, prefilled.failure), last=True)
            return
        now = time.monotonic()
        handoff = prefilled.handoff
        running = _Running(Answer(request, handoff, self._tokenizer, now), reply, handoff.pages)
        self._metrics.observe("tritone_time_to_first_token_seconds", now - request.created)
        text = running.answer.accept(handoff.first)
        self._send_text(running, text, extra=(handoff.hidden,) if handoff.hidden else ())
        if running.answer.finish_reason is not None:
            self._views.release(handoff.pages)
            self._finish(running)
            return
        self._loop.post(lambda: self._add(running, request, handoff.first))

    def stop(self) -> None:
        self._loop.stop()
        self._outbox.stop()

    def _add(self, running: _Running, request: GenerateRequest, first: TokenInfo) -> None:
        if len(self._scheduler.waiting) >= self._max_queue:
            message = f"decode: {self._max_queue} requests wait already; try again in 1 s"
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
            salt=request.options.cache_salt,
            state=running,
        )
        sequence.append(first.token)
        self._running[request.session] = (running, sequence)
        self._scheduler.add(sequence)

    def _import_kv(self, sequence: Sequence) -> None:
        """Copy prefill's pages into the sequence's own, in this pool's precision, except those that the prefix cache had;
        tags are compared before and after."""
        running: _Running = sequence.state
        refs = running.refs
        assert refs is not None
        running.refs = None
        view = self._views.of(refs)
        first = sequence.cached // self._scheduler.page_size
        sources, targets = refs.blocks[first:], sequence.pages[first : len(refs.blocks)]
        try:
            view.check(refs)
            if refs.dtype == self._pages.header.dtype and self._same_scales:
                for source, target in zip(sources, targets, strict=True):
                    self._pages.block(target)[:] = view.block(source)
            elif sources:
                held: torch.Tensor = torch_view(view.data, refs.dtype, refs.shape)
                pages = held if self._prefill_scales is None else QuantizedPages(held, self._prefill_scales)
                tokens = sequence.imported - first * self._scheduler.page_size
                wrong = self._kernels.convert_pages(pages, sources, self._engine.kv, targets, tokens)
                if wrong is not None:
                    raise TritoneError(f"decode: page {first + wrong} of the prompt's keys and values holds NaN")
            view.check(refs)
        finally:
            view.release(refs)
        handed_over = running.answer.handoff.timings["handed_over"]
        self._metrics.observe("tritone_handover_seconds", time.monotonic() - handed_over)
        self._metrics.count("tritone_cached_tokens_total", sequence.cached)

    def step(self) -> bool:
        outputs = self._engine.step()
        for output in outputs:
            self._take_safely(output)
        return bool(self._scheduler.running) or bool(outputs)

    def _take_safely(self, output: Output) -> None:
        """An error in one answer ends that answer; the step's other tokens are still taken."""
        try:
            self._take(output)
        except Exception as error:
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
        if self._hidden is not None and answer.request.options.speech:
            running.hidden.append(output.hidden)
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
        for session, (running, sequence) in list(self._running.items()):
            answer = running.answer
            if self._board.is_cancelled(session):
                self._end(sequence)
                self._fail(running, Failure("cancelled"))
            elif now - answer.last_sent >= BEAT_SECONDS:
                answer.last_sent = now
                self._outbox.put(running.reply, Event(session, "beat"))
            if running.refs is not None and now - answer.arrived > 0.8 * self._lease_seconds:
                # Still queued and the lease is nearly over: give prefill its pages back and compute the prompt here.
                self._views.release(running.refs)
                running.refs = None
                sequence.drop_import()
        self._metrics.gauge("tritone_queue_requests", len(self._scheduler.waiting))
        self._metrics.gauge("tritone_running_requests", len(self._scheduler.running))
        self._metrics.gauges("tritone_pages", self._pages.gauges())
        held = self._hidden_pool is not None and self._hidden_pool.leases
        return bool(self._running) or bool(held)

    def _end(self, sequence: Sequence) -> None:
        """Take a sequence out of the engine; its pages are free from here on."""
        del self._running[sequence.session]
        self._scheduler.remove(sequence)
        self._count_preemptions(sequence)

    def _count_preemptions(self, sequence: Sequence) -> None:
        if sequence.preemptions:
            self._metrics.count("tritone_preemptions_total", sequence.preemptions)

    def _send_text(self, running: _Running, text: str, extra: tuple[BlockRefs, ...] = ()) -> None:
        """A text event, if there is text, or if the answer ends with tokens that are owed to the client."""
        answer = running.answer
        info = answer.take_logprobs() if text or answer.finish_reason is not None else {}
        if not text and not info and not extra:
            return
        refs = extra
        if running.hidden:
            assert self._hidden is not None
            try:
                refs += self._hidden.lend(running.hidden)
            except PoolExhausted as error:
                raise TritoneError(f"decode: hidden-state pool: {error}", "RESOURCE_EXHAUSTED") from None
            running.hidden = []
        answer.last_sent = time.monotonic()
        self._outbox.put(running.reply, Event(answer.session, "text", text=text, info=info, hidden=refs))

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
