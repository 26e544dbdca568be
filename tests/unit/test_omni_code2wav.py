"""Qwen3-Omni's vocoder: streamed sound against transformers' whole module, alone and beside others."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from perf.omni.tiny import make_qwen3_omni
from tests.unit.omni_sound import Audio, assert_no_click, decibels, draw_codes, streamed, together
from tritone.errors import InvalidArgument
from tritone.models.omni.voicebox.batch import Call, alone, compute
from tritone.models.omni.voicebox.box import OmniVoiceBox
from tritone.models.omni.voicebox.loading import load_voicebox
from tritone.models.omni.voicebox.plan import ChunkPlan

GROUPS, CODEBOOK, HOP = 4, 64, 1920
TRIMMED = 555
"""Samples that the module's waveform is short of frames x hop: its transposed convolutions drop 8, 5, 4 and 3 of their
outputs, which would have made 60, 12, 3 and 1 samples each."""
FRAMES = 170  # more than twice the attention's window of 72


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("qwen3-omni")
    return directory, make_qwen3_omni(directory).code2wav


@pytest.fixture(scope="module")
def box(checkpoint: tuple[Path, Any]) -> OmniVoiceBox:
    return load_voicebox(checkpoint[0])


@pytest.fixture(scope="module")
def wide(checkpoint: tuple[Path, Any]) -> OmniVoiceBox:
    """Batches of eight sessions."""
    return load_voicebox(checkpoint[0], slots=8)


@pytest.fixture(scope="module")
def codes() -> np.ndarray[Any, np.dtype[np.int64]]:
    return draw_codes(FRAMES, GROUPS, CODEBOOK, seed=1)


@pytest.fixture(scope="module")
def whole(checkpoint: tuple[Path, Any], codes: Any) -> Audio:
    """What transformers makes of all codes at once."""
    with torch.inference_mode():
        sound: Audio = checkpoint[1](torch.from_numpy(codes.T[None].copy()))[0, 0].numpy()
    return sound


def test_oneshot_is_the_module(box: OmniVoiceBox, codes: Any, whole: Audio) -> None:
    assert whole.std() > 0.01 and len(whole) == FRAMES * HOP - TRIMMED
    sound = box.oneshot(codes)
    assert sound.dtype == np.float32 and len(sound) == FRAMES * HOP
    np.testing.assert_array_equal(sound[:-TRIMMED], whole)
    assert not sound[-TRIMMED:].any()


def random_sizes(seed: int) -> list[int]:
    draw, sizes = random.Random(seed), [0]
    while sum(sizes) < FRAMES:
        sizes.append(draw.choice([0, 1, 2, 5, 30]))
    return sizes


@pytest.mark.parametrize("sizes", [[1] * 20 + [150], [3, 1, 72, 1, 71, 73], [169, 1], random_sizes(1), random_sizes(2)])
def test_any_sizes_of_chunks_give_the_module(box: OmniVoiceBox, codes: Any, whole: Audio, sizes: list[int]) -> None:
    segment, pieces, start = box.segment("latency", 0, 0, None), [], 0
    tensor = box.checked(codes)
    for size in sizes:
        pieces.append(alone(segment.run(tensor[:, start : start + size], last=start + size >= FRAMES), 1))
        start += size
        if start >= FRAMES:
            break
    sound = np.concatenate(pieces)
    assert len(sound) == FRAMES * HOP
    assert decibels(whole, sound[:-TRIMMED]) > 100
    assert not sound[-TRIMMED:].any()


@pytest.mark.parametrize("mode", ["latency", "quality"])
def test_pushes_change_no_bit_and_make_no_click(box: OmniVoiceBox, codes: Any, whole: Audio, mode: str) -> None:
    pieces = streamed(box.stream(mode), codes, [1] * FRAMES)
    sound = np.concatenate(pieces)
    assert decibels(whole, sound[:-TRIMMED]) > 100
    assert_no_click(pieces)
    for sizes in ([FRAMES], [7] * 25, [5, 0, 100, 65]):
        np.testing.assert_array_equal(np.concatenate(streamed(box.stream(mode), codes, sizes)), sound)


@pytest.mark.parametrize(
    ("mode", "frames", "samples"),
    # Four frames are needed for the sound of a little more than three; then chunks of 3, 6, 12, 24, 24, ...
    [("latency", [4, 7, 13, 25, 49, 73], [4, 3, 6, 12, 24, 24]), ("quality", [25, 49, 73], [25, 24, 24])],
)
def test_first_chunk_is_small_and_grows(
    box: OmniVoiceBox, codes: Any, mode: str, frames: list[int], samples: list[int]
) -> None:
    stream, heard = box.stream(mode), {}
    for index in range(80):
        if len(sound := stream.push(codes[index : index + 1], last=False)):
            heard[index + 1] = len(sound)
    assert list(heard) == frames
    assert list(heard.values()) == [samples[0] * HOP - TRIMMED, *(size * HOP for size in samples[1:])]


def test_plans(box: OmniVoiceBox) -> None:
    latency, quality = box.plans["latency"], box.plans["quality"]
    for plan, sizes in ((latency, [4, 3, 6, 12, 24]), (quality, [25, 24]), (ChunkPlan(12, 3, 1, 8), [48, 12, 24, 48, 96])):
        assert [plan.frames(index) for index in range(len(sizes))] == sizes
        assert plan.frames(len(sizes)) == plan.frames(1000) == sizes[-1]
        assert plan.warm_frames() == sum(sizes), "each size once"


@pytest.mark.parametrize("frames", [1, 2, 3, 4, 5, 7, 8])
def test_short_answers(box: OmniVoiceBox, codes: Any, frames: int) -> None:
    for mode in ("latency", "quality"):
        sound = box.stream(mode).push(codes[:frames], last=True)
        assert len(sound) == frames * HOP and decibels(box.oneshot(codes[:frames]), sound) > 100


def test_the_end_may_come_without_codes(box: OmniVoiceBox, codes: Any) -> None:
    stream = box.stream()
    start, rest = stream.push(codes[:5], last=False), stream.push(codes[:0], last=True)
    np.testing.assert_array_equal(np.concatenate([start, rest]), box.stream().push(codes[:5], last=True))
    assert len(stream.push(codes[:0], last=True)) == 0
    again = stream.push(codes[:5], last=True)
    np.testing.assert_array_equal(again, np.concatenate([start, rest]))


@pytest.mark.parametrize("slots", [1, 8])
def test_neighbours_change_no_bit(slots: int, request: pytest.FixtureRequest, codes: Any, whole: Audio) -> None:
    box: OmniVoiceBox = request.getfixturevalue("box" if slots == 1 else "wide")
    assert box.slots == slots
    alone = np.concatenate(streamed(box.stream(), codes[:60], [9] * 7))
    assert decibels(whole[: 50 * HOP], alone[: 50 * HOP]) > 100, "the end is another, for codes follow there"
    # Five equal sessions, and between them three others of other lengths, modes and codes.
    streams = [box.stream("quality" if index % 3 == 1 else "latency") for index in range(8)]
    equal = [index for index in range(8) if index % 3 != 1]
    parts = [codes[:60] if index in equal else codes[index * 10 : 100] for index in range(8)]
    heard: list[list[Audio]] = [[] for _ in streams]
    for start in range(0, 120, 9):
        work = [(s, p[start : start + 9], start + 9 >= len(p)) for s, p in zip(streams, parts, strict=True) if start < len(p)]
        running = [pieces for pieces, part in zip(heard, parts, strict=True) if start < len(part)]
        for pieces, sound in zip(running, together(box, work), strict=True):
            pieces.append(sound)
    for index in equal:
        np.testing.assert_array_equal(np.concatenate(heard[index]), alone)
    other = np.concatenate(heard[1])
    np.testing.assert_array_equal(other, box.stream("quality").push(parts[1], last=True))


def test_a_session_has_the_same_bits_at_any_place_and_time(wide: OmniVoiceBox, codes: Any) -> None:
    """Ten others of all ages share its batches; each time it stands elsewhere."""
    alone = np.concatenate(streamed(wide.stream(), codes[:73], [4, 3, 6, 12, 24, 24]))
    draw, heard = random.Random(1), []
    others = [wide.stream() for _ in range(10)]
    for stream in others[:5]:
        stream.push(codes[:49], last=False)
    stream, start = wide.stream(), 0
    for size in (4, 3, 6, 12, 24, 24):
        work = [(other, codes[start : start + 24], False) for other in others]
        place = draw.randrange(len(work))
        work.insert(place, (stream, codes[start : start + size], start + size == 73))
        heard.append(together(wide, work)[place])
        start += size
    np.testing.assert_array_equal(np.concatenate(heard), alone)


def test_a_batch_is_one_pass(wide: OmniVoiceBox, codes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[tuple[int, ...]] = []
    decode = wide.decode  # type: ignore[attr-defined]

    def counted(codes: torch.Tensor, *rest: torch.Tensor) -> Any:
        passes.append(tuple(codes.shape))
        return decode(codes, *rest)

    monkeypatch.setattr(wide, "decode", counted)
    work = [(wide.stream(), codes[index : index + 7], False) for index in range(12)]
    assert [len(sound) for sound in together(wide, work)] == [7 * HOP - TRIMMED] * 12
    assert passes == [(8, GROUPS, 4), (8, GROUPS, 4), (8, GROUPS, 3), (8, GROUPS, 3)]


def test_only_calls_of_a_kind_share_a_batch(wide: OmniVoiceBox) -> None:
    def double(x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x * 2,)

    one, same, longer = (Call(double, (torch.ones(size),)) for size in (3, 3, 4))
    assert one.kind == same.kind != longer.kind
    assert [made[0].tolist() for made in compute([one, same], 4)] == [[2, 2, 2], [2, 2, 2]]
    with pytest.raises(AssertionError):
        compute([one, longer], 4)


def test_a_b_a_gives_a_twice(box: OmniVoiceBox, codes: Any) -> None:
    first, _, again = (box.stream().push(part, last=True) for part in (codes[:40], codes[40:75], codes[:40]))
    np.testing.assert_array_equal(first, again)


def test_bad_codes_are_refused_and_change_nothing(box: OmniVoiceBox, codes: Any) -> None:
    stream, healthy = box.stream(), box.stream()
    head = stream.push(codes[:10], last=False)
    np.testing.assert_array_equal(head, healthy.push(codes[:10], last=False))
    high, low = codes[:3].copy(), codes[:3].copy()
    high[2, 1], low[0, 3] = CODEBOOK, -1
    for wrong, message in (
        (codes[:3].T, "codes"),
        (codes[:3, :2], r"shape \[frames, 4\]"),
        (codes[:3].astype(np.float32), "integers"),
        (high, r"codes\[2, 1\].*64.*0 to 63"),
        (low, r"codes\[0, 3\].*-1"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            stream.push(wrong, last=True)
    np.testing.assert_array_equal(stream.push(codes[10:30], last=True), healthy.push(codes[10:30], last=True))
    with pytest.raises(InvalidArgument, match=r"mode.*fast.*latency, quality"):
        box.stream("fast")
    with pytest.raises(InvalidArgument, match=r"voice.*Chelsie"):
        box.stream(voice="Chelsie")


def test_only_the_vocoder_is_read(checkpoint: tuple[Path, Any], box: OmniVoiceBox, codes: Any, tmp_path: Path) -> None:
    tensors = load_file(checkpoint[0] / "model.safetensors")
    part = {name: tensor.bfloat16() for name, tensor in tensors.items() if name.startswith("code2wav.")}
    assert 0 < len(part) < len(tensors)
    (tmp_path / "config.json").write_text((checkpoint[0] / "config.json").read_text())
    save_file(part, tmp_path / "model.safetensors")
    seen: list[tuple[int, int]] = []
    alone = load_voicebox(tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == sum(tensor.nbytes for tensor in part.values())
    sound = alone.oneshot(codes[:20])
    assert sound.dtype == np.float32 and 20 < decibels(box.oneshot(codes[:20]), sound) < 80, "bfloat16 weights, float32 sums"

    missing = dict(part)
    del missing["code2wav.decoder.0.conv.weight"]
    save_file(missing, tmp_path / "model.safetensors")
    with pytest.raises(InvalidArgument, match=r"code2wav\.decoder\.0\.conv\.weight.*missing"):
        load_voicebox(tmp_path)
    save_file(part | {"code2wav.stranger": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(InvalidArgument, match=r"code2wav\.stranger"):
        load_voicebox(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", r"config\.json"),
        ("[]", r"config\.json"),
        ('{"model_type": "llama"}', r"model_type.*llama.*qwen3_omni_moe.*qwen2_5_omni"),
        ('{"model_type": "qwen3_omni_moe", "code2wav_config": {"hidden_size": "wide"}}', r"config\.json.*hidden_size.*wide"),
    ],
)
def test_other_configurations_are_refused(tmp_path: Path, config: str, message: str) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(InvalidArgument, match=message):
        load_voicebox(tmp_path)
