"""Compiles the C kernels at first use and keeps the result under a name made of everything that went into it."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tritone.compiler import BuildError, compile_with, compiled, find_compiler

SOURCES = Path(__file__).parent / "csrc"
FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-Wno-psabi", "-Wno-unknown-pragmas")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mprefer-vector-width=512")
INSTRUCTION_SETS: dict[str, tuple[str, ...]] = {
    # Vector code without vector instructions: -O3 takes three times as long to compile it.
    "plain": ("-O2",),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx512": _AVX512,
    "avx512bf16": (*_AVX512, "-mavx512bf16", "-mavx512vnni"),
}


def build_library(instruction_sets: Iterable[str] = tuple(INSTRUCTION_SETS)) -> Path:
    """The shared library with those of the instruction sets that the compiler can make for this architecture.

    Of several processes that ask at once, one builds and the others wait.
    """
    compiler = find_compiler()
    if platform.machine() not in ("x86_64", "AMD64"):
        instruction_sets = ("plain",)
    wanted = {name: INSTRUCTION_SETS[name] for name in instruction_sets}
    openmp = _openmp_options()
    digest = hashlib.sha256(repr((compiler, FLAGS, wanted, openmp, platform.machine())).encode())
    for source in sorted(SOURCES.glob("*.[ch]")):
        digest.update(source.name.encode() + source.read_bytes())

    def build(target: Path) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            shutil.move(_compile(shlex.split(compiler), wanted, openmp, Path(scratch)), target)

    return compiled(f"kernels-{digest.hexdigest()[:20]}", build)


def _compile(compiler: list[str], wanted: dict[str, tuple[str, ...]], openmp: list[list[str]], folder: Path) -> Path:
    target = folder / "kernels.so"
    threading = ["-fopenmp"] if openmp else []

    def object_of(name: str) -> Path | BuildError:
        try:
            options = [*threading, *wanted[name], f"-DTRITONE_SUFFIX=_{name}"]
            return _object(compiler, "kernels.c", folder / f"{name}.o", options)
        except BuildError as error:
            return error

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = list(pool.map(object_of, wanted))
    objects = [path for path in made if isinstance(path, Path)]
    problems = [str(error) for error in made if isinstance(error, BuildError)]
    if objects:
        objects.append(_object(compiler, "isa.c", folder / "isa.o", []))
        for runtime in openmp or [[]]:
            try:
                compile_with([*compiler, "-shared", "-o", str(target), *map(str, objects), *runtime, "-lm"])
                return target
            except BuildError as error:
                problems.append(str(error))
    if openmp:
        return _compile(compiler, wanted, [], folder)
    raise BuildError(problems[-1])


def _openmp_options() -> list[list[str]]:
    """Ways to link OpenMP, best first: the runtime that torch already loaded, so that there is one pool of threads."""
    loaded = []
    try:
        for line in Path("/proc/self/maps").read_text().splitlines():
            path = line.split(maxsplit=5)[-1]
            if Path(path).name.startswith("libgomp") and [path] not in loaded:
                loaded.append([path])
    except OSError:
        pass
    return [*loaded, ["-fopenmp"]]


def _object(compiler: list[str], source: str, target: Path, options: list[str]) -> Path:
    compile_with([*compiler, *FLAGS, *options, "-c", str(SOURCES / source), "-o", str(target)])
    return target

