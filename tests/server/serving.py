"""The deployment that the server under test runs."""

from __future__ import annotations

from pathlib import Path

from tritone.cache import default_cache
from tritone.deployment import Deployment
from tritone.supervisor import resolve_deployment

PROJECT = Path(__file__).resolve().parents[2]
MAX_CONTEXT = 2048
PAGE_SIZE = 32
CHUNK = 256
FAULTS = {
    "stale_tag": "stale_tag",
    "swapped_pages": "page_table",
    "freed_while_read": "stale_tag",
    "flipped_byte": "content",
    "out_of_range": "out_of_range",
    "dropped_transfer": "transfer",
    "slow_transfer": "transfer",
}
"""The faults that a request may ask for, and what each is found as."""
DEADLY_FAULTS = {
    "prefill_dies": ("prefill", "UNAVAILABLE: integrity: epoch: "),
    "prefill_memory": ("prefill", "UNAVAILABLE: integrity: epoch: "),
    "decode_dies": ("decode", "UNAVAILABLE: decode: the process of this stage has ended"),
}
"""Those that end a stage: which, and how the error of the request begins."""


def make_deployment(**changes: object) -> Deployment:
    """The demo's deployment with a short context, small pools, two threads a stage, free ports, every check on, and faults
    for those who ask for them; with the hibari voice, whose sound the tests can make by themselves."""
    engine = {"dtype": "float32", "threads": 2, "pool_tokens": 16384, "max_batch_tokens": CHUNK}
    written = Deployment.load(PROJECT / "deployments" / "demo-cpu.yaml").model_dump()
    changed = {
        "voice": "demo:hibari",
        "page_size": PAGE_SIZE,
        "max_context": MAX_CONTEXT,
        "max_wait_seconds": 120.0,  # 20 prompts at once are more than 30 seconds of work on a slow machine
        "prefill": engine,
        "decode": engine,
        "integrity": {
            "mode": "raise",
            "checksum": True,
            "audit_seconds": 1.0,
            "transfer_seconds": 2.0,
            "faults": [*FAULTS, *DEADLY_FAULTS],
        },
        "server": {"http_port": 0, "grpc_port": 0, "metrics_port": 0},
    }
    return resolve_deployment(Deployment.parse(written | changed | changes, "tests/server"), default_cache())
