"""The three servers that are compared: same checkpoint, same machine, same client."""

from __future__ import annotations

import json
from pathlib import Path

from perf.omni.tiny import make_qwen3_omni
from tritone.cache import default_cache
from tritone.deployment import Deployment
from tritone.sizes import required_shared_memory
from tritone.supervisor import Server, resolve_deployment
from tritone.supervisor.installation import PROJECT

HERE = Path(__file__).parent
SYSTEMS = ("overlapped", "without overlap", "transformers")
"""The shipped cascade; the same, each stage of speech waiting for the whole output of the one before; transformers' own
``generate`` in one Triton model, request by request."""


def make_checkpoint(directory: Path, frames: int) -> Path:
    """A tiny Qwen3-Omni that speaks greedily, and always so many frames of 80 ms."""
    made = directory / "tiny-qwen3-omni"
    made.mkdir()
    make_qwen3_omni(made, endless=True)
    file = made / "generation_config.json"
    limits = {"talker_do_sample": False, "talker_max_new_tokens": frames}
    file.write_text(json.dumps(json.loads(file.read_text()) | limits))
    return made


def deployment(checkpoint: Path) -> Deployment:
    """One thread a stage, for matrices of this size gain nothing by two; pools that hold all requests at once."""
    engine = {"dtype": "float32", "threads": 1, "pool_tokens": 16384}
    written = {
        "name": checkpoint.name,
        "checkpoint": str(checkpoint),
        "voice": "checkpoint",
        "page_size": 16,
        "max_context": 512,
        "prefill": engine,
        "decode": engine,
        "talker": {"dtype": "float32", "pool_tokens": 32768},
        "server": {"http_port": 0, "grpc_port": 0, "metrics_port": 0},
    }
    return resolve_deployment(Deployment.parse(written, "bench-omni"), default_cache())


def server(system: str, checkpoint: Path, directory: Path) -> Server:
    """Not started yet; ``directory`` is for what only this server needs."""
    served = deployment(checkpoint)
    if system == "overlapped":
        return Server(served, shared_memory=required_shared_memory)
    own = directory / system.replace(" ", "-")
    if system == "without overlap":
        backends = own / "backends"
        backends.mkdir(parents=True)
        for shipped in (PROJECT / "backends").iterdir():
            changed = HERE / "backends" / shipped.name
            (backends / shipped.name).symlink_to(changed if changed.is_dir() else shipped)
        return Server(served, backends=backends, cache=own / "cache", shared_memory=required_shared_memory)
    return Server(served, models=("omni",), repositories=(HERE / "reference",))
