"""A sequence: the tokens of one request and what the engine has computed of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tritone.options import Sampling


@dataclass(eq=False)
class Sequence:
    """``tokens`` are prompt and answer; KV exists for the first ``computed`` of them, in ``pages``.

    ``imported`` tokens come with KV computed elsewhere: at admission ``import_kv`` copies it into the sequence's pages
    (False once that KV is gone, as after a preemption; then the tokens are computed again).
    """

    session: int
    tokens: list[int]
    prompt_length: int
    sampling: Sampling
    max_tokens: int
    logprobs: int | None = None
    imported: int = 0
    import_kv: Callable[[Sequence], None] | None = None
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    counts: dict[int, int] = field(default_factory=dict)
    preemptions: int = 0
    state: Any = None
    """Whatever the stage keeps with the sequence; the engine does not look at it."""

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def answer_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.counts[token] = self.counts.get(token, 0) + 1
