"""The C compiler of this machine, and where what it makes is kept."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path


class BuildError(RuntimeError):
    """Something could not be compiled; the message says what to install or shows the compiler's own words."""


def cache_folder() -> Path:
    """``$TRITONE_CACHE``, or ``tritone`` under the user's cache folder."""
    chosen = os.environ.get("TRITONE_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(chosen or f"{base}/tritone").expanduser()


def find_compiler() -> str:
    """``$CC`` if set, else the first of cc, gcc, clang on the path. Raises ``BuildError`` without one."""
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and shutil.which(shlex.split(name)[0]):
            return name
    raise BuildError("no C compiler (cc, gcc or clang) found; install one, for example: apt-get install gcc libc6-dev")


def compile_with(command: Sequence[str]) -> None:
    """Runs one command of the compiler; raises ``BuildError`` with its last words."""
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=300)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{shlex.join(command)}: {error}") from error
    if done.returncode:
        raise BuildError(f"{shlex.join(command)} failed:\n{done.stderr[-2000:]}")
