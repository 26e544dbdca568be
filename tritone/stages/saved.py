"""The KV of a sequence that had to give its pages back, kept beside the pool until it gets others."""

from __future__ import annotations

from collections.abc import Callable

from tritone.engine.sequence import Sequence
from tritone.pools import BlockPool


def saver(pages: BlockPool, page_size: int) -> Callable[[Sequence], Callable[[Sequence], None]]:
    """A ``save_kv`` for sequences with pages of ``pages``: copies bytes, so that the sequence goes on with the very numbers
    it had, which computing the prompt again here would not give where prefill has another precision."""

    def save(sequence: Sequence) -> Callable[[Sequence], None]:
        used = -(-sequence.computed // page_size)
        saved = [pages.block(page).copy() for page in sequence.pages[:used]]

        def restore(sequence: Sequence) -> None:
            for number in range(sequence.cached // page_size, used):
                pages.block(sequence.pages[number])[:] = saved[number]

        return restore

    return save
