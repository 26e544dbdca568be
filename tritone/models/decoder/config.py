"""What a dense decoder is, read from a Hugging Face ``config.json``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tritone.errors import bad

MODEL_TYPES = ("llama", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and switches of a Llama, Qwen2 or Qwen3 decoder.

    ``rope_frequencies`` are radians a position, [head_dim / 2] values exact in float32; ``rope_scaling`` multiplies the
    cosines and sines. ``max_positions`` is the longest context the checkpoint declares.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_positions: int
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope_frequencies: tuple[float, ...]
    rope_scaling: float

    @classmethod
    def from_directory(cls, path: str | Path) -> DecoderConfig:
        """Read ``config.json`` in ``path``. Raises ``InvalidArgument`` naming field, value and what is allowed."""
        from transformers import AutoConfig

        file = Path(path) / "config.json"
        try:
            declared = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise bad("config.json", str(file), f"a readable JSON file ({error})") from error
        if not isinstance(declared, dict):
            raise bad("config.json", declared, "a JSON object")
        model_type = declared.get("model_type")
        if model_type not in MODEL_TYPES:
            raise bad("model_type", model_type, ", ".join(MODEL_TYPES))
        architectures = declared.get("architectures") or []
        if not all(name.endswith("ForCausalLM") for name in architectures):
            raise bad("architectures", architectures, "a ...ForCausalLM class")
        try:
            return cls.from_hugging_face(AutoConfig.from_pretrained(str(path), local_files_only=True))
        except (KeyError, TypeError) as error:
            raise bad("config.json", str(file), f"a complete {model_type} configuration ({error!r})") from error

    @classmethod
    def from_hugging_face(cls, config: Any) -> DecoderConfig:
        """From a ``transformers`` configuration object of one of ``MODEL_TYPES``; errors as ``from_directory``."""
        if config.model_type not in MODEL_TYPES:
            raise bad("model_type", config.model_type, ", ".join(MODEL_TYPES))
        if config.hidden_act not in ("silu", "swish"):
            raise bad("hidden_act", config.hidden_act, "silu")
        sliding = getattr(config, "sliding_window", None)
        layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
        if sliding is not None and "sliding_attention" in layer_types:
            raise bad("sliding_window", sliding, "none (use_sliding_window false)")
        if layer_types != {"full_attention"}:
            raise bad("layer_types", sorted(layer_types), "full_attention in every layer")
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        if heads % kv_heads:
            raise bad("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads ({heads})")
        if head_dim % 2 or head_dim > 512:
            raise bad("head_dim", head_dim, "an even number up to 512")
        frequencies, scaling = _rope(config, head_dim)
        qwen2 = config.model_type == "qwen2"
        attention_bias = bool(getattr(config, "attention_bias", False))
        return cls(
            model_type=config.model_type,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            layers=config.num_hidden_layers,
            q_heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=config.rms_norm_eps,
            max_positions=config.max_position_embeddings,
            tied_embeddings=bool(config.tie_word_embeddings),
            qkv_bias=qwen2 or attention_bias,
            output_bias=not qwen2 and attention_bias,
            mlp_bias=config.model_type == "llama" and bool(getattr(config, "mlp_bias", False)),
            qk_norm=config.model_type == "qwen3",
            rope_frequencies=frequencies,
            rope_scaling=scaling,
        )

    def page_shape(self, page_size: int) -> tuple[int, int, int, int, int]:
        """Shape of one physical KV page: [layers, 2, kv_heads, page_size, head_dim]."""
        return (self.layers, 2, self.kv_heads, page_size, self.head_dim)


def _rope(config: Any, head_dim: int) -> tuple[tuple[float, ...], float]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind not in ROPE_TYPES:
        raise bad("rope_parameters.rope_type", kind, ", ".join(ROPE_TYPES))
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise bad("rope_parameters.partial_rotary_factor", parameters["partial_rotary_factor"], "1.0")
    if kind == "default":
        steps = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        frequencies, scaling = 1.0 / (parameters["rope_theta"] ** steps), 1.0
    else:
        frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return tuple(frequencies.float().tolist()), float(scaling)
