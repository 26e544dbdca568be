"""All training data, in shards that are made when they are first wanted."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from training.voice.answers import answers
from training.voice.batches import Batch, batches
from training.voice.contexts import Thinker, make_contexts, with_contexts
from training.voice.data import SHARD, Answer, make_codec, make_shard, read_shard
from training.voice.spoken import Teacher
from training.voice.trainer import Plan
from training.voice.unseen import UNSEEN
from tritone.models.voice.talker import HibariTalker

CONTEXT_SHARDS = 4
"""One shard in so many has the Thinker's hidden states."""

CONTEXTS_AFTER = 19
"""Shards that are trained on first, without any: the voice learns to speak, and then what contexts are."""


class Shards:
    """``cache`` holds what is made; ``voice`` is hibari's directory, ``thinker`` the checkpoint that hidden states are of.

    The first shard is kept for validation.
    """

    def __init__(self, cache: Path, voice: Path, thinker: Path) -> None:
        self._cache = cache
        self._texts = answers(cache, UNSEEN)
        self._teacher = Teacher(HibariTalker(voice))
        self._thinker_directory = thinker
        self._thinker: Thinker | None = None
        self._codec = make_codec(self._teacher, self._texts, cache / "codec.safetensors")

    def __len__(self) -> int:
        return len(self._texts) // SHARD

    def shard(self, index: int, contexts: bool = False) -> list[Answer]:
        """The answers of one shard, with hidden states if ``contexts``."""
        texts = self._texts[index * SHARD : (index + 1) * SHARD]
        path = self._cache / f"shard-{index:03d}.safetensors"
        make_shard(self._teacher, self._codec, texts, path)
        found = read_shard(path)
        if not contexts:
            return found
        path = self._cache / f"contexts-{index:03d}.safetensors"
        if not path.is_file():
            self._thinker = self._thinker or Thinker(self._thinker_directory)
            make_contexts(self._thinker, texts, found, path)
        return with_contexts(found, path)

    def batches(self, plan: Plan, gap: int) -> Iterator[Batch]:
        """Batches without end: shard after shard, in each pass packed in another order."""
        count = len(self) - 1
        for number in itertools.count():
            shard = 1 + number % count
            contexts = number >= CONTEXTS_AFTER and shard % CONTEXT_SHARDS == 0
            yield from batches(self.shard(shard, contexts), plan.rows, plan.length, gap, plan.seed + number)
