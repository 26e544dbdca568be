"""Prompts with media, as the engine computes them chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence as Spans

import numpy as np
import torch
from torch import Tensor

from tritone.engine.sequence import Sequence
from tritone.errors import bad
from tritone.messages import MediaKey
from tritone.models.decoder.batch import Deepstack, Media
from tritone.models.omni.prompt import MediaPrompt

Span = tuple[Sequence, int, int]
"""A sequence, and the first of its tokens to compute and how many."""


def media_key(prompt: MediaPrompt) -> MediaKey | None:
    """What goes with a prompt from stage to stage; None where no medium is in it.

    Raises ``InvalidArgument`` for a prompt whose parts do not fit together, or whose positions do not.
    """
    ids, places, visual = len(prompt.ids), prompt.places, prompt.visual
    for name, indexes in (("places", places), ("visual", visual)):
        if len(indexes) and (indexes[0] < 0 or indexes[-1] >= ids or (np.diff(indexes) <= 0).any()):
            raise bad(name, indexes.tolist(), f"ascending indexes from 0 to {ids - 1}")
    if len(prompt.embeddings) != len(places):
        raise bad("embeddings", list(prompt.embeddings.shape), f"one for each of {len(places)} places")
    if len(prompt.deepstack) and prompt.deepstack.shape[1] != len(visual):
        raise bad("deepstack", list(prompt.deepstack.shape), f"one for each of {len(visual)} places of images, in each layer")
    if not len(places):
        return None
    positions, begins = prompt.positions, int(places[0])
    if positions.shape != (3, ids) or positions.min() < 0 or positions.max() >= ids:
        raise bad("positions", list(positions.shape), f"[3, {ids}], each from 0 to {ids - 1}")
    # Pages before the first medium are shared with prompts of text.
    if (positions[:, :begins] != np.arange(begins)).any():
        raise bad("positions", positions[:, :begins].tolist(), "each token's place, before the first medium")
    if not -ids < prompt.delta <= 0:
        raise bad("delta", prompt.delta, f"{1 - ids} to 0")
    return MediaKey(prompt.delta, begins, prompt.digest.hex())


def rotary_of(spans: Spans[Span]) -> Tensor | None:
    """``Batch.rotary`` of a step; None where every token is rotated by its place."""
    if all(sequence.media is None for sequence, _, _ in spans):
        return None
    parts = []
    for sequence, begin, count in spans:
        delta = 0 if sequence.media is None else sequence.media.delta
        positions = np.broadcast_to(np.arange(begin, begin + count, dtype=np.int32) + delta, (3, count))
        if sequence.prompt is not None and begin < sequence.prompt_length:
            given = sequence.prompt.positions[:, begin : begin + count]
            positions = np.concatenate((given, positions[:, given.shape[1] :]), axis=1)
        parts.append(positions)
    return torch.from_numpy(np.concatenate(parts, axis=1, dtype=np.int32))


def media_of(spans: Spans[Span]) -> Media | None:
    """``Batch.media`` of a step; None where no medium is among its tokens."""
    rows: list[Tensor] = []
    embeddings: list[Tensor] = []
    deep_rows: list[Tensor] = []
    deep: list[Tensor] = []
    start = 0
    for sequence, begin, count in spans:
        prompt = sequence.prompt
        if prompt is not None:
            first, last = np.searchsorted(prompt.places, (begin, begin + count))
            if first < last:
                rows.append(torch.from_numpy(prompt.places[first:last].astype(np.int64) + (start - begin)))
                embeddings.append(prompt.embeddings[first:last])
            first, last = np.searchsorted(prompt.visual, (begin, begin + count))
            if first < last and len(prompt.deepstack):
                deep_rows.append(torch.from_numpy(prompt.visual[first:last].astype(np.int64) + (start - begin)))
                deep.append(prompt.deepstack[:, first:last])
        start += count
    if not rows:
        return None
    deepstack = Deepstack(torch.cat(deep_rows), torch.cat(deep, dim=1)) if deep else None
    return Media(torch.cat(rows), torch.cat(embeddings), deepstack)
