"""Runs the reference and every precision through all tasks, one model in memory at a time."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tritone.checkpoints import Progress, resolve_checkpoint
from tritone.errors import bad
from tritone.evaluation.bars import Bar, bars
from tritone.evaluation.bootstrap import Figure
from tritone.evaluation.build import Sizes, Texts, build_tasks
from tritone.evaluation.candidates import Candidates, check_grid, is_quantized
from tritone.evaluation.corpora import write_calibration
from tritone.evaluation.grid import grid_of
from tritone.evaluation.precisions import Precision
from tritone.evaluation.reference import Reference
from tritone.evaluation.runner import Runner
from tritone.evaluation.store import Store, checkpoint_key, digest
from tritone.evaluation.tasks import Raw, Task
from tritone.kernels import default_kernels
from tritone.models.decoder import DecoderConfig, load_decoder

VERSION = 1
"""Changes when results that were kept are no longer what tasks would find."""
KV_VERSION = 2
"""The same for rows with e4m3 keys and values."""


@dataclass(frozen=True)
class Settings:
    """``checkpoint`` is evaluated, ``reference`` is what it is compared to, in float32; ``work`` keeps what was made."""

    checkpoint: Path
    reference: Path
    precisions: list[Precision]
    tasks: list[str]
    sizes: Sizes
    work: Path
    seed: int = 0
    text: Path | None = None
    calibrate: Path | None = None
    fresh: bool = False


@dataclass(frozen=True)
class Row:
    """What one precision did (the reference's ``precision`` is None): figures by task, and seconds by task."""

    precision: Precision | None
    raw: Mapping[str, Raw]
    figures: Mapping[str, Mapping[str, Figure]]
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class Evaluation:
    """``rows`` begins with the reference. ``grid``: the group of the 4-bit grid its weights lie on, or None."""

    settings: Settings
    tasks: list[Task]
    rows: list[Row]
    bars: list[Bar]
    grid: int | None
    kernels: str


def evaluate(settings: Settings, progress: Progress) -> Evaluation:
    """Raises ``InvalidArgument`` naming field, value and what is allowed. A run that was ended may be started again: what
    was measured is kept in ``work`` for each precision and task."""
    if is_quantized(settings.reference):
        raise bad("reference", settings.reference.name, "a checkpoint with float32, float16 or bfloat16 weights")
    grid = grid_of(settings.reference)
    for precision in settings.precisions:
        if precision.directory is not None:
            resolve_checkpoint(str(precision.directory), settings.work)
        check_grid(precision, settings.checkpoint, grid)
    texts = Texts(settings.reference)
    _check_vocabulary(settings, texts)
    tasks = build_tasks(settings.tasks, texts, settings.sizes, settings.seed, settings.text)
    _check_context(settings, tasks)
    return _Run(settings, tasks, grid, progress).run()


class _Run:
    def __init__(self, settings: Settings, tasks: list[Task], grid: int | None, progress: Progress) -> None:
        self._settings, self._tasks, self._grid, self._progress = settings, tasks, grid, progress
        self._positions = max(task.longest for task in tasks)
        self._kernels = default_kernels().name
        key = checkpoint_key(settings.reference)
        self._items = {task.name: digest([VERSION, self._kernels, key, task.items]) for task in tasks}
        work = settings.work
        self._reference = Reference(settings.reference, work / "reference", {n: k[:16] for n, k in self._items.items()})
        self._store = Store(work / "results")
        self._candidates = Candidates(settings.checkpoint, work / "checkpoints", self._calibration)

    def run(self) -> Evaluation:
        if self._settings.fresh:
            self._store.clear()
        first = self._row(None)
        rows = [first, *(self._row(precision, first.raw) for precision in self._settings.precisions)]
        found: list[Bar] = []
        if "text" in first.raw:
            measured = [(row.precision, row.raw["text"], row.figures["text"]) for row in rows if row.precision is not None]
            found = bars(measured, first.raw["text"], self._settings.seed)
        return Evaluation(self._settings, self._tasks, rows, found, self._grid, self._kernels)

    def _row(self, precision: Precision | None, reference: Mapping[str, Raw] | None = None) -> Row:
        name = "reference" if precision is None else precision.name
        decided: dict[str, Any] = {}
        source = self._settings.reference
        if precision is not None:
            source = self._candidates.source(precision, self._steps(f"{name}: quantising"))
            form = {field: value for field, value in vars(precision).items() if field != "directory"}
            decided = form | {"source": checkpoint_key(source)} | ({"version": KV_VERSION} if precision.kv == "fp8" else {})
        raw: dict[str, Raw] = {}
        seconds: dict[str, float] = {}
        runner: Runner | None = None
        for task in self._tasks:
            key = decided | {"items": self._items[task.name]}
            known = self._store.get(name, task.name, key)
            lacking = precision is None and task.by_token and not self._reference.has(task.name)
            if known is None or lacking:
                runner = runner or self._load(precision, source, name)
                begun = time.monotonic()
                made = task.run(runner, self._reference, precision is None, self._steps(f"{name}: {task.name}"))
                known = made, time.monotonic() - begun
                self._store.put(name, task.name, key, *known)
            raw[task.name], seconds[task.name] = known
        del runner
        gc.collect()
        figures = {
            task.name: task.figures(raw[task.name], (reference or raw)[task.name], self._settings.seed) for task in self._tasks
        }
        return Row(precision, raw, figures, seconds)

    def _load(self, precision: Precision | None, source: Path, name: str) -> Runner:
        steps = self._steps(f"{name}: loading")
        if precision is not None:
            return self._candidates.load(precision, source, self._positions, steps)
        decoder = load_decoder(source, dtype=torch.float32, progress=steps, max_positions=self._positions, weights="float32")
        return Runner(decoder, torch.float32)

    def _calibration(self) -> Path:
        return self._settings.calibrate or write_calibration(self._settings.work / "calibration.jsonl")

    def _steps(self, line: str) -> Callable[[int, int], None]:
        return lambda done, total: self._progress(line, done, total)


def _check_vocabulary(settings: Settings, texts: Texts) -> None:
    probe = "Precision, 1234 and naïve — three tokens?"
    size = DecoderConfig.from_directory(settings.reference).vocab_size
    for checkpoint in (settings.checkpoint, *(p.directory for p in settings.precisions if p.directory is not None)):
        same = checkpoint == settings.reference or Texts(checkpoint).encode(probe) == texts.encode(probe)
        if not same or DecoderConfig.from_directory(checkpoint).vocab_size != size:
            raise bad("reference", settings.reference.name, f"one with the tokenizer and the vocabulary of {checkpoint.name}")


def _check_context(settings: Settings, tasks: list[Task]) -> None:
    most = DecoderConfig.from_directory(settings.reference).max_positions
    for task in tasks:
        if task.longest > most:
            field = f"tokens of the longest item of task {task.name}"
            raise bad(field, task.longest, f"at most {most}, the reference's context")
