"""The VoiceBox: streamed sound against the whole segment's, and against hibari's own signal processing."""

from __future__ import annotations

import importlib
import random
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tritone.models.voice.chunks import LOOKAHEAD_FRAMES, STEP_FRAMES, block_frames, plan_chunks
from tritone.models.voice.decoder import DecoderStream
from tritone.models.voice.frames import Frames
from tritone.models.voice.prepare import prepare_voice
from tritone.models.voice.source import PulseSource, frame_noise
from tritone.models.voice.talker import HibariTalker
from tritone.models.voice.voicebox import VoiceBox, VoiceBoxStream

Audio = npt.NDArray[np.float32]
TEXT = "It was the best of times, it was the worst of times."
BOUND = 1e-4  # of streamed against whole, with a peak of about 1


@pytest.fixture(scope="module")
def voice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_voice(tmp_path_factory.mktemp("voices") / "heart")


@pytest.fixture(scope="module")
def box(voice: Path) -> VoiceBox:
    return VoiceBox(voice)


@pytest.fixture(scope="module")
def frames(voice: Path) -> Frames:
    return HibariTalker(voice).speak(TEXT)


def stream(running: VoiceBoxStream, frames: Frames, sizes: list[int]) -> list[Audio]:
    """One segment in chunks of these sizes; the last chunk takes what is left."""
    pieces, start = [], 0
    for size in sizes:
        if start + size >= len(frames):
            break
        pieces.append(running.push(frames.slice(start, start + size), last=False))
        start += size
    pieces.append(running.push(frames.slice(start, len(frames)), last=True))
    return pieces


def random_sizes(draw: random.Random, total: int) -> list[int]:
    largest = draw.choice([2, 5, 30, 60, total])
    sizes: list[int] = []
    while sum(sizes) < total:
        sizes.append(draw.randint(0, largest))
    return sizes


def test_any_chunking_gives_the_whole_segment(box: VoiceBox, frames: Frames) -> None:
    whole = box.oneshot(frames, seed=11)
    assert len(whole) == len(frames) * 300 and whole.dtype == np.float32
    assert 0.2 < np.abs(whole).max() < 1.5
    draw = random.Random(2)
    total = len(frames)
    cuts = [[1] * total, [7] * total, [49, 20, 40], [total], plan_chunks(total)]
    cuts += [random_sizes(draw, total) for _ in range(12)]
    results = [np.concatenate(stream(VoiceBoxStream(box, seed=11), frames, sizes)) for sizes in cuts]
    for result in results:
        np.testing.assert_array_equal(result, results[0])
    assert len(results[0]) == len(whole)
    assert np.abs(results[0] - whole).max() <= BOUND


@pytest.mark.parametrize("total", [1, 2, 3, 4, 5, 26, 27, 28, 29, 30, 48, 49, 50, 68, 69, 70, 109, 110])
def test_short_and_border_lengths(box: VoiceBox, frames: Frames, total: int) -> None:
    part = frames.slice(30, 30 + total)
    whole = box.oneshot(part, seed=5)
    for size in (1, 4, total):
        pieces = np.concatenate(stream(VoiceBoxStream(box, seed=5), part, [size] * total))
        assert len(pieces) == total * 300
        assert np.abs(pieces - whole).max() <= BOUND


def test_end_without_frames_flushes_the_rest(box: VoiceBox, frames: Frames) -> None:
    running = VoiceBoxStream(box, seed=5)
    start = running.push(frames, last=False)
    rest = running.push(Frames.empty(130), last=True)
    assert len(start) > 0 and len(rest) >= LOOKAHEAD_FRAMES * 300
    assert np.abs(np.concatenate([start, rest]) - box.oneshot(frames, seed=5)).max() <= BOUND


def test_joins_are_no_steps(box: VoiceBox, frames: Frames) -> None:
    pieces = stream(VoiceBoxStream(box, seed=1), frames, [1] * len(frames))
    pieces = [p for p in pieces if len(p)]
    assert len(pieces) >= 4
    steps = np.abs(np.diff(np.concatenate(pieces)))
    joins = np.cumsum([len(p) for p in pieces])[:-1] - 1
    assert steps[joins].max() <= np.percentile(np.delete(steps, joins), 99.9)


