"""Quantised checkpoints and weights in the decoder, against transformers with the same weights dequantised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quantization.quantize import Settings, quantize_checkpoint
from tests.unit.test_quantization_checkpoints import words
from tests.unit.test_quantization_models import KINDS, distance, logits, make
from tritone.errors import InvalidArgument
from tritone.kernels import TorchKernels, default_kernels
from tritone.models.decoder import Batch, Decoder, load_decoder
from tritone.models.decoder.linear import DenseLinear, QuantizedLinear
from tritone.models.decoder.mlp import DenseMlp

PAGE = 16
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def run(decoder: Decoder) -> torch.Tensor:
    """Float32 [2, 24, vocabulary] of the tokens that ``test_quantization_models.run`` uses."""
    ids = ((torch.arange(48).reshape(2, 24) * 7919) % 330).flatten()
    kv = torch.zeros((4, *decoder.config.page_shape(PAGE)), dtype=decoder.dtype)
    table = torch.arange(4, dtype=torch.int32).reshape(2, 2)
    positions = torch.arange(24, dtype=torch.int32).repeat(2)
    hidden = decoder.forward(Batch(ids, positions, [0, 24, 48], torch.tensor([24, 24], dtype=torch.int32), table), kv)
    return decoder.logits(hidden).reshape(2, 24, -1)


def gated(decoder: Decoder) -> DenseMlp:
    """What the first layer does after attention."""
    mlp = decoder.layers[0].mlp
    assert isinstance(mlp, DenseMlp)
    return mlp


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("dense"), tie_word_embeddings=False)


SETTINGS: dict[str, dict[str, Any]] = {
    "int4": {"weights": "int4", "group": 32},
    "int4-asymmetric": {"weights": "int4", "group": 16, "symmetric": False},
    "int4-rows": {"weights": "int4", "group": -1},
    "int8": {"weights": "int8"},
    "fp8": {"weights": "fp8"},
    "fp8-blocks": {"weights": "fp8", "block": (32, 32)},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_quantised_checkpoint_gives_what_its_dequantised_weights_give(name: str, kind: str, tmp_path: Path) -> None:
    source = make(tmp_path / "source", kind)
    written = quantize_checkpoint(source, tmp_path / "written", Settings(**SETTINGS[name]))
    expected = logits(written)
    for kernels in (default_kernels(), TorchKernels()):
        exact = load_decoder(written, torch.float32, kernels=kernels, integers=False)
        assert isinstance(exact.layers[0].qkv, QuantizedLinear) and isinstance(gated(exact).down, QuantizedLinear)
        assert distance(run(exact), expected) < 1e-4
    assert distance(run(load_decoder(written, torch.float32)), expected) < 0.04
    assert distance(run(load_decoder(written, torch.bfloat16)), expected) < 0.06
    unpacked = load_decoder(written, torch.float32, weights="float32")
    assert isinstance(unpacked.layers[0].qkv, DenseLinear)
    assert distance(run(unpacked), expected) < 1e-4


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_awq_and_gptq_checkpoints_load_unmodified(method: str, dense: Path, tmp_path: Path) -> None:
    random, group = np.random.default_rng(3), 32
    tensors, weights = {}, {}
    for name, tensor in load_file(dense / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        if not layer.endswith("_proj"):
            tensors[name] = tensor
            weights[name] = tensor.float()
            continue
        rows, columns = tensor.shape
        codes = random.integers(0, 16, (rows, columns)).astype(np.uint8)
        zeros = random.integers(0, 16, (rows, columns // group)).astype(np.uint8)
        scales = ((random.random((rows, columns // group)) + 0.5) / 60).astype(np.float16)
        spread = [np.repeat(part.astype(np.float32), group, 1) for part in (zeros, scales)]
        weights[name] = torch.from_numpy((codes.astype(np.float32) - spread[0]) * spread[1])
        kept = zeros if method == "awq" else ((zeros.astype(np.int64) - 1) % 16)
        order = AWQ_ORDER if method == "awq" else tuple(range(8))
        packed = words(codes.T, order) if method == "awq" else words(codes).t().contiguous()
        tensors[f"{layer}.qweight"], tensors[f"{layer}.qzeros"] = packed, words(kept.T, order)
        tensors[f"{layer}.scales"] = torch.from_numpy(scales.T.copy())
        if method == "gptq":
            tensors[f"{layer}.g_idx"] = (torch.arange(columns) // group).int()
    declared = {"quant_method": method, "bits": 4, "group_size": group}
    declared |= {"zero_point": True, "version": "gemm"} if method == "awq" else {"desc_act": False, "sym": False}
    config = json.loads((dense / "config.json").read_text()) | {"quantization_config": declared}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    expected = logits(dense, weights)
    assert distance(run(load_decoder(tmp_path, torch.float32, integers=False)), expected) < 1e-4
    tensors.pop("model.layers.1.mlp.up_proj.qzeros")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InvalidArgument, match=r"layers.1.mlp.up_proj.qzeros: 'missing'"):
        load_decoder(tmp_path)


def bfloat16(values: np.ndarray) -> np.ndarray:
    """The nearest float32 of which the lower 16 bits are zero, ties to even."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def rounded(weight: torch.Tensor, weights: str, group: int) -> torch.Tensor:
    """Round to nearest in numpy float32, from the formulas, INT4 scales in bfloat16; dequantised."""
    values = weight.float().numpy()
    if weights == "int8":
        scales = np.abs(values).max(1, keepdims=True) / np.float32(127)
        return torch.from_numpy(np.rint(values / scales) * scales)
    whole = np.zeros_like(values)
    for begin in range(0, values.shape[1], group):
        part = values[:, begin : begin + group]
        scales = bfloat16(np.abs(part).max(1, keepdims=True) / np.float32(7.5))
        whole[:, begin : begin + group] = (np.clip(np.rint(part / scales) + 8, 0, 15) - 8) * scales
    return torch.from_numpy(whole)


