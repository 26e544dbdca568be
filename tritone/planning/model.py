"""From a checkpoint's ``config.json`` to the parts that each stage holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tritone.errors import bad
from tritone.planning import defaults
from tritone.planning.code2wav import code2wav
from tritone.planning.decoders import DecoderSizes, layer_tensors
from tritone.planning.fields import Section
from tritone.planning.talkers import talker_3, talker_25
from tritone.planning.tensors import Part, Tensors, matrix
from tritone.planning.token2wav import bigvgan, dit
from tritone.planning.towers import audio_tower_3, audio_tower_25, vision_tower_3, vision_tower_25

DENSE_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@dataclass(frozen=True)
class Model:
    """What the stages hold of one checkpoint.

    ``towers`` and ``thinker`` are prefill's, ``thinker`` alone decode's. ``talker`` and ``voicebox`` are empty, and
    ``talker_text`` None, where the checkpoint has no voice. ``tied`` says that the embedding is the head, too;
    ``max_positions`` is the longest context it declares; ``config`` the parsed file.
    """

    architecture: str
    text: DecoderSizes
    thinker: tuple[Part, ...]
    max_positions: int
    tied: bool
    config: Mapping[str, Any]
    towers: tuple[Part, ...] = ()
    talker_text: DecoderSizes | None = None
    talker: tuple[Part, ...] = ()
    voicebox: tuple[Part, ...] = ()


def read_model(directory: Path) -> Model:
    """Of a checkpoint directory, of which only ``config.json`` is read.

    Raises InvalidArgument naming the field, its value and what is allowed."""
    config = Section.read(directory)
    named = config.values.get("architectures")
    if not isinstance(named, list) or len(named) != 1 or named[0] not in ARCHITECTURES:
        raise bad("config.json: architectures", named, f"one of {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[named[0]](str(named[0]), config)


def _dense(architecture: str, config: Section) -> Model:
    attention = config.flag("attention_bias")
    qwen2, llama = architecture.startswith("Qwen2"), architecture.startswith("Llama")
    sizes = DecoderSizes.read(
        config,
        qkv_bias=qwen2 or attention,
        output_bias=not qwen2 and attention,
        mlp_bias=llama and config.flag("mlp_bias"),
        qk_norm=architecture.startswith("Qwen3"),
    )
    tied = config.flag("tie_word_embeddings")
    thinker = _text("decoder", "", sizes, tied)
    return Model(architecture, sizes, thinker, config.number("max_position_embeddings"), tied, config.values)


def _qwen3_omni(architecture: str, config: Section) -> Model:
    thinker = config.section("thinker_config")
    text = thinker.section("text_config")
    bias = text.flag("attention_bias")
    sizes = DecoderSizes.read(text, qkv_bias=bias, output_bias=bias, qk_norm=True, experts=True)
    audio = audio_tower_3("thinker.audio_tower.", thinker.section("audio_config", defaults.AUDIO_3))
    vision = vision_tower_3("thinker.visual.", thinker.section("vision_config", defaults.VISION_3))
    silent = _silent(architecture, config, sizes, audio, vision)
    if not config.flag("enable_audio_output", True):
        return silent
    talker_text, talker = talker_3("talker.", config.section("talker_config"))
    vocoder = code2wav("code2wav.", config.section("code2wav_config", defaults.CODE2WAV))
    return replace(silent, talker_text=talker_text, talker=talker, voicebox=vocoder)


def _qwen25_omni(architecture: str, config: Section) -> Model:
    thinker = config.section("thinker_config")
    text = thinker.section("text_config")
    sizes = DecoderSizes.read(text, qkv_bias=True)
    audio = audio_tower_25("thinker.audio_tower.", thinker.section("audio_config", defaults.AUDIO_25))
    vision = vision_tower_25("thinker.visual.", thinker.section("vision_config", defaults.VISION_25))
    silent = _silent(architecture, config, sizes, audio, vision)
    if not config.flag("enable_audio_output", True):
        return silent
    talker_text, talker = talker_25("talker.", config.section("talker_config"))
    vocoder = config.section("token2wav_config")
    parts = (
        dit("token2wav.code2wav_dit_model.", vocoder.section("dit_config", defaults.DIT)),
        bigvgan("token2wav.code2wav_bigvgan_model.", vocoder.section("bigvgan_config", defaults.BIGVGAN)),
    )
    return replace(silent, talker_text=talker_text, talker=talker, voicebox=parts)


def _silent(architecture: str, config: Section, sizes: DecoderSizes, audio: list[Tensors], vision: list[Tensors]) -> Model:
    """The thinker alone, as checkpoints without audio output have it."""
    thinker = config.section("thinker_config")
    tied = thinker.flag("tie_word_embeddings")
    return Model(
        architecture,
        sizes,
        _text("thinker", "thinker.", sizes, tied),
        thinker.section("text_config").number("max_position_embeddings"),
        tied,
        config.values,
        towers=(Part("audio tower", tuple(audio)), Part("vision tower", tuple(vision))),
    )


def _text(name: str, prefix: str, sizes: DecoderSizes, tied: bool) -> tuple[Part, ...]:
    embedding = matrix(f"{prefix}model.embed_tokens", sizes.vocabulary, sizes.hidden)
    head = [] if tied else matrix(f"{prefix}lm_head", sizes.vocabulary, sizes.hidden)
    return (Part(name, (*embedding, *layer_tensors(f"{prefix}model.", sizes), *head)),)


ARCHITECTURES: Mapping[str, Callable[[str, Section], Model]] = {
    **dict.fromkeys(DENSE_ARCHITECTURES, _dense),
    "Qwen3OmniMoeForConditionalGeneration": _qwen3_omni,
    "Qwen2_5OmniForConditionalGeneration": _qwen25_omni,
    "Qwen2_5OmniModel": _qwen25_omni,  # so in the files as they were published
}
