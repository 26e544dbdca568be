"""Linear layers and key and value scales of a quantised checkpoint, tensor by tensor, into the forms of ``formats``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from quantization.checkpoints.scheme import Scheme, Storage
from quantization.e4m3 import check_scales
from quantization.errors import bad
from quantization.formats import ChannelInt8, Float8, GroupedInt4, NvFp4, Quantized
from quantization.packing import (
    unpack_awq,
    unpack_bytes,
    unpack_compressed,
    unpack_gptq,
    unpack_gptq_zeros,
    unpack_pairs,
)
from quantization.rounding import PER_CHANNEL, group_width

Read = Callable[[str], Tensor]
Shapes = Mapping[str, tuple[int, ...]]

_MAIN = {"awq": "qweight", "gptq": "qweight", "packed": "weight_shape", "nvfp4": "weight_packed"}
_DENSE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_AUXILIARY = ("g_idx", "input_scale", "input_zero_point", "input_global_scale", "weight_zero_point", "weight_g_idx")
_KV = ("k_scale", "v_scale", "kv_scale", "output_scale", "q_scale", "k_zero_point", "v_zero_point", "output_zero_point")
_KV_PLACES = (
    "self_attn.{0}_scale",
    "self_attn.attn.{0}_scale",
    "self_attn.{0}_proj.{0}_scale",
    "self_attn.{0}_proj.output_scale",
)


def read_linear(name: str, read: Read, shapes: Shapes, scheme: Scheme) -> Quantized | Tensor:
    """The weights of the layer ``name``, such as ``model.layers.0.mlp.down_proj``.

    ``read`` gives a tensor in the dtype it is stored in; ``shapes`` has the shape of every tensor of the checkpoint.
    A floating-point layer comes as its tensor [N, K]. Raises ``QuantizationError`` naming the tensor that is missing or
    of another shape, dtype or value than the scheme implies.
    """
    storage = scheme.storage_of(name)
    if storage is None or not is_quantized(name, shapes, storage):
        return _dense(f"{name}.weight", read, shapes)
    rows, columns = _size(name, read, shapes, storage)
    _check_shapes(linear_tensors(name, rows, columns, storage), shapes)
    if storage.layout in ("awq", "gptq"):
        return _words_by_rows(name, read, shapes, storage, rows, columns)
    if storage.layout == "nvfp4":
        scales = read(f"{name}.weight_scale")
        if scales.dtype != torch.float8_e4m3fn:
            raise bad(f"dtype of {name}.weight_scale", scales.dtype, "torch.float8_e4m3fn")
        divisor = check_scales(read(f"{name}.weight_global_scale"), f"{name}.weight_global_scale").reshape(())
        return NvFp4(unpack_pairs(read(f"{name}.weight_packed")), scales, divisor)
    scale_name = f"{name}.weight_scale_inv" if storage.layout == "scale_inv" else f"{name}.weight_scale"
    scales = check_scales(read(scale_name), scale_name)
    if storage.weights == "int4":
        width = columns if storage.group == PER_CHANNEL else storage.group
        zeros = None if storage.symmetric else unpack_compressed(read(f"{name}.weight_zero_point"), rows, 0)
        return GroupedInt4(unpack_compressed(read(f"{name}.weight_packed"), columns), scales, zeros, width)
    if storage.block is None:
        scales = scales.reshape(-1).expand(rows).contiguous()
    if storage.layout == "packed":
        return ChannelInt8(unpack_bytes(read(f"{name}.weight_packed"), columns), scales)
    wanted = torch.int8 if storage.weights == "int8" else torch.float8_e4m3fn
    codes = read(f"{name}.weight")
    if codes.dtype != wanted:
        raise bad(f"dtype of {name}.weight", codes.dtype, str(wanted))
    return ChannelInt8(codes, scales) if storage.weights == "int8" else Float8(codes, scales, storage.block)


def is_quantized(name: str, shapes: Shapes, storage: Storage) -> bool:
    """Whether the file holds the layer as ``storage`` says; checkpoints leave some layers dense without a word (lm_head)."""
    tensors = linear_tensors(name, 8, 16, storage)
    return f"{name}.weight" not in shapes or any(key in shapes for key in tensors if key != f"{name}.weight")


def linear_tensors(name: str, rows: int, columns: int, storage: Storage | None) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that hold the weights of a layer of ``rows`` outputs and ``columns`` inputs."""
    if storage is None:
        return {f"{name}.weight": (rows, columns)}
    shapes: dict[str, tuple[int, ...]]
    groups = 1 if storage.group == PER_CHANNEL else -(-columns // storage.group)
    if storage.layout in ("awq", "gptq"):
        words = (columns, rows // 8) if storage.layout == "awq" else (columns // 8, rows)
        shapes = {"qweight": words, "qzeros": (groups, rows // 8), "scales": (groups, rows)}
    elif storage.layout == "nvfp4":
        shapes = {"weight_packed": (rows, columns // 2), "weight_scale": (rows, groups), "weight_global_scale": (1,)}
    elif storage.layout == "packed":
        words = (rows, -(-columns // (8 if storage.weights == "int4" else 4)))
        shapes = {"weight_packed": words, "weight_scale": (rows, groups), "weight_shape": (2,)}
        if not storage.symmetric:
            shapes["weight_zero_point"] = (-(-rows // 8), groups)
    else:
        scale: tuple[int, ...] = (1,) if storage.per_tensor else (rows, 1)
        if storage.block is not None:
            scale = (-(-rows // storage.block[0]), -(-columns // storage.block[1]))
        suffix = "weight_scale_inv" if storage.layout == "scale_inv" else "weight_scale"
        shapes = {"weight": (rows, columns), suffix: scale}
    return {f"{name}.{suffix}": shape for suffix, shape in shapes.items()}


def is_auxiliary(tensor: str) -> bool:
    """Whether a quantised checkpoint may hold ``tensor`` besides what ``linear_tensors`` lists: scales of activations,
    of keys and values, GPTQ's order of columns."""
    return tensor.rsplit(".", 1)[-1] in _AUXILIARY + _KV


def read_kv_scales(layer: str, read: Read, shapes: Shapes, scheme: Scheme, heads: int) -> tuple[Tensor, Tensor] | None:
    """Scales of keys and values of ``layer`` (``model.layers.0``), each float32 [heads]: stored value times scale is real.

    One scale for all heads is repeated. None where the checkpoint has none and declares none. A scale that is missing,
    <= 0, NaN or infinite, or a number of them that is neither 1 nor ``heads``, is refused by name.
    """
    found: dict[str, Tensor] = {}
    for letter in "kv":
        for place in _KV_PLACES:
            name = f"{layer}.{place.format(letter)}"
            if name in shapes:
                scales = check_scales(read(name), name).reshape(-1)
                if scales.numel() not in (1, heads):
                    raise bad(f"shape of {name}", list(shapes[name]), f"1 or {heads} values")
                found[letter] = scales.expand(heads).contiguous()
                break
    if not found and not scheme.kv:
        return None
    for letter in "kv":
        if letter not in found:
            raise bad(f"tensor {layer}.self_attn.{letter}_scale", "missing", "a scale above 0")
    return found["k"], found["v"]


def _words_by_rows(name: str, read: Read, shapes: Shapes, storage: Storage, rows: int, columns: int) -> GroupedInt4:
    scales = check_scales(read(f"{name}.scales"), f"{name}.scales").t().contiguous()
    width = columns if storage.group == PER_CHANNEL else storage.group
    if storage.layout == "awq":
        return GroupedInt4(unpack_awq(read(f"{name}.qweight")), scales, unpack_awq(read(f"{name}.qzeros")), width)
    if f"{name}.g_idx" in shapes and not torch.equal(read(f"{name}.g_idx").long(), torch.arange(columns) // width):
        raise bad(f"tensor {name}.g_idx", "a permutation (desc_act)", "columns in order, or no such tensor")
    zeros = None if storage.symmetric else unpack_gptq_zeros(read(f"{name}.qzeros"), storage.version)
    return GroupedInt4(unpack_gptq(read(f"{name}.qweight")), scales, zeros, width)


def _size(name: str, read: Read, shapes: Shapes, storage: Storage) -> tuple[int, int]:
    main = _MAIN.get(storage.layout, "weight")
    shape = shapes.get(f"{name}.{main}")
    if shape is None:
        raise bad(f"tensor {name}.{main}", "missing", f"a layer of {storage.weights} weights in layout {storage.layout}")
    if storage.layout == "packed":
        size = [int(value) for value in read(f"{name}.weight_shape")]
        rows, columns = size if len(size) == 2 else (0, 0)
    else:
        rows, columns = (shape[0], shape[1]) if len(shape) == 2 else (0, 0)
        if storage.layout == "awq":
            rows, columns = 8 * columns, rows
        elif storage.layout == "gptq":
            rows, columns = columns, 8 * rows
        elif storage.layout == "nvfp4":
            columns *= 2
    if rows <= 0 or columns <= 0:
        raise bad(f"shape of {name}.{main}", list(shape), "a matrix")
    if storage.weights in ("int4", "nvfp4"):
        group_width(columns, storage.group, name)
    return rows, columns


def _check_shapes(expected: Mapping[str, tuple[int, ...]], shapes: Shapes) -> None:
    for tensor, shape in expected.items():
        if tensor not in shapes:
            raise bad(f"tensor {tensor}", "missing", f"shape {list(shape)}")
        found = shapes[tensor]
        if not shape_fits(found, shape):
            raise bad(f"shape of {tensor}", list(found), str(list(shape)))


def shape_fits(found: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a tensor may stand for ``shape``: a column may be stored as a vector, one number in any dimensions."""
    column = len(shape) == 2 and shape[1] == 1 and found == shape[:1]
    return found == shape or column or (shape == (1,) and torch.Size(found).numel() == 1)


def _dense(tensor: str, read: Read, shapes: Shapes) -> Tensor:
    if tensor not in shapes:
        raise bad(f"tensor {tensor}", "missing", "a floating-point matrix")
    weight = read(tensor)
    if weight.dtype not in _DENSE:
        raise bad(f"dtype of {tensor}", weight.dtype, ", ".join(map(str, _DENSE)))
    return weight
