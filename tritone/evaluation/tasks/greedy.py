"""Greedy answers: after how many tokens they differ from the reference's."""

from __future__ import annotations

from typing import Any

import numpy as np

from tritone.evaluation.bootstrap import Figure, Values, estimate
from tritone.evaluation.reference import Reference
from tritone.evaluation.runner import Runner
from tritone.evaluation.tasks.task import Raw, Report


class Greedy:
    """Generates ``length`` tokens at most for each prompt; an answer that is the same to its end counts as ``length``."""

    name = "greedy"
    by_token = False

    def __init__(self, source: str, prompts: list[list[int]], length: int, stop: list[int]) -> None:
        self.source = source
        self._prompts, self._length, self._stop = prompts, length, stop

    @property
    def items(self) -> Any:
        return [self._prompts, self._length, self._stop]

    @property
    def longest(self) -> int:
        return max(map(len, self._prompts)) + self._length

    def run(self, runner: Runner, reference: Reference, is_reference: bool, progress: Report) -> Raw:
        count = len(self._prompts)
        return {"answers": runner.greedy(self._prompts, self._length, self._stop, lambda done: progress(done, count))}

    def figures(self, raw: Raw, reference: Raw, seed: int) -> dict[str, Figure]:
        positions = []
        for ours, theirs in zip(raw["answers"], reference["answers"], strict=True):
            positions.append(self._length if ours == theirs else divergence(ours, theirs))
        same = [float(position == self._length) for position in positions]

        def middle(values: Values) -> Values:
            medians: Values = np.median(values, -1)
            return medians

        def mean(values: Values) -> Values:
            means: Values = values.mean(-1)
            return means

        return {
            "median_tokens_until_different": estimate(middle, positions, seed=seed, name=self.name),
            "mean_tokens_until_different": estimate(mean, positions, seed=seed, name=self.name),
            "same_answer": estimate(mean, same, seed=seed, name=self.name),
        }


def divergence(ours: list[int], theirs: list[int]) -> int:
    """How many tokens at the beginning are the same."""
    shorter = min(len(ours), len(theirs))
    return next((position for position in range(shorter) if ours[position] != theirs[position]), shorter)
