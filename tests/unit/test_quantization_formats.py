"""Number formats against plain numpy and ml_dtypes: conversion to e4m3, rounding into every form, fused projections."""

from __future__ import annotations

import importlib
import math

import numpy as np
import pytest
import torch

from quantization.e4m3 import check_scales, scales_from_amax, to_e4m3
from quantization.errors import QuantizationError
from quantization.formats import E2M1_VALUES, ChannelInt8, Float8, GroupedInt4, Quantized, split_rows, stack_rows
from quantization.rounding import (
    PER_CHANNEL,
    nvfp4_divisor,
    quantize_fp8,
    quantize_int4,
    quantize_int8,
    quantize_nvfp4,
)

WIDE = (torch.float32, torch.bfloat16, torch.float16)


def weight(rows: int = 24, columns: int = 96, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * torch.rand(rows, 1, generator=generator) * 0.1


def e4m3_values() -> np.ndarray:
    """The 127 magnitudes of the codes 0x00 to 0x7e, written out from the format's definition."""
    codes = np.arange(0x7F)
    exponent, mantissa = codes >> 3, codes & 7
    return np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("value", [447.0, 448.0, 464.0, 465.0, 1e4, math.inf])
def test_e4m3_saturates_and_never_makes_nan(value: float, dtype: torch.dtype) -> None:
    got = to_e4m3(torch.tensor([value, -value], dtype=dtype)).float()
    assert got.tolist() == [448.0, -448.0]


def test_e4m3_rounds_to_nearest_even() -> None:
    values = e4m3_values()
    middles = (values[:-1] + values[1:]) / 2
    probes = np.concatenate([values, middles, np.nextafter(middles, 0), np.nextafter(middles, 1e9)])
    probes = np.concatenate([probes, np.random.default_rng(0).normal(size=4096) * 50]).astype(np.float32)
    distance = np.abs(np.abs(probes.astype(np.float64))[:, None] - values)
    best = distance.min(1, keepdims=True)
    even = np.where(distance == best, np.arange(0x7F) % 2 * 1000 + np.arange(0x7F), 10**6).argmin(1)
    expected = even | np.where(np.signbit(probes), 0x80, 0)
    assert np.array_equal(to_e4m3(torch.from_numpy(probes)).view(torch.uint8).numpy(), expected)


def test_e4m3_agrees_with_ml_dtypes() -> None:
    ml_dtypes = importlib.import_module("ml_dtypes")
    probes = np.random.default_rng(1).uniform(-448, 448, 20000).astype(np.float32)
    expected = probes.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert np.array_equal(to_e4m3(torch.from_numpy(probes)).view(torch.uint8).numpy(), expected)


def test_e4m3_nan_is_refused_or_kept() -> None:
    values = torch.tensor([1.0, math.nan])
    with pytest.raises(QuantizationError, match="keys: nan"):
        to_e4m3(values, name="keys")
    assert to_e4m3(values, nan="propagate").float().isnan().tolist() == [False, True]
    with pytest.raises(QuantizationError, match=r"dtype.*float64"):
        to_e4m3(values.double())


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, None])
def test_scales_that_are_refused(value: float | None) -> None:
    scales = None if value is None else torch.tensor([1.0, value])
    with pytest.raises(QuantizationError, match="k_scale of layer 3"):
        check_scales(scales, "k_scale of layer 3")


def test_scales_from_ranges() -> None:
    assert scales_from_amax(torch.tensor([448.0, 0.0, 44.8])).tolist() == pytest.approx([1.0, 1.0, 0.1])
    assert float(check_scales(scales_from_amax(torch.tensor([1e-45])), "k")) > 0
    for wrong in (math.nan, math.inf, -1.0):
        with pytest.raises(QuantizationError, match="amax"):
            scales_from_amax(torch.tensor([wrong]))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, 48, PER_CHANNEL])
def test_int4_against_numpy(group: int, symmetric: bool) -> None:
    values = weight()
    got = quantize_int4(values, group, symmetric)
    width = 96 if group == PER_CHANNEL else group
    groups = values.numpy().reshape(24, -1, width)
    if symmetric:
        scales, zeros = (np.abs(groups).max(-1) / np.float32(7.5)), np.full(groups.shape[:2], 8.0, np.float32)
    else:
        low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
        scales = (high - low) / np.float32(15)
        zeros = np.clip(np.rint(-low / scales), 0, 15)
    codes = np.clip(np.rint(groups / scales[..., None]) + zeros[..., None], 0, 15)
    assert np.array_equal(got.codes.numpy(), codes.reshape(24, 96))
    assert np.array_equal(got.scales.numpy(), scales)
    assert (got.zeros is None) == symmetric
    exact = ((codes - zeros[..., None]) * scales[..., None]).astype(np.float32).reshape(24, 96)
    assert np.array_equal(got.dequantize().numpy(), exact)
    step = np.repeat(scales, width, 1)
    assert (np.abs(exact - values.numpy()) <= step * (0.5 if symmetric else 1.0) * 1.0001).all()


