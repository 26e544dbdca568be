"""Finds what a start needs on this machine: Triton's binary and python backend (from the nvidia-pytriton wheel), the
stub and the shared library of the running Python. Nothing here imports those packages."""

from __future__ import annotations

import ctypes
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from tritone.checkpoints.packages import package_directory
from tritone.errors import TritoneError

PACKAGE = "pytriton"
PROJECT = Path(__file__).resolve().parents[2]
"""The checkout: model_repository/, ensembles/ and backends/ lie here."""


def python_version() -> str:
    """``3.11``: how the wheel names its stubs."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def libpython_name() -> str:
    return f"libpython{python_version()}.so.1.0"


def libpython_directory() -> Path | None:
    """The running Python's own library folder when its libpython lies there: the stub must load that very one."""
    folders = [sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("LIBPL")]
    multiarch = sysconfig.get_config_var("MULTIARCH")
    if folders[0] and multiarch:
        folders.append(f"{folders[0]}/{multiarch}")
    for folder in folders:
        if folder and (Path(folder) / libpython_name()).is_file():
            return Path(folder)
    return None


def has_libpython() -> bool:
    """Whether the stub will find libpython: beside this Python, or where the system's loader looks."""
    if libpython_directory() is not None:
        return True
    try:
        ctypes.CDLL(libpython_name())
    except OSError:
        return False
    return True


@dataclass(frozen=True)
class Installation:
    """Paths of one complete Triton installation."""

    server: Path
    library: Path
    utilities: Path
    stub: Path

    @classmethod
    def find(cls) -> Installation:
        """Raises TritoneError that says what is missing and how to get it."""
        package = package_directory(PACKAGE)
        if package is None:
            raise TritoneError(
                "the tritonserver binary is missing: install it with "
                "`pip install --no-deps -r requirements/nodeps.txt` (package nvidia-pytriton)"
            )
        root = package / "tritonserver"
        found = cls(
            server=root / "bin" / "tritonserver",
            library=root / "backends" / "python" / "libtriton_python.so",
            utilities=root / "backends" / "python" / "triton_python_backend_utils.py",
            stub=root / "python_backend_stubs" / python_version() / "triton_python_backend_stub",
        )
        if not found.stub.is_file():
            stubs = sorted(p.name for p in (root / "python_backend_stubs").glob("3.*"))
            raise TritoneError(f"Triton has no stub for Python {python_version()}; allowed: {', '.join(stubs) or 'none'}")
        for path in (found.server, found.library, found.utilities):
            if not path.is_file():
                raise TritoneError(f"{path} is missing: install nvidia-pytriton again")
        if not has_libpython():
            raise TritoneError(
                f"{libpython_name()} is missing, which Triton's python stub loads: "
                f"`apt-get install libpython{python_version()}` on Debian and Ubuntu"
            )
        return found
