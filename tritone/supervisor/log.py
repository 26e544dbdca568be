"""Reads a tritonserver log: which models have loaded, and why a start failed."""

from __future__ import annotations

import re
from pathlib import Path

_LOADING = re.compile(r'"loading: ([^":]+):\d+"')
_LOADED = re.compile(r"successfully loaded '([^']+)'")
_FAILED = re.compile(r"\"failed to load '([^']+)' version \d+: (.*)\"$")
_CREATING = re.compile(r"^error: (?:creating server: )?(.*)$")
_STATUS = re.compile(r"^(?:Internal|Invalid argument|Not found|Unavailable|Unsupported|Unknown|Already exists)(?: - |: )")
_OURS = re.compile(r"^\w+: (?=[A-Z_]+: )")
_FRAME = re.compile(r"At:\n\s*(\S+)\((\d+)\)")
_TABLE = ("|", "+-")
TAIL_LINES = 5


def loaded_models(text: str) -> tuple[int, int]:
    """(models loaded, models that have begun to load)."""
    loaded = set(_LOADED.findall(text))
    return len(loaded), len(loaded | set(_LOADING.findall(text)))


def failure_reason(path: Path) -> str:
    """Why the server did not start, in as few lines as possible: the error of each model that failed, else Triton's own
    last error, else the end of the log."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return "it left no log"
    failed = {}
    for line in lines:
        match = _FAILED.search(line)
        if match:
            failed[match.group(1)] = _readable(match.group(2).replace("\\n", "\n").replace('\\"', '"'))
    if failed:
        return "\n".join(f"model {name!r}: {reason}" for name, reason in failed.items())
    for line in reversed(lines):
        match = _CREATING.match(line)
        if match:
            return _readable(match.group(1))
    told = [line for line in lines if line.strip() and not line.startswith(_TABLE)]
    return "\n".join(told[-TAIL_LINES:]) or "it wrote nothing into its log"


def _readable(reason: str) -> str:
    """Without Triton's status words and with at most one line of a Python trace."""
    message, _, _ = reason.partition("\n\nAt:")
    message = _STATUS.sub("", message.strip())
    ours = _OURS.sub("", message)
    if ours != message:
        # One of our own errors says field, value and what is allowed: where it was raised adds nothing.
        return ours
    frame = _FRAME.search(reason)
    return f"{message} ({frame.group(1)}, line {frame.group(2)})" if frame else message
