"""Which sequences compute how many tokens in the next step. Pure data structures; no torch.

Continuous batching with chunked prefill: every step takes one token of each running sequence that is up to date, and fills
the rest of its token budget with chunks of sequences that are not (new prompts, or preempted ones computed again). When a
running sequence needs a page and none is free, the youngest running sequence gives its pages back and waits at the head of
the queue; its tokens are kept, so its output is the same as without.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from tritone.engine.sequence import Sequence


class Pages(Protocol):
    """What the scheduler needs of a page pool."""

    @property
    def total(self) -> int: ...
    @property
    def available(self) -> int: ...
    def allocate(self, count: int) -> list[int]: ...
    def free(self, blocks: list[int]) -> None: ...


@dataclass
class Plan:
    """One step: ``decodes`` compute one token each, ``chunks`` several; ``imports`` copy KV in before the step."""

    decodes: list[Sequence] = field(default_factory=list)
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    imports: list[Sequence] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.decodes or self.chunks)


class Scheduler:
    def __init__(self, pages: Pages, page_size: int, max_sequences: int, max_batch_tokens: int) -> None:
        self.pages = pages
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
        if not keep_pages:
            self._release(sequence)

    def schedule(self) -> Plan:
        plan = Plan()
        budget = self.max_batch_tokens
        # Oldest first, so that a shortage of pages falls on the youngest.
        for sequence in list(self.running):
            if sequence not in self.running:
                continue
            if sequence.pending == 1 and self._grow(sequence, sequence.computed + 1):
                plan.decodes.append(sequence)
                budget -= 1
        for sequence in self.running:
            if sequence.pending > 1 and budget > 0:
                count = min(sequence.pending, budget)
                plan.chunks.append((sequence, count))
                budget -= count
        self._admit(plan, budget)
        # A sequence planned above may have been preempted by an older one's growth.
        plan.decodes = [s for s in plan.decodes if s.pages]
        return plan

    def computed(self, plan: Plan) -> Iterable[Sequence]:
        """Account for a step that was run; gives the sequences whose next token can be chosen now."""
        ready = []
        for sequence in plan.decodes:
            sequence.computed += 1
            ready.append(sequence)
        for sequence, count in plan.chunks:
            sequence.computed += count
            if sequence.pending == 0:
                ready.append(sequence)
        return ready

    def _admit(self, plan: Plan, budget: int) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.max_sequences:
            sequence = self.waiting[0]
            # One token beyond what is known, so that an admitted sequence can always make its next token.
            need = self._pages_for(len(sequence.tokens) + 1)
            # While others run, keep a page for each of them: admission must not cause preemption at the next border.
            reserve = len(self.running)
            if need + reserve > self.pages.available and not (not self.running and need <= self.pages.available):
                break
            self.waiting.popleft()
            sequence.pages = self.pages.allocate(need)
            sequence.computed = sequence.imported
            self.running.append(sequence)
            if sequence.imported:
                plan.imports.append(sequence)
            count = min(sequence.pending, budget)
            budget -= count
            if sequence.pending == 1:
                plan.decodes.append(sequence)
            else:
                plan.chunks.append((sequence, count))

    def _grow(self, sequence: Sequence, tokens: int) -> bool:
        """Give ``sequence`` pages for ``tokens`` tokens, preempting younger ones; False if it was preempted itself."""
        while len(sequence.pages) < self._pages_for(tokens):
            if self.pages.available:
                sequence.pages += self.pages.allocate(1)
                continue
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        sequence.imported = 0
        sequence.computed = 0
        sequence.preemptions += 1
        self.waiting.appendleft(sequence)

    def _release(self, sequence: Sequence) -> None:
        if sequence.pages:
            self.pages.free(sequence.pages)
            sequence.pages = []

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)
