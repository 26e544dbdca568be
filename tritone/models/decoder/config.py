"""What a decoder is, read from a Hugging Face ``config.json``."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tritone.errors import bad
from tritone.models.decoder.handed import Handed, handed_of
from tritone.models.decoder.parts import PARTS, THINKER, Part, part_of
from tritone.models.decoder.rope import axes_of, frequencies_of

_PLAIN = ("llama", "qwen2", "qwen3", "qwen3_moe")
_QWEN2 = ("qwen2", "qwen2_5_omni_text", "qwen2_5_omni_talker")
_SPARSE = ("qwen3_moe", "qwen3_omni_moe_text", "qwen3_omni_moe_talker_text")
_QWEN3 = ("qwen3", "qwen3_omni_moe_talker_code_predictor", *_SPARSE)
MODEL_TYPES = ("llama", *_QWEN2, *_QWEN3)


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in ``layers``; the other layers are dense.

    A token goes to ``per_token`` of ``count`` experts of ``inner_size``; ``normalized``: their weights then sum to 1.
    ``shared_size``: the inner size of an expert that every token goes to as well, 0 where there is none.
    """

    count: int
    per_token: int
    inner_size: int
    normalized: bool
    shared_size: int
    layers: frozenset[int]


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and switches of a decoder of ``MODEL_TYPES``.

    ``rope_frequencies`` are radians a position, [head_dim / 2] values exact in float32; ``rope_scaling`` multiplies the
    cosines and sines; ``rope_axes``: see ``axes_of``. ``max_positions`` is the longest context the checkpoint declares.
    ``embedding_size`` is ``hidden_size`` but where a projection that is not the decoder's own comes after the embedding.
    ``part`` says where in the checkpoint it lies. ``handed``: what its Talker is given, where it is a thinker with one.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    embedding_size: int
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
    experts: Experts | None
    rope_frequencies: tuple[float, ...]
    rope_scaling: float
    rope_axes: tuple[int, ...] | None
    part: Part
    handed: Handed | None = None

    @classmethod
    def from_directory(cls, path: str | Path, part: str | None = None) -> DecoderConfig:
        """Read ``config.json`` in ``path``; ``part`` as in ``part_of``.

        Raises ``InvalidArgument`` naming field, value and what is allowed.
        """
        from transformers import AutoConfig

        file = Path(path) / "config.json"
        try:
            declared = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise bad("config.json", str(file), f"a readable JSON file ({error})") from error
        if not isinstance(declared, dict):
            raise bad("config.json", declared, "a JSON object")
        model_type = declared.get("model_type")
        if model_type not in _PLAIN and model_type not in PARTS:
            raise bad("model_type", model_type, ", ".join((*_PLAIN, *PARTS)))
        # Qwen2_5OmniModel: so Qwen2.5-Omni was published.
        wanted = ("ForConditionalGeneration", "OmniModel") if model_type in PARTS else ("ForCausalLM",)
        architectures = declared.get("architectures") or []
        if not all(name.endswith(wanted) for name in architectures):
            raise bad("architectures", architectures, f"a ...{' or ...'.join(wanted)} class")
        found = part_of(model_type, part)
        try:
            whole: Any = AutoConfig.from_pretrained(str(path), local_files_only=True)
            # The weights are tied, or not, by what the model around the text model says.
            tied = bool((getattr(whole, found.section[0]) if found.section else whole).tie_word_embeddings)
            config = whole
            for key in found.section:
                config = getattr(config, key)
            decoder = cls.from_hugging_face(config, found, tied)
            return replace(decoder, handed=handed_of(whole, decoder.layers)) if found is THINKER else decoder
        except (AttributeError, KeyError, TypeError) as error:
            raise bad("config.json", str(file), f"a complete {model_type} configuration ({error!r})") from error

    @classmethod
    def from_hugging_face(cls, config: Any, part: Part, tied: bool) -> DecoderConfig:
        """From a ``transformers`` text configuration of one of ``MODEL_TYPES``; errors as ``from_directory``."""
        kind = config.model_type
        if kind not in MODEL_TYPES:
            raise bad("model_type", kind, ", ".join(MODEL_TYPES))
        if config.hidden_act not in ("silu", "swish"):
            raise bad("hidden_act", config.hidden_act, "silu")
        _refuse_windows(config)
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        if heads % kv_heads:
            raise bad("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads ({heads})")
        if head_dim % 2 or head_dim > 512:
            raise bad("head_dim", head_dim, "an even number up to 512")
        frequencies, scaling = frequencies_of(config, head_dim)
        attention_bias = bool(getattr(config, "attention_bias", False))
        return cls(
            model_type=kind,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            embedding_size=getattr(config, "embedding_size", None) or config.hidden_size,
            intermediate_size=config.intermediate_size,
            layers=config.num_hidden_layers,
            q_heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=config.rms_norm_eps,
            max_positions=config.max_position_embeddings,
            tied_embeddings=tied,
            qkv_bias=kind in _QWEN2 or attention_bias,
            output_bias=kind not in _QWEN2 and attention_bias,
            mlp_bias=kind == "llama" and bool(getattr(config, "mlp_bias", False)),
            qk_norm=kind in _QWEN3,
            experts=_experts(config) if kind in _SPARSE else None,
            rope_frequencies=frequencies,
            rope_scaling=scaling,
            rope_axes=axes_of(config, head_dim),
            part=part,
        )

    def page_shape(self, page_size: int) -> tuple[int, int, int, int, int]:
        """Shape of one physical KV page: [layers, 2, kv_heads, page_size, head_dim]."""
        return (self.layers, 2, self.kv_heads, page_size, self.head_dim)

    def is_sparse(self, layer: int) -> bool:
        """Whether the layer has experts."""
        return self.experts is not None and layer in self.experts.layers


def _refuse_windows(config: Any) -> None:
    sliding = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    # A family without layer types has the window in every layer.
    if sliding is not None and (types is None or "sliding_attention" in types):
        raise bad("sliding_window", sliding, "none (use_sliding_window false)")
    if types is not None and set(types) != {"full_attention"}:
        raise bad("layer_types", sorted(set(types)), "full_attention in every layer")


def _experts(config: Any) -> Experts | None:
    count, per_token = config.num_experts or 0, config.num_experts_per_tok
    shared = getattr(config, "shared_expert_intermediate_size", None) or 0
    layers = list(range(config.num_hidden_layers))
    if config.model_type != "qwen3_omni_moe_talker_text":  # which has experts everywhere
        dense, step = config.mlp_only_layers or [], config.decoder_sparse_step
        layers = [n for n in layers if n not in dense and (n + 1) % step == 0]
    if not count or not layers:
        return None
    if not 0 < per_token <= count:
        raise bad("num_experts_per_tok", per_token, f"1 to num_experts ({count})")
    normalized = bool(config.norm_topk_prob)
    return Experts(count, per_token, config.moe_intermediate_size, normalized, shared, frozenset(layers))
