"""Names and shapes of the tensors that a decoder's part of a checkpoint must hold."""

from __future__ import annotations

from tritone.models.decoder.config import DecoderConfig


def linear_shapes(config: DecoderConfig, stacked: bool = False) -> dict[str, tuple[int, int]]:
    """Name (without ``.weight``) and (rows, columns) of every matrix that may be stored dense or quantised.

    ``stacked``: the experts of a layer are two tensors, which ``tensor_shapes`` then has.
    """
    shapes: dict[str, tuple[int, int]] = {}
    for index in range(config.layers):
        base = f"{config.part.model}.layers.{index}"
        shapes |= {f"{base}.{name}": size for name, size in _attention(config).items()}
        shapes |= {f"{base}.mlp.{name}": size for name, size in _mlp(config, index, stacked).items()}
    if not config.tied_embeddings:
        shapes[config.part.head] = (config.vocab_size, config.hidden_size)
    return shapes


def tensor_shapes(config: DecoderConfig, stacked: bool = False) -> dict[str, tuple[int, ...]]:
    """Name and shape of every other tensor: embedding, norms, biases, routers and stacks, which are floating point."""
    hidden, experts = config.hidden_size, config.experts
    shapes: dict[str, tuple[int, ...]] = {f"{config.part.embedding}.weight": (config.vocab_size, config.embedding_size)}
    for index in range(config.layers):
        base = f"{config.part.model}.layers.{index}"
        shapes[f"{base}.input_layernorm.weight"] = (hidden,)
        shapes[f"{base}.post_attention_layernorm.weight"] = (hidden,)
        for name, (rows, _) in _attention(config).items():
            if config.output_bias if name == "self_attn.o_proj" else config.qkv_bias:
                shapes[f"{base}.{name}.bias"] = (rows,)
        if config.qk_norm:
            shapes[f"{base}.self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[f"{base}.self_attn.k_norm.weight"] = (config.head_dim,)
        if config.mlp_bias:
            shapes |= {f"{base}.mlp.{name}.bias": (rows,) for name, (rows, _) in _mlp(config, index, stacked).items()}
        if experts is not None and config.is_sparse(index):
            shapes[f"{base}.mlp.gate.weight"] = (experts.count, hidden)
            if experts.shared_size:
                shapes[f"{base}.mlp.shared_expert_gate.weight"] = (1, hidden)
            if stacked:
                shapes[f"{base}.mlp.experts.gate_up_proj"] = (experts.count, 2 * experts.inner_size, hidden)
                shapes[f"{base}.mlp.experts.down_proj"] = (experts.count, hidden, experts.inner_size)
    shapes[f"{config.part.model}.norm.weight"] = (hidden,)
    return shapes


def _attention(config: DecoderConfig) -> dict[str, tuple[int, int]]:
    hidden, q, kv = config.hidden_size, config.q_heads * config.head_dim, config.kv_heads * config.head_dim
    return {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
    }


def _mlp(config: DecoderConfig, layer: int, stacked: bool) -> dict[str, tuple[int, int]]:
    hidden, experts = config.hidden_size, config.experts
    if experts is None or not config.is_sparse(layer):
        return _gated("", config.intermediate_size, hidden)
    shapes = _gated("shared_expert.", experts.shared_size, hidden) if experts.shared_size else {}
    for number in range(0 if stacked else experts.count):
        shapes |= _gated(f"experts.{number}.", experts.inner_size, hidden)
    return shapes


def _gated(prefix: str, inner: int, hidden: int) -> dict[str, tuple[int, int]]:
    return {
        f"{prefix}gate_proj": (inner, hidden),
        f"{prefix}up_proj": (inner, hidden),
        f"{prefix}down_proj": (hidden, inner),
    }
