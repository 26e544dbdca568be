"""A server's own model repositories: copies that can be touched, and what ensembles consist of."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tritone.errors import TritoneError
from tritone.supervisor.installation import PROJECT
from tritone.supervisor.repositories import Repositories, check_repositories

SOURCES = (PROJECT / "model_repository", PROJECT / "ensembles")


def test_a_touch_is_of_one_model_and_of_the_copy(tmp_path: Path) -> None:
    copies = Repositories(SOURCES, tmp_path / "models")
    kept = {path.parts[-3]: path for folder in copies.paths for path in folder.glob("*/1/.keep")}
    for path in kept.values():
        os.utime(path, (1, 1))
    before = (SOURCES[0] / "decode" / "1" / ".keep").stat().st_mtime_ns
    copies.touch("decode")
    assert [name for name, path in kept.items() if path.stat().st_mtime > 1] == ["decode"]
    assert (SOURCES[0] / "decode" / "1" / ".keep").stat().st_mtime_ns == before


def test_the_steps_of_the_ensembles(tmp_path: Path) -> None:
    steps = Repositories(SOURCES, tmp_path / "models").steps()
    first = ("preprocess", "prefill", "integrity", "decode")
    assert steps == {
        "chat": (*first, "postprocess"),
        "omni": (*first, "talker", "voicebox", "postprocess"),
        "speech": ("preprocess", "talker", "voicebox", "postprocess"),
    }


def test_a_missing_repository_is_named(tmp_path: Path) -> None:
    with pytest.raises(TritoneError, match="absent is no directory"):
        check_repositories([*SOURCES, tmp_path / "absent"])
