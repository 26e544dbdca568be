"""Multiple choice by likelihood: how a GSM8K problem's solution begins, among the beginnings of four solutions."""

from __future__ import annotations

import random
from typing import Any

import torch

from tritone.evaluation.bootstrap import Figure, Values, estimate
from tritone.evaluation.corpora import Problem
from tritone.evaluation.reference import Reference
from tritone.evaluation.runner import Runner
from tritone.evaluation.tasks.task import Raw, Report

OPTIONS = 4


class Choice:
    """The answer is the option whose tokens are likeliest on average. The right one is the first; its place does not count,
    since each option is scored by itself."""

    name = "choice"
    by_token = False
    source = "GSM8K: the first step of the solution, among first steps of three other problems"

    def __init__(self, encode: Any, problems: list[Problem], items: int, seed: int) -> None:
        """``encode`` makes token ids of text."""
        draw = random.Random(seed)
        self._items: list[tuple[list[int], list[list[int]]]] = []
        for index in range(min(items, len(problems))):
            others = draw.sample([other for other in range(len(problems)) if other != index], OPTIONS - 1)
            texts = [" " + problems[number].steps[0] for number in (index, *others)]
            self._items.append((encode(problems[index].prompt), [encode(text) for text in texts]))

    @property
    def items(self) -> Any:
        return self._items

    @property
    def longest(self) -> int:
        return max(len(context) + max(map(len, options)) for context, options in self._items)

    def run(self, runner: Runner, reference: Reference, is_reference: bool, progress: Report) -> Raw:
        scores = []
        for index, (context, options) in enumerate(self._items):
            found = []
            for option, rows in zip(options, runner.options(context, options), strict=True):
                likely = runner.decoder.logits(rows).log_softmax(-1)
                found.append(float(likely.gather(1, torch.tensor(option)[:, None]).double().mean()))
            scores.append(found)
            progress(index + 1, len(self._items))
        return {"scores": scores}

    def figures(self, raw: Raw, reference: Raw, seed: int) -> dict[str, Figure]:
        ours, theirs = _chosen(raw), _chosen(reference)
        right = [float(choice == 0) for choice in ours]
        same = [float(a == b) for a, b in zip(ours, theirs, strict=True)]
        before = [float(choice == 0) for choice in theirs]
        return {
            "accuracy": estimate(_mean, right, seed=seed, name=self.name),
            "accuracy_change": estimate(lambda a, b: _mean(a - b), right, before, seed=seed, name=self.name),
            "same_choice": estimate(_mean, same, seed=seed, name=self.name),
        }


def _chosen(raw: Raw) -> list[int]:
    """The likeliest option of each item; among equals the last, so that a tie is never counted as right."""
    return [max(range(len(scores)), key=lambda option: (scores[option], option)) for scores in raw["scores"]]


def _mean(values: Values) -> Values:
    shares: Values = values.mean(-1)
    return shares
