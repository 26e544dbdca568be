"""A trained Talker on disk.

A directory of it holds:

- ``talker/`` and ``code_predictor/``: the two decoders, each a Qwen3 checkpoint as Hugging Face writes them. The code
  predictor's embedding and head are codebook 1's table and head.
- ``voice.safetensors``: everything else, with the names of :class:`~tritone.models.talker.model.TalkerModel`, and the codec.
- ``voice.json``: sizes, origin, and the sha256 of each file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tritone.models.codec.codec import Codec
from tritone.models.talker.config import (
    CONFIG_FILE,
    FORMAT,
    PREDICTOR,
    REST,
    TALKER,
    VOCABULARY,
    TalkerConfig,
    load_config,
)
from tritone.models.talker.model import TalkerModel

_PREDICTOR_NAMES = {
    "code_predictor.model.codec_embedding.0.weight": "model.embed_tokens.weight",
    "code_predictor.lm_head.0.weight": "lm_head.weight",
}


def save_talker(directory: Path, model: TalkerModel, codec: Codec, origin: dict[str, str]) -> None:
    """Writes a directory, weights in bfloat16 and the codec in float16; ``origin`` goes into ``voice.json``."""
    parts: dict[str, dict[str, Tensor]] = {TALKER: {}, PREDICTOR: {}, "": {}}
    for name, value in model.state_dict().items():
        part, own = _place(name)
        parts[part][own] = value.to(torch.bfloat16).contiguous()
    for field in dataclasses.fields(codec):
        parts[""][f"codec.{field.name}"] = torch.from_numpy(getattr(codec, field.name)).half()
    config = model.config
    _save_decoder(directory / TALKER, parts[TALKER], _qwen3(config, config.layers, config.intermediate_size, VOCABULARY))
    predictor = _qwen3(config, config.predictor_layers, config.predictor_intermediate_size, config.entries)
    _save_decoder(directory / PREDICTOR, parts[PREDICTOR], predictor)
    save_file(parts[""], directory / REST)
    for path in directory.rglob("*.safetensors"):
        path.chmod(0o644)  # safetensors writes 0600, which a server under another user could not read
    digests = {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != CONFIG_FILE
    }
    described = {"format": FORMAT, "origin": origin, "config": dataclasses.asdict(config), "files": digests}
    (directory / CONFIG_FILE).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def load_network(directory: Path) -> TalkerModel:
    """The whole network in float32, for :mod:`~tritone.models.talker.generate`. Errors as
    ``load_config``."""
    stored = {part: load_file(directory / part / "model.safetensors") for part in (TALKER, PREDICTOR)}
    stored[""] = load_file(directory / REST)
    model = TalkerModel(load_config(directory))
    model.load_state_dict({name: stored[part][own].float() for name in model.state_dict() for part, own in [_place(name)]})
    return model.eval()


def load_codec(directory: Path) -> Codec:
    """The codec alone; torch is not used."""
    with safe_open(str(directory / REST), framework="np") as file:
        return Codec(*(file.get_tensor(f"codec.{field.name}").astype("float32") for field in dataclasses.fields(Codec)))


def _place(name: str) -> tuple[str, str]:
    """The part that holds a tensor of the network, and its name there."""
    if name.startswith(("model.", "lm_head.")):
        return TALKER, name
    if name in _PREDICTOR_NAMES:
        return PREDICTOR, _PREDICTOR_NAMES[name]
    if name.startswith(("code_predictor.model.layers.", "code_predictor.model.norm.")):
        return PREDICTOR, name.removeprefix("code_predictor.")
    return "", name


def _qwen3(config: TalkerConfig, layers: int, inner: int, vocabulary: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocabulary,
        "hidden_size": config.hidden_size,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def _save_decoder(directory: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
