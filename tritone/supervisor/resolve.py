"""Turns a deployment as written into one with nothing left open: directories, threads, precision, context length."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tritone.checkpoints import DEMO_VOICE, Progress, resolve_checkpoint, resolve_voice
from tritone.deployment import DENSE_NAMES, DENSE_WEIGHTS, OWN_VOICE, Deployment, EngineStage
from tritone.errors import bad
from tritone.models.omni.families import FAMILIES
from tritone.models.talker.config import is_talker
from tritone.sizes import decoder_config, model_type, token_bytes

STORED_DIFFERENTLY = frozenset(
    {"_name_or_path", "architectures", "compression_config", "dtype", "quantization_config", "torch_dtype",
     "transformers_version", "use_cache"}
)
"""Fields of a config.json that may differ between two copies of one model."""

SERVED_MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe", *FAMILIES)
"""What the stages can load; here again so that a start is refused before any of them runs, and without torch."""

BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


def resolve_deployment(deployment: Deployment, cache: Path, progress: Progress | None = None) -> Deployment:
    """Prepares checkpoint and voice (once, in ``cache``) and fills in what is automatic. Ports stay as they are: they
    are chosen at the start itself. Raises TritoneError when something cannot be had."""
    checkpoint = resolve_checkpoint(deployment.checkpoint, cache, progress)
    _check_served(checkpoint)
    voice = _voice(deployment.voice, checkpoint, cache, progress)
    size = deployment.page_size
    stages = {}
    for name in ("prefill", "decode"):
        part: EngineStage = getattr(deployment, name)
        own = checkpoint if part.checkpoint is None else resolve_checkpoint(part.checkpoint, cache, progress)
        _check_same_model(f"{name}.checkpoint", own, checkpoint)
        stages[name] = _stage(name, part, own, size)
    pools = (part.pool_tokens // size * size for part in stages.values())
    context = deployment.max_context or min(checkpoint_context(checkpoint), *pools)
    return Deployment.parse(
        deployment.model_dump()
        | {
            "checkpoint": str(checkpoint.resolve()),
            "voice": voice,
            "voicebox": deployment.voicebox.model_dump() | {"voice": _voicebox(deployment, voice, cache, progress)},
            "max_context": context,
        }
        | {name: part.model_dump() for name, part in stages.items()}
        | {"talker": deployment.talker.model_dump() | {"dtype": _dtype(deployment.talker.dtype)}},
        deployment.name,
    )


def checkpoint_context(checkpoint: Path) -> int:
    """The longest sequence the checkpoint was made for, from its config.json."""
    value = decoder_config(checkpoint).get("max_position_embeddings")
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


def _stage(name: str, stage: EngineStage, checkpoint: Path, page_size: int) -> EngineStage:
    dtype = _dtype(DENSE_WEIGHTS.get(stage.weights, stage.dtype))
    kv = stage.kv if stage.kv != "auto" else DENSE_NAMES[dtype]
    tokens = stage.pool_tokens
    if stage.pool_bytes:
        page_bytes = token_bytes(checkpoint, kv) * page_size
        tokens = stage.pool_bytes // page_bytes * page_size
        if not tokens:
            raise bad(f"{name}.pool_bytes", stage.pool_bytes, f"at least {page_bytes}, one page")
    known = {"threads": stage.threads or usable_cores(), "dtype": dtype, "kv": kv, "pool_tokens": tokens, "pool_bytes": 0}
    return stage.model_copy(update=known | {"checkpoint": str(checkpoint.resolve())})


def _dtype(asked: str) -> str:
    return asked if asked != "auto" else "bfloat16" if has_bfloat16() else "float32"


def _voice(name: str | None, checkpoint: Path, cache: Path, progress: Progress | None) -> str | None:
    """The directory of a prepared voice, or what stands for the checkpoint's own, or nothing."""
    if name is None:
        return None
    if name != OWN_VOICE:
        return str(resolve_voice(name, cache, progress).resolve())
    if model_type(checkpoint) not in FAMILIES:
        raise bad("voice", name, f"another one or null: {checkpoint} is none of {', '.join(FAMILIES)}")
    return name


def _voicebox(deployment: Deployment, voice: str | None, cache: Path, progress: Progress | None) -> str | None:
    """The directory of the voice whose VoiceBox sounds the codes of a trained Talker; None for another ``voice``."""
    if voice in (None, OWN_VOICE) or not is_talker(Path(str(voice))):
        return None
    return str(resolve_voice(deployment.voicebox.voice or DEMO_VOICE, cache, progress).resolve())


def _check_served(checkpoint: Path) -> None:
    found = model_type(checkpoint)
    if found not in SERVED_MODEL_TYPES:
        raise bad(f"checkpoint: model_type in {checkpoint / 'config.json'}", found, ", ".join(SERVED_MODEL_TYPES))


def _check_same_model(field: str, checkpoint: Path, other: Path) -> None:
    """Both phases and the tokenizer work on one model: only the precision of its weights may differ."""
    if checkpoint == other:
        return
    here, there = (json.loads((path / "config.json").read_text()) for path in (checkpoint, other))
    for key in sorted((here.keys() | there.keys()) - STORED_DIFFERENTLY):
        if here.get(key) != there.get(key):
            raise bad(f"{field}: {key} of {checkpoint}", here.get(key), f"{there.get(key)!r}, as in {other}")
