"""Decoders (Llama, Qwen2, Qwen3, with experts, and those of Qwen's omni models) over paged KV."""

from tritone.models.decoder.batch import Batch
from tritone.models.decoder.config import DecoderConfig
from tritone.models.decoder.key_offsets import key_offsets
from tritone.models.decoder.kv_scales import load_kv_scales
from tritone.models.decoder.linear import DenseLinear, Linear
from tritone.models.decoder.loading import load_decoder
from tritone.models.decoder.model import Decoder, Layer
from tritone.models.decoder.remembered import decoder_config

__all__ = [
    "Batch",
    "Decoder",
    "DecoderConfig",
    "DenseLinear",
    "Layer",
    "Linear",
    "decoder_config",
    "key_offsets",
    "load_decoder",
    "load_kv_scales",
]
