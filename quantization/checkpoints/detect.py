"""From a ``config.json`` to a ``Scheme``; what this package cannot read is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantization.checkpoints.scheme import Scheme, Storage, Target
from quantization.errors import bad, one_of
from quantization.rounding import PER_CHANNEL

METHODS = ("compressed-tensors", "awq", "gptq", "fp8")
FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized")
_FIELD = "quantization_config"


def detect(config: Mapping[str, Any]) -> Scheme:
    """The scheme that the parsed ``config.json`` declares; ``Scheme("none")`` for a floating-point checkpoint.

    Raises ``QuantizationError`` naming the field of ``quantization_config``, its value and what is allowed.
    """
    declared = config.get(_FIELD) or config.get("compression_config")
    if not declared and isinstance(config.get("text_config"), Mapping):
        declared = config["text_config"].get(_FIELD)
    if not declared:
        return Scheme("none")
    if not isinstance(declared, Mapping):
        raise bad(_FIELD, declared, "a JSON object")
    method = declared.get("quant_method")
    one_of(f"{_FIELD}.quant_method", method, METHODS)
    if method == "compressed-tensors":
        return _compressed_tensors(declared)
    return {"awq": _awq, "gptq": _gptq, "fp8": _fp8}[str(method)](declared)


def _compressed_tensors(declared: Mapping[str, Any]) -> Scheme:
    one_of(f"{_FIELD}.quantization_status", declared.get("quantization_status", "compressed"), ("compressed",))
    for field in ("sparsity_config", "transform_config"):
        content = declared.get(field)
        if content and not (isinstance(content, Mapping) and content.get("format") == "dense"):
            raise bad(f"{_FIELD}.{field}", content, "none")
    groups = declared.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise bad(f"{_FIELD}.config_groups", groups, "at least one group")
    targets = []
    for key, group in groups.items():
        field = f"{_FIELD}.config_groups.{key}"
        if not isinstance(group, Mapping):
            raise bad(field, group, "an object with targets and weights")
        names = tuple(group.get("targets") or ())
        if not names or any(name != "Linear" and "." not in name and not name.startswith("re:") for name in names):
            raise bad(f"{field}.targets", names, "Linear, names of layers, re: and an expression")
        format = group.get("format") or declared.get("format")
        one_of(f"{field}.format", format, FORMATS)
        if group.get("output_activations"):
            raise bad(f"{field}.output_activations", group["output_activations"], "none")
        targets.append(Target(names, _storage(f"{field}.weights", str(format), group.get("weights"))))
    exact = sorted(targets, key=lambda target: "Linear" in target.names)
    return Scheme("compressed-tensors", tuple(exact), tuple(declared.get("ignore") or ()), kv=_kv(declared))


def _storage(field: str, format: str, weights: Any) -> Storage:
    if not isinstance(weights, Mapping):
        raise bad(field, weights, "an object with num_bits, type and strategy")
    bits, kind = weights.get("num_bits", 8), weights.get("type", "int")
    symmetric = bool(weights.get("symmetric", True))
    one_of(f"{field}.dynamic", weights.get("dynamic", False), (False,))
    one_of(f"{field}.actorder", weights.get("actorder"), (None, False, "weight", "static"))
    group = weights.get("group_size")
    strategy = weights.get("strategy") or ("tensor" if group is None else "channel" if group == PER_CHANNEL else "group")
    if format == "pack-quantized":
        one_of(f"{field}.type", kind, ("int",))
        one_of(f"{field}.num_bits", bits, (4, 8))
        if bits == 8:
            one_of(f"{field}.strategy of 8 bits", strategy, ("channel",))
            one_of(f"{field}.symmetric of 8 bits", symmetric, (True,))
            return Storage("packed", "int8")
        one_of(f"{field}.strategy", strategy, ("group", "channel"))
        return Storage("packed", "int4", _group(field, group) if strategy == "group" else PER_CHANNEL, symmetric)
    one_of(f"{field}.symmetric", symmetric, (True,))
    if format == "nvfp4-pack-quantized":
        one_of(f"{field}.type and num_bits", (kind, bits), (("float", 4),))
        one_of(f"{field}.group_size", group, (16,))
        return Storage("nvfp4", "nvfp4", 16)
    one_of(f"{field}.num_bits", bits, (8,))
    one_of(f"{field}.type", kind, {"int-quantized": ("int",), "float-quantized": ("float",)}.get(format, ("int", "float")))
    if kind == "int":
        one_of(f"{field}.strategy", strategy, ("channel", "tensor"))
        return Storage("plain", "int8", per_tensor=strategy == "tensor")
    one_of(f"{field}.strategy", strategy, ("channel", "tensor", "block"))
    block = _block(f"{field}.block_structure", weights.get("block_structure")) if strategy == "block" else None
    return Storage("plain", "fp8", per_tensor=strategy == "tensor", block=block)


def _kv(declared: Mapping[str, Any]) -> bool:
    scheme = declared.get("kv_cache_scheme")
    if scheme is None:
        return False
    field = f"{_FIELD}.kv_cache_scheme"
    if not isinstance(scheme, Mapping):
        raise bad(field, scheme, "an object with num_bits, type and strategy")
    one_of(f"{field}.type and num_bits", (scheme.get("type"), scheme.get("num_bits")), (("float", 8),))
    one_of(f"{field}.strategy", scheme.get("strategy", "tensor"), ("tensor", "attn_head"))
    one_of(f"{field}.symmetric", scheme.get("symmetric", True), (True,))
    one_of(f"{field}.dynamic", scheme.get("dynamic", False), (False,))
    return True


def _awq(declared: Mapping[str, Any]) -> Scheme:
    one_of(f"{_FIELD}.bits", declared.get("bits", declared.get("w_bit")), (4,))
    one_of(f"{_FIELD}.version", str(declared.get("version", "gemm")).lower(), ("gemm",))
    one_of(f"{_FIELD}.zero_point", declared.get("zero_point", True), (True,))
    group = _group(_FIELD, declared.get("group_size", declared.get("q_group_size")))
    return _parts("awq", declared, Storage("awq", "int4", group, symmetric=False))


def _gptq(declared: Mapping[str, Any]) -> Scheme:
    one_of(f"{_FIELD}.bits", declared.get("bits"), (4,))
    one_of(f"{_FIELD}.desc_act", bool(declared.get("desc_act", False)), (False,))
    format = declared.get("checkpoint_format") or "gptq"
    one_of(f"{_FIELD}.checkpoint_format", format, ("gptq", "gptq_v2"))
    for field in ("dynamic", "modules_in_block_to_quantize"):
        if declared.get(field):
            raise bad(f"{_FIELD}.{field}", declared[field], "none")
    group = _group(_FIELD, declared.get("group_size"))
    version = 2 if format == "gptq_v2" else 1
    return _parts("gptq", declared, Storage("gptq", "int4", group, bool(declared.get("sym", True)), version=version))


def _fp8(declared: Mapping[str, Any]) -> Scheme:
    one_of(f"{_FIELD}.fmt", declared.get("fmt", "e4m3"), ("e4m3",))
    one_of(f"{_FIELD}.expert_dtype", declared.get("expert_dtype", "fp8"), ("fp8",))
    one_of(f"{_FIELD}.activation_scheme", declared.get("activation_scheme", "dynamic"), ("dynamic", "static"))
    if declared.get("weight_block_size") is None:
        return _parts("fp8", declared, Storage("plain", "fp8", per_tensor=True))
    block = _block(f"{_FIELD}.weight_block_size", declared["weight_block_size"])
    return _parts("fp8", declared, Storage("scale_inv", "fp8", block=block))


def _parts(method: str, declared: Mapping[str, Any], storage: Storage) -> Scheme:
    names = declared.get("modules_to_not_convert") or declared.get("ignored_layers") or ()
    return Scheme(method, (Target(("Linear",), storage),), tuple(names), ignore_parts=True)


def _group(field: str, group: Any) -> int:
    if not isinstance(group, int) or isinstance(group, bool) or (group <= 0 and group != PER_CHANNEL):
        raise bad(f"{field}.group_size", group, f"a number above 0, or {PER_CHANNEL} (per channel)")
    return group


def _block(field: str, block: Any) -> tuple[int, int]:
    whole = isinstance(block, list | tuple) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)
    if not whole:
        raise bad(field, block, "two numbers above 0")
    return block[0], block[1]
