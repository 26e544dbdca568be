"""Preparing the hibari voice from the installed hibari-tts package."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tritone.models.voice import prepare
from tritone.models.voice.config import CONFIG_FILE, DECODER_FILE, FRONT_FILE, VoiceConfig


@pytest.fixture(scope="module")
def voice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare.prepare_voice(tmp_path_factory.mktemp("voices") / "heart")


def test_directory_is_complete(voice: Path) -> None:
    assert {p.name for p in voice.iterdir()} == {CONFIG_FILE, FRONT_FILE, DECODER_FILE, "LICENSE", "NOTICE"}
    assert "Apache License" in (voice / "LICENSE").read_text()
    assert "Kokoro" in (voice / "NOTICE").read_text()
    assert all(p.stat().st_mode & 0o044 == 0o044 for p in voice.iterdir())
    config = VoiceConfig.load(voice)
    assert (config.sample_rate, config.hop, config.n_fft, config.frame_rate) == (24000, 300, 1200, 80)
    assert (config.feature_width, config.receptive_field) == (130, 27)
    assert config.layer_norm_epsilon == pytest.approx(1e-5)
    assert config.source.sha256 == prepare.MODEL_SHA256
    assert not [p for p in voice.parent.iterdir() if p != voice], "a temporary directory was left behind"


def test_second_call_writes_nothing(voice: Path) -> None:
    before = {p.name: p.stat().st_mtime_ns for p in voice.iterdir()}
    prepare.prepare_voice(voice)
    assert {p.name: p.stat().st_mtime_ns for p in voice.iterdir()} == before


def test_damaged_voice_is_written_again(tmp_path: Path) -> None:
    directory = prepare.prepare_voice(tmp_path / "heart")
    (directory / DECODER_FILE).write_bytes(b"cut short")
    assert not prepare.is_prepared(directory)
    lines: list[str] = []
    prepare.prepare_voice(directory, lines.append)
    assert prepare.is_prepared(directory)
    assert any(DECODER_FILE in line for line in lines)
    assert [p.name for p in tmp_path.iterdir()] == ["heart"]


def test_other_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "MODEL_SHA256", "0" * 64)
    with pytest.raises(prepare.VoicePackageError, match=r"sha256 5f70741d.*knows 0000"):
        prepare.prepare_voice(tmp_path / "heart")
    assert not list(tmp_path.iterdir())


def test_foreign_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("two years of work")
    with pytest.raises(FileExistsError, match="holds no voice"):
        prepare.prepare_voice(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "two years of work"


@pytest.mark.parametrize("text", ["{", "[]", json.dumps({"format": 99}), json.dumps({"format": 1})])
def test_bad_config_names_the_file(tmp_path: Path, text: str) -> None:
    (tmp_path / CONFIG_FILE).write_text(text)
    with pytest.raises(ValueError, match=CONFIG_FILE):
        VoiceConfig.load(tmp_path)


def test_missing_voice_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="prepare the voice"):
        VoiceConfig.load(tmp_path)


def test_front_is_the_first_half_of_the_model(voice: Path) -> None:
    import onnxruntime

    def session(path: Path) -> onnxruntime.InferenceSession:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    feed = {"ids": np.array([[0, *range(40, 90), 0]], np.int64), "speed": np.ones(1, np.float32)}
    features, f0 = session(voice / FRONT_FILE).run(["features", "f0"], feed)
    whole_f0 = session(prepare._find_model()).run(["f0"], feed)[0]
    assert features.shape == (1, 130, whole_f0.shape[1])
    # Hz; the int8 activations are rounded differently when the runtime fuses another graph
    np.testing.assert_allclose(f0, whole_f0, atol=2.0)


def test_talker_needs_no_torch_and_no_onnx(voice: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from tritone.models.voice.talker import HibariTalker; "
        f"assert len(HibariTalker(Path({str(voice)!r})).speak('Hello.')) > 20; "
        "print([m for m in ('torch', 'onnx') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.stdout.strip() == "[]", run.stderr
