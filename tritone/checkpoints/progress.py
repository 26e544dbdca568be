"""How long work reports where it is."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    def __call__(self, line: str, done: int = 0, total: int = 0) -> None:
        """``line`` names the step; ``total`` 0 is a step of unknown length. A plain ``print`` will do."""


def silent(line: str, done: int = 0, total: int = 0) -> None:
    """Reports nothing."""
