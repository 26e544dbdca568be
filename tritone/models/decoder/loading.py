"""From a checkpoint directory to a ``Decoder``."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from tritone.errors import bad
from tritone.kernels import HeadNorm, Kernels, RopeTable, TorchKernels, default_kernels
from tritone.models.decoder.checkpoint import Checkpoint, Progress
from tritone.models.decoder.config import DecoderConfig
from tritone.models.decoder.linear import DenseLinear, Linear
from tritone.models.decoder.model import Decoder, Layer
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
) -> Decoder:
    """Load a Llama, Qwen2 or Qwen3 checkpoint (``config.json`` and safetensors) for inference; activations are ``dtype``.

    ``weights`` and ``group``: the precision of the layers' matrices, see ``LinearReader``; embedding, norms and a head that
    the checkpoint does not hold quantised are ``dtype``. ``integers``: INT4 and INT8 weights multiply activations rounded to
    INT8, row by row. ``progress`` gets (bytes done, bytes in all). ``kernels`` defaults to the native ones on CPU and torch's
    elsewhere. ``max_positions`` bounds the rotary table (default: what the checkpoint declares; 4 * head_dim bytes a
    position). A tied embedding is held twice on CPU, once by rows and once packed for the head: vocab * hidden elements more,
    for a head that is about twice as fast.
    Raises ``InvalidArgument`` naming the field or tensor, what was found and what is allowed.
    """
    if dtype not in DTYPES:
        raise bad("dtype", str(dtype), ", ".join(map(str, DTYPES)))
    device = torch.device(device)
    config = DecoderConfig.from_directory(path)
    if kernels is None:
        kernels = default_kernels() if device.type == "cpu" else TorchKernels()
    tensors, linears = tensor_shapes(config), linear_shapes(config)

    def ignored(name: str) -> bool:
        # The scales of e4m3 keys and values are read apart (load_kv_scales).
        known = name.endswith(("rotary_emb.inv_freq", ".k_scale", ".v_scale"))
        return known or (config.tied_embeddings and name == "lm_head.weight")

    with torch.inference_mode(), Checkpoint(path, tensors, linears, ignored, progress) as checkpoint:
        reader = LinearReader(checkpoint, kernels, dtype, device, weights, group, integers)

        def read(*names: str) -> Tensor:
            parts = [checkpoint.read(name, dtype).to(device) for name in names]
            return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)

        def linear(prefix: str, *names: str) -> Linear:
            biases = [f"{prefix}.{name}.bias" for name in names if f"{prefix}.{name}.bias" in tensors]
            return reader.linear([f"{prefix}.{name}" for name in names], read(*biases) if biases else None)

        embedding = read("model.embed_tokens.weight")
        layers = []
        for index in range(config.layers):
            base = f"model.layers.{index}"
            norm = None
            if config.qk_norm:
                q, k = (read(f"{base}.self_attn.{name}_norm.weight") for name in "qk")
                norm = HeadNorm(q, k, config.rms_norm_eps)
            layers.append(
                Layer(
                    input_norm=read(f"{base}.input_layernorm.weight"),
                    qkv=linear(f"{base}.self_attn", "q_proj", "k_proj", "v_proj"),
                    head_norm=norm,
                    output=linear(f"{base}.self_attn", "o_proj"),
                    mlp_norm=read(f"{base}.post_attention_layernorm.weight"),
                    gate_up=linear(f"{base}.mlp", "gate_proj", "up_proj"),
                    down=linear(f"{base}.mlp", "down_proj"),
                )
            )
        final_norm = read("model.norm.weight")
        head = DenseLinear(kernels, embedding) if config.tied_embeddings else reader.head("lm_head")
        rope = rope_table(config, max_positions or config.max_positions, device)
    return Decoder(config, embedding, layers, final_norm, head, rope, kernels)


def linear_shapes(config: DecoderConfig) -> dict[str, tuple[int, int]]:
    """Name (without ``.weight``) and (rows, columns) of every matrix that the checkpoint must hold, dense or quantised."""
    shapes = {
        f"model.layers.{index}.{name}": (rows, columns)
        for index in range(config.layers)
        for name, (rows, columns, _) in _matrices(config).items()
    }
    if not config.tied_embeddings:
        shapes["lm_head"] = (config.vocab_size, config.hidden_size)
    return shapes


def tensor_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every other tensor: embedding, norms and biases, which are floating point."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for index in range(config.layers):
        base = f"model.layers.{index}"
        shapes[f"{base}.input_layernorm.weight"] = (hidden,)
        shapes[f"{base}.post_attention_layernorm.weight"] = (hidden,)
        for name, (rows, _, bias) in _matrices(config).items():
            if bias:
                shapes[f"{base}.{name}.bias"] = (rows,)
        if config.qk_norm:
            shapes[f"{base}.self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[f"{base}.self_attn.k_norm.weight"] = (config.head_dim,)
    shapes["model.norm.weight"] = (hidden,)
    return shapes


def _matrices(config: DecoderConfig) -> dict[str, tuple[int, int, bool]]:
    """Rows, columns and whether there is a bias, by the name inside a layer."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.q_heads * config.head_dim, config.kv_heads * config.head_dim
    return {
        "self_attn.q_proj": (q, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, q, config.output_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }


def rope_table(config: DecoderConfig, positions: int, device: torch.device) -> RopeTable:
    """Cosines and sines of position times frequency, float32 [positions, head_dim / 2], times the attention scaling."""
    frequencies = torch.tensor(config.rope_frequencies, dtype=torch.float32)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
    return RopeTable((angles.cos() * config.rope_scaling).to(device), (angles.sin() * config.rope_scaling).to(device))
