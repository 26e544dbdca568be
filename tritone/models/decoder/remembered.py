"""What a ``config.json`` was found to mean, kept in the cache: asking transformers takes seconds, at every start of a stage."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from tritone.cache import default_cache
from tritone.models.decoder.config import DecoderConfig

_READERS = ("config.py", "handed.py", "parts.py", "rope.py")
"""The files beside this one that decide what is found."""


def decoder_config(path: str | Path, part: str | None = None) -> DecoderConfig:
    """As ``DecoderConfig.from_directory``, which is asked once for each content of the file."""
    try:
        declared = (Path(path) / "config.json").read_bytes()
    except OSError:
        return DecoderConfig.from_directory(path, part)  # whose error says what is wrong
    kept = default_cache() / "configs" / f"{_key(declared, part)}.json"
    kind = _kind()
    try:
        return kind.validate_json(kept.read_bytes())
    except (OSError, ValidationError):
        found = DecoderConfig.from_directory(path, part)
    _keep(kept, kind.dump_json(found))
    return found


@cache
def _kind() -> TypeAdapter[DecoderConfig]:
    return TypeAdapter(DecoderConfig)


def _key(declared: bytes, part: str | None) -> str:
    here = Path(__file__).parent
    readers = [(here / name).read_bytes() for name in _READERS]
    parts = [declared, repr(part).encode(), version("transformers").encode(), *readers]
    return hashlib.sha256(b"".join(hashlib.sha256(one).digest() for one in parts)).hexdigest()[:32]


def _keep(path: Path, data: bytes) -> None:
    """Whole or not at all; a cache that cannot be written to is only slower."""
    temporary = path.with_suffix(f".{os.getpid()}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
