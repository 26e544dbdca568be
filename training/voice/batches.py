"""Rows of equal length, packed with answers, as tensors to train on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from training.voice.data import Answer, Clause
from tritone.models.talker.config import END, READ

Ints = npt.NDArray[np.int64]

IGNORED = -100

CONTEXT_SHOWN = 0.7
"""Share of the answers with hidden states whose hidden states the model gets."""


@dataclass(frozen=True, eq=False)
class Batch:
    """R rows of T positions; a *place* is row * T + position.

    Phonemes of all clauses stand in one row with gaps: ids int64 [1, S], mask bool [1, S] (false in the gaps). Units are
    unit_ids int64 [U], indexes into S, at unit_places [U]; ends of text at end_places, speakers at start_places; frames at
    frame_places [F] with codes [F, 3]. targets int64 [R * T] is the token of codebook 0 that a place must give, IGNORED
    where there is none. contexts [U, hidden], if any answer has them: the Thinker's hidden states, zeros elsewhere.
    """

    shape: tuple[int, int]
    ids: Tensor
    mask: Tensor
    unit_ids: Tensor
    unit_places: Tensor
    end_places: Tensor
    start_places: Tensor
    frame_places: Tensor
    codes: Tensor
    targets: Tensor
    contexts: Tensor | None = None


def positions(answer: Answer) -> int:
    """Places an answer takes: its speaker, units, frames and the end of its text."""
    return 2 + sum(len(clause.text.picks) + len(clause.codes) for clause in answer)


def packed(answers: Sequence[Answer], length: int) -> list[list[Answer]]:
    """Answers in rows of at most ``length`` places, long ones first, each in the first row it fits in. Longer ones than
    ``length`` are left out, and those without a clause."""
    rows: list[list[Answer]] = []
    room: list[int] = []
    for answer in sorted(answers, key=positions, reverse=True):
        need = positions(answer)
        if not answer or need > length:
            continue
        row = next((index for index, free in enumerate(room) if free >= need), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(length)
        rows[row].append(answer)
        room[row] -= need
    return rows


def batches(answers: Sequence[Answer], rows: int, length: int, gap: int, seed: int) -> Iterator[Batch]:
    """All full batches of some answers, in an order drawn from ``seed``; an answer's contexts are hidden at times."""
    draw = np.random.default_rng(seed)
    packs = packed(answers, length)
    order = draw.permutation(len(packs))
    for start in range(0, len(order) - rows + 1, rows):
        chosen = [packs[index] for index in order[start : start + rows]]
        yield collated([[_shown(row[i], draw) for i in draw.permutation(len(row))] for row in chosen], length, gap)


def collated(rows: Sequence[Sequence[Answer]], length: int, gap: int) -> Batch:
    """A batch of rows; ``gap`` is how far a clause's phonemes must lie from the next one's."""
    targets = np.full(len(rows) * length, IGNORED, np.int64)
    ids, mask, starts, ends = [], [], [], []
    unit_ids, unit_places, frame_places, codes = [], [], [], []
    contexts = []
    shift = 0
    for number, row in enumerate(rows):
        place = number * length
        for answer in row:
            first = place
            starts.append(place)
            place += 1
            tokens: list[Ints] = []
            for clause in answer:
                units, frames = _interleaved(clause)
                unit_places.append(place + units)
                frame_places.append(place + frames)
                unit_ids.append(shift + clause.text.picks)
                codes.append(clause.codes)
                contexts.append(clause.context)
                clause_tokens = np.full(len(units) + len(frames), READ, np.int64)
                clause_tokens[frames] = clause.codes[:, 0]
                tokens.append(clause_tokens)
                place += len(clause_tokens)
                count = len(clause.text.ids)
                ids.append(np.concatenate([clause.text.ids, np.zeros(gap, np.int64)]))
                mask.append(np.concatenate([np.ones(count, bool), np.zeros(gap, bool)]))
                shift += count + gap
            ends.append(place)
            place += 1
            targets[first:place] = np.concatenate([*tokens, [READ, END]])
    width = next((found.shape[1] for found in contexts if found is not None), 0)
    filled = [np.zeros((len(u), width), np.float16) if c is None else c for u, c in zip(unit_places, contexts, strict=True)]
    arrays = (unit_ids, unit_places, frame_places, codes)
    joined = [torch.from_numpy(np.concatenate(parts)) for parts in arrays]
    return Batch(
        (len(rows), length), torch.from_numpy(np.concatenate(ids))[None], torch.from_numpy(np.concatenate(mask))[None],
        joined[0], joined[1], torch.tensor(ends), torch.tensor(starts), joined[2], joined[3], torch.from_numpy(targets),
        torch.from_numpy(np.concatenate(filled)) if width else None,
    )  # fmt: skip


def _shown(answer: Answer, draw: np.random.Generator) -> Answer:
    if answer[0].context is None or draw.random() < CONTEXT_SHOWN:
        return answer
    return [replace(clause, context=None) for clause in answer]


def _interleaved(clause: Clause) -> tuple[Ints, Ints]:
    """Positions of the units and of the frames within their clause."""
    units = clause.reads + np.arange(len(clause.reads))
    frames = np.arange(len(clause.codes))
    return units, frames + np.searchsorted(clause.reads, frames, side="right")
