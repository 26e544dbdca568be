"""A tiny omni checkpoint in the layout of the published ones, which an older transformers wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def publish(directory: Path) -> None:
    """No ``tokenizer.json`` (Qwen3-Omni has none), the chat template and the processor in their own older files, rotary
    positions under their older names, and Qwen2.5-Omni's first class."""
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    _write(directory / "vocab.json", tokenizer["model"]["vocab"])
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    (directory / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    added = {str(token.pop("id")): token for token in tokenizer["added_tokens"]}
    settings = directory / "tokenizer_config.json"
    _write(settings, json.loads(settings.read_text()) | {"added_tokens_decoder": added})
    (directory / "tokenizer.json").unlink()

    template = directory / "chat_template.jinja"
    _write(directory / "chat_template.json", {"chat_template": template.read_text()})
    template.unlink()

    parts = directory / "processor_config.json"
    read = json.loads(parts.read_text())
    flat = read["feature_extractor"] | read["image_processor"] | {"processor_class": read["processor_class"]}
    _write(directory / "preprocessor_config.json", flat | {"feature_extractor_type": "WhisperFeatureExtractor"})
    parts.unlink()

    config = directory / "config.json"
    read = _older(json.loads(config.read_text()))
    if read["model_type"] == "qwen2_5_omni":
        read["architectures"] = ["Qwen2_5OmniModel"]
    _write(config, read)


def _older(section: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings and dtype as transformers 4 names them, at every depth."""
    found: dict[str, Any] = {name: _older(value) if isinstance(value, dict) else value for name, value in section.items()}
    if (rotary := found.pop("rope_parameters", None)) is not None:
        found["rope_theta"] = rotary.pop("rope_theta")
        found["rope_scaling"] = rotary | {"type": "default"} if "mrope_section" in rotary else None
    if "dtype" in found:
        found["torch_dtype"] = found.pop("dtype")
    return found


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content))
