"""How much is measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """``rounds`` is how often each thing is measured, in turn with what it is compared to.

    ``matrices`` and ``linear_batches``: the kernels' load. ``batches``, ``context`` and ``prompt``: decode and prefill by
    weights. ``pool_tokens`` is what BF16 fits into the limited memory; ``contexts``, ``answer`` and ``load_weights``: the
    loads there; ``growth``: the answers that outgrow it. ``larger_pool`` (tokens, and the context of its load) is one in which
    arithmetic limits rather than memory. ``request`` is prompt and answer of a request end to end; ``judged_request`` the same
    for the deployed checkpoint, where pairings that are faster than the deployed one are measured for accuracy.
    """

    rounds: int
    matrices: int
    linear_batches: tuple[int, ...]
    attention_rounds: int
    batches: tuple[int, ...]
    context: int
    prompt: int
    prefill_rounds: int
    pool_tokens: int
    contexts: tuple[int, ...]
    larger_pool: tuple[int, int] | None
    answer: int
    growth: int
    load_weights: tuple[str, ...]
    load_rounds: int
    request: tuple[int, int]
    pair_rounds: int
    judged_request: tuple[int, int] | None

    @property
    def positions(self) -> int:
        """Tokens of the longest sequence."""
        return max(*self.contexts, self.context, sum(self.request), sum(self.judged_request or ()), self.prompt) + 256

    def steps_of(self, batch: int) -> int:
        """Decode steps in one measurement."""
        return 16 if batch < 8 else 8


FULL = Sizes(
    rounds=7,
    matrices=24,
    linear_batches=(1, 32),
    attention_rounds=5,
    batches=(1, 8, 32),
    context=256,
    prompt=512,
    prefill_rounds=5,
    pool_tokens=8704,
    contexts=(2048, 4096, 8192),
    larger_pool=(17408, 2048),
    answer=16,
    growth=72,
    load_weights=("int4",),
    load_rounds=3,
    request=(128, 32),
    pair_rounds=3,
    judged_request=(512, 128),  # as `tritone doctor --measure` times it
)
QUICK = Sizes(
    rounds=2,
    matrices=8,
    linear_batches=(1,),
    attention_rounds=1,
    batches=(1, 32),
    context=64,
    prompt=128,
    prefill_rounds=1,
    pool_tokens=4352,
    contexts=(2048,),
    larger_pool=None,
    answer=8,
    growth=40,
    load_weights=("int4",),
    load_rounds=1,
    request=(32, 4),
    pair_rounds=1,
    judged_request=None,
)
