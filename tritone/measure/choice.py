"""The fastest pairing that is accurate enough for a deployment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tritone.errors import InvalidArgument
from tritone.evaluation.bootstrap import Figure
from tritone.measure.pairings import Pairing, Timed

TIE = 0.02
"""How much slower FP8 keys and values may be and still be taken: they hold twice as many tokens."""


class Judge(Protocol):
    def __call__(self, pairing: Pairing) -> Figure:
        """Percent of perplexity that a pairing costs."""
        ...


@dataclass(frozen=True)
class Choice:
    """``chosen``, and the increase in perplexity (percent) of every pairing that had to be looked at."""

    chosen: Timed
    increases: dict[Pairing, Figure]


def choose(timed: Sequence[Timed], limit: float, judge: Judge) -> Choice:
    """``timed`` is in order of seconds. Accuracy takes longer to measure than time, so that it is measured from the fastest
    pairing on, until one costs at most ``limit`` percent of perplexity. Raises ``InvalidArgument`` if none does."""
    increases: dict[Pairing, Figure] = {}

    def meets(one: Timed) -> bool:
        if one.pairing not in increases:
            increases[one.pairing] = judge(one.pairing)
        return increases[one.pairing].value <= limit

    for one in timed:
        if not meets(one):
            continue
        for other in timed:
            same = (other.pairing.prefill, other.pairing.decode) == (one.pairing.prefill, one.pairing.decode)
            if same and other.pairing.kv == "fp8" and other.seconds <= (1 + TIE) * one.seconds and meets(other):
                return Choice(other, increases)
        return Choice(one, increases)
    least = min(increases, key=lambda pairing: increases[pairing].value)
    raise InvalidArgument(
        f"accuracy.max_perplexity_increase: no pairing is within {limit:g} %; the closest is {least} with "
        f"{increases[least].value:.2f} %"
    )