def test_segments_are_independent(box: VoiceBox, frames: Frames) -> None:
    first, second = frames.slice(0, 90), frames.slice(90, 150)
    running = VoiceBoxStream(box, seed=3)
    heard = [np.concatenate(stream(running, part, [25] * 4)) for part in (first, second)]
    assert len(running.push(Frames.empty(130), last=True)) == 0, "a segment without frames does not count"
    heard.append(running.push(first, last=True))
    for index, part in enumerate((first, second, first)):
        assert np.abs(heard[index] - box.oneshot(part, 3, segment=index)).max() <= BOUND
    assert np.abs(heard[2] - heard[0]).max() > 1e-4, "the noise of two segments is not the same"


def test_streams_side_by_side_do_not_touch(box: VoiceBox, frames: Frames) -> None:
    streams = [VoiceBoxStream(box, seed) for seed in (1, 2)]
    parts = [frames, frames.slice(40, 200)]
    pieces: list[list[Audio]] = [[], []]
    for start in range(0, len(frames), 33):
        for running, part, heard in zip(streams, parts, pieces, strict=True):
            heard.append(running.push(part.slice(start, start + 33), last=False))
    for seed, (running, part, heard) in enumerate(zip(streams, parts, pieces, strict=True), 1):
        heard.append(running.push(Frames.empty(130), last=True))
        assert np.abs(np.concatenate(heard) - box.oneshot(part, seed)).max() <= BOUND


