"""One network computed for several sessions at once, so that no session's bits depend on the others.

A convolution or a product of a batch of four may sum in another order than one of a batch of one. So a batch always has the
same number of places: those that no session needs are computed on zeros. Which place a session gets, and what the others hold,
then changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

Tensors = tuple[Tensor, ...]
Result = TypeVar("Result")
Steps = Generator["Call", Tensors, Result]
"""A session's work: it yields what it needs computed and is sent what came of it."""


@dataclass(frozen=True, eq=False)
class Call:
    """One pass of ``network`` for one session.

    The network takes and returns tensors whose first dimension is the sessions; ``inputs``, and what the session gets back, are
    without it. Calls of the same ``kind`` can share a batch.
    """

    network: Callable[..., Tensors]
    inputs: Tensors

    @property
    def kind(self) -> Hashable:
        return self.network, *((tensor.shape, tensor.dtype) for tensor in self.inputs)


def compute(calls: Sequence[Call], slots: int) -> list[Tensors]:
    """What each of 1 to ``slots`` calls of one kind gets, in a batch of ``slots``."""
    assert 0 < len(calls) <= slots and len({call.kind for call in calls}) == 1
    rows = zip(*(call.inputs for call in calls), strict=True)
    with torch.inference_mode():
        stacked = [torch.stack([*row, *[torch.zeros_like(row[0])] * (slots - len(calls))]) for row in rows]
        made = calls[0].network(*stacked)
        # Copies, for a session that keeps its place alone must not keep the whole batch's memory.
        return [tuple(tensor[place].clone() for tensor in made) for place in range(len(calls))]


def alone(steps: Steps[Result], slots: int) -> Result:
    """Runs one session's work to its end, in batches of ``slots`` that it has for itself."""
    try:
        call = next(steps)
        while True:
            call = steps.send(compute([call], slots)[0])
    except StopIteration as ended:
        result: Result = ended.value
        return result
