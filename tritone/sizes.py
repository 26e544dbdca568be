"""How large the pools of a deployment are; read from the checkpoint's configuration alone, without torch or weights."""

from __future__ import annotations

import json
from pathlib import Path

from tritone.deployment import Deployment, EngineStage

ITEM_SIZES = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1}
"""Bytes of one element."""

KV_DTYPES = {"float32": "float32", "bf16": "bfloat16", "fp8": "float8_e4m3fn"}
"""The element type of each ``kv`` of a resolved deployment."""

HIDDEN_ROWS = 8
"""Hidden states one block of a hidden-state pool holds; an event of more tokens refers to several blocks."""


def page_count(deployment: Deployment, part: EngineStage) -> int:
    return part.pool_tokens // deployment.page_size


def token_bytes(checkpoint: Path, kv: str) -> int:
    """Bytes of one token's keys and values in all layers."""
    config = json.loads((checkpoint / "config.json").read_text())
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    width = 2 * config["num_hidden_layers"] * (config.get("num_key_value_heads") or heads) * head_dim
    return int(width) * ITEM_SIZES[KV_DTYPES[kv]]


def required_shared_memory(deployment: Deployment) -> int:
    """Bytes of /dev/shm that the pools of a resolved deployment take."""
    config = json.loads((Path(deployment.checkpoint) / "config.json").read_text())
    total = 0
    for part in (deployment.prefill, deployment.decode):
        size = deployment.page_size * token_bytes(Path(deployment.checkpoint), part.kv)
        total += page_count(deployment, part) * size
        if deployment.voice:
            total += deployment.talker.hidden_blocks * HIDDEN_ROWS * config["hidden_size"] * ITEM_SIZES[part.dtype]
    return total
