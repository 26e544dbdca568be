"""The checks of `tritone doctor`. Each looks at one thing and changes nothing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from tritone.cache import default_cache
from tritone.checkpoints import is_prepared
from tritone.deployment import OWN_VOICE, Deployment
from tritone.errors import TritoneError
from tritone.processes import SHARED_MEMORY
from tritone.supervisor.installation import (
    PROJECT,
    Installation,
    has_libpython,
    libpython_directory,
    libpython_name,
    python_version,
)
from tritone.supervisor.ports import choose_ports
from tritone.supervisor.resolve import cpu_flags, has_bfloat16, usable_cores
from tritone.supervisor.run_directory import STUB_BYTES, check_shared_memory

PYTHONS = ((3, 10), (3, 13))
MEMORY = 3 << 30
COMPILERS = ("cc", "gcc", "clang")
INSTALL = "`make demo`, or pip install -r requirements/runtime.txt, then --no-deps -r requirements/nodeps.txt"


@dataclass(frozen=True)
class Check:
    """``missing`` is needed and not there; ``note`` is worth knowing and no obstacle."""

    name: str
    state: Literal["ok", "missing", "note"]
    detail: str
    fix: str = ""


def run_checks(deployment: Deployment) -> list[Check]:
    checks: list[Callable[[Deployment], Check]] = [
        _python, _environment, _packages, _triton, _libpython, _compiler, _shared_memory, _memory, _cpu, _gpu,
        _checkpoint, _voice, _ports,
    ]  # fmt: skip
    return [check(deployment) for check in checks]


def _python(deployment: Deployment) -> Check:
    detail = f"{platform.python_version()} ({sys.executable})"
    if not PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        return Check("python", "missing", detail, "Python 3.10 to 3.13; `make PYTHON=python3.12 demo` chooses one")
    return Check("python", "ok", detail)


def _environment(deployment: Deployment) -> Check:
    if sys.prefix == sys.base_prefix:
        return Check("environment", "note", "not a virtual environment", "`make demo` makes .venv and works in it")
    return Check("environment", "ok", sys.prefix)


def _packages(deployment: Deployment) -> Check:
    """Compares with the requirement files; a checkout without them has nothing to compare with."""
    wrong = []
    for name, version in required_packages(PROJECT / "requirements"):
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{name} {version} is not installed")
            continue
        if found.split("+")[0] != version:
            wrong.append(f"{name} is {found}, tested with {version}")
    if any(line.endswith("is not installed") for line in wrong):
        return Check("packages", "missing", "; ".join(wrong), INSTALL)
    if wrong:
        return Check("packages", "note", "; ".join(wrong), INSTALL)
    return Check("packages", "ok", "as in requirements/")


def required_packages(folder: Path) -> list[tuple[str, str]]:
    """(name, version) of what runtime.txt and nodeps.txt pin for the running Python."""
    from packaging.requirements import Requirement

    found = []
    for path in (folder / "runtime.txt", folder / "nodeps.txt"):
        for line in path.read_text().splitlines() if path.is_file() else ():
            text = line.split("#")[0].strip()
            if not text:
                continue
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate():
                found.append((requirement.name, re.sub(r"^[=~<>!]+", "", str(requirement.specifier))))
    return found


def _triton(deployment: Deployment) -> Check:
    try:
        found = Installation.find()
    except TritoneError as error:
        message, _, fix = error.message.partition(": ")
        return Check("tritonserver", "missing", message, fix)
    return Check("tritonserver", "ok", f"{found.server}, stub for Python {python_version()}")


def _libpython(deployment: Deployment) -> Check:
    if not has_libpython():
        return Check("libpython", "missing", libpython_name(), f"`apt-get install libpython{python_version()}`")
    return Check("libpython", "ok", f"{libpython_directory() or 'on the system'}: {libpython_name()}")


def _compiler(deployment: Deployment) -> Check:
    names = [os.environ["CC"].split()[0]] if os.environ.get("CC", "").strip() else []
    for name in [*names, *COMPILERS]:
        if path := shutil.which(name):
            return Check("compiler", "ok", path)
    detail = "no C compiler: slower kernels, and a stage that dies takes the server with it"
    return Check("compiler", "note", detail, "`apt-get install gcc libc6-dev`")


def _shared_memory(deployment: Deployment) -> Check:
    free = f"{shutil.disk_usage(SHARED_MEMORY).free >> 20} MiB free"
    needed = pool_bytes(deployment)
    try:
        check_shared_memory(needed or 0)
    except TritoneError as error:
        message, _, fix = error.message.partition(": ")
        return Check("/dev/shm", "missing", message, fix)
    if needed is None:
        return Check("/dev/shm", "ok", f"{free} (what the pools need is known once the checkpoint is there)")
    return Check("/dev/shm", "ok", f"{free}, {needed + STUB_BYTES >> 20} MiB needed")


def pool_bytes(deployment: Deployment) -> int | None:
    """What the pools take; None while the checkpoint is not there."""
    from tritone.sizes import required_shared_memory
    from tritone.supervisor import resolve_deployment

    cache = default_cache()
    voice = None if deployment.voice == OWN_VOICE else deployment.voice
    names = [deployment.checkpoint, *([voice] if voice else [])]
    if not all(is_prepared(name, cache) for name in names):
        return None
    try:
        return required_shared_memory(resolve_deployment(deployment, cache))
    except (TritoneError, OSError, KeyError, ValueError):
        return None  # the checkpoint's own check says what is wrong with it


def _memory(deployment: Deployment) -> Check:
    memory = psutil.virtual_memory()
    detail = f"{memory.available / 2**30:.1f} GiB of {memory.total / 2**30:.1f} GiB available"
    if memory.available < MEMORY:
        return Check("memory", "note", detail, f"the demo takes about {MEMORY >> 30} GiB: close something")
    return Check("memory", "ok", detail)


def _cpu(deployment: Deployment) -> Check:
    known = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "asimd", "bf16", "sve")
    features = [flag for flag in known if flag in cpu_flags()]
    dtype = "bfloat16" if has_bfloat16() else "float32"
    detail = f"{usable_cores()} cores, {' '.join(features) or 'no vector extension'}; dtype auto is {dtype}"
    if platform.machine() != "x86_64":
        return Check("cpu", "note", f"{platform.machine()}: {detail}", "tested on x86-64 only")
    return Check("cpu", "ok", detail)


def _gpu(deployment: Deployment) -> Check:
    if Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi"):
        return Check("gpu", "note", "an NVIDIA GPU; this deployment computes on the CPU")
    return Check("gpu", "ok", "none, and none is needed")


def _checkpoint(deployment: Deployment) -> Check:
    return _prepared("checkpoint", deployment.checkpoint)


def _voice(deployment: Deployment) -> Check:
    if deployment.voice == OWN_VOICE:
        return Check("voice", "ok", "the checkpoint's own")
    return Check("voice", "ok", "none: text only") if deployment.voice is None else _prepared("voice", deployment.voice)


def _prepared(kind: str, name: str) -> Check:
    if is_prepared(name, default_cache()):
        return Check(kind, "ok", name)
    if name.startswith(("/", ".", "~")):
        return Check(kind, "missing", f"{name} is no directory", f"name another with --{kind}")
    return Check(kind, "note", f"{name} is not here yet", "`tritone prepare`; the first start does it, too")


def _ports(deployment: Deployment) -> Check:
    try:
        choose_ports(deployment.server)
    except TritoneError as error:
        return Check("ports", "missing", error.message, "serve --http-port 0 --grpc-port 0 --metrics-port 0 takes free ones")
    server = deployment.server
    return Check("ports", "ok", f"{server.http_port}, {server.grpc_port} and {server.metrics_port} are free on {server.host}")
