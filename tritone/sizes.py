"""How large the pools of a deployment are; read from the checkpoint's configuration alone, without torch or weights."""

from __future__ import annotations

import json
from pathlib import Path

from tritone.deployment import Deployment, EngineStage

ITEM_SIZES = {"float32": 4, "bfloat16": 2}
"""Bytes of one element."""

HIDDEN_ROWS = 8
"""Hidden states one block of a hidden-state pool holds; an event of more tokens refers to several blocks."""


def page_count(deployment: Deployment, part: EngineStage) -> int:
    return part.pool_tokens // deployment.page_size


def required_shared_memory(deployment: Deployment) -> int:
    """Bytes of /dev/shm that the pools of a resolved deployment take."""
    config = json.loads((Path(deployment.checkpoint) / "config.json").read_text())
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    kv_width = 2 * config["num_hidden_layers"] * (config.get("num_key_value_heads") or heads) * head_dim
    total = 0
    for part in (deployment.prefill, deployment.decode):
        total += page_count(deployment, part) * deployment.page_size * kv_width * ITEM_SIZES[part.dtype]
        if deployment.voice:
            total += deployment.talker.hidden_blocks * HIDDEN_ROWS * config["hidden_size"] * ITEM_SIZES[part.dtype]
    return total
