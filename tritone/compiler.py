"""The C compiler of this machine, and what it has made."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from tritone.cache import default_cache, made_whole

LIBRARY = "library.so"


class BuildError(RuntimeError):
    """Something could not be compiled; the message says what to install or shows the compiler's own words."""


def compiled(name: str, build: Callable[[Path], None]) -> Path:
    """The shared library ``name``, a name made of everything that goes into it; ``build`` makes it as the file it is given,
    once: a second process that wants it waits. Raises what ``build`` raises, and ``BuildError`` where the cache cannot be
    written."""
    folder = default_cache() / name
    try:
        if not folder.is_dir():
            with made_whole(folder) as made:
                if made is not None:
                    build(made / LIBRARY)
    except OSError as error:
        raise BuildError(f"{folder.parent}: {error}; set TRITONE_CACHE to a folder that can be written") from error
    return folder / LIBRARY


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
