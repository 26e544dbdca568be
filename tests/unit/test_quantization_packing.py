"""Packing of codes: against plain numpy, against compressed-tensors, and there and back."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from quantization import packing
from quantization.errors import QuantizationError


def all_codes(rows: int = 16, columns: int = 32) -> torch.Tensor:
    """Every nibble at every place of a word, and at every place of every row's words."""
    place = torch.arange(rows)[:, None] * 3 + torch.arange(columns)[None] * 5
    return ((place + place // 16) % 16).to(torch.uint8)


def numpy_words(codes: np.ndarray, order: tuple[int, ...]) -> np.ndarray:
    """[..., 8 * n] to int32 [..., n], by Python integers."""
    flat = codes.reshape(-1, 8)
    words = [sum(int(row[source]) << (4 * place) for place, source in enumerate(order)) for row in flat]
    return np.array(words, np.uint32).view(np.int32).reshape(*codes.shape[:-1], -1)


def test_every_nibble_at_every_place() -> None:
    words = all_codes(16, 256).reshape(-1, 8)
    assert all(set(words[:, place].tolist()) == set(range(16)) for place in range(8))


@pytest.mark.parametrize("order", [packing.IN_ORDER, packing.AWQ_ORDER])
@pytest.mark.parametrize("dim", [0, 1])
def test_words_against_numpy(order: tuple[int, ...], dim: int) -> None:
    codes = all_codes()
    packed = packing.pack_words(codes, dim, order)
    plain = np.moveaxis(numpy_words(np.moveaxis(codes.numpy(), dim, -1), order), -1, dim)
    assert packed.dtype == torch.int32 and np.array_equal(packed.numpy(), plain)
    assert torch.equal(packing.unpack_words(packed, dim, codes.shape[dim], order), codes)


LAYOUTS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "compressed": (packing.pack_compressed, lambda packed: packing.unpack_compressed(packed, 32)),
    "compressed zeros": (
        lambda codes: packing.pack_compressed(codes, 0),
        lambda packed: packing.unpack_compressed(packed, 16, 0),
    ),
    "gptq": (packing.pack_gptq, packing.unpack_gptq),
    "gptq zeros 1": (lambda zeros: packing.pack_gptq_zeros(zeros, 1), lambda packed: packing.unpack_gptq_zeros(packed, 1)),
    "gptq zeros 2": (lambda zeros: packing.pack_gptq_zeros(zeros, 2), lambda packed: packing.unpack_gptq_zeros(packed, 2)),
    "awq": (packing.pack_awq, packing.unpack_awq),
    "pairs": (packing.pack_pairs, packing.unpack_pairs),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_there_and_back(layout: str) -> None:
    pack, unpack = LAYOUTS[layout]
    codes = all_codes()
    assert torch.equal(unpack(pack(codes)), codes)
    for value in (0, 7, 8, 15):
        constant = torch.full((16, 32), value, dtype=torch.uint8)
        assert torch.equal(unpack(pack(constant)), constant)


def test_layouts_of_gptq_and_awq() -> None:
    codes = all_codes()
    assert np.array_equal(packing.pack_gptq(codes).numpy(), numpy_words(codes.numpy(), packing.IN_ORDER).T)
    assert np.array_equal(packing.pack_awq(codes).numpy(), numpy_words(codes.numpy().T.copy(), packing.AWQ_ORDER))
    zeros = torch.tensor([[0], [15], [8], [1], [0], [15], [8], [1]], dtype=torch.uint8)
    stored = (np.array([0, 15, 8, 1, 0, 15, 8, 1]) - 1) % 16
    assert np.array_equal(packing.pack_gptq_zeros(zeros, 1).numpy(), numpy_words(stored[None], packing.IN_ORDER))
    assert np.array_equal(packing.pack_gptq_zeros(zeros, 2).numpy(), numpy_words(zeros.numpy().T.copy(), packing.IN_ORDER))


@pytest.mark.parametrize("length", [1, 7, 9, 30])
def test_odd_lengths(length: int) -> None:
    codes = all_codes(16, 32)[:, :length].contiguous()
    assert torch.equal(packing.unpack_compressed(packing.pack_compressed(codes), length), codes)
    signed = (codes.to(torch.int16) * 17 - 128).to(torch.int8)
    assert torch.equal(packing.unpack_bytes(packing.pack_bytes(signed), length), signed)


def test_wrong_lengths_and_dtypes() -> None:
    with pytest.raises(QuantizationError, match="multiple of 8"):
        packing.pack_words(torch.zeros(2, 12, dtype=torch.uint8), 1)
    with pytest.raises(QuantizationError, match="multiple of 2"):
        packing.pack_pairs(torch.zeros(2, 3, dtype=torch.uint8))
    with pytest.raises(QuantizationError, match="int32"):
        packing.unpack_words(torch.zeros(2, 2, dtype=torch.int64), 1, 16)
    with pytest.raises(QuantizationError, match="packed words"):
        packing.unpack_words(torch.zeros(2, 2, dtype=torch.int32), 1, 17)
    with pytest.raises(QuantizationError, match="packed words"):
        packing.unpack_bytes(torch.zeros(2, 2, dtype=torch.int32), 9)


@pytest.mark.parametrize("columns", [32, 44])
def test_agrees_with_compressed_tensors(columns: int) -> None:
    library = importlib.import_module("compressed_tensors.compressors.pack_quantized.helpers")
    codes = torch.cat([all_codes(), all_codes()], 1)[:, :columns].contiguous()
    signed = codes.to(torch.int8) - 8
    for dim in (0, 1):
        packed = library.pack_to_int32(signed, 4, packed_dim=dim)
        assert torch.equal(packing.pack_compressed(codes, dim), packed)
        assert torch.equal(library.unpack_from_int32(packed, 4, codes.shape, packed_dim=dim) + 8, codes.to(torch.int8))
    every = torch.arange(-128, 128).to(torch.int8).repeat(2, 1)[:, : 256 - columns]
    assert torch.equal(packing.pack_bytes(every), library.pack_to_int32(every, 8))


def test_pairs_agree_with_compressed_tensors() -> None:
    library = importlib.import_module("compressed_tensors.compressors.nvfp4.helpers")
    codes = all_codes()
    unpacked = library.unpack_fp4_from_uint8(packing.pack_pairs(codes), 16, 32, torch.float32)
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    assert torch.equal(unpacked, torch.cat([table, -table])[codes.long()])
