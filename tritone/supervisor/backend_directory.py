"""Builds the directory given to tritonserver as --backend-directory.

Triton wants one folder that holds its python backend, the stub of the running Python, and the stages' own
Python-based backends. Each piece has its own way to get there:

- ``libtriton_python.so`` is a hard link or a copy: a symlink that leaves the directory is refused;
- the stub is a symlink: a copy would not find its libraries, which it looks for relative to where it lies;
- the stages' folders are symlinks, so they are never out of date;
- so are the ``tritone`` and ``quantization`` packages, beside the stub, where every stage's ``sys.path`` leads: stages
  run from a checkout that was never pip-installed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from pathlib import Path

from tritone.supervisor.installation import PROJECT, Installation, python_version

LINKED_PACKAGES = ("tritone", "quantization")


def build_backend_directory(backends: Path, cache: Path, installation: Installation, guard: Path | None = None) -> Path:
    """Brings the directory up to date and returns it. ``backends`` holds one folder with a model.py per backend; ``guard``
    is the library that Triton loads in the place of its python backend (see ``guard.py``), None for that backend itself.

    Another server may be running on the same directory: entries that are right are left alone, others are replaced by
    rename. Another Python, wheel or set of backends has a directory of its own.
    """
    key = hashlib.sha256(f"{backends.resolve()}\n{PROJECT}\n{installation.stub}\n{guard}".encode()).hexdigest()[:8]
    target = (cache / f"backends-{python_version()}-{key}").resolve()
    python = target / "python"
    python.mkdir(parents=True, exist_ok=True)
    with (target / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _place(guard or installation.library, python / installation.library.name)
        _symlink(installation.utilities, python / installation.utilities.name)
        _symlink(installation.stub, python / installation.stub.name)
        for package in LINKED_PACKAGES:
            if (PROJECT / package).is_dir():
                _symlink(PROJECT / package, python / package)
        stages = {path.parent.name: path.parent.resolve() for path in backends.glob("*/model.py")}
        for name, source in stages.items():
            _symlink(source, target / name)
        for path in target.iterdir():
            if path.is_symlink() and path.name not in stages:
                path.unlink()
    return target


def _place(source: Path, target: Path) -> None:
    """A hard link, or a copy where the two lie on different file systems."""
    if target.is_file() and not target.is_symlink():
        ours, theirs = source.stat(), target.stat()
        if ours.st_size == theirs.st_size and ours.st_mtime_ns == theirs.st_mtime_ns:
            return
    work = target.with_name(f".{target.name}.new")
    work.unlink(missing_ok=True)
    try:
        os.link(source, work)
    except OSError:
        shutil.copy2(source, work)
    work.replace(target)


def _symlink(source: Path, target: Path) -> None:
    if target.is_symlink() and os.readlink(target) == str(source):
        return
    work = target.with_name(f".{target.name}.new")
    work.unlink(missing_ok=True)
    work.symlink_to(source)
    work.replace(target)
