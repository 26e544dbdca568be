"""Qwen2.5-Omni's vocoder: windows against the whole, noise by place, voices."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from perf.omni.tiny import make_qwen25_omni
from tests.unit.omni_sound import Audio, assert_no_click, decibels, draw_codes, streamed, together
from tritone.errors import InvalidArgument
from tritone.models.omni.voicebox.loading import load_voicebox
from tritone.models.omni.voicebox.speakers import read_speakers
from tritone.models.omni.voicebox.token2wav import Token2Wav

HOP, BLOCK = 480, 12  # samples a code; codes a block of attention
FRAMES = 170
BOUND = {"latency": 80.0, "quality": 100.0}  # decibels of a stream against the whole


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("qwen25-omni")
    return directory, make_qwen25_omni(directory).token2wav


@pytest.fixture(scope="module")
def box(checkpoint: tuple[Path, Any]) -> Token2Wav:
    made = load_voicebox(checkpoint[0])
    assert isinstance(made, Token2Wav)
    return made


@pytest.fixture(scope="module")
def codes() -> np.ndarray[Any, np.dtype[np.int64]]:
    return draw_codes(FRAMES, 1, 256, seed=1)


@pytest.fixture(scope="module")
def whole(box: Token2Wav, codes: Any) -> Audio:
    return box.oneshot(codes, seed=7)


@pytest.fixture(scope="module", params=["latency", "quality"])
def pieces(request: pytest.FixtureRequest, box: Token2Wav, codes: Any) -> tuple[str, list[Audio]]:
    return request.param, streamed(box.stream(request.param, seed=7), codes, [1] * FRAMES)


def test_oneshot_is_the_module(
    box: Token2Wav, checkpoint: tuple[Path, Any], codes: Any, whole: Audio, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = box.noise(7, 0, 0, 2 * FRAMES)
    assert abs(noise.mean()) < 0.02 and abs(noise.std() - 1) < 0.02
    voice = torch.load(checkpoint[0] / "spk_dict.pt", weights_only=True)["Chelsie"]
    monkeypatch.setattr(torch, "randn", lambda shape, **_: noise.reshape(shape))
    module = checkpoint[1](torch.from_numpy(codes.T.copy()), voice["cond"], voice["ref_mel"]).detach().numpy()
    assert module.std() > 0.02 and len(module) == len(whole) == FRAMES * HOP
    assert whole.dtype == np.float32 and decibels(module, whole) > 100


def test_stream_is_the_whole_within_the_bound(pieces: tuple[str, list[Audio]], whole: Audio) -> None:
    mode, parts = pieces
    sound = np.concatenate(parts)
    assert len(sound) == len(whole)
    assert decibels(whole, sound) > BOUND[mode]
    assert_no_click(parts)


def test_how_codes_were_pushed_changes_no_bit(box: Token2Wav, codes: Any, pieces: tuple[str, list[Audio]]) -> None:
    mode, parts = pieces
    again = streamed(box.stream(mode, seed=7), codes, [5, 0, 47, 20, 1])
    np.testing.assert_array_equal(np.concatenate(again), np.concatenate(parts))


def test_first_chunk_is_small_and_grows(pieces: tuple[str, list[Audio]]) -> None:
    mode, parts = pieces
    heard = {index + 1: len(part) // HOP for index, part in enumerate(parts) if len(part)}
    # Sound lags by 24 or 48 frames of mel that the network looks ahead and 34 that BigVGAN does: 29 or 41 codes.
    expected = {
        "latency": {48: 19, 60: 12, 84: 24, 132: 48, 170: 67},
        "quality": {144: 103, 170: 67},
    }
    assert heard == expected[mode]


@pytest.mark.parametrize("frames", [1, 12, 13, 48])
def test_short_answers(box: Token2Wav, codes: Any, frames: int) -> None:
    sound = box.stream(seed=7).push(codes[:frames], last=True)
    assert len(sound) == frames * HOP and decibels(box.oneshot(codes[:frames], seed=7), sound) > BOUND["latency"]


def test_noise_depends_on_seed_segment_and_place_only(box: Token2Wav) -> None:
    noise = box.noise(3, 1, 0, 60)
    assert noise.shape == (60, 80) and noise.dtype == torch.float32
    assert torch.equal(noise[20:50], box.noise(3, 1, 20, 30))
    for other in (box.noise(4, 1, 0, 60), box.noise(3, 2, 0, 60), box.noise(3, 1, 1, 60)):
        assert not torch.isclose(noise, other).all(1).any()


def test_seeds_and_segments(box: Token2Wav, codes: Any) -> None:
    part = codes[:15]
    stream = box.stream(seed=7)
    first, second = stream.push(part, last=True), stream.push(part, last=True)
    np.testing.assert_array_equal(first, box.stream(seed=7).push(part, last=True))
    for other in (second, box.stream(seed=8).push(part, last=True)):
        assert len(other) == len(first) and decibels(first, other) < 20, "noise of its own"


@pytest.mark.parametrize("slots", [1, 8])
def test_neighbours_change_no_bit(
    slots: int, checkpoint: tuple[Path, Any], box: Token2Wav, whole: Audio, codes: Any
) -> None:
    if slots > 1:
        made = load_voicebox(checkpoint[0], slots=slots)
        assert isinstance(made, Token2Wav)
        box = made
    alone = np.concatenate(streamed(box.stream(seed=7), codes[:55], [50]))
    assert decibels(box.oneshot(codes[:55], seed=7), alone) > BOUND["latency"]
    other, third = box.stream("quality", seed=8), box.stream(seed=9, voice="Ethan")
    streams = [box.stream(seed=7), other, box.stream(seed=7), third, box.stream(seed=7)]
    heads = together(box, [(stream, codes[60:110] if stream in (other, third) else codes[:50], False) for stream in streams])
    rests = together(box, [(stream, codes[50:55], True) for stream in streams])
    for index in (0, 2, 4):
        np.testing.assert_array_equal(np.concatenate([heads[index], rests[index]]), alone)
    np.testing.assert_array_equal(box.stream(seed=7).push(codes[:55], last=True), alone)
    ethan = box.stream(seed=9, voice="Ethan").push(np.concatenate([codes[60:110], codes[50:55]]), last=True)
    np.testing.assert_array_equal(np.concatenate([heads[3], rests[3]]), ethan)


def test_voices(box: Token2Wav, codes: Any) -> None:
    assert box.voices == ("Chelsie", "Ethan")
    first, same, other = (box.oneshot(codes[:10], voice=name) for name in (None, "Chelsie", "Ethan"))
    np.testing.assert_array_equal(first, same)
    assert decibels(first, other) < 40
    streams = [box.stream(voice=name).push(codes[:10], last=True) for name in (None, "Ethan")]
    assert decibels(first, streams[0]) > 80 and decibels(other, streams[1]) > 80
    with pytest.raises(InvalidArgument, match=r"voice.*Alice.*Chelsie, Ethan"):
        box.stream(voice="Alice")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda voices: voices.clear(), "at least one voice"),
        (lambda voices: voices["Ethan"].pop("cond"), r"Ethan\.cond"),
        (lambda voices: voices["Ethan"].update(ref_mel=torch.zeros(1, 60, 79)), r"Ethan\.ref_mel.*79.*\[1, T, 80\]"),
        (lambda voices: voices["Chelsie"].update(cond=torch.full((1, 16), torch.nan)), r"Chelsie\.cond.*finite"),
    ],
)
def test_wrong_voices_are_refused(
    checkpoint: tuple[Path, Any], tmp_path: Path, change: Callable[[Any], Any], message: str
) -> None:
    voices = torch.load(checkpoint[0] / "spk_dict.pt", weights_only=True)
    change(voices)
    torch.save(voices, tmp_path / "spk_dict.pt")
    with pytest.raises(InvalidArgument, match=message):
        read_speakers(tmp_path, 16, 80)


def test_default_voice_and_files_that_are_none(checkpoint: tuple[Path, Any], tmp_path: Path) -> None:
    voices = torch.load(checkpoint[0] / "spk_dict.pt", weights_only=True)
    torch.save({"Ethan": voices["Ethan"], "Chelsie": voices["Chelsie"]}, tmp_path / "spk_dict.pt")
    assert list(read_speakers(tmp_path, 16, 80)) == ["Chelsie", "Ethan"]
    torch.save({"Zoe": voices["Ethan"], "Ethan": voices["Ethan"]}, tmp_path / "spk_dict.pt")
    assert list(read_speakers(tmp_path, 16, 80)) == ["Zoe", "Ethan"]
    for content in (b"", b"no archive", b"PK\x03\x04"):
        (tmp_path / "spk_dict.pt").write_bytes(content)
        with pytest.raises(InvalidArgument, match=r"spk_dict\.pt"):
            read_speakers(tmp_path, 16, 80)
    with pytest.raises(InvalidArgument, match=r"spk_dict\.pt"):
        read_speakers(tmp_path / "nowhere", 16, 80)


def test_bigvgan_sees_as_far_as_its_reach(box: Token2Wav) -> None:
    assert box.reach == 34
    middle = 40
    mel = torch.randn(1, 80, 2 * middle + 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mel.requires_grad_(True)
    # In float64 no derivative is so small that it vanishes.
    sound = deepcopy(box.bigvgan).double()(mel).reshape(-1, box.mel_hop)
    sound[middle].sum().backward()
    assert mel.grad is not None
    seen = mel.grad[0].abs().amax(0).nonzero().flatten() - middle
    assert max(-seen[0], seen[-1]) == box.reach
