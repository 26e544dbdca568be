"""Stop strings that may span several tokens."""

from __future__ import annotations


class StopMatcher:
    """Passes text on as far as no stop string can begin in it.

    Text that could be the beginning of a stop string is held back until the next text decides. Text after a match, and
    the match itself, never leaves. Of several stop strings the one that is complete first wins.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that may be shown now; sets :attr:`matched` when a stop string was found."""
        if not self._stops or self.matched is not None:
            return text if self.matched is None else ""
        self._held += text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            _, at, self.matched = min(found)
            shown, self._held = self._held[:at], ""
            return shown
        keep = max(self._overlap(stop) for stop in self._stops)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def flush(self) -> str:
        """The answer ended: what was held back is text after all."""
        held, self._held = self._held, ""
        return held

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that begins ``stop``."""
        longest = min(len(stop) - 1, len(self._held))
        for length in range(longest, 0, -1):
            if self._held.endswith(stop[:length]):
                return length
        return 0
