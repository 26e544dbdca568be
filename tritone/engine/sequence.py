"""A sequence: the tokens of one request and what the engine has computed of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tritone.messages import MediaKey
from tritone.options import Sampling

if TYPE_CHECKING:
    from tritone.models.omni.prompt import MediaPrompt


@dataclass(eq=False)
class Sequence:
    """``tokens`` are prompt and answer; KV exists for the first ``computed`` of them, in ``pages``.

    ``imported`` tokens come with KV from elsewhere: at admission ``import_kv`` copies it into the sequence's pages, except
    those of the first ``cached`` tokens, which the prefix cache held. On preemption ``save_kv``, if there is one, puts the
    KV aside and becomes the next ``import_kv``; without it the tokens are computed again.
    """

    session: int
    tokens: list[int]
    prompt_length: int
    sampling: Sampling
    max_tokens: int
    logprobs: int | None = None
    imported: int = 0
    import_kv: Callable[[Sequence], None] | None = None
    save_kv: Callable[[Sequence], Callable[[Sequence], None]] | None = None
    foreign: int = 0
    """So many tokens in front have KV made by another engine, whose numbers may differ from this one's."""
    media: MediaKey | None = None
    """Of a prompt with media; ``prompt`` is its media, in an engine that computes it."""
    prompt: MediaPrompt | None = None
    salt: str = ""
    """Sequences of different salts never share pages."""
    cached: int = 0
    keys: list[bytes] = field(default_factory=list)
    """The prefix cache's keys of the full pages; ``entered`` of the pages held now were offered to it."""
    entered: int = 0
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
    def due(self) -> bool:
        """Whether the next token is to be chosen now that all tokens are computed."""
        return self.pending == 0

    @property
    def answer_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def seen(self) -> set[int]:
        """The ids that the repetition penalty is about."""
        return set(self.tokens)

    def drop_import(self) -> None:
        """The KV to import is gone: all tokens are computed here."""
        self.imported = self.foreign = 0
        self.import_kv = None
        self.keys = []

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.counts[token] = self.counts.get(token, 0) + 1
