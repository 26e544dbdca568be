"""The guard: a small library inside tritonserver that ends the requests of a stage whose process has died.

Triton itself would leave them, and every ensemble request they are part of, without an end (see ``csrc/guard.c``).
"""

from __future__ import annotations

import hashlib
import itertools
import os
import platform
import select
import shlex
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from tritone.compiler import compile_with, compiled, find_compiler
from tritone.errors import TritoneError

SOURCES = Path(__file__).parent / "csrc"
FLAGS = ("-std=gnu11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden")
PIPE = "guard.pipe"
LOAD_SECONDS = 300.0
POLL_SECONDS = 0.5


def build_guard() -> Path:
    """The compiled library, made at first use. Raises :class:`tritone.compiler.BuildError`."""
    compiler = find_compiler()
    sources = sorted(SOURCES.glob("*.c"))
    digest = hashlib.sha256(repr((compiler, FLAGS, platform.machine())).encode())
    for source in sorted(SOURCES.glob("*.[ch]")):
        digest.update(source.name.encode() + source.read_bytes())

    def build(target: Path) -> None:
        compile_with([*shlex.split(compiler), *FLAGS, "-o", str(target), *map(str, sources), "-ldl", "-pthread"])

    return compiled(f"guard-{digest.hexdigest()[:20]}", build)


class Guard:
    """The supervisor's end of the guard of one server. ``library`` is the file that Triton loads as its python backend,
    ``backend`` the real one."""

    def __init__(self, run: Path, library: Path, backend: Path) -> None:
        self._library = library
        self._backend = backend
        self._run = run
        self._path = run / PIPE
        self._loads = itertools.count()
        os.mkfifo(self._path, 0o600)
        # For reading too: lines written before the server listens wait for it.
        self._pipe = os.open(self._path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def environment(self, known: str | None) -> dict[str, str]:
        """What tritonserver's environment needs; ``known`` is the LD_PRELOAD that it had and its stages keep."""
        preload = f"{self._library}:{known}" if known else str(self._library)
        return {
            "LD_PRELOAD": preload,
            "TRITONE_PRELOAD": known or "",
            "TRITONE_GUARD": str(self._path),
            "TRITONE_PYTHON_BACKEND": str(self._backend),
        }

    def end(self, model: str) -> None:
        """The process of ``model`` has died: its requests end now, further ones are answered in its place."""
        self._tell(f"dead {model}")

    def load(self, model: str, serves: Callable[[], bool]) -> None:
        """Returns once the server has loaded ``model`` (again); not over HTTP, where other connections would wait for it.

        ``serves`` says whether the server lives. Raises TritoneError with Triton's reason.
        """
        path = self._run / f"load-{model}-{next(self._loads)}.pipe"
        os.mkfifo(path, 0o600)
        # For writing too: so it has no end before the server has answered.
        pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            self._tell(f"load {model} {path}")
            deadline = time.monotonic() + LOAD_SECONDS
            while not select.select([pipe], [], [], POLL_SECONDS)[0]:
                if not serves():
                    raise TritoneError("the server has ended", "UNAVAILABLE")
                if time.monotonic() > deadline:
                    raise TritoneError(f"not loaded after {LOAD_SECONDS:.0f} s", "UNAVAILABLE")
            # One write of at most PIPE_BUF bytes, so it is whole.
            reason = os.read(pipe, select.PIPE_BUF).rstrip(b"\0").decode(errors="replace")
        finally:
            os.close(pipe)
            path.unlink(missing_ok=True)
        if reason:
            raise TritoneError(reason, "UNAVAILABLE")

    def set_unready(self, models: Iterable[str]) -> None:
        """These models, and no others, say that they are not ready."""
        self._tell(" ".join(["unready", *sorted(models)]))

    def drain(self) -> None:
        """New requests are refused with UNAVAILABLE from now on."""
        self._tell("drain")

    def close(self) -> None:
        os.close(self._pipe)

    def _tell(self, line: str) -> None:
        os.write(self._pipe, f"{line}\n".encode())
