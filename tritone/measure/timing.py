"""Seconds of what a request consists of: its prompt, the hand-over, its answer's steps."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tritone.engine.engine import Engine, Output
from tritone.engine.sequence import Sequence
from tritone.errors import TritoneError
from tritone.kernels import default_kernels
from tritone.measure.workbench import Pages
from tritone.options import Sampling

GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True)
class RequestTime:
    """Seconds: the prompt with the first token, the hand-over, and all further tokens."""

    prefill: float
    hand_over: float
    decode: float

    @property
    def total(self) -> float:
        return self.prefill + self.hand_over + self.decode


def prompt_of(length: int, vocabulary: int, seed: int = 0) -> list[int]:
    """Token ids that are spread over the vocabulary."""
    return [3 + (seed * 7919 + position * 104729) % (vocabulary - 3) for position in range(length)]


def prefill_seconds(engine: Engine, prompt: list[int]) -> float:
    """A prompt alone, up to its first token."""
    sequence = Sequence(0, list(prompt), len(prompt), GREEDY, 1)
    begun = time.perf_counter()
    _prefill(engine, sequence)
    seconds = time.perf_counter() - begun
    engine.scheduler.remove(sequence)
    return seconds


def step_seconds(engine: Engine, batch: int, context: int, steps: int, vocabulary: int) -> list[float]:
    """Each of ``steps`` steps of ``batch`` sequences whose first ``context`` tokens come with keys and values.

    Those are what the pages hold already: they cost the same whatever they are.
    """
    sequences = [present(number, context, steps + 1, vocabulary) for number in range(batch)]
    for sequence in sequences:
        engine.scheduler.add(sequence)
    seconds = []
    for _ in range(steps + 1):
        begun = time.perf_counter()
        outputs = engine.step()
        seconds.append(time.perf_counter() - begun)
        check(outputs)
        if len(outputs) != batch:
            raise TritoneError(f"{len(outputs)} of {batch} sequences in a step: the pages do not hold them")
    for sequence in sequences:
        engine.scheduler.remove(sequence)
    return seconds[1:]


def tokens_needed(batch: int, context: int, steps: int, page_size: int) -> int:
    """Room in pages that :func:`step_seconds` takes: each sequence's own, and what admission keeps free."""
    return batch * (-(-(context + steps + 3) // page_size) + 1) * page_size


def request_time(prefill: Engine, source: Pages, decode: Engine, target: Pages, prompt: list[int], answer: int) -> RequestTime:
    """One request alone: ``prefill`` computes its prompt in pages of ``source``, ``decode`` takes them over into its own."""
    first = Sequence(0, list(prompt), len(prompt), GREEDY, 1)
    moments = [time.perf_counter()]
    _prefill(prefill, first)
    moments.append(time.perf_counter())

    def take_over(sequence: Sequence) -> None:
        hand_over(source, first.pages, target, sequence.pages, len(prompt))
        moments.append(time.perf_counter())

    sequence = Sequence(0, list(first.tokens), len(prompt), GREEDY, answer, imported=len(prompt), import_kv=take_over)
    decode.scheduler.add(sequence)
    while sequence.answer_length < answer:
        check(decode.step())
    moments.append(time.perf_counter())
    prefill.scheduler.remove(first)
    decode.scheduler.remove(sequence)
    begun, computed, taken, ended = moments
    return RequestTime(computed - begun, taken - computed, ended - taken)


def hand_over_seconds(source: Pages, target: Pages, tokens: int) -> float:
    """Copying the keys and values of so many tokens from one pool's first pages into those of another."""
    pages = list(range(-(-tokens // source.page_size)))
    begun = time.perf_counter()
    hand_over(source, pages, target, pages, tokens)
    return time.perf_counter() - begun


def hand_over(source: Pages, blocks: list[int], target: Pages, pages: list[int], tokens: int) -> None:
    """As decode does it: blocks of bytes, or numbers of the other type."""
    used = -(-tokens // source.page_size)
    if source.kv.dtype == target.kv.dtype:
        for block, page in zip(blocks[:used], pages[:used], strict=True):
            target.pool.block(page)[:] = source.pool.block(block)
        return
    wrong = default_kernels().convert_pages(source.kv, blocks[:used], target.kv, pages[:used], tokens)
    if wrong is not None:
        raise TritoneError(f"page {wrong} of the prompt's keys and values holds NaN")


def present(number: int, context: int, answer: int, vocabulary: int) -> Sequence:
    """A sequence whose first ``context`` tokens need no computing; the pages' content stands for their keys and values."""
    ids = prompt_of(context + 1, vocabulary, number)
    return Sequence(number, ids, context, GREEDY, answer, imported=context, import_kv=lambda sequence: None)


def check(outputs: list[Output]) -> None:
    for output in outputs:
        if output.error is not None:
            raise output.error


def _prefill(engine: Engine, sequence: Sequence) -> None:
    engine.scheduler.add(sequence)
    while sequence.answer_length < 1:
        check(engine.step())
