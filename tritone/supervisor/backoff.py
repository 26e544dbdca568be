"""When a stage that died is loaded again."""

from __future__ import annotations

LONGEST_SECONDS = 30.0
STABLE_SECONDS = 60.0
"""A stage that served for so long before it died starts anew."""


class Backoff:
    """Seconds to wait before each load: none at first, then 1, 2, 4 ... up to ``LONGEST_SECONDS`` while it keeps dying."""

    def __init__(self) -> None:
        self.failures = 0
        self._ready = 0.0

    def served(self, now: float) -> None:
        """The stage is ready from ``now`` on."""
        self._ready = now

    def failed(self, now: float) -> float:
        """It died, or could not be loaded; gives the seconds to wait."""
        if self._ready and now - self._ready >= STABLE_SECONDS:
            self.failures = 0
        self._ready = 0.0
        self.failures += 1
        return 0.0 if self.failures == 1 else min(LONGEST_SECONDS, float(2 ** min(self.failures - 2, 10)))
