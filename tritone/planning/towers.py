"""Tensors of the thinkers' towers. They compute as transformers' modules, so all of them stay dense."""

from __future__ import annotations

from tritone.planning.fields import Section
from tritone.planning.tensors import Tensors, convolution, matrix, vectors


def audio_tower_3(prefix: str, config: Section) -> list[Tensors]:
    """Qwen3-Omni: three convolutions that halve time and frequency, encoder layers, two projections."""
    width, small, out = config.number("d_model"), config.number("downsample_hidden_size"), config.number("output_dim")
    bins = config.number("num_mel_bins")
    for _ in range(3):
        bins = (bins + 1) // 2
    return [
        *convolution(f"{prefix}conv2d1", (small, 1, 3, 3), small),
        *convolution(f"{prefix}conv2d2", (small, small, 3, 3), small, count=2),
        *matrix(f"{prefix}conv_out", width, small * bins),
        *_audio_layers(prefix, config, key_bias=True),
        *matrix(f"{prefix}proj1", width, width, bias=True),
        *matrix(f"{prefix}proj2", out, width, bias=True),
    ]


def audio_tower_25(prefix: str, config: Section) -> list[Tensors]:
    """Qwen2.5-Omni: Whisper's two convolutions and encoder layers, one projection, embeddings of begin and end."""
    width, out = config.number("d_model"), config.number("output_dim")
    return [
        *convolution(f"{prefix}conv1", (width, config.number("num_mel_bins"), 3), width),
        *convolution(f"{prefix}conv2", (width, width, 3), width),
        *matrix(f"{prefix}audio_bos_eos_token", 2, out),
        *_audio_layers(prefix, config, key_bias=False),
        *matrix(f"{prefix}proj", out, width, bias=True),
    ]


def _audio_layers(prefix: str, config: Section, key_bias: bool) -> list[Tensors]:
    width, inner, layers = (config.number(name) for name in ("d_model", "encoder_ffn_dim", "encoder_layers"))
    base = f"{prefix}layers.0."
    made = []
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        made += matrix(f"{base}self_attn.{name}", width, width, layers, bias=key_bias or name != "k_proj")
    return [
        *made,
        *matrix(f"{base}fc1", inner, width, layers, bias=True),
        *matrix(f"{base}fc2", width, inner, layers, bias=True),
        *_layer_norms((f"{base}self_attn_layer_norm", f"{base}final_layer_norm"), width, layers),
        *_layer_norms((f"{prefix}ln_post",), width),
    ]


def vision_tower_3(prefix: str, config: Section) -> list[Tensors]:
    """Qwen3-Omni: patches, learned positions, blocks, and one merger for the output and for each deepstack layer."""
    width, inner, depth = config.number("hidden_size"), config.number("intermediate_size"), config.number("depth")
    merged, out = width * config.number("spatial_merge_size") ** 2, config.number("out_hidden_size")
    taps = len(config.numbers("deepstack_visual_indexes", least=0))
    base = f"{prefix}blocks.0."
    return [
        *convolution(f"{prefix}patch_embed.proj", _patch(config, width), width),
        *matrix(f"{prefix}pos_embed", config.number("num_position_embeddings"), width),
        *matrix(f"{base}attn.qkv", 3 * width, width, depth, bias=True),
        *matrix(f"{base}attn.proj", width, width, depth, bias=True),
        *matrix(f"{base}mlp.linear_fc1", inner, width, depth, bias=True),
        *matrix(f"{base}mlp.linear_fc2", width, inner, depth, bias=True),
        *_layer_norms((f"{base}norm1", f"{base}norm2"), width, depth),
        *_layer_norms((f"{prefix}merger.ln_q",), width),
        *(_layer_norms((f"{prefix}merger_list.0.ln_q",), merged, taps) if taps else []),
        *_merger(f"{prefix}merger.", merged, out, 1 + taps),
    ]


def vision_tower_25(prefix: str, config: Section) -> list[Tensors]:
    """Qwen2.5-Omni: patches, blocks with a gated MLP and RMS norms, one merger."""
    width, inner, depth = config.number("hidden_size"), config.number("intermediate_size"), config.number("depth")
    base = f"{prefix}blocks.0."
    made = []
    for name in ("attn.q", "attn.k", "attn.v", "attn.proj"):
        made += matrix(base + name, width, width, depth, bias=True)
    return [
        *convolution(f"{prefix}patch_embed.proj", _patch(config, width)),
        *made,
        *matrix(f"{base}mlp.gate_proj", inner, width, depth, bias=True),
        *matrix(f"{base}mlp.up_proj", inner, width, depth, bias=True),
        *matrix(f"{base}mlp.down_proj", width, inner, depth, bias=True),
        *vectors((f"{base}norm1", f"{base}norm2"), width, depth),
        *vectors((f"{prefix}merger.ln_q",), width),
        *_merger(f"{prefix}merger.", width * config.number("spatial_merge_size") ** 2, config.number("out_hidden_size"), 1),
    ]


def _patch(config: Section, width: int) -> tuple[int, ...]:
    patch = config.number("patch_size")
    return (width, config.number("in_channels"), config.number("temporal_patch_size"), patch, patch)


def _merger(base: str, merged: int, out: int, count: int) -> list[Tensors]:
    return [
        *matrix(f"{base}mlp.0", merged, merged, count, bias=True),
        *matrix(f"{base}mlp.2", out, merged, count, bias=True),
    ]


def _layer_norms(names: tuple[str, ...], width: int, count: int = 1) -> list[Tensors]:
    return vectors(tuple(f"{name}.{kind}" for name in names for kind in ("weight", "bias")), width, count)
