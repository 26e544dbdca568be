"""Names to directories."""

from __future__ import annotations

import re
from pathlib import Path

from tritone.checkpoints.hub import cached_checkpoint, fetch_checkpoint
from tritone.checkpoints.progress import Progress, silent
from tritone.checkpoints.smollm2 import prepare_smollm2
from tritone.errors import TritoneError, bad
from tritone.models.talker.config import HEART

DEMO_CHECKPOINT = "demo:smollm2-135m-instruct"
DEMO_VOICE = "demo:hibari"
DEMO_TALKER = "demo:heart"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve_checkpoint(name: str, cache: Path, progress: Progress | None = None) -> Path:
    """The directory of a checkpoint in Hugging Face form (config.json, safetensors, tokenizer.json).

    ``name`` is such a directory, ``demo:smollm2-135m-instruct`` (prepared once in ``cache``), or a hub name such as
    ``Qwen/Qwen2.5-0.5B-Instruct``. Raises TritoneError naming the checkpoint and what is wrong.
    """
    report = progress or silent
    if name.startswith("demo:"):
        if name != DEMO_CHECKPOINT:
            raise bad("checkpoint", name, DEMO_CHECKPOINT)
        return prepare_smollm2(_demo_checkpoint(cache), report)
    path = Path(name).expanduser()
    if name and path.is_dir():
        return _checked(path)
    if _HUB_NAME.fullmatch(name):
        return _checked(fetch_checkpoint(name, report))
    raise bad("checkpoint", name, f"a directory, a hub name such as Qwen/Qwen2.5-0.5B-Instruct, or {DEMO_CHECKPOINT}")


def find_checkpoint(name: str, cache: Path) -> Path:
    """Where a checkpoint lies already, with whatever files it has; nothing is made or fetched. ``name`` as above."""
    path = _demo_checkpoint(cache) if name == DEMO_CHECKPOINT else Path(name).expanduser()
    if name and path.is_dir():
        return path
    found = cached_checkpoint(name) if _HUB_NAME.fullmatch(name) else None
    if found is None:
        raise bad("checkpoint", name, "a directory with config.json, or a name that `tritone prepare` has made or fetched")
    return found


def resolve_voice(name: str, cache: Path, progress: Progress | None = None) -> Path:
    """The directory of a voice (with voice.json): an existing one, ``demo:hibari`` (made once in ``cache``), or ``demo:heart``,
    the trained Talker that comes along."""
    report = progress or silent
    if name == DEMO_TALKER:
        return HEART
    if name == DEMO_VOICE:
        # Only here: it needs onnx, which nothing but the preparation does.
        from tritone.models.voice.prepare import VoicePackageError, prepare_voice

        try:
            return prepare_voice(_demo_voice(cache), report)
        except VoicePackageError as error:
            raise TritoneError(f"voice {name}: {error}", "NOT_FOUND") from None
    path = Path(name).expanduser()
    if not name or not (path / "voice.json").is_file():
        raise bad("voice", name, f"a directory with voice.json, {DEMO_VOICE}, or {DEMO_TALKER}")
    return path


def is_prepared(name: str, cache: Path) -> bool:
    """Whether a start with this checkpoint or voice name has nothing left to make (a hub name: False)."""
    if name == DEMO_CHECKPOINT:
        return _demo_checkpoint(cache).is_dir()
    if name in (DEMO_VOICE, DEMO_TALKER):  # the Talker needs the other's VoiceBox
        return (_demo_voice(cache) / "voice.json").is_file()
    return bool(name) and Path(name).expanduser().is_dir()


def _demo_checkpoint(cache: Path) -> Path:
    return cache / "checkpoints" / "smollm2-135m-instruct"


def _demo_voice(cache: Path) -> Path:
    return cache / "voices" / "hibari"


def _checked(path: Path) -> Path:
    """Of a tokenizer there is one file or, in some published checkpoints, the two that it was made of."""
    tokenizer = [("tokenizer.json",), ("vocab.json", "merges.txt")]
    missing = [] if (path / "config.json").is_file() else ["config.json"]
    if not any(all((path / name).is_file() for name in names) for names in tokenizer):
        missing.append("tokenizer.json (or vocab.json and merges.txt)")
    if not any(path.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        raise TritoneError(
            f"checkpoint: {str(path)!r} lacks {', '.join(missing)}; allowed: a Hugging Face directory with config.json, "
            "tokenizer.json and safetensors weights",
            "INVALID_ARGUMENT",
        )
    return path
