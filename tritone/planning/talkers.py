"""Tensors of the talkers around their decoders: what takes the thinker's states in, and what gives codes out."""

from __future__ import annotations

from tritone.planning.decoders import DecoderSizes, layer_tensors
from tritone.planning.fields import Section
from tritone.planning.tensors import Part, Tensors, matrix


def talker_3(prefix: str, config: Section) -> tuple[DecoderSizes, tuple[Part, ...]]:
    """Qwen3-Omni: a decoder with shared experts, two projections, and the code predictor with an embedding and a head for
    each codebook but the first."""
    text = config.section("text_config")
    bias = text.flag("attention_bias")
    sizes = DecoderSizes.read(text, qkv_bias=bias, output_bias=bias, qk_norm=True, experts=True, shared=True)
    thinker = config.number("thinker_hidden_size")
    # The projections' inner width is the one that a dense layer would have.
    inner = text.number("intermediate_size")
    projections = []
    for name in ("text_projection", "hidden_projection"):
        projections += matrix(f"{prefix}{name}.linear_fc1", inner, thinker, bias=True)
        projections += matrix(f"{prefix}{name}.linear_fc2", sizes.hidden, inner, bias=True)
    ends, layers = _ends(prefix, "codec_embedding", sizes, sizes.hidden), layer_tensors(f"{prefix}model.", sizes)
    decoder = Part("talker", (*projections, *ends, *layers))
    return sizes, (decoder, _code_predictor(f"{prefix}code_predictor.", config.section("code_predictor_config")))


def talker_25(prefix: str, config: Section) -> tuple[DecoderSizes, tuple[Part, ...]]:
    """Qwen2.5-Omni: a dense decoder whose embeddings are as wide as the thinker's, and one projection of them."""
    sizes = DecoderSizes.read(config, qkv_bias=True)
    wide = config.number("embedding_size")
    projection = matrix(f"{prefix}thinker_to_talker_proj", sizes.hidden, wide, bias=True)
    tensors = (*projection, *_ends(prefix, "embed_tokens", sizes, wide), *layer_tensors(f"{prefix}model.", sizes))
    return sizes, (Part("talker", tensors),)


def _ends(prefix: str, embedding: str, sizes: DecoderSizes, width: int) -> list[Tensors]:
    return [
        *matrix(f"{prefix}model.{embedding}", sizes.vocabulary, width),
        *matrix(f"{prefix}codec_head", sizes.vocabulary, sizes.hidden),
    ]


def _code_predictor(prefix: str, config: Section) -> Part:
    bias = config.flag("attention_bias")
    sizes = DecoderSizes.read(config, qkv_bias=bias, output_bias=bias, qk_norm=True)
    others = config.number("num_code_groups") - 1
    ends = []
    if others:
        for name in ("model.codec_embedding.0", "lm_head.0"):
            ends += matrix(prefix + name, sizes.vocabulary, sizes.hidden, others)
    return Part("code predictor", (*ends, *layer_tensors(f"{prefix}model.", sizes)))
