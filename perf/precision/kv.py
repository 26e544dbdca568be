"""What FP8 pages change: tokens in the same memory, sequences at once, tokens a second of a load that memory limits.

The keys and values of the prompts are not computed: the pages hold random numbers, and a step costs the same with those.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

from perf.common import Spread, interleave, ratios
from perf.precision.kernels import Report
from tritone.engine.engine import Engine
from tritone.measure.timing import check, present, step_seconds
from tritone.measure.workbench import Pages, Workbench
from tritone.sizes import token_bytes
from tritone.stages.saved import saver

KV = ("bf16", "fp8")


def capacity(bench: Workbench, pool_bytes: int) -> dict[str, Any]:
    """Bytes a token and tokens that fit into ``pool_bytes``."""
    results: dict[str, Any] = {"pool bytes": pool_bytes}
    for kv in KV:
        size = token_bytes(bench.checkpoint, kv)
        tokens = pool_bytes // (size * bench.page_size) * bench.page_size
        results[kv] = {"bytes per token": size, "tokens that fit": tokens}
    results["tokens, fp8 / bf16"] = results["fp8"]["tokens that fit"] / results["bf16"]["tokens that fit"]
    return results


def limited_load(
    bench: Workbench, weights: str, pages: dict[str, Pages], context: int, answer: int, rounds: int, progress: Report
) -> dict[str, Any]:
    """As many requests of ``context`` + ``answer`` tokens as the FP8 pages hold, all there at the beginning."""
    each = -(-(context + answer + 1) // bench.page_size)
    # Admission keeps a page free for each sequence that runs.
    count = (pages["fp8"].pool.total + 1) // (each + 1)
    return _compare(bench, weights, pages, count, context, answer, rounds, progress)


def growing_load(
    bench: Workbench, weights: str, pages: dict[str, Pages], count: int, answer: int, rounds: int, progress: Report
) -> dict[str, Any]:
    """``count`` requests that BF16 admits all at once but whose answers outgrow its pages."""
    context = (pages["bf16"].pool.total - count + 1) // count * bench.page_size - 2
    return _compare(bench, weights, pages, count, context, answer, rounds, progress)


def _compare(
    bench: Workbench,
    weights: str,
    pages: dict[str, Pages],
    count: int,
    context: int,
    answer: int,
    rounds: int,
    progress: Report,
) -> dict[str, Any]:
    """``tokens/s`` is over the whole load, from the first step to the last token; ``at once`` is the most sequences in one
    step; ``had to wait`` the most that waited for pages."""
    engines = {kv: bench.engine(bench.decoders[weights], held) for kv, held in pages.items()}
    found: dict[str, list[_Served]] = {kv: [] for kv in engines}

    def run(kv: str) -> float:
        served = _serve(engines[kv], pages[kv], count, context, answer, bench.config.vocab_size)
        found[kv].append(served)
        return served.rate

    values = interleave({kv: lambda kv=kv: run(kv) for kv in engines}, rounds, progress)  # type: ignore[misc]
    return {
        "load": f"{count} requests of {context} + {answer} tokens, {weights} weights, {pages['bf16'].tokens} tokens of BF16",
        **{
            kv: {
                "tokens/s": vars(Spread.of(values[kv])),
                "at once": max(served.most for served in found[kv]),
                "had to wait": max(served.waited for served in found[kv]),
                "preemptions": max(served.preemptions for served in found[kv]),
            }
            for kv in engines
        },
        "tokens/s, fp8 / bf16": vars(ratios(values["fp8"], values["bf16"])),
    }


def step_time(bench: Workbench, weights: str, context: int, steps: int, rounds: int, progress: Report) -> dict[str, Any]:
    """Seconds per output token of one sequence alone."""
    pages = {kv: bench.pages(kv, context + steps + 3 * bench.page_size) for kv in KV}
    vocabulary = bench.config.vocab_size

    def run(kv: str) -> float:
        return median(step_seconds(bench.engine(bench.decoders[weights], pages[kv]), 1, context, steps, vocabulary))

    values = interleave({kv: lambda kv=kv: run(kv) for kv in KV}, rounds, progress)  # type: ignore[misc]
    return {
        "load": f"one sequence of {context} tokens, {weights} weights",
        **{kv: vars(Spread.of(found)) for kv, found in values.items()},
        "fp8 / bf16": vars(ratios(values["fp8"], values["bf16"])),
    }


class _Served:
    """How a load went: tokens a second, most sequences in a step, sequences that the first step left waiting."""

    def __init__(self) -> None:
        self.rate, self.most, self.waited, self.preemptions = 0.0, 0, 0, 0


def _serve(engine: Engine, pages: Pages, count: int, context: int, answer: int, vocabulary: int) -> _Served:
    scheduler, save = engine.scheduler, saver(pages.pool, pages.page_size)
    sequences = [present(number, context, answer, vocabulary) for number in range(count)]
    for sequence in sequences:
        sequence.save_kv = save
        scheduler.add(sequence)
    served = _Served()
    begun = time.perf_counter()
    made = 0
    while len(scheduler):
        outputs = engine.step()
        check(outputs)
        made += len(outputs)
        served.most = max(served.most, len(outputs))
        served.waited = max(served.waited, len(scheduler.waiting))
        for output in outputs:
            if output.sequence.answer_length > answer:
                scheduler.remove(output.sequence)
    served.rate = made / (time.perf_counter() - begun)
    served.preemptions = sum(sequence.preemptions for sequence in sequences)
    return served
