"""Which sequences compute how many tokens in the next step. Pure data structures; no torch.

Continuous batching with chunked prefill: every step takes one token of each running sequence that is up to date, and fills
the rest of its token budget with chunks of sequences that are not (new prompts, or preempted ones computed again), oldest
first; a prompt that takes more than one step leaves a quarter to those behind it, so that a short one need not wait. When a
running sequence needs a page and none is free, the youngest running sequence gives its pages back and waits at the head of
the queue; its tokens are kept, so its output is the same as without. A sequence whose next input has not come yet
(``pending`` is 0) keeps its pages and is in no step. With a prefix cache a sequence begins with the pages that the cache
holds of it, and gives it each page that is full.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from tritone.engine.prefix_cache import Pages, PrefixCache
from tritone.engine.sequence import Sequence
from tritone.integrity.tracker import NoTracker


@dataclass
class Plan:
    """One step: ``decodes`` compute one token each, ``chunks`` several; ``imports`` copy KV in before the step."""

    decodes: list[Sequence] = field(default_factory=list)
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    imports: list[Sequence] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.decodes or self.chunks)


COPIES_PER_TOKEN = 32
"""Copying the KV of so many tokens takes less time than computing one."""


class Scheduler:
    """``max_chunk_tokens`` (None: no limit of its own) is the most that chunks take of a step in which others decode: a
    prompt's chunk lasts many times as long as a step of single tokens, and all running streams wait for it. Imports beside
    them are limited likewise."""

    def __init__(
        self,
        pages: Pages,
        page_size: int,
        max_sequences: int,
        max_batch_tokens: int,
        *,
        cache: PrefixCache | None = None,
        tracker: NoTracker | None = None,
        max_chunk_tokens: int | None = None,
    ) -> None:
        self.pages = pages
        self.cache = cache
        self.tracker = tracker or NoTracker()
        self.max_chunk_tokens = max_chunk_tokens
        self.page_size = page_size
        self.max_sequences = max_sequences
        self.max_batch_tokens = max_batch_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence, *, keep_pages: bool = False) -> None:
        """Take a sequence out at any stage of its life; its pages are freed unless they now belong to someone else."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        if keep_pages:
            self.tracker.give_up(sequence)
        else:
            self._release(sequence)

    def schedule(self) -> Plan:
        self.tracker.begin()
        plan = Plan()
        budget = self.max_batch_tokens
        # Oldest first, so that a shortage of pages falls on the youngest.
        for sequence in list(self.running):
            if sequence not in self.running:
                continue
            if sequence.pending == 1 and self._grow(sequence, sequence.computed + 1):
                plan.decodes.append(sequence)
                budget -= 1
        if self.max_chunk_tokens is not None and plan.decodes:
            budget = min(budget, self.max_chunk_tokens)
        for sequence in self.running:
            if sequence.pending > 1 and budget > 0:
                self._catch_up(sequence)
                budget -= self._plan(plan, sequence, budget)
        budget = self._admit(plan, budget)
        for index, (sequence, count) in enumerate(plan.chunks):
            more = min(sequence.pending - count, budget)
            plan.chunks[index] = (sequence, count + more)
            budget -= more
        # A sequence planned above may have been preempted by an older one's growth.
        plan.decodes = [s for s in plan.decodes if s.pages]
        return plan

    def computed(self, plan: Plan) -> Iterable[Sequence]:
        """Account for a step that was run; gives the sequences whose next token can be chosen now."""
        ready = []
        for sequence, count in [*((sequence, 1) for sequence in plan.decodes), *plan.chunks]:
            sequence.computed += count
            if sequence.due:
                ready.append(sequence)
        return ready

    def enter(self, sequence: Sequence) -> None:
        """Give the prefix cache what a sequence has computed. Called once its token was chosen without a fault, so that a
        prompt that failed or was aborted on its way leaves no page there."""
        if self.cache is not None:
            self.cache.enter(sequence)

    def _plan(self, plan: Plan, sequence: Sequence, budget: int) -> int:
        """Plan the next tokens of a sequence; gives how many."""
        if sequence.pending == 0:
            return 0
        if sequence.pending == 1:
            plan.decodes.append(sequence)
            return 1
        count = sequence.pending if sequence.pending <= budget else budget - budget // 4
        plan.chunks.append((sequence, count))
        return count

    def _catch_up(self, sequence: Sequence) -> None:
        """Skip what another sequence with the same beginning has computed meanwhile."""
        shared = self.cache.match(sequence) if self.cache is not None else []
        ahead = len(shared) * self.page_size - sequence.computed
        if ahead <= 0:
            self.pages.free(shared)
            return
        self.pages.free(self.tracker.give_up(sequence, len(shared)))
        sequence.pages[: len(shared)] = shared
        self.tracker.share(sequence, shared)
        sequence.entered = len(shared)
        sequence.cached += ahead
        sequence.computed += ahead

    def _admit(self, plan: Plan, budget: int) -> int:
        """Let waiting sequences in, first come, first served; gives what is left of the budget."""
        copied, beside = 0, bool(plan.decodes)
        while self.waiting and budget > 0 and len(self.running) < self.max_sequences:
            sequence = self.waiting[0]
            shared = self.cache.match(sequence) if self.cache is not None else []
            # One token beyond what is known, so that an admitted sequence can always make its next token.
            need = self._pages_for(len(sequence.tokens) + 1) - len(shared)
            # While others run, keep a page for each of them: admission must not cause preemption at the next border.
            reserve = len(self.running)
            if need + reserve > self.pages.available and not (not self.running and need <= self.pages.available):
                self.pages.free(shared)
                break
            self.waiting.popleft()
            new = self.pages.allocate(need)
            sequence.pages = shared + new
            self.tracker.share(sequence, shared)
            self.tracker.take(sequence, new)
            sequence.entered = len(shared)
            sequence.cached = len(shared) * self.page_size
            sequence.computed = max(sequence.imported, sequence.cached)
            self.running.append(sequence)
            if sequence.imported:
                plan.imports.append(sequence)
                copied += sequence.imported - sequence.cached
            budget -= self._plan(plan, sequence, budget)
            if beside and self.max_chunk_tokens is not None and copied > COPIES_PER_TOKEN * self.max_chunk_tokens:
                break
        return budget

    def _grow(self, sequence: Sequence, tokens: int) -> bool:
        """Give ``sequence`` pages for ``tokens`` tokens, preempting younger ones; False if it was preempted itself."""
        while len(sequence.pages) < self._pages_for(tokens):
            if self.pages.available:
                new = self.pages.allocate(1)
                sequence.pages += new
                self.tracker.take(sequence, new)
                continue
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.tracker.examine(sequence)
        # Without all of its KV there is nothing to go on from: a prompt on its way is computed again.
        if sequence.save_kv is not None and sequence.pending <= 1:
            sequence.import_kv = sequence.save_kv(sequence)
            sequence.imported = sequence.computed
        else:
            sequence.drop_import()
        self._release(sequence)
        sequence.computed = 0
        sequence.preemptions += 1
        self.waiting.appendleft(sequence)

    def _release(self, sequence: Sequence) -> None:
        if sequence.pages:
            self.pages.free(self.tracker.give_up(sequence))
            sequence.pages = []

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)