def test_int4_zero_points_reach_0_and_15() -> None:
    got = quantize_int4(torch.stack([torch.linspace(0, 3, 32), torch.linspace(-3, 0, 32)]), 32, symmetric=False)
    assert got.zeros is not None and got.zeros.flatten().tolist() == [0, 15]
    assert got.dequantize()[0, 0] == got.dequantize()[1, -1] == 0


def test_int4_grid_points_survive_exactly() -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(3, 2)
    grid = GroupedInt4(codes, torch.tensor([[0.5, 2.0]] * 3), torch.full((3, 2), 5, dtype=torch.uint8), 16)
    again = quantize_int4(grid.dequantize(), 16, symmetric=False)
    assert torch.equal(again.codes, codes) and torch.equal(again.scales, grid.scales)


def test_int4_group_that_does_not_divide() -> None:
    with pytest.raises(QuantizationError, match=r"mlp\.down_proj: 64 .* width 96"):
        quantize_int4(weight(), 64, name="mlp.down_proj")
    for group in (0, -2, 128):
        with pytest.raises(QuantizationError, match="group"):
            quantize_int4(weight(), group)
    padded = quantize_int4(weight(), 64, symmetric=False, pad=True)
    assert padded.scales.shape == (24, 2)
    extended = quantize_int4(torch.nn.functional.pad(weight(), (0, 32)), 64, symmetric=False)
    assert torch.equal(padded.codes, extended.codes[:, :96]) and torch.equal(padded.scales, extended.scales)
    assert torch.equal(padded.dequantize(), extended.dequantize()[:, :96])


def test_int8_and_fp8_against_numpy() -> None:
    values = weight()
    plain = values.numpy()
    scales = np.abs(plain).max(1, keepdims=True) / np.float32(127)
    int8 = quantize_int8(values)
    assert np.array_equal(int8.codes.numpy(), np.rint(plain / scales))
    assert np.array_equal(int8.dequantize().numpy(), np.rint(plain / scales) * scales)
    fp8 = quantize_fp8(values)
    assert float(fp8.codes.float().abs().max()) == 448
    relative = (fp8.dequantize() - values).abs() / values.abs().clamp_min(float(values.abs().amax()) * 2**-9)
    assert float(relative.max()) <= 2**-4 * 1.001


@pytest.mark.parametrize("block", [(8, 32), (16, 64), (128, 128)])
def test_fp8_blocks_may_be_partial(block: tuple[int, int]) -> None:
    values = weight()
    got = quantize_fp8(values, block)
    assert got.scales.shape == (math.ceil(24 / block[0]), math.ceil(96 / block[1]))
    for row in range(0, 24, block[0]):
        for column in range(0, 96, block[1]):
            part = values[row : row + block[0], column : column + block[1]]
            scale = got.scales[row // block[0], column // block[1]]
            assert scale == part.abs().max() / 448
            expected = to_e4m3(part / scale).float() * scale
            assert torch.equal(got.dequantize()[row : row + block[0], column : column + block[1]], expected)


def test_nvfp4_against_numpy() -> None:
    values = weight()
    got = quantize_nvfp4(values)
    assert float(got.divisor) == pytest.approx(448 * 6 / float(values.abs().max()))
    scale = got.scales.float().numpy() / got.divisor.numpy()
    table = np.array(E2M1_VALUES, np.float32)
    scaled = values.numpy() / np.repeat(scale, 16, 1)
    nearest = np.abs(np.abs(scaled)[..., None] - table).argmin(-1)
    expected = table[nearest] * np.sign(scaled) * np.repeat(scale, 16, 1)
    np.testing.assert_allclose(got.dequantize().numpy(), expected, rtol=1e-6)
    ties = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, 9.0]])
    codes = quantize_nvfp4(ties * 0 + torch.where(ties == 9, 6.0, ties), divisor=torch.tensor(1.0)).codes
    assert codes.tolist() == [[0, 2, 2, 4, 4, 6, 6, 7, 8, 10, 10, 12, 12, 14, 14, 7]]
    with pytest.raises(QuantizationError, match="up_proj: 24"):
        quantize_nvfp4(weight(4, 24), name="up_proj")


@pytest.mark.parametrize("form", ["int4", "asymmetric", "int8", "fp8", "block", "nvfp4"])
def test_zero_rows_stay_zero(form: str) -> None:
    values = weight()
    values[5] = 0
    got = quantized(form, values).dequantize()
    assert torch.equal(got[5], torch.zeros(96)) and bool(got.isfinite().all())


