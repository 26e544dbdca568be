"""Finds installed packages whose files are wanted and whose code is not."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def package_directory(package: str) -> Path | None:
    """Where an installed package lies, without importing it; None when it is not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))
