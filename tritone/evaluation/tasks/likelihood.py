"""How likely real text is, and how far the distributions are from the reference's, token by token."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from tritone.evaluation.bootstrap import Figure, Values, estimate
from tritone.evaluation.reference import Reference
from tritone.evaluation.runner import Runner
from tritone.evaluation.scoring import ROWS, Scores, added, compare
from tritone.evaluation.tasks.task import Raw, Report


@dataclass(frozen=True)
class Document:
    """Token ids; those from ``first`` (at least 1) on are scored, each given all before it."""

    ids: tuple[int, ...]
    first: int


class Likelihood:
    by_token = True

    def __init__(self, name: str, source: str, documents: list[Document]) -> None:
        self.name = name
        self.source = source
        self._documents = documents

    @property
    def items(self) -> Any:
        return [[document.first, *document.ids] for document in self._documents]

    @property
    def longest(self) -> int:
        return max(len(document.ids) for document in self._documents)

    def run(self, runner: Runner, reference: Reference, is_reference: bool, progress: Report) -> Raw:
        count = len(self._documents)
        before = 0
        if is_reference:
            rows = []
            for index, document in enumerate(self._documents):
                rows.append(runner.hidden(document.ids, document.first))
                progress(index, 2 * count)
            reference.keep(self.name, rows)
            before = count
        found: list[Scores] = []
        for index, document in enumerate(self._documents):
            theirs = reference.rows(self.name, index)
            ours = theirs if is_reference else runner.hidden(document.ids, document.first)
            targets = torch.tensor(document.ids[document.first :])
            parts = []
            for begin in range(0, len(targets), ROWS):
                part = slice(begin, begin + ROWS)
                wanted = reference.logits(theirs[part])
                got = wanted if is_reference else runner.decoder.logits(ours[part])
                parts.append(compare(got, wanted, targets[part]))
            found.append(added(parts))
            progress(before + index + 1, before + count)
        return {field: [asdict(scores)[field] for scores in found] for field in ("tokens", "nll", "kl", "top1", "top5")}

    def figures(self, raw: Raw, reference: Raw, seed: int) -> dict[str, Figure]:
        def get(statistic: Any, *columns: str) -> Figure:
            return estimate(statistic, *(raw[column] for column in columns), seed=seed, name=self.name)

        def increase(ours: Values, theirs: Values, tokens: Values) -> Values:
            percent: Values = 100 * np.expm1((ours.sum(-1) - theirs.sum(-1)) / tokens.sum(-1))
            return percent

        def mean(sums: Values, tokens: Values) -> Values:
            shares: Values = sums.sum(-1) / tokens.sum(-1)
            return shares

        more = estimate(increase, raw["nll"], reference["nll"], raw["tokens"], seed=seed, name=self.name)
        return {
            "perplexity": get(lambda nll, tokens: np.exp(mean(nll, tokens)), "nll", "tokens"),
            "perplexity_increase_percent": more,
            "log_likelihood": get(lambda nll, tokens: -mean(nll, tokens), "nll", "tokens"),
            "kl": get(mean, "kl", "tokens"),
            "top1": get(mean, "top1", "tokens"),
            "top5": get(mean, "top5", "tokens"),
        }
