"""How large the pools of a deployment are; read from the checkpoint's configuration alone, without torch or weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tritone.deployment import DENSE_NAMES, OWN_VOICE, Deployment, EngineStage
from tritone.models.talker.config import TALKER, is_talker

ITEM_SIZES = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1}
"""Bytes of one element."""

KV_DTYPES = {"float32": "float32", "bf16": "bfloat16", "fp8": "float8_e4m3fn"}
"""The element type of each ``kv`` of a resolved deployment."""

HIDDEN_ROWS = 8
"""Hidden states one block of a hidden-state pool holds; an event of more tokens refers to several blocks."""


def page_count(deployment: Deployment, part: EngineStage) -> int:
    return part.pool_tokens // deployment.page_size


def model_type(checkpoint: Path) -> Any:
    return _config(checkpoint).get("model_type")


def decoder_config(checkpoint: Path) -> Mapping[str, Any]:
    """The fields of the decoder that answers: of the whole checkpoint, or of an omni checkpoint's Thinker."""
    config = _config(checkpoint)
    found: Mapping[str, Any] = config.get("thinker_config", {}).get("text_config", config)
    return found


def talker_config(checkpoint: Path) -> Mapping[str, Any]:
    """The fields of an omni checkpoint's Talker; its sizes are its decoder's."""
    found: Mapping[str, Any] = _config(checkpoint)["talker_config"]
    inner: Mapping[str, Any] = found.get("text_config", found)
    return inner


def _config(checkpoint: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    return config


def token_bytes(checkpoint: Path, kv: str) -> int:
    """Bytes of one token's keys and values in all layers of the decoder that answers."""
    return _token_bytes(decoder_config(checkpoint), kv)


def _token_bytes(config: Mapping[str, Any], kv: str) -> int:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    width = 2 * config["num_hidden_layers"] * (config.get("num_key_value_heads") or heads) * head_dim
    return int(width) * ITEM_SIZES[KV_DTYPES[kv]]


def required_shared_memory(deployment: Deployment) -> int:
    """Bytes of /dev/shm that the pools of a resolved deployment take."""
    checkpoint = Path(deployment.checkpoint)
    config = decoder_config(checkpoint)
    total = 0
    for part in (deployment.prefill, deployment.decode):
        size = deployment.page_size * _token_bytes(config, part.kv)
        total += page_count(deployment, part) * size
        if deployment.voice:
            total += deployment.talker.hidden_blocks * HIDDEN_ROWS * config["hidden_size"] * ITEM_SIZES[part.dtype]
    spoken = talker_that_speaks_in_codes(deployment)
    if spoken is not None:
        talker = deployment.talker
        page = deployment.page_size * _token_bytes(spoken, DENSE_NAMES[talker.dtype])
        total += talker.pool_tokens // deployment.page_size * page
    return total


def talker_that_speaks_in_codes(deployment: Deployment) -> Mapping[str, Any] | None:
    """The fields of its decoder, if the resolved deployment has one."""
    if deployment.voice == OWN_VOICE:
        return talker_config(Path(deployment.checkpoint))
    if deployment.voice is None or not is_talker(Path(deployment.voice)):
        return None
    return _config(Path(deployment.voice) / TALKER)
