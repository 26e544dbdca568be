"""What the integrity checks cost: decode with the tracker off, on, and on with digests, run in turn; and the check alone.

Contexts are made by giving sequences pages without computing them: what lies in a page changes no time. The prefix cache is
on, as in the shipped deployments, so that digests are made of every page that becomes full. Two measures:

- between runs: tokens per second and the 95th percentile of the time between two tokens, beside ``off``; a second ``off``
  shows what this machine's noise is;
- within a run: the time spent in the tracker and in digests, step by step, as a share of the same step. It is what the bars
  judge where the noise between two runs of ``off`` is larger than the bar.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from perf.common import Bar, Spread, demo_deployment, finish, interleave, is_quick, ratios
from tritone.engine.engine import Engine
from tritone.engine.sequence import Sequence
from tritone.integrity import IntegrityError, Ledger, NoTracker, Tracker
from tritone.options import Sampling
from tritone.pools import BlockPool
from tritone.stages.build import build_engine

CONTEXTS = (2048, 8192)
LIMIT = 0.5
"""Percent."""
MODES = ("off", "raise", "raise+checksum", "off again")
console = Console()


class TimedTracker(Tracker):
    """Adds up the seconds spent in itself."""

    spent = 0.0

    def begin(self) -> None:
        begun = time.perf_counter()
        super().begin()
        self.spent += time.perf_counter() - begun

    def take(self, sequence: Sequence, pages: list[int]) -> None:
        begun = time.perf_counter()
        super().take(sequence, pages)
        self.spent += time.perf_counter() - begun

    def check(self, sequences: Iterable[Sequence]) -> list[tuple[Sequence, IntegrityError]]:
        begun = time.perf_counter()
        found = super().check(sequences)
        self.spent += time.perf_counter() - begun
        return found


class Runner:
    """One engine; every run begins with new sequences, takes steps of the whole batch, and gives its pages back."""

    def __init__(self, engine: Engine, pool: BlockPool, directory: Path) -> None:
        self.engine = engine
        self.pool = pool
        self.off = NoTracker()
        self.on = TimedTracker(pool, Ledger(directory, "bench", owner=True))
        self.shares: dict[str, list[tuple[float, float]]] = {}
        """Of each run with checks: cost in percent of the throughput and of the 95th percentile, measured inside."""
        self.p95: dict[str, list[float]] = {}
        self._runs = 0
        self._digests = 0.0
        plain: Callable[[int], None] = pool.keep

        def keep(block: int) -> None:
            begun = time.perf_counter()
            plain(block)
            if pool.seal:
                self._digests += time.perf_counter() - begun

        pool.keep = keep  # type: ignore[method-assign]

    def rate(self, mode: str, batch: int, steps: int) -> float:
        """Tokens per second of the median step."""
        scheduler = self.engine.scheduler
        scheduler.tracker = self.on if mode.startswith("raise") else self.off
        self._runs += 1
        generator = torch.Generator().manual_seed(batch)
        lengths = torch.randint(*CONTEXTS, (batch,), generator=generator).tolist()
        sequences = []
        for number, length in enumerate(lengths):
            sequence = Sequence(number + 1, [3] * length, length, Sampling(temperature=0.0), steps + 2, imported=length,
                                import_kv=lambda sequence: None, salt=f"{self._runs} {number}")
            sequence.append(3)
            sequences.append(sequence)
            scheduler.add(sequence)
        self.pool.seal = False
        while any(sequence.answer_length < 2 for sequence in sequences):
            self.engine.step()
        self.pool.seal = mode == "raise+checksum"
        total, inside = [], []
        for _ in range(steps):
            self.on.spent = self._digests = 0.0
            begun = time.perf_counter()
            outputs = self.engine.step()
            total.append(time.perf_counter() - begun)
            inside.append(self.on.spent + self._digests)
            assert len(outputs) == batch
            assert all(output.error is None for output in outputs)
        for sequence in sequences:
            scheduler.remove(sequence)
        self.p95.setdefault(f"{mode} {batch}", []).append(percentile_95(total))
        if mode.startswith("raise"):
            without = [whole - part for whole, part in zip(total, inside, strict=True)]
            cost = 100 * sum(inside) / sum(without), 100 * (percentile_95(total) / percentile_95(without) - 1)
            self.shares.setdefault(f"{mode} {batch}", []).append(cost)
        return batch / median(total)


def percentile_95(values: list[float]) -> float:
    return quantiles(values, n=20, method="inclusive")[-1]


def compare(runner: Runner, batch: int, rounds: int, steps: int, progress: Progress) -> dict[str, Any]:
    task = progress.add_task(f"batch {batch}", total=rounds)
    runner.rate("off", batch, 2)
    runner.p95.clear()
    rates = interleave(
        {mode: lambda m=mode: runner.rate(m, batch, steps) for mode in MODES},
        rounds,
        lambda done, total: progress.update(task, completed=done),
    )
    p95 = {mode: runner.p95[f"{mode} {batch}"] for mode in MODES}
    result: dict[str, Any] = {"steps per run": steps, "tokens/s": {mode: vars(Spread.of(rates[mode])) for mode in MODES}}
    result["p95 ms"] = {mode: vars(Spread.of([1000 * value for value in p95[mode]])) for mode in MODES}
    for mode in MODES[1:]:
        entry = {
            "throughput beside off %": vars(percent(ratios(rates[mode], rates["off"]))),
            "p95 beside off %": vars(percent(ratios(p95[mode], p95["off"]))),
        }
        if costs := runner.shares.get(f"{mode} {batch}"):
            entry["throughput inside %"] = vars(Spread.of([-cost for cost, _ in costs]))
            entry["p95 inside %"] = vars(Spread.of([cost for _, cost in costs]))
        result[mode] = entry
    return result


def percent(ratio: Spread) -> Spread:
    return Spread(100 * (ratio.median - 1), 100 * (ratio.low - 1), 100 * (ratio.high - 1), ratio.count)


def check_alone(directory: Path, steps: int) -> dict[str, Any]:
    """Microseconds per step of 64 sequences with 512 pages each: nothing changed since, and two of them took a page."""
    pool = BlockPool(directory, "alone", 64 * 512 + 4 * steps, (1,), "uint8", 1)
    tracker = Tracker(pool, Ledger(directory, "alone", owner=True))
    sequences = [Sequence(number, [], 0, Sampling(), 1) for number in range(1, 65)]
    for sequence in sequences:
        sequence.pages = pool.allocate(512)
        tracker.share(sequence, [])
        tracker.take(sequence, list(sequence.pages))
    times: dict[str, list[float]] = {"unchanged": [], "two pages taken": [], "off": []}
    nothing = NoTracker()
    for step in range(steps):
        for name in times:
            begun = time.perf_counter()
            used: NoTracker = nothing if name == "off" else tracker
            used.begin()
            if name == "two pages taken":
                for sequence in (sequences[step % 64], sequences[(step + 32) % 64]):
                    new = pool.allocate(1)
                    sequence.pages += new
                    used.take(sequence, new)
            assert used.check(list(sequences)) == []
            times[name].append(1e6 * (time.perf_counter() - begun))
    return {name: vars(Spread(median(v), float(np.quantile(v, 0.05)), float(np.quantile(v, 0.95)), steps))
            for name, v in times.items()}


def bars(results: dict[str, Any]) -> list[Bar]:
    """The worst of all batches; between runs where their noise allows, else within."""
    made = []
    for mode in ("raise", "raise+checksum"):
        for what, sense, limit in (("throughput", "at least", -LIMIT), ("p95", "at most", LIMIT)):
            values = []
            for row in results["decode"].values():
                noise = row["off again"][f"{what} beside off %"]
                calm = max(abs(noise["low"]), abs(noise["high"])) <= LIMIT
                values.append(row[mode][f"{what} {'beside off' if calm else 'inside'} %"]["median"])
            worst = min(values) if sense == "at least" else max(values)
            made.append(Bar(f"{mode} {what} %", worst, "at least" if sense == "at least" else "at most", limit))
    return made


def show(results: dict[str, Any]) -> None:
    table = Table(title="Percent beside off: between runs (range) | inside a step")
    for column in ("", *MODES[1:]):
        table.add_column(column, justify="left" if not column else "right")
    for name, row in results["decode"].items():
        for what in ("throughput", "p95"):
            cells = []
            for mode in MODES[1:]:
                inside = row[mode].get(f"{what} inside %")
                cell = str(Spread(**row[mode][f"{what} beside off %"]))
                cells.append(cell + (f" | {inside['median']:+.3f}" if inside else ""))
            table.add_row(f"{name}, {what}", *cells)
    console.print(table)
    for name, spread in results["check alone, us per step, 64 x 512 pages"].items():
        console.print(f"check of 64 x 512 pages, {name}: {Spread(**spread)} us per step")


def main() -> None:
    quick = is_quick()
    # Batch, pairs, steps in a run.
    plan = ((1, 10, 8), (8, 10, 4)) if quick else ((1, 12, 16), (8, 10, 8), (32, 10, 5))
    deployment = demo_deployment()
    part = deployment.decode.model_copy(
        update={"kv": "fp8", "pool_tokens": max(batch for batch, _, _ in plan) * (CONTEXTS[0] + CONTEXTS[1]) // 2 * 5 // 4
                + CONTEXTS[1], "max_batch_tokens": 1024}
    )
    deployment = deployment.model_copy(update={"decode": part, "voice": None})
    directory = Path(tempfile.mkdtemp(prefix="bench-integrity-", dir="/dev/shm"))
    try:
        engine, pool, _ = build_engine(deployment, part, directory, "decode")
        runner = Runner(engine, pool, directory)
        results: dict[str, Any] = {
            "checkpoint": deployment.name, "kv": part.kv, "threads": part.threads, "contexts": CONTEXTS, "decode": {},
        }
        with Progress(console=console, transient=True) as progress:
            for batch, rounds, steps in plan:
                results["decode"][f"batch {batch}"] = compare(runner, batch, rounds, steps, progress)
        results["check alone, us per step, 64 x 512 pages"] = check_alone(directory, 200 if quick else 1000)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    show(results)
    finish("integrity", results, bars(results))


if __name__ == "__main__":
    main()
