"""Reading quantised checkpoints, written here by plain numpy, and what is refused by name."""

from __future__ import annotations

import copy
import importlib
import math
from typing import Any

import numpy as np
import pytest
import torch

from quantization.checkpoints import (
    detect,
    is_auxiliary,
    linear_tensors,
    quantization_config,
    read_kv_scales,
    read_linear,
    store_linear,
)
from quantization.errors import QuantizationError
from quantization.formats import Float8, GroupedInt4
from quantization.rounding import PER_CHANNEL, quantize_fp8, quantize_int4, quantize_int8, quantize_nvfp4

NAME = "model.layers.0.mlp.up_proj"
N, K, GROUP = 16, 64, 32
RANDOM = np.random.default_rng(0)
CODES = RANDOM.integers(0, 16, (N, K)).astype(np.uint8)
ZEROS = np.concatenate([[[0, 15], [15, 0]], RANDOM.integers(0, 16, (N - 2, K // GROUP))]).astype(np.uint8)
SCALES = (RANDOM.random((N, K // GROUP)) + 0.5).astype(np.float16)

AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
FP8: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [8, 32]}


def words(codes: np.ndarray, order: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)) -> torch.Tensor:
    """Along the last dimension, by Python integers."""
    rows = codes.reshape(-1, 8).tolist()
    packed = [sum(row[source] << (4 * place) for place, source in enumerate(order)) for row in rows]
    return torch.from_numpy(np.array(packed, np.uint32).view(np.int32).reshape(*codes.shape[:-1], -1).copy())


def exact(zeros: np.ndarray) -> np.ndarray:
    scales = SCALES.astype(np.float32)
    return (CODES.astype(np.float32) - np.repeat(zeros, GROUP, 1)) * np.repeat(scales, GROUP, 1)


def stored(kind: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """(quantization_config, tensors) of the layer in an AWQ or GPTQ checkpoint."""
    scales = torch.from_numpy(SCALES.T.copy())
    if kind == "awq":
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        return AWQ, {"qweight": words(CODES.T, order), "qzeros": words(ZEROS.T, order), "scales": scales}
    zeros = ZEROS if "asymmetric" in kind else np.full_like(ZEROS, 8)
    kept = zeros if "v2" in kind else (zeros.astype(np.int64) - 1) % 16
    config = GPTQ | {"sym": "asymmetric" not in kind, "checkpoint_format": "gptq_v2" if "v2" in kind else "gptq"}
    tensors = {"qweight": words(CODES).t().contiguous(), "qzeros": words(kept.T), "scales": scales}
    return config, tensors | {"g_idx": (torch.arange(K) // GROUP).int()}


def read(config: dict[str, Any], tensors: dict[str, torch.Tensor], name: str = NAME) -> Any:
    named = {f"{NAME}.{suffix}": tensor for suffix, tensor in tensors.items()}
    shapes = {key: tuple(tensor.shape) for key, tensor in named.items()}
    return read_linear(name, named.__getitem__, shapes, detect({"quantization_config": config}))


@pytest.mark.parametrize("kind", ["awq", "gptq", "gptq asymmetric", "gptq v2", "gptq v2 asymmetric"])
def test_awq_and_gptq(kind: str) -> None:
    config, tensors = stored(kind)
    got = read(config, tensors)
    assert isinstance(got, GroupedInt4) and got.group == GROUP
    assert np.array_equal(got.codes.numpy(), CODES)
    zeros = ZEROS if kind == "awq" or "asymmetric" in kind else np.full_like(ZEROS, 8)
    assert np.array_equal(got.dequantize().numpy(), exact(zeros))


@pytest.mark.parametrize("kind", ["awq", "gptq asymmetric"])
def test_one_group_a_channel(kind: str) -> None:
    config, tensors = stored(kind)
    tensors |= {"scales": tensors["scales"][:1].contiguous(), "qzeros": tensors["qzeros"][:1].contiguous()}
    tensors.pop("g_idx", None)
    got = read(config | {"group_size": -1}, tensors)
    first = (CODES.astype(np.float32) - ZEROS[:, :1]) * SCALES[:, :1].astype(np.float32)
    assert got.group == K and np.array_equal(got.dequantize().numpy(), first)


def test_fp8_with_inverse_scales() -> None:
    whole = quantize_fp8(torch.randn(20, 48), (8, 32))
    got = read(FP8, {"weight": whole.codes, "weight_scale_inv": whole.scales})
    assert isinstance(got, Float8) and got.block == (8, 32) and torch.equal(got.dequantize(), whole.dequantize())
    scalar = read(FP8 | {"weight_block_size": None}, {"weight": whole.codes, "weight_scale": torch.tensor(0.5)})
    assert torch.equal(scalar.dequantize(), whole.codes.float() * 0.5)


def compressed(weights: str, **changes: Any) -> dict[str, Any]:
    arguments = {"group": GROUP, "symmetric": True, "ignore": ["lm_head"], "kv": None} | changes
    return quantization_config(weights, **arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["int4", "asymmetric", "channel", "int8", "fp8", "block", "nvfp4"])
def test_compressed_tensors_there_and_back(form: str, dtype: torch.dtype) -> None:
    weight = torch.randn(N, K)
    made: dict[str, Any] = {
        "int4": lambda: (quantize_int4(weight, GROUP, True, dtype), compressed("int4")),
        "asymmetric": lambda: (quantize_int4(weight, GROUP, False, dtype), compressed("int4", symmetric=False)),
        "channel": lambda: (quantize_int4(weight, PER_CHANNEL, True, dtype), compressed("int4", group=PER_CHANNEL)),
        "int8": lambda: (quantize_int8(weight, dtype), compressed("int8")),
        "fp8": lambda: (quantize_fp8(weight, None, dtype), compressed("fp8")),
        "block": lambda: (quantize_fp8(weight, (8, 32), dtype), compressed("fp8", block=(8, 32))),
        "nvfp4": lambda: (quantize_nvfp4(weight), compressed("nvfp4")),
    }
    whole, config = made[form]()
    tensors = store_linear(NAME, whole, dtype)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    scheme = detect({"quantization_config": config})
    assert shapes == linear_tensors(NAME, N, K, scheme.storage_of(NAME))
    got = read_linear(NAME, tensors.__getitem__, shapes, scheme)
    assert type(got) is type(whole) and torch.equal(got.dequantize(), whole.dequantize())
    library = importlib.import_module("compressed_tensors")
    assert_library_agrees(library, config, {name.removeprefix(NAME + "."): t for name, t in tensors.items()}, whole, dtype)


def assert_library_agrees(library: Any, config: dict[str, Any], tensors: Any, whole: Any, dtype: torch.dtype) -> None:
    """compressed-tensors decompresses what was stored to the same values, in the dtype of the scales."""
    from compressed_tensors.compressors import BaseCompressor

    parsed = library.QuantizationConfig.model_validate(config)
    scheme = parsed.config_groups["group_0"]
    weight = BaseCompressor.get_value_from_registry(parsed.format).decompress(dict(tensors), scheme)["weight"]
    kind = torch.bfloat16 if parsed.format.startswith("nvfp4") else dtype
    assert torch.equal(weight, whole.dequantize().to(kind))


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
def test_int_quantized(strategy: str) -> None:
    config = compressed("int8") | {"format": "int-quantized"}
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": strategy, "dynamic": False}
    activations = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    config["config_groups"] = {"a": {"targets": ["Linear"], "weights": weights, "input_activations": activations}}
    whole = quantize_int8(torch.randn(N, K))
    scales = whole.scales[:, None] if strategy == "channel" else whole.scales[:1]
    got = read(config, {"weight": whole.codes, "weight_scale": scales})
    assert torch.equal(got.dequantize(), whole.codes.float() * (whole.scales[:, None] if strategy == "channel" else scales))


def test_fp8_of_one_scale() -> None:
    config = compressed("fp8")
    config["config_groups"]["group_0"]["weights"]["strategy"] = "tensor"
    whole = quantize_fp8(torch.randn(N, K))
    got = read(config, {"weight": whole.codes, "weight_scale": torch.tensor([0.25])})
    assert torch.equal(got.dequantize(), whole.codes.float() * 0.25)


def test_several_groups_and_ignored_layers() -> None:
    config = compressed("int4", ignore=["lm_head", "re:.*router$"])
    groups = config["config_groups"]
    groups["group_1"] = copy.deepcopy(compressed("int8")["config_groups"]["group_0"]) | {"targets": ["re:.*down_proj$"]}
    scheme = detect({"quantization_config": config | {"format": "mixed-precision"}})
    storage = {name: scheme.storage_of(f"model.layers.0.mlp.{name}") for name in ("up_proj", "down_proj", "router")}
    assert storage["up_proj"] is not None and storage["up_proj"].weights == "int4"
    assert storage["down_proj"] is not None and storage["down_proj"].weights == "int8"
    assert storage["router"] is None and scheme.storage_of("lm_head") is None
    parts = detect({"quantization_config": AWQ | {"modules_to_not_convert": ["mlp.gate"]}})
    assert parts.storage_of("model.layers.3.mlp.gate") is None and parts.storage_of("model.layers.3.mlp.up_proj")


def test_dense_layers() -> None:
    assert detect({}).storage_of(NAME) is None
    weight = torch.randn(N, K).bfloat16()
    head = {"weight": weight}
    assert read(AWQ, head) is weight and read(FP8, head) is weight
    with pytest.raises(QuantizationError, match=r"dtype of .*up_proj\.weight.*float8"):
        read(FP8, {"weight": quantize_fp8(torch.randn(N, K)).codes})
    with pytest.raises(QuantizationError, match=r"up_proj\.qweight: 'missing'"):
        read(AWQ, {"bias": weight})


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown method": ({"quant_method": "bitsandbytes"}, "quant_method: 'bitsandbytes'.*compressed-tensors, awq, gptq, fp8"),
    "no method": ({"bits": 4}, "quant_method: None"),
    "desc_act": (GPTQ | {"desc_act": True}, "desc_act: True"),
    "gptq bits": (GPTQ | {"bits": 8}, "bits: 8 .* 4"),
    "gptq format": (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format: 'marlin'"),
    "gptq dynamic": (GPTQ | {"dynamic": {"-:lm_head": {}}}, "dynamic"),
    "gptq group": (GPTQ | {"group_size": 0}, "group_size: 0"),
    "awq bits": (AWQ | {"bits": 3}, "bits: 3"),
    "awq version": (AWQ | {"version": "gemv"}, "version: 'gemv'.*gemm"),
    "awq zeros": (AWQ | {"zero_point": False}, "zero_point: False"),
    "e5m2": (FP8 | {"fmt": "e5m2"}, "fmt: 'e5m2'.*e4m3"),
    "fp8 block": (FP8 | {"weight_block_size": [128]}, "weight_block_size"),
    "format": (compressed("int4") | {"config_groups": {"g": {"targets": ["Linear"], "format": "marlin-24"}}}, "marlin-24"),
    "no groups": (compressed("int4") | {"config_groups": {}}, "config_groups"),
    "status": (compressed("int4") | {"quantization_status": "frozen"}, "quantization_status: 'frozen'"),
    "sparsity": (compressed("int4") | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
    "transform": (compressed("int4") | {"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case: str) -> None:
    config, message = REFUSED[case]
    with pytest.raises(QuantizationError, match=message):
        detect({"quantization_config": config})


@pytest.mark.parametrize(
    ("weights", "changes", "message"),
    [
        ("int4", {"num_bits": 3}, "num_bits: 3"),
        ("int4", {"type": "float"}, "type: 'float'"),
        ("int4", {"actorder": "group"}, "actorder: 'group'"),
        ("int4", {"strategy": "tensor"}, "strategy: 'tensor'"),
        ("int4", {"group_size": None}, "group_size: None"),
        ("int8", {"strategy": "group", "group_size": 32}, "strategy of 8 bits: 'group'"),
        ("fp8", {"dynamic": True}, "dynamic: True"),
        ("fp8", {"symmetric": False}, "symmetric: False"),
        ("fp8", {"strategy": "block"}, "block_structure: None"),
        ("nvfp4", {"group_size": 32}, "group_size: 32"),
    ],
)
def test_refused_weights(weights: str, changes: dict[str, Any], message: str) -> None:
    config = compressed(weights)
    config["config_groups"]["group_0"]["weights"] |= changes
    with pytest.raises(QuantizationError, match=message):
        detect({"quantization_config": config})


@pytest.mark.parametrize("kind", ["awq", "gptq"])
def test_wrong_tensors_are_named(kind: str) -> None:
    config, tensors = stored(kind)
    with pytest.raises(QuantizationError, match=r"up_proj\.scales: 'missing'"):
        read(config, {key: tensor for key, tensor in tensors.items() if key != "scales"})
    with pytest.raises(QuantizationError, match=r"shape of .*up_proj\.qzeros"):
        read(config, tensors | {"qzeros": tensors["qzeros"][:1]})
    with pytest.raises(QuantizationError, match="48 .* width 64"):
        read(config | {"group_size": 48}, tensors)
    for value in (0.0, -1.0, math.nan, math.inf):
        scales = tensors["scales"].clone()
        scales[1, 3] = value
        with pytest.raises(QuantizationError, match=r"up_proj\.scales"):
            read(config, tensors | {"scales": scales})


def test_order_of_columns_is_refused() -> None:
    config, tensors = stored("gptq")
    with pytest.raises(QuantizationError, match="g_idx.*desc_act"):
        read(config, tensors | {"g_idx": tensors["g_idx"].flip(0)})


def kv(tensors: dict[str, torch.Tensor], declared: str | None = "tensor") -> Any:
    named = {f"model.layers.0.{suffix}": tensor for suffix, tensor in tensors.items()}
    shapes = {key: tuple(tensor.shape) for key, tensor in named.items()}
    scheme = detect({"quantization_config": compressed("int4", kv=declared)})
    return read_kv_scales("model.layers.0", named.__getitem__, shapes, scheme, heads=4)


def test_kv_scales() -> None:
    heads = torch.tensor([1.0, 2.0, 3.0, 4.0])
    keys, values = kv({"self_attn.k_scale": heads[:, None, None], "self_attn.v_scale": torch.tensor([0.5])})
    assert torch.equal(keys, heads) and values.tolist() == [0.5] * 4
    keys, values = kv({"self_attn.k_proj.output_scale": heads[:1], "self_attn.v_proj.v_scale": heads[0]}, None)
    assert keys.tolist() == values.tolist() == [1.0] * 4
    assert kv({}, None) is None
    with pytest.raises(QuantizationError, match=r"self_attn\.v_scale: 'missing'"):
        kv({"self_attn.k_scale": heads})
    with pytest.raises(QuantizationError, match=r"self_attn\.k_scale"):
        kv({})
    with pytest.raises(QuantizationError, match="1 or 4"):
        kv({"self_attn.k_scale": heads[:3], "self_attn.v_scale": heads})
    for value in (0.0, -0.5, math.nan, math.inf):
        with pytest.raises(QuantizationError, match=r"self_attn\.k_scale"):
            kv({"self_attn.k_scale": torch.tensor([value]), "self_attn.v_scale": heads})


@pytest.mark.parametrize(
    "change", [{"num_bits": 4}, {"type": "int"}, {"strategy": "token"}, {"dynamic": True}, {"symmetric": False}]
)
def test_kv_schemes_that_are_refused(change: dict[str, Any]) -> None:
    config = compressed("int4", kv="tensor")
    config["kv_cache_scheme"] |= change
    with pytest.raises(QuantizationError, match=f"kv_cache_scheme.*{next(iter(change))}"):
        detect({"quantization_config": config})


def test_auxiliary_tensors() -> None:
    base = "model.layers.0.self_attn"
    assert all(is_auxiliary(f"{base}.{suffix}") for suffix in ("k_scale", "q_proj.g_idx", "q_proj.input_scale"))
    assert not any(is_auxiliary(f"{base}.q_proj.{suffix}") for suffix in ("weight", "weight_packed", "bias", "scales"))
