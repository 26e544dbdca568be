"""Every pairing of prefill's weights with decode's weights and keys and values, and how long a request takes with each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from statistics import median

import torch

from tritone.measure.timing import hand_over_seconds, prefill_seconds, prompt_of, step_seconds, tokens_needed
from tritone.measure.workbench import Workbench
from tritone.models.decoder import Decoder

COPY = "copy"
STEPS = 8
"""Decode steps in one measurement."""
Report = Callable[[int, int], None]


@dataclass(frozen=True)
class Pairing:
    """Prefill's weights, decode's weights, and decode's keys and values, named as in a deployment; ``copy`` are weights as the
    stage's own checkpoint stores them."""

    prefill: str
    decode: str
    kv: str

    def __str__(self) -> str:
        return f"prefill {self.prefill}, decode {self.decode}, kv {self.kv}"


@dataclass(frozen=True)
class Load:
    """What a request is: ``prompt`` and ``answer`` tokens, while ``batch`` answers are decoded at once."""

    prompt: int = 512
    answer: int = 128
    batch: int = 1


@dataclass(frozen=True)
class Timed:
    """A pairing with the median seconds of a request, and what they consist of."""

    pairing: Pairing
    seconds: float
    prefill: float
    hand_over: float
    decode: float


def time_pairings(
    bench: Workbench,
    prefill: Mapping[str, Decoder],
    decode: Mapping[str, Decoder],
    prefill_kv: str,
    kinds: tuple[str, ...],
    load: Load,
    threads: tuple[int, int],
    rounds: int,
    progress: Report,
) -> list[Timed]:
    """All pairings of decoders in ``prefill`` and ``decode`` with keys and values of ``kinds``, the fastest first.

    A request's phases follow each other, and a phase takes as long whatever the others' precisions are. So each phase is
    timed in each precision, all of them in every round, and the request is their sum: ``prompt`` computed over pages of
    ``prefill_kv``, handed over, and ``answer`` - 1 steps half-way through the answer. ``threads`` are prefill's and decode's.
    """
    context = load.prompt + load.answer // 2
    vocabulary = bench.config.vocab_size
    source = bench.pages(prefill_kv, load.prompt + 2 * bench.page_size)
    room = tokens_needed(load.batch, context, STEPS, bench.page_size)
    targets = {kv: bench.pages(kv, room) for kv in kinds}
    prompt = prompt_of(load.prompt, vocabulary)
    prefills: dict[str, list[float]] = {name: [] for name in prefill}
    copies: dict[str, list[float]] = {kv: [] for kv in kinds}
    steps: dict[tuple[str, str], list[float]] = {key: [] for key in product(decode, kinds)}
    # The first round warms up.
    for number in range(rounds + 1):
        keep = number > 0
        torch.set_num_threads(threads[0])
        for name, found in prefills.items():
            seconds = prefill_seconds(bench.engine(prefill[name], source), prompt)
            found += [seconds] * keep
        torch.set_num_threads(threads[1])
        for kv, found in copies.items():
            seconds = hand_over_seconds(source, targets[kv], load.prompt)
            found += [seconds] * keep
        for (name, kv), found in steps.items():
            engine = bench.engine(decode[name], targets[kv])
            seconds = median(step_seconds(engine, load.batch, context, STEPS, vocabulary))
            found += [seconds] * keep
        progress(number + 1, rounds + 1)
    timed = []
    for first, second, kv in product(prefill, decode, kinds):
        parts = median(prefills[first]), median(copies[kv]), (load.answer - 1) * median(steps[second, kv])
        timed.append(Timed(Pairing(first, second, kv), sum(parts), *parts))
    return sorted(timed, key=lambda one: one.seconds)