@pytest.mark.parametrize("form", ["int4", "int8", "fp8", "block", "nvfp4"])
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_weights_that_are_no_numbers_are_refused(form: str, wrong: float) -> None:
    values = weight()
    values[1, 2] = wrong
    with pytest.raises(QuantizationError, match="tensor weight"):
        quantized(form, values)


def quantized(form: str, values: torch.Tensor) -> Quantized:
    if form in ("int4", "asymmetric"):
        return quantize_int4(values, 32, form == "int4")
    if form == "nvfp4":
        return quantize_nvfp4(values, nvfp4_divisor(torch.tensor(0.5)))
    return quantize_int8(values) if form == "int8" else quantize_fp8(values, (16, 32) if form == "block" else None)


@pytest.mark.parametrize("form", ["int4", "asymmetric", "int8", "fp8", "block", "nvfp4"])
def test_scales_survive_bfloat16(form: str) -> None:
    values = weight().bfloat16()
    if form == "nvfp4":
        return
    make = {
        "int4": lambda: quantize_int4(values, 32, True, torch.bfloat16),
        "int8": lambda: quantize_int8(values, torch.bfloat16),
    }
    other = {"asymmetric": lambda: quantize_int4(values, 32, False, torch.bfloat16)}
    fp8 = {
        "fp8": lambda: quantize_fp8(values, None, torch.bfloat16),
        "block": lambda: quantize_fp8(values, (16, 32), torch.bfloat16),
    }
    got = (make | other | fp8)[form]()
    assert torch.equal(got.scales.bfloat16().float(), got.scales)


@pytest.mark.parametrize("form", ["int4", "asymmetric", "int8", "fp8", "block", "nvfp4"])
@pytest.mark.parametrize("rows", [(32, 16, 16), (24, 8, 8)])
def test_fused_rows_equal_their_parts(form: str, rows: tuple[int, ...]) -> None:
    parts = [quantized(form, weight(count, seed=count + index)) for index, count in enumerate(rows)]
    whole = stack_rows(parts)
    assert whole.shape == (sum(rows), 96)
    assert torch.equal(whole.dequantize(), torch.cat([part.dequantize() for part in parts]))


@pytest.mark.parametrize("form", ["int4", "asymmetric", "int8", "fp8", "nvfp4"])
def test_rows_split_into_their_parts(form: str) -> None:
    whole = quantized(form, weight())
    parts = split_rows(whole, [8, 12, 4])
    assert [part.shape[0] for part in parts] == [8, 12, 4]
    assert torch.equal(torch.cat([part.dequantize() for part in parts]), whole.dequantize())
    with pytest.raises(QuantizationError, match="block"):
        split_rows(quantized("block", weight()), [8, 16])


def test_searched_fp8_scales_are_never_worse() -> None:
    values = weight(64, 256).bfloat16()
    plain, searched = (quantize_fp8(values, None, torch.bfloat16, search=search) for search in (False, True))
    errors = [(form.dequantize() - values.float()).square().sum(1) for form in (plain, searched)]
    assert bool((errors[1] <= errors[0]).all()) and float(errors[1].sum()) < 0.95 * float(errors[0].sum())


def test_fused_symmetric_and_asymmetric() -> None:
    parts: list[Quantized] = [quantized("int4", weight()), quantized("asymmetric", weight(seed=1))]
    assert torch.equal(stack_rows(parts).dequantize(), torch.cat([part.dequantize() for part in parts]))


def test_fused_parts_that_do_not_fit() -> None:
    with pytest.raises(QuantizationError, match="one form and one width"):
        stack_rows([quantize_int8(weight()), quantize_fp8(weight())])
    with pytest.raises(QuantizationError, match="groups"):
        stack_rows([quantize_int4(weight(), 32), quantize_int4(weight(), 48)])
    with pytest.raises(QuantizationError, match="global scales"):
        stack_rows([quantize_nvfp4(weight()), quantize_nvfp4(weight(seed=1))])
    with pytest.raises(QuantizationError, match="block width"):
        stack_rows([quantize_fp8(weight(), (8, 32)), quantize_fp8(weight(), (8, 16))])


def test_sizes_in_memory() -> None:
    assert quantize_int4(weight(), 32).nbytes == 24 * 48 + 24 * 3 * 4
    assert ChannelInt8(torch.zeros(2, 4, dtype=torch.int8), torch.ones(2)).nbytes == 16
    assert Float8(torch.zeros(2, 4).to(torch.float8_e4m3fn), torch.ones(2)).nbytes == 16
    assert quantize_nvfp4(weight()).nbytes == 24 * 48 + 24 * 6 + 4
