"""What the tests of both omni vocoders share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tritone.models.omni.voicebox.batch import Call, Tensors, compute
from tritone.models.omni.voicebox.box import OmniStream, OmniVoiceBox

Audio = npt.NDArray[np.float32]


def draw_codes(frames: int, groups: int, count: int, seed: int) -> npt.NDArray[np.int64]:
    """Codes [frames, groups], each below ``count``."""
    return np.random.default_rng(seed).integers(0, count, (frames, groups))


def decibels(wanted: Audio, got: Audio) -> float:
    """Signal-to-noise ratio of ``got``; infinite where they are equal. Lengths must be."""
    noise = np.square(wanted.astype(np.float64) - got).sum()
    return float(10 * np.log10(np.square(wanted.astype(np.float64)).sum() / noise)) if noise else np.inf


def streamed(stream: OmniStream, codes: npt.NDArray[Any], sizes: list[int]) -> list[Audio]:
    """One answer pushed in these sizes; the last push takes what is left."""
    pieces, start = [], 0
    for size in sizes:
        if start + size >= len(codes):
            break
        pieces.append(stream.push(codes[start : start + size], last=False))
        start += size
    pieces.append(stream.push(codes[start:], last=True))
    return pieces


def together(box: OmniVoiceBox, work: Sequence[tuple[OmniStream, npt.NDArray[Any], bool]]) -> list[Audio]:
    """``push(codes, last)`` of each stream, what they need computed in shared batches."""
    running = [stream.steps(codes, last) for stream, codes, last in work]
    wanted: dict[int, Call] = {}
    sounds: dict[int, Audio] = {}

    def go_on(index: int, made: Tensors | None) -> None:
        try:
            wanted[index] = next(running[index]) if made is None else running[index].send(made)
        except StopIteration as ended:
            sounds[index] = ended.value

    for index in range(len(work)):
        go_on(index, None)
    while wanted:
        kind = next(iter(wanted.values())).kind
        batch = [index for index, call in wanted.items() if call.kind == kind][: box.slots]
        for index, made in zip(batch, compute([wanted.pop(index) for index in batch], box.slots), strict=True):
            go_on(index, made)
    return [sounds[index] for index in range(len(work))]


def assert_no_click(pieces: list[Audio]) -> None:
    """The largest step at a border is not above the 99.9th percentile of the others."""
    pieces = [piece for piece in pieces if len(piece)]
    assert len(pieces) >= 2
    steps = np.abs(np.diff(np.concatenate(pieces)))
    borders = np.cumsum([len(piece) for piece in pieces])[:-1] - 1
    assert steps[borders].max() <= np.percentile(np.delete(steps, borders), 99.9)
