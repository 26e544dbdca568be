"""What all tasks have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from tritone.evaluation.bootstrap import Figure
from tritone.evaluation.reference import Reference
from tritone.evaluation.runner import Runner

Raw = dict[str, list[Any]]
"""What a model did: lists with an entry for each document or item, as JSON holds them."""
Report = Callable[[int, int], None]


class Task(Protocol):
    """``name`` is that of the command line; ``source`` says what the items are; ``items`` is all that decides them, for JSON.

    ``by_token``: the reference leaves its hidden states for the others.
    """

    name: str
    source: str
    by_token: bool

    @property
    def items(self) -> Any: ...

    @property
    def longest(self) -> int:
        """Tokens of the longest item with what is generated for it."""
        ...

    def run(self, runner: Runner, reference: Reference, is_reference: bool, progress: Report) -> Raw:
        """``is_reference``: this is the reference itself, which leaves in ``reference`` what the others are compared to.

        ``progress`` gets (items done, items in all).
        """
        ...

    def figures(self, raw: Raw, reference: Raw, seed: int) -> dict[str, Figure]:
        """By name, with their intervals; differences are to ``reference``, item by item."""
        ...
