"""The digest of a block's content: XXH3, 64 bits, over the block's own bytes and nothing about where they lie."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash


def digest(block: npt.NDArray[np.uint8]) -> int:
    """A number above 0, for 0 stands for no digest. ``block`` uint8 [bytes], contiguous."""
    return xxhash.xxh3_64_intdigest(block.data) or 1