def test_seed_changes_the_noise_alone(box: VoiceBox, frames: Frames) -> None:
    one, same, other = (box.oneshot(frames, seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    difference = one - other
    assert 0 < np.square(difference).mean() < 0.02 * np.square(one).mean()
    assert np.corrcoef(one, other)[0, 1] > 0.98
    assert len(box.oneshot(frames, -1)) == len(box.oneshot(frames, 2**70)) == len(one)


def test_caller_may_reuse_its_memory(box: VoiceBox, frames: Frames) -> None:
    features, f0 = frames.features.copy(), frames.f0.copy()
    running = VoiceBoxStream(box, seed=1)
    head = Frames(features[:30], f0[:30])
    pieces = [running.push(head, last=False)]
    features[:30], f0[:30] = np.nan, np.nan
    pieces.append(running.push(frames.slice(30, len(frames)), last=True))
    np.testing.assert_array_equal(np.concatenate(pieces), VoiceBoxStream(box, 1).push(frames, last=True))


def test_bad_frames_are_refused_and_change_nothing(box: VoiceBox, frames: Frames) -> None:
    running = VoiceBoxStream(box, seed=1)
    pieces = [running.push(frames.slice(0, 60), last=False)]
    bad = frames.features[:2].copy()
    bad[1, 5] = np.nan
    with pytest.raises(ValueError, match="features hold a value that is not finite"):
        running.push(Frames(bad, frames.f0[:2]), last=True)
    with pytest.raises(ValueError, match="width 7, this voice takes 130"):
        running.push(Frames.empty(7), last=True)
    with pytest.raises(ValueError, match="float64"):
        running.push(Frames(frames.features, frames.f0.astype(np.dtype("float64"))), last=True)
    with pytest.raises(ValueError, match="must be"):
        Frames(frames.features[:3], frames.f0[:2])
    pieces.append(running.push(frames.slice(60, len(frames)), last=True))
    assert np.abs(np.concatenate(pieces) - box.oneshot(frames, 1)).max() <= BOUND


def test_decoder_equals_padded_convolutions(voice: Path, box: VoiceBox, frames: Frames) -> None:
    w = load_file(str(voice / "decoder.safetensors"))
    x = F.conv1d(torch.from_numpy(frames.features).T[None], w["dec_in.weight"], w["dec_in.bias"], padding=3)
    for i in range(8):
        p = {k.removeprefix(f"dec.{i}."): v for k, v in w.items() if k.startswith(f"dec.{i}.")}
        h = F.conv1d(x, p["dw.weight"], p["dw.bias"], padding=3, groups=256).transpose(1, 2)
        h = F.layer_norm(h, (256,), p["norm.weight"], p["norm.bias"], 1e-5)
        h = F.linear(F.gelu(F.linear(h, p["pw1.weight"], p["pw1.bias"])), p["pw2.weight"], p["pw2.bias"])
        x = x + (h * p["gamma"]).transpose(1, 2)
    x = F.layer_norm(x.transpose(1, 2), (256,), w["dec_norm.weight"], w["dec_norm.bias"], 1e-5)
    expected = F.linear(x, w["head.weight"], w["head.bias"])[0]
    torch.testing.assert_close(heads_of(box, frames), expected, atol=2e-3, rtol=1e-4)


class _GivenNoise:
    """Stands in for hibari's random generator and returns this noise, complex64 [F, bins]."""

    def __init__(self, noise: npt.NDArray[np.complex64]) -> None:
        self._noise = np.ascontiguousarray(noise.T)

    def standard_normal(self, shape: tuple[int, int], dtype: Any) -> npt.NDArray[np.float32]:
        return self._noise.view(np.float32).reshape(shape)


def heads_of(box: VoiceBox, frames: Frames) -> torch.Tensor:
    with torch.inference_mode():
        return DecoderStream(box.decoder).push(torch.from_numpy(frames.features), last=True)


@pytest.mark.parametrize("total", [1, 2, 3, 4, 40, 400])
def test_equals_hibaris_own_synthesis(box: VoiceBox, frames: Frames, total: int) -> None:
    dsp: Any = importlib.import_module("hibari.dsp")
    part = frames.slice(0, total)
    spectra = [np.ascontiguousarray(h.numpy().T) for h in heads_of(box, part).chunk(5, dim=1)]
    theirs = dsp.synth(*spectra, part.f0, _GivenNoise(frame_noise(9, 0, 0, len(part), 601)))
    assert np.abs(theirs - box.oneshot(part, 9)).max() <= 1e-5


def test_close_to_the_whole_int8_model(voice: Path, box: VoiceBox, frames: Frames) -> None:
    hibari: Any = importlib.import_module("hibari")
    model = hibari.Hibari(threads=1)
    ids = model.ids(model.phonemize(TEXT)[0])
    noise = _GivenNoise(frame_noise(9, 0, 0, len(frames), 601))
    theirs = model.from_ids(ids, rng=noise)
    assert len(theirs) == len(frames) * 300
    assert np.corrcoef(theirs, box.oneshot(frames, 9))[0, 1] > 0.99


def test_phase_runs_on_across_chunks() -> None:
    f0 = np.linspace(90, 260, 400).astype(np.float32)
    whole, pieces = PulseSource(24000, 300, 1200), PulseSource(24000, 300, 1200)
    whole.push(f0, last=True)
    expected = whole.take(400)
    pieces.push(f0[:5], last=False)
    taken = [pieces.take(2)]
    for at in range(5, 400):
        pieces.push(f0[at : at + 1], last=at == 399)
        taken.append(pieces.take(1))
    taken.append(pieces.take(400 - sum(map(len, taken))))
    np.testing.assert_array_equal(np.concatenate(taken), expected)


def test_noise_depends_on_its_frame_alone() -> None:
    whole = frame_noise(1, 2, 0, 30, 601)
    np.testing.assert_array_equal(frame_noise(1, 2, 7, 5, 601), whole[7:12])
    assert not np.array_equal(frame_noise(1, 3, 7, 5, 601), whole[7:12])
    assert np.std(whole.real) == pytest.approx(1, abs=0.02)
    assert abs(np.mean(whole[1:] * whole[:-1].conj())) < 0.03


def test_chunk_plan() -> None:
    assert plan_chunks(0) == []
    assert plan_chunks(1) == [1]
    assert plan_chunks(60) == [60]
    assert plan_chunks(300) == [49, 20, 40, 80, 80, 31]
    for total in range(500):
        plan = plan_chunks(total)
        assert sum(plan) == total and all(size > 0 for size in plan)
        assert all(size == block_frames(i) for i, size in enumerate(plan[:-1]))
    with pytest.raises(ValueError, match="-1"):
        plan_chunks(-1)


def test_blocks_are_never_longer_than_the_sound_before_them() -> None:
    for index in range(1, 20):
        sound = sum(block_frames(i) for i in range(index)) - LOOKAHEAD_FRAMES
        assert STEP_FRAMES <= block_frames(index) <= sound


def test_chunks_of_quality_are_large_from_the_first_on(box: VoiceBox, frames: Frames) -> None:
    assert plan_chunks(300, "quality") == [109, 80, 80, 31]
    assert sum(plan_chunks(189, "quality")) == 189
    running = VoiceBoxStream(box, 3, "quality")
    assert not len(running.push(frames.slice(0, 108), last=False))
    first = running.push(frames.slice(108, 109), last=False)
    assert len(first) == 80 * 300
    rest = running.push(frames.slice(109, len(frames)), last=True)
    assert np.abs(np.concatenate([first, rest]) - box.oneshot(frames, 3)).max() <= 1e-4


def test_first_planned_chunk_gives_a_quarter_of_a_second(box: VoiceBox, frames: Frames) -> None:
    first = plan_chunks(len(frames))[0]
    assert len(VoiceBoxStream(box, 0).push(frames.slice(0, first), last=False)) == 6000
