"""What precisions must reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tritone.evaluation.bootstrap import Figure, Values, estimate
from tritone.evaluation.precisions import Precision
from tritone.evaluation.tasks import Raw

KV_KL = 0.01
KV_INCREASE = 0.5
FP8_INCREASE = 1.5
INT4_SHARE = 0.5
INT4_GROUP = 64


@dataclass(frozen=True)
class Bar:
    """A figure of a precision beside what it may be at most. Met is judged by the figure, not by its interval."""

    precision: str
    name: str
    unit: str
    figure: Figure
    limit: float

    @property
    def met(self) -> bool:
        return self.figure.value <= self.limit


def bars(rows: list[tuple[Precision, Raw, Mapping[str, Figure]]], reference: Raw, seed: int) -> list[Bar]:
    """``rows``: what each precision did on running text, and its figures."""
    found = []
    by_form = {(p.weights, p.group, p.method, p.kv, p.integers): raw for p, raw, _ in rows}
    for precision, raw, figures in rows:
        increase = figures["perplexity_increase_percent"]
        if precision.weights == "bf16" and precision.kv == "fp8":
            found.append(Bar(precision.name, "KL divergence with FP8 KV", "nats", figures["kl"], KV_KL))
            found.append(Bar(precision.name, "perplexity increase with FP8 KV", "%", increase, KV_INCREASE))
        elif precision.weights == "fp8" and precision.kv != "fp8":
            found.append(Bar(precision.name, "perplexity increase with FP8 weights", "%", increase, FP8_INCREASE))
        elif precision.weights == "int4" and precision.group == INT4_GROUP and precision.method != "rtn":
            plain = by_form.get(("int4", precision.group, "rtn", precision.kv, precision.integers))
            if plain is not None:
                share = _share(raw, plain, reference, seed)
                name = "perplexity increase as a share of that of rounding to nearest"
                found.append(Bar(precision.name, name, "", share, INT4_SHARE))
    return found


def _share(raw: Raw, plain: Raw, reference: Raw, seed: int) -> Figure:
    def share(ours: Values, rounded: Values, theirs: Values, tokens: Values) -> Values:
        count = tokens.sum(-1)
        base = theirs.sum(-1)
        parts: Values = np.expm1((ours.sum(-1) - base) / count) / np.expm1((rounded.sum(-1) - base) / count)
        return parts

    columns = (raw["nll"], plain["nll"], reference["nll"], raw["tokens"])
    return estimate(share, *columns, seed=seed, name="text")


def as_json(bar: Bar) -> dict[str, Any]:
    return {
        "precision": bar.precision,
        "name": bar.name,
        "unit": bar.unit,
        **vars(bar.figure),
        "at_most": bar.limit,
        "met": bar.met,
    }
