"""Omni checkpoints through all stages: text, audio and images in; the tokens, codes and sound of transformers out."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from tests.omni_cascade import WORDS, Stages, expected, inputs, message, written
from tests.omni_processor import reference_processor
from tests.talker_reference import SPEAKER, Reference
from tests.unit.media_files import noise, pixels
from tritone.cache import default_cache
from tritone.models.omni.voicebox.loading import load_voicebox
from tritone.supervisor import resolve_deployment

ASKED: dict[str, list[Any]] = {
    "text": ["Hello, how are you today?"],
    "audio": ["Describe this sound in one sentence please.", noise(16_000)],
    "image": [pixels(100, 64), "Describe"],
    "both": ["one", noise(9000), pixels(64, 64), "two", noise(20_000, 1)],
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("omni")


@functools.cache
def reference(family: str, root: Path) -> Reference:
    return Reference(family, root / family)


@pytest.fixture(scope="module", params=["qwen3", "qwen2.5"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def stages(family: str, root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stages]:
    deployment = resolve_deployment(written(reference(family, root).directory), default_cache())
    made = Stages(deployment, tmp_path_factory.mktemp("run"))
    yield made
    made.stop()


@functools.cache
def wanted(family: str, root: Path) -> dict[str, tuple[list[int], Any]]:
    made = reference(family, root)
    cls = transformers.Qwen3OmniMoeProcessor if family == "qwen3" else transformers.Qwen2_5OmniProcessor
    processor = reference_processor(cls, made.directory)
    return {name: expected(made, inputs(processor, content)) for name, content in ASKED.items()}


def test_answers_and_speech_are_those_of_transformers(family: str, root: Path, stages: Stages) -> None:
    """All at once: prompts of different lengths in one batch, spoken while the text is made."""
    asked = {
        name: stages.ask(message(content), temperature=0.0, max_tokens=WORDS, ignore_eos=True, logprobs=0, voice=SPEAKER.lower()
                         if family == "qwen3" else SPEAKER)
        for name, content in ASKED.items()
    }
    box = load_voicebox(reference(family, root).directory)
    for name, (session, client) in asked.items():
        client.wait(30)
        tokens, codes = wanted(family, root)[name]
        assert client.tokens() == tokens, name
        spoken = np.concatenate(stages.codes[session])
        assert spoken.tolist() == codes.tolist(), name
        sound, whole = client.audio(), box.oneshot(codes.numpy(), seed=0)
        assert len(sound) == len(codes) * box.hop
        if family == "qwen3":  # nothing random in it
            assert 10 * np.log10((whole**2).sum() / ((sound - whole) ** 2).sum()) > 60
        end = client.infos()[-1]
        assert end["finish_reason"] == "length"
        assert end["usage"]["completion_tokens"] == WORDS
        assert end["usage"]["audio_seconds"] == len(codes) * box.hop / 24_000
        assert [end["usage"][f"prompt_{kind}_tokens"] > 0 for kind in ("audio", "image")] == [
            name in ("audio", "both"), name in ("image", "both")
        ]
