"""Turns a deployment as written into one with nothing left open: directories, threads, precision, context length."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tritone.checkpoints import Progress, resolve_checkpoint, resolve_voice
from tritone.deployment import Deployment, EngineStage
from tritone.errors import bad

BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


def resolve_deployment(deployment: Deployment, cache: Path, progress: Progress | None = None) -> Deployment:
    """Prepares checkpoint and voice (once, in ``cache``) and fills in what is automatic. Ports stay as they are: they
    are chosen at the start itself. Raises TritoneError when something cannot be had."""
    checkpoint = resolve_checkpoint(deployment.checkpoint, cache, progress)
    voice = None if deployment.voice is None else resolve_voice(deployment.voice, cache, progress)
    size = deployment.page_size
    pools = (part.pool_tokens // size * size for part in (deployment.prefill, deployment.decode))
    context = deployment.max_context or min(checkpoint_context(checkpoint), *pools)
    return Deployment.parse(
        deployment.model_dump()
        | {
            "checkpoint": str(checkpoint.resolve()),
            "voice": None if voice is None else str(voice.resolve()),
            "max_context": context,
            "prefill": _stage(deployment.prefill).model_dump(),
            "decode": _stage(deployment.decode).model_dump(),
        },
        deployment.name,
    )


def checkpoint_context(checkpoint: Path) -> int:
    """The longest sequence the checkpoint was made for, from its config.json."""
    config = json.loads((checkpoint / "config.json").read_text())
    value = config.get("max_position_embeddings")
    if not isinstance(value, int) or value < 1:
        raise bad("max_position_embeddings", value, f"a positive number in {checkpoint / 'config.json'}")
    return value


def usable_cores() -> int:
    """Cores this process may use: its affinity, cut by the container's CPU quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    if quota == "max":
        return cores
    return max(1, min(cores, int(quota) // int(period)))


def cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def has_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 itself; elsewhere it is emulated and slower than float32."""
    return bool(cpu_flags() & BFLOAT16_FLAGS)


def _stage(stage: EngineStage) -> EngineStage:
    dtype = stage.dtype if stage.dtype != "auto" else "bfloat16" if has_bfloat16() else "float32"
    return stage.model_copy(update={"threads": stage.threads or usable_cores(), "dtype": dtype})
