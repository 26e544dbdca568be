"""What a Talker reads of a prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]
Span = tuple[int, int]


@dataclass(frozen=True)
class Heard:
    """Which of a prompt's ``tokens`` a Talker reads: those of ``spans`` (begin, end), in order.

    ``media``: the spans among them that are audio's or images'. ``opening``: where the turn begins that the answer belongs
    to (Qwen3-Omni; its spans lie before). ``positions``: int32 [3, read] as lists, or None where they are 0, 1, 2, ...
    """

    tokens: int
    spans: tuple[Span, ...]
    media: tuple[Span, ...] = ()
    opening: int = 0
    positions: tuple[tuple[int, ...], ...] | None = None

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Heard:
        values = dict(data)
        for name in ("spans", "media"):
            values[name] = tuple((begin, end) for begin, end in values[name])
        if values["positions"] is not None:
            values["positions"] = tuple(map(tuple, values["positions"]))
        return cls(**values)


def hear_all(ids: Ints, positions: Ints | None) -> Heard:
    """Qwen2.5-Omni's Talker reads every token of the prompt; ``positions`` [3, T] are those of a prompt with media."""
    return Heard(len(ids), ((0, len(ids)),), positions=_listed(positions))


def hear_user(
    ids: Ints, positions: Ints | None, *, turn: int, user: int, assistant: int, media: frozenset[int]
) -> Heard:
    """Qwen3-Omni's Talker reads the user's turns, and the beginning of the assistant's last.

    ``turn``, ``user``, ``assistant``: the ids that begin a turn and name its role. ``media``: the ids of placeholders.
    A turn keeps its positions, moved to where the turns before it that are read have ended.
    """
    begins = np.flatnonzero(ids == turn).tolist()
    ends = [*begins[1:], len(ids)]
    roles = {begin: int(ids[begin + 1]) if begin + 1 < len(ids) else -1 for begin in begins}
    opening = max((begin for begin in begins if roles[begin] == assistant), default=len(ids))
    spans = tuple((begin, end) for begin, end in zip(begins, ends, strict=True) if roles[begin] == user)
    placeholders = np.isin(ids, list(media))
    found = tuple(run for begin, end in spans for run in _runs(placeholders, begin, end))
    moved: list[Ints] = []
    if positions is not None:
        start = 0
        for begin, end in spans:
            # A turn begins with text, whose three positions are one.
            moved.append(positions[:, begin:end] + (start - int(positions[0, begin])))
            start = int(moved[-1].max()) + 1
    return Heard(len(ids), spans, found, opening, _listed(np.concatenate(moved, axis=1) if moved else None))


def _runs(mask: npt.NDArray[np.bool_], begin: int, end: int) -> list[Span]:
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask[begin:end], [False])).astype(np.int8))) + begin
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _listed(positions: Ints | None) -> tuple[tuple[int, ...], ...] | None:
    return None if positions is None else tuple(tuple(axis) for axis in positions.tolist())