@pytest.mark.parametrize(("weights", "group"), [("int8", 64), ("int4", 32), ("int4", 40), ("int4", 4096)])
def test_dense_weights_are_rounded_to_nearest_while_loading(weights: str, group: int, dense: Path) -> None:
    tensors = load_file(dense / "model.safetensors")
    changed = {name: rounded(t, weights, group) if "_proj" in name else t.float() for name, t in tensors.items()}
    asked = -1 if group == 4096 else group
    found = load_decoder(dense, torch.float32, weights=weights, group=asked, integers=False)
    assert distance(run(found), logits(dense, changed)) < 1e-4
    assert isinstance(found.head, DenseLinear)
    assert gated(found).down.nbytes < gated(load_decoder(dense, torch.float32)).down.nbytes / 2


def test_fp8_made_while_loading_is_near_the_dense_weights(dense: Path) -> None:
    found = load_decoder(dense, torch.float32, weights="fp8")
    assert isinstance(found.layers[0].qkv, QuantizedLinear)
    error = distance(run(found), logits(dense))
    assert 1e-4 < error < 0.1


def test_weights_that_cannot_be_had_are_refused_by_name(dense: Path, tmp_path: Path) -> None:
    for weights, message in (("nvfp4", "weights: 'nvfp4'.*int4"), ("float32", "weights: 'float32'.*bfloat16")):
        with pytest.raises(InvalidArgument, match=message):
            load_decoder(dense, torch.bfloat16, weights=weights)
    written = quantize_checkpoint(dense, tmp_path / "int8", Settings(weights="int8"))
    with pytest.raises(InvalidArgument, match=r"weights: 'int4'.*q_proj is stored as int8"):
        load_decoder(written, weights="int4")
    assert isinstance(load_decoder(written, weights="int8").layers[0].qkv, QuantizedLinear)
    four = quantize_checkpoint(dense, tmp_path / "nvfp4", Settings(weights="nvfp4"))
    with pytest.raises(InvalidArgument, match="nvfp4"):
        load_decoder(four)
    assert isinstance(load_decoder(four, torch.float32, weights="float32").layers[0].qkv, DenseLinear)
    with pytest.raises(InvalidArgument, match=r"group of model.layers.0.self_attn.q_proj: 128.*64"):
        load_decoder(dense, weights="int4", group=128)


def test_projections_stored_in_different_forms_become_dense(dense: Path, tmp_path: Path) -> None:
    written = quantize_checkpoint(dense, tmp_path / "written", Settings(weights="int8"))
    config = json.loads((written / "config.json").read_text())
    name = "model.layers.0.self_attn.v_proj"
    config["quantization_config"]["ignore"].append(name)
    (written / "config.json").write_text(json.dumps(config))
    shard = next(path for path in written.glob("*.safetensors") if f"{name}.weight_packed" in load_file(path))
    tensors = load_file(shard)
    for suffix in ("weight_packed", "weight_scale", "weight_shape"):
        del tensors[f"{name}.{suffix}"]
    tensors[f"{name}.weight"] = load_file(dense / "model.safetensors")[f"{name}.weight"]
    save_file(tensors, shard)
    found = load_decoder(written, torch.float32, integers=False)
    assert isinstance(found.layers[0].qkv, DenseLinear) and isinstance(found.layers[1].qkv, QuantizedLinear)
    assert distance(run(found), logits(written)) < 1e-4


def test_a_row_of_quantised_weights_never_depends_on_its_neighbours(dense: Path) -> None:
    if default_kernels().name == "torch":
        pytest.skip("native kernels only")
    for weights in ("fp8", "int8", "int4"):
        layer = gated(load_decoder(dense, torch.bfloat16, weights=weights, group=32)).gate_up
        rows = torch.randn(5, 64).bfloat16()
        outlier = rows.clone()
        outlier[1:] *= 1000
        assert torch.equal(layer(rows)[0], layer(outlier)[0])
        assert torch.equal(layer(rows)[0], layer(rows[:1])[0])
