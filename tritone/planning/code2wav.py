"""Tensors of Qwen3-Omni's code2wav: a small transformer over codes, upsampling, and a decoder of convolutions."""

from __future__ import annotations

from tritone.planning.fields import Section
from tritone.planning.tensors import Part, Tensors, convolution, matrix, vectors

RESIDUAL_UNITS = 3


def code2wav(prefix: str, config: Section) -> tuple[Part, ...]:
    return (Part("code2wav", (*_transformer(prefix, config), *_upsampling(prefix, config), *_decoder(prefix, config))),)


def _transformer(prefix: str, config: Section) -> list[Tensors]:
    width, inner, layers = (config.number(name) for name in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    heads = config.number("num_attention_heads")
    head_dim, bias = config.number("head_dim", max(1, width // heads)), config.flag("attention_bias")
    q, kv = heads * head_dim, config.number("num_key_value_heads") * head_dim
    base = f"{prefix}pre_transformer.layers.0."
    made = matrix(f"{prefix}code_embedding", config.number("codebook_size") * config.number("num_quantizers"), width)
    for name, rows, columns in (("q_proj", q, width), ("k_proj", kv, width), ("v_proj", kv, width), ("o_proj", width, q)):
        made += matrix(f"{base}self_attn.{name}", rows, columns, layers, bias=bias)
    for name, rows, columns in (("gate_proj", inner, width), ("up_proj", inner, width), ("down_proj", width, inner)):
        made += matrix(f"{base}mlp.{name}", rows, columns, layers)
    norms = ("input_layernorm", "post_attention_layernorm", "self_attn_layer_scale", "mlp_layer_scale")
    made += vectors((base + name for name in norms), width, layers)
    return made + vectors((f"{prefix}pre_transformer.norm",), width)


def _upsampling(prefix: str, config: Section) -> list[Tensors]:
    width = config.number("hidden_size")
    made = []
    for index, factor in enumerate(config.numbers("upsampling_ratios")):
        base = f"{prefix}upsample.{index}."
        made += convolution(f"{base}0.conv", (width, width, factor), width)
        made += convolution(f"{base}1.dwconv.conv", (width, 1, 7), width)
        made += matrix(f"{base}1.pwconv1", 4 * width, width, bias=True)
        made += matrix(f"{base}1.pwconv2", width, 4 * width, bias=True)
        made += vectors((f"{base}1.norm.weight", f"{base}1.norm.bias", f"{base}1.gamma"), width)
    return made


def _decoder(prefix: str, config: Section) -> list[Tensors]:
    width = config.number("decoder_dim")
    made = convolution(f"{prefix}decoder.0.conv", (width, config.number("hidden_size"), 7), width)
    rates = config.numbers("upsample_rates")
    for index, rate in enumerate(rates):
        base, half = f"{prefix}decoder.{index + 1}.block.", width // 2
        made += _snake(f"{base}0", width)
        made += convolution(f"{base}1.conv", (width, half, 2 * rate), half)
        made += _snake(f"{base}2.act1", half, 2 * RESIDUAL_UNITS)
        made += convolution(f"{base}2.conv1.conv", (half, half, 7), half, RESIDUAL_UNITS)
        made += convolution(f"{base}2.conv2.conv", (half, half, 1), half, RESIDUAL_UNITS)
        width = half
    last = f"{prefix}decoder.{len(rates) + 1}"
    return [*made, *_snake(last, width), *convolution(f"{prefix}decoder.{len(rates) + 2}.conv", (1, width, 7), 1)]


def _snake(name: str, width: int, count: int = 1) -> list[Tensors]:
    return vectors((f"{name}.alpha", f"{name}.beta"), width, count)
