"""What was measured already: a file for each precision and task, good for as long as everything that decided it is the same."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from quantization.files import write_json
from tritone.evaluation.tasks import Raw


class Store:
    """Results in ``directory``; ``decided_by`` is what they depend on, as JSON."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def get(self, name: str, task: str, decided_by: dict[str, Any]) -> tuple[Raw, float] | None:
        """What the model did and the seconds it took, if it was kept and is still good."""
        path = self._path(name, task)
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if found["key"] == digest(decided_by):
                return found["raw"], found["seconds"]
        except (OSError, ValueError, KeyError, TypeError):
            pass  # missing, or cut off: it is measured again
        return None

    def put(self, name: str, task: str, decided_by: dict[str, Any], raw: Raw, seconds: float) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        write_json(self._path(name, task), {"key": digest(decided_by), "seconds": seconds, "raw": raw})

    def clear(self) -> None:
        for path in self._directory.glob("*.json"):
            path.unlink()

    def _path(self, name: str, task: str) -> Path:
        plain = re.sub(r"[^A-Za-z0-9.+-]+", "_", name)[-80:]
        return self._directory / f"{plain}.{digest(name)[:8]}.{task}.json"


def digest(content: Any) -> str:
    """SHA-256 of JSON."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def checkpoint_key(checkpoint: Path) -> list[Any]:
    """Changes when the files of a checkpoint do."""
    names = ("config.json", "tokenizer.json", "vocab.json", "merges.txt")
    files = sorted([*checkpoint.glob("*.safetensors"), *(checkpoint / name for name in names)])
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files if path.is_file()]
