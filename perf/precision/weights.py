"""Tokens a second of decode and prefill by precision of weights, with BF16 keys and values."""

from __future__ import annotations

from statistics import median
from typing import Any

from perf.common import Spread, interleave, ratios
from perf.precision.kernels import Report
from tritone.measure.timing import prefill_seconds, prompt_of, step_seconds, tokens_needed
from tritone.measure.workbench import Workbench

PLAIN = "bf16"


def decode(bench: Workbench, batch: int, context: int, steps: int, rounds: int, progress: Report) -> dict[str, Any]:
    """All sequences hold ``context`` tokens; each value is over the median of ``steps`` steps."""
    vocabulary = bench.config.vocab_size
    pages = bench.pages("bf16", tokens_needed(batch, context, steps, bench.page_size))

    def run(weights: str) -> float:
        return batch / median(step_seconds(bench.engine(bench.decoders[weights], pages), batch, context, steps, vocabulary))

    return _compare({name: lambda name=name: run(name) for name in bench.decoders}, rounds, progress)  # type: ignore[misc]


def prefill(bench: Workbench, length: int, rounds: int, progress: Report) -> dict[str, Any]:
    """One prompt of ``length`` tokens."""
    pages = bench.pages("bf16", length + bench.page_size)
    prompt = prompt_of(length, bench.config.vocab_size)

    def run(weights: str) -> float:
        return length / prefill_seconds(bench.engine(bench.decoders[weights], pages), prompt)

    return _compare({name: lambda name=name: run(name) for name in bench.decoders}, rounds, progress)  # type: ignore[misc]


def _compare(runs: dict[str, Any], rounds: int, progress: Report) -> dict[str, Any]:
    values = interleave(runs, rounds, progress)
    return {
        name: {"tokens/s": vars(Spread.of(found)), f"/ {PLAIN}": vars(ratios(found, values[PLAIN]))}
        for name, found in values.items()
    }
