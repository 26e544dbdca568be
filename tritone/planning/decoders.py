"""Tensors of the decoders: dense ones, and those with experts.

A layer of width h, H query heads and K key-value heads of size d:

- attention: (H + 2 K) d h + h H d, and biases or head norms as the family has them;
- MLP of width f: 3 f h;
- or E experts of width m: 3 E m h, a router E h, and perhaps a shared expert of width s: 3 s h and its gate of h;
- two norms of h.

One token's keys and values take 2 * layers * K * d elements.
"""

from __future__ import annotations

from dataclasses import dataclass

from tritone.planning.fields import Section
from tritone.planning.tensors import Tensors, matrix, vectors


@dataclass(frozen=True)
class DecoderSizes:
    """``sparse_layers`` of the ``layers`` have experts in place of the MLP; ``shared`` is the shared expert's width, or 0."""

    layers: int
    hidden: int
    inner: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sparse_layers: int = 0
    experts: int = 0
    expert_inner: int = 0
    shared: int = 0

    @classmethod
    def read(
        cls,
        config: Section,
        *,
        qkv_bias: bool = False,
        output_bias: bool = False,
        mlp_bias: bool = False,
        qk_norm: bool = False,
        experts: bool = False,
        shared: bool = False,
    ) -> DecoderSizes:
        """From a decoder's part of ``config.json``; the switches are what its family has."""
        layers, hidden, heads = (config.number(name) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
        sparse = 0
        if experts:
            step, dense = config.number("decoder_sparse_step", 1), config.numbers("mlp_only_layers", (), least=0)
            sparse = sum((index + 1) % step == 0 and index not in dense for index in range(layers))
        return cls(
            layers=layers,
            hidden=hidden,
            # A model of experts alone may leave the width of a dense layer out.
            inner=config.number("intermediate_size") if sparse < layers else 0,
            q_heads=heads,
            kv_heads=config.number("num_key_value_heads", heads),
            head_dim=config.number("head_dim", max(1, hidden // heads)),
            vocabulary=config.number("vocab_size"),
            qkv_bias=qkv_bias,
            output_bias=output_bias,
            mlp_bias=mlp_bias,
            qk_norm=qk_norm,
            sparse_layers=sparse,
            # transformers 5 writes num_local_experts for what was published as num_experts.
            experts=config.number("num_local_experts" if config.has("num_local_experts") else "num_experts") if sparse else 0,
            expert_inner=config.number("moe_intermediate_size") if sparse else 0,
            shared=config.number("shared_expert_intermediate_size") if sparse and shared else 0,
        )

    @property
    def kv_elements(self) -> int:
        """Of one token's keys and values in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim


def layer_tensors(prefix: str, sizes: DecoderSizes) -> list[Tensors]:
    """All layers and the norm after them; names begin with ``prefix`` (``model.``)."""
    base, layers, dense = f"{prefix}layers.0.", sizes.layers, sizes.layers - sizes.sparse_layers
    return [
        *_attention(f"{base}self_attn.", sizes),
        *(_mlp(f"{base}mlp.", sizes.inner, sizes.hidden, dense, sizes.mlp_bias) if dense else []),
        *(_experts(f"{base}mlp.", sizes) if sizes.sparse_layers else []),
        *vectors((f"{base}input_layernorm", f"{base}post_attention_layernorm"), sizes.hidden, layers),
        *vectors((f"{prefix}norm",), sizes.hidden),
    ]


def _attention(base: str, sizes: DecoderSizes) -> list[Tensors]:
    q, kv = sizes.q_heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    made = []
    for name, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
        made += matrix(base + name, rows, sizes.hidden, sizes.layers, bias=sizes.qkv_bias, quantisable=True)
    made += matrix(f"{base}o_proj", sizes.hidden, q, sizes.layers, bias=sizes.output_bias, quantisable=True)
    return made + (vectors((f"{base}q_norm", f"{base}k_norm"), sizes.head_dim, sizes.layers) if sizes.qk_norm else [])


def _mlp(base: str, inner: int, hidden: int, count: int, bias: bool = False) -> list[Tensors]:
    return [
        *matrix(f"{base}gate_proj", inner, hidden, count, bias=bias, quantisable=True),
        *matrix(f"{base}up_proj", inner, hidden, count, bias=bias, quantisable=True),
        *matrix(f"{base}down_proj", hidden, inner, count, bias=bias, quantisable=True),
    ]


def _experts(base: str, sizes: DecoderSizes) -> list[Tensors]:
    sparse = sizes.sparse_layers
    made = _mlp(f"{base}experts.0.", sizes.expert_inner, sizes.hidden, sparse * sizes.experts)
    made += matrix(f"{base}gate", sizes.experts, sizes.hidden, sparse)
    if sizes.shared:
        made += _mlp(f"{base}shared_expert.", sizes.shared, sizes.hidden, sparse)
        made += matrix(f"{base}shared_expert_gate", 1, sizes.hidden, sparse)
    return made
