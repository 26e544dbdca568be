"""How fast a stage works, to say how long a new request would wait."""

from __future__ import annotations

KEPT = 0.9
"""Share of the past in the mean: about the last ten steps count."""


class Pace:
    """A running mean of tokens a second."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """One step; a step without tokens says nothing."""
        if tokens > 0:
            self._tokens = KEPT * self._tokens + tokens
            self._seconds = KEPT * self._seconds + seconds

    def seconds(self, tokens: int) -> float:
        """How long ``tokens`` would take; 0 before the first step."""
        return tokens * self._seconds / self._tokens if self._tokens else 0.0
