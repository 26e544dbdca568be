"""Qwen3 checkpoints of seeded random weights: as fast as real ones of their size, and made in seconds."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from tritone.cache import made_whole
from tritone.checkpoints import Progress
from tritone.models.decoder import DecoderConfig
from tritone.models.decoder.shapes import linear_shapes, tensor_shapes

HEAD_DIM = 128
CONTEXT = 16384
_LAYERS_PER_FILE = 4


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen3 decoder with a tied head. A small ``vocabulary`` keeps the head, which is never quantised, small
    beside the layers, as it is in large models."""

    name: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int

    @property
    def config(self) -> dict[str, object]:
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": HEAD_DIM,
            "hidden_act": "silu",
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "torch_dtype": "bfloat16",
        }


LARGE = Shape("random-1.0b", 2048, 8192, 16, 16, 8, 4096)
"""1.01 billion parameters, 2.0 GB in bf16 and 0.53 GB in INT4."""
SHORT = Shape("random-0.26b", 2048, 8192, 4, 16, 8, 4096)
"""The same layers, four of them, for a short run."""
PEER = Shape("random-0.45b", 1024, 3072, 28, 16, 8, 4096)
"""The layers of Qwen3-0.6B."""


def make(model: Shape, cache: Path, progress: Progress) -> Path:
    """The checkpoint's directory in ``cache``, made once; it has no tokenizer.

    Weights are normal with variance 1 / inputs, norms are 1; each tensor's seed is its place in the model.
    """
    destination = cache / "checkpoints" / model.name
    with made_whole(destination) as work:
        if work is None:
            return destination
        (work / "config.json").write_text(json.dumps(model.config, indent=2) + "\n")
        config = DecoderConfig.from_directory(work)
        shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in linear_shapes(config).items()}
        shapes |= tensor_shapes(config)
        files = _files(shapes)
        seeds = {name: number for number, name in enumerate(shapes)}
        where, done, total = {}, 0, sum(map(math.prod, shapes.values()))
        for number, names in enumerate(files, 1):
            file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
            tensors = {}
            for name in names:
                tensors[name] = _tensor(shapes[name], seeds[name])
                done += math.prod(shapes[name])
                progress(f"making {model.name}", done, total)
            save_file(tensors, str(work / file), metadata={"format": "pt"})
            where |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": 2 * total}, "weight_map": where}
        (work / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return destination


def _files(names: dict[str, tuple[int, ...]]) -> list[list[str]]:
    """Names by file: so many layers in each; what belongs to no layer is in the first."""
    files: dict[int, list[str]] = {}
    for name in names:
        parts = name.split(".")
        files.setdefault(int(parts[2]) // _LAYERS_PER_FILE if parts[1] == "layers" else 0, []).append(name)
    return [files[number] for number in sorted(files)]


def _tensor(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * shape[1] ** -0.5).to(torch.bfloat16)


def parameters(shape: Shape) -> int:
    """Numbers in all tensors."""
    attention = shape.hidden * HEAD_DIM * (2 * shape.heads + 2 * shape.kv_heads)
    norms = 2 * shape.hidden + 2 * HEAD_DIM
    layer = attention + 3 * shape.hidden * shape.inner + norms
    return shape.vocabulary * shape.hidden + shape.layers * layer + shape.hidden
