"""The forms of ``formats`` as a compressed-tensors checkpoint stores them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quantization.errors import bad
from quantization.formats import Float8, GroupedInt4, NvFp4, Quantized
from quantization.packing import pack_bytes, pack_compressed, pack_pairs
from quantization.rounding import PER_CHANNEL


def store_linear(name: str, weight: Quantized, scale_dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors by name; scales as ``scale_dtype``, which must hold them exactly (see ``rounding``)."""
    if isinstance(weight, NvFp4):
        tensors = {
            "weight_packed": pack_pairs(weight.codes),
            "weight_scale": weight.scales,
            "weight_global_scale": weight.divisor.reshape(1).clone(),
        }
        return {f"{name}.{suffix}": tensor.contiguous() for suffix, tensor in tensors.items()}
    scales = weight.scales.to(scale_dtype)
    if not torch.equal(scales.to(torch.float32), weight.scales):
        raise bad(f"scales of {name}", "not representable", f"values of {scale_dtype}")
    tensors = {"weight_scale": scales if scales.ndim == 2 else scales[:, None]}
    if isinstance(weight, Float8):
        tensors["weight"] = weight.codes
    else:
        tensors["weight_shape"] = torch.tensor(weight.shape)
        tensors["weight_packed"] = (
            pack_compressed(weight.codes) if isinstance(weight, GroupedInt4) else pack_bytes(weight.codes)
        )
        if isinstance(weight, GroupedInt4) and weight.zeros is not None:
            tensors["weight_zero_point"] = pack_compressed(weight.zeros, 0)
    return {f"{name}.{suffix}": tensor.contiguous() for suffix, tensor in tensors.items()}


def quantization_config(
    weights: str, group: int, symmetric: bool, ignore: list[str], kv: str | None, block: tuple[int, int] | None = None
) -> dict[str, Any]:
    """For ``config.json``: weight-only, all linear layers but ``ignore``.

    ``kv`` is None, "tensor" or "attn_head": what shares a scale of keys or values. INT8 is stored as pack-quantized with
    8 bits, because int-quantized means that activations are quantised too.
    """
    integer = weights in ("int4", "int8")
    scheme: dict[str, Any] = {
        "num_bits": 4 if weights in ("int4", "nvfp4") else 8,
        "type": "int" if integer else "float",
        "symmetric": symmetric,
        "dynamic": False,
        "strategy": "channel",
    }
    if weights == "int4" and group != PER_CHANNEL:
        scheme |= {"strategy": "group", "group_size": group}
    elif weights == "nvfp4":
        scheme |= {"strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
    elif weights == "fp8" and block is not None:
        scheme |= {"strategy": "block", "block_structure": list(block)}
    format = "pack-quantized" if integer else "float-quantized" if weights == "fp8" else "nvfp4-pack-quantized"
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "ignore": ignore,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": scheme,
                "input_activations": None,
                "output_activations": None,
                "format": format,
            }
        },
        "kv_cache_scheme": None
        if kv is None
        else {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": kv},
    }
