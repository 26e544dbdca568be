"""Which codes make a chunk: a pure function of the mode and the chunk's index."""

from __future__ import annotations

from dataclasses import dataclass

MODES = ("latency", "quality")
"""``latency`` begins with a small chunk and grows; ``quality`` computes large ones from the first on."""


@dataclass(frozen=True)
class ChunkPlan:
    """Chunks of ``lead + first`` units, then ``first``, twice that, and so on up to ``largest``; ``unit`` is in frames.

    ``lead`` units are those whose sound still waits for later codes when their chunk is computed. With it no chunk is longer
    than the sound of those before, so a Talker that is barely faster than real time delivers the next chunk in time.
    """

    unit: int
    lead: int
    first: int
    largest: int

    def frames(self, index: int) -> int:
        """Frames of chunk ``index``, from 0. The last chunk of an answer is whatever is left."""
        if index == 0:
            return (self.lead + self.first) * self.unit
        return min(self.first << min(index - 1, 16), self.largest) * self.unit

    def warm_frames(self) -> int:
        """Frames of a stream that computes a chunk of every size."""
        largest = 1
        while self.frames(largest) < self.largest * self.unit:
            largest += 1
        return sum(self.frames(index) for index in range(largest + 1))
