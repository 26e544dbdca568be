"""A GGUF file with the weights of a random checkpoint, for llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quantization.files import TensorFiles
from tritone.checkpoints import Progress
from tritone.models.decoder import DecoderConfig

_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}


def write_q4_0(checkpoint: Path, progress: Progress) -> Path:
    """``model.q4_0.gguf`` beside the checkpoint's files, made once: matrices in Q4_0, the tied embedding in Q8_0, and no
    vocabulary."""
    import gguf

    destination = checkpoint / "model.q4_0.gguf"
    if destination.is_file():
        return destination
    config = DecoderConfig.from_directory(checkpoint)
    temporary = destination.with_suffix(".new")
    writer = gguf.GGUFWriter(str(temporary), "qwen3")
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.q_heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(json.loads((checkpoint / "config.json").read_text())["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    kinds = gguf.GGMLQuantizationType
    with TensorFiles.of(checkpoint) as files:
        for number, (name, shape) in enumerate(files.shapes.items(), 1):
            values = files.read(name).float().numpy()
            kind: Any = kinds.F32 if len(shape) == 1 else kinds.Q8_0 if name.startswith("model.embed_tokens") else kinds.Q4_0
            data = values if kind == kinds.F32 else gguf.quants.quantize(values, kind)
            writer.add_tensor(_name(name), data, raw_dtype=kind)
            progress("writing a GGUF copy", number, len(files.shapes))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    temporary.rename(destination)
    return destination


def _name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in _TOP:
        return f"{_TOP[stem]}.weight"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_LAYER[part]}.weight"
