"""From a checkpoint directory to a ``Decoder``."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from tritone.errors import bad
from tritone.kernels import Kernels, TorchKernels, default_kernels
from tritone.models.decoder.checkpoint import Checkpoint, Progress, tensor_names
from tritone.models.decoder.config import DecoderConfig
from tritone.models.decoder.layers import LayerReader
from tritone.models.decoder.linear import DenseLinear
from tritone.models.decoder.model import Decoder
from tritone.models.decoder.remembered import decoder_config
from tritone.models.decoder.rope import rope_table
from tritone.models.decoder.shapes import linear_shapes, tensor_shapes
from tritone.models.decoder.weights import LinearReader

DTYPES = (torch.float32, torch.bfloat16)


def load_decoder(
    path: str | Path,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
    kernels: Kernels | None = None,
    max_positions: int | None = None,
    weights: str = "auto",
    group: int = 64,
    integers: bool = True,
    part: str | None = None,
) -> Decoder:
    """Load a decoder of one of ``MODEL_TYPES`` (``config.json`` and safetensors) for inference; activations are ``dtype``.

    ``part``: which decoder of a checkpoint that holds several, see ``part_of``; nothing else of it is read.
    ``weights`` and ``group``: the precision of the layers' matrices, experts' too, see ``LinearReader``; embedding, norms
    and a head that the checkpoint does not hold quantised are ``dtype``, routers float32. ``integers``: INT4 and INT8 weights
    multiply activations rounded to INT8, row by row. ``progress`` gets (bytes done, bytes in all). ``kernels`` defaults to
    the native ones on CPU and torch's elsewhere. ``max_positions`` bounds the rotary table (default: what the checkpoint
    declares; 4 * head_dim bytes a position). A tied embedding is held twice on CPU, once by rows and once packed for the head:
    vocab * hidden elements more, for a head that is about twice as fast.
    Raises ``InvalidArgument`` naming the field or tensor, what was found and what is allowed.
    """
    if dtype not in DTYPES:
        raise bad("dtype", str(dtype), ", ".join(map(str, DTYPES)))
    device = torch.device(device)
    config = decoder_config(path, part)
    where = config.part
    if kernels is None:
        kernels = default_kernels() if device.type == "cpu" else TorchKernels()
    stacked = config.experts is not None and _are_stacked(path, config)
    tensors, linears = tensor_shapes(config, stacked), linear_shapes(config, stacked)

    def ignored(name: str) -> bool:
        # The scales of e4m3 keys and values are read apart (load_kv_scales).
        known = name.endswith(("rotary_emb.inv_freq", ".k_scale", ".v_scale")) or not name.startswith(where.scope)
        return known or (config.tied_embeddings and name == f"{where.head}.weight")

    with torch.inference_mode(), Checkpoint(path, tensors, linears, ignored, progress) as checkpoint:

        def read(name: str, kind: torch.dtype) -> Tensor:
            return checkpoint.read(name, kind).to(device).contiguous()

        reader = LinearReader(checkpoint, kernels, dtype, device, weights, group, integers)
        embedding = read(f"{where.embedding}.weight", dtype)
        layer_reader = LayerReader(config, kernels, reader, read, tensors, dtype)
        layers = [layer_reader.layer(index) for index in range(config.layers)]
        final_norm = read(f"{where.model}.norm.weight", dtype)
        head = DenseLinear(kernels, embedding) if config.tied_embeddings else reader.head(where.head)
        positions = max_positions or config.max_positions
        rope = rope_table(config.rope_frequencies, config.rope_scaling, positions, device)
    return Decoder(config, embedding, layers, final_norm, head, rope, kernels)


def _are_stacked(path: str | Path, config: DecoderConfig) -> bool:
    """Whether the file holds a layer's experts as two tensors [experts, rows, columns] rather than as matrices."""
    stack = f"{config.part.model}.layers.{{}}.mlp.experts.gate_up_proj"
    names = tensor_names(path)
    return any(stack.format(index) in names for index in range(config.layers))
