"""What a configuration means is asked of transformers once, and is the same from memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.omni_prompts import FAMILIES
from tests.omni_prompts import checkpoint as omni_checkpoint
from tests.unit.test_decoder import MODELS, make
from tritone.cache import ENVIRONMENT
from tritone.errors import InvalidArgument
from tritone.models.decoder import DecoderConfig, decoder_config


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    directory = tmp_path / "cache"
    monkeypatch.setenv(ENVIRONMENT, str(directory))
    yield directory
    assert not list(directory.rglob("*.new"))


@pytest.fixture
def never_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> DecoderConfig:
        raise AssertionError("transformers was asked")

    monkeypatch.setattr(DecoderConfig, "from_directory", refuse)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("omni")


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_decoder_is_the_same_from_memory(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    make(name, tmp_path / "checkpoint")
    wanted = DecoderConfig.from_directory(tmp_path / "checkpoint")
    assert decoder_config(tmp_path / "checkpoint") == wanted
    request.getfixturevalue("never_asked")
    assert decoder_config(tmp_path / "checkpoint") == wanted


@pytest.mark.parametrize("part", [None, "thinker", "talker"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_part_of_an_omni_checkpoint(family: str, part: str, directory: Path, request: pytest.FixtureRequest) -> None:
    path = omni_checkpoint(family, directory)[2]
    wanted = DecoderConfig.from_directory(path, part)
    assert decoder_config(path, part) == wanted
    request.getfixturevalue("never_asked")
    assert decoder_config(path, part) == wanted


def test_another_content_is_another_configuration(tmp_path: Path) -> None:
    make("llama", tmp_path)
    before = decoder_config(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rms_norm_eps": 1e-3}))
    assert decoder_config(tmp_path).rms_norm_eps == 1e-3 != before.rms_norm_eps


def test_a_spoilt_memory_is_made_again(tmp_path: Path, cache: Path) -> None:
    make("llama", tmp_path)
    wanted = decoder_config(tmp_path)
    (kept,) = cache.glob("configs/*.json")
    whole = kept.read_bytes()
    for spoilt in (b"", b"{}", whole[:-9], b"\xff"):
        kept.write_bytes(spoilt)
        assert decoder_config(tmp_path) == wanted
        assert kept.read_bytes() == whole


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(tmp_path: Path, cache: Path) -> None:
    make("llama", tmp_path)
    cache.write_text("a file where the directory belongs")
    assert decoder_config(tmp_path) == DecoderConfig.from_directory(tmp_path)


def test_errors_are_not_remembered(tmp_path: Path, cache: Path) -> None:
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="a readable JSON file"):
            decoder_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="model_type: 'gpt2'"):
            decoder_config(tmp_path)
    assert not cache.exists()
