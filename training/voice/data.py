"""Training data on disk: codebooks, then shards of answers in codes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

from training.voice.answers import clauses
from training.voice.spoken import SpokenClause, Teacher
from tritone.models.codec.codec import Codec
from tritone.models.codec.fit import fit_codec
from tritone.models.talker.text import ClauseText

FIT_ANSWERS = 1500
SHARD = 1000

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Clause:
    """A clause to train on: its units; how many frames come before each, int64 [U]; its codes, int64 [F, 3]; where it was
    made the Thinker's hidden state for each unit, float16 [U, hidden]."""

    text: ClauseText
    reads: Ints
    codes: Ints
    context: npt.NDArray[np.float16] | None = None


Answer = list[Clause]


def spoken(teacher: Teacher, answer: str) -> list[SpokenClause]:
    """The answer's clauses; none when one of them cannot be used."""
    parts = [teacher.speak(clause) for clause in clauses(answer)]
    return [part for part in parts if part is not None] if all(part is not None for part in parts) else []


def make_codec(teacher: Teacher, answers: list[str], path: Path) -> Codec:
    """The codec fitted to the first answers, kept in ``path``."""
    if not path.is_file():
        frames = [part.frames for answer in answers[:FIT_ANSWERS] for part in spoken(teacher, answer)]
        codec = fit_codec(frames)
        save_arrays({"text": codec.text, "prosody": codec.prosody}, path)
    return Codec(**load_file(path))


def make_shard(teacher: Teacher, codec: Codec, answers: list[str], path: Path) -> None:
    """Writes one shard: counts of clauses an answer, ids, picks, reads and codes, one after the other, with their counts."""
    if path.is_file():
        return
    per_answer, parts = [], []
    for answer in answers:
        made = spoken(teacher, answer)
        per_answer.append(len(made))
        parts += [Clause(part.text, part.reads, codec.encode(part.frames)) for part in made]
    counts = [[len(part.text.ids), len(part.text.picks), len(part.codes)] for part in parts]
    arrays: dict[str, npt.NDArray[Any]] = {
        "clauses": np.array(per_answer, np.int32),
        "counts": np.array(counts, np.int32),
        "ids": np.concatenate([part.text.ids for part in parts]).astype(np.uint8),
        "picks": np.concatenate([part.text.picks for part in parts]).astype(np.int16),
        "reads": np.concatenate([part.reads for part in parts]).astype(np.int16),
        "codes": np.concatenate([part.codes for part in parts]).astype(np.int16),
    }
    save_arrays(arrays, path)


def read_shard(path: Path) -> list[Answer]:
    """The shard's answers; one that could not be used has no clause."""
    arrays = load_file(path)
    ends = np.cumsum(arrays["counts"], axis=0)
    bounds = [np.split(arrays[name], ends[:-1, column]) for name, column in _COLUMNS]
    made = [Clause(ClauseText(i.astype(np.int64), p.astype(np.int64)), r.astype(np.int64), c.astype(np.int64))
            for i, p, r, c in zip(*bounds, strict=True)]  # fmt: skip
    ends = np.cumsum(arrays["clauses"])
    return [made[end - count : end] for end, count in zip(ends, arrays["clauses"], strict=True)]


_COLUMNS = (("ids", 0), ("picks", 1), ("reads", 1), ("codes", 2))


def save_arrays(arrays: dict[str, npt.NDArray[Any]], path: Path) -> None:
    """Writes a file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".new")
    save_file(arrays, temporary)
    temporary.replace(path)
