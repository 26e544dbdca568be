"""Products by quantised weights: every instruction set and torch against float64, exactness, and rows by themselves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantization.formats import ChannelInt8, Float8, GroupedInt4
from tritone.errors import InvalidArgument
from tritone.kernels import NativeKernels, TorchKernels, build
from tritone.kernels.quantized import NativeQuantized, QuantizedKernels, QuantizedWeight, TorchQuantized, quantize_rows
from tritone.models.decoder.linear import QuantizedLinear

DTYPES = [torch.float32, torch.bfloat16]
# Widths and heights that no tile divides, whole rows, groups that do not divide the width.
INT4_SHAPES = [(100, 576, 64), (48, 1536, 128), (7, 96, 32), (200, 96, 128), (130, 2048, 4096), (50, 100, 32), (1, 20, 64)]


def native(instruction_set: str) -> NativeQuantized:
    try:
        library = build.build_library()
    except build.BuildError as error:
        pytest.skip(f"no native kernels here: {error}")
    try:
        NativeKernels(library, instruction_set)
    except InvalidArgument as error:
        pytest.skip(f"this CPU lacks {instruction_set}: {error}")
    return NativeQuantized(instruction_set)


@pytest.fixture(params=["torch", *build.INSTRUCTION_SETS])
def kernels(request: pytest.FixtureRequest) -> QuantizedKernels:
    torch.manual_seed(0)
    return TorchQuantized() if request.param == "torch" else native(request.param)


@pytest.fixture(params=["plain", "avx2", "avx512", "avx512bf16"])
def native_kernels(request: pytest.FixtureRequest) -> NativeQuantized:
    torch.manual_seed(0)
    return native(request.param)


def int4(outputs: int, inputs: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    groups = -(-inputs // group)
    codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
    zeros = torch.randint(0, 16, (outputs, groups), dtype=torch.uint8)
    zeros[:, 0] = 15 * (torch.arange(outputs) % 2)
    return codes, torch.rand(outputs, groups) * 0.1, zeros


def spread(values: Tensor, group: int, inputs: int) -> Tensor:
    return values.repeat_interleave(group, 1)[:, :inputs]


def every_e4m3(outputs: int, inputs: int) -> Tensor:
    codes = torch.arange(outputs * inputs).remainder(254).to(torch.uint8)
    codes[codes >= 0x7F] += 1
    return codes.view(outputs, inputs).view(torch.float8_e4m3fn)


def product(x: Tensor, weight: Tensor, bias: Tensor, integers: bool) -> Tensor:
    """In float64, by the definition of the product and the float64 weights."""
    if integers:
        codes, scale = quantize_rows(x)
        return codes.double() @ weight.T * scale.double() + bias.double()
    return x.double() @ weight.T + bias.double()


def close(found: Tensor, expected: Tensor) -> bool:
    unit = 3e-6 if found.dtype == torch.float32 else 2**-8
    return bool((found.double() - expected).abs().max() <= unit * 2 * max(1.0, float(expected.abs().max())))


def packed_kinds(kernels: QuantizedKernels) -> list[QuantizedWeight]:
    """One small matrix [130, 576] of every kind."""
    codes, scales, zeros = int4(130, 576, 128)
    eight, channel = torch.randint(-128, 128, (130, 576), dtype=torch.int8), torch.rand(130)
    return [
        *(kernels.pack_int4(codes, scales, z, 128, integers) for z in (None, zeros) for integers in (True, False)),
        *(kernels.pack_int8(eight, channel, integers) for integers in (True, False)),
        kernels.pack_float8(every_e4m3(130, 576), channel),
        kernels.pack_float8(every_e4m3(130, 576), torch.rand(3, 5), (64, 128)),
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("integers", [True, False])
@pytest.mark.parametrize(("outputs", "inputs", "group"), INT4_SHAPES)
def test_int4_matches_float64(
    kernels: QuantizedKernels, dtype: torch.dtype, integers: bool, outputs: int, inputs: int, group: int
) -> None:
    codes, scales, zeros = int4(outputs, inputs, group)
    x, bias = torch.randn(40, inputs).to(dtype), torch.randn(outputs).to(dtype)
    for zero in (None, zeros):
        offset = 8.0 if zero is None else spread(zero.double(), group, inputs)
        for kind in (torch.float32, torch.bfloat16, torch.float16):  # how the scales are kept in memory
            kept = scales.to(kind).float()
            weight = (codes.double() - offset) * spread(kept.double(), group, inputs)
            packed = kernels.pack_int4(codes, kept, zero, group, integers)
            for rows in (1, 2, 3, 8, 9, 40):
                assert close(kernels.linear(x[:rows], packed, bias), product(x[:rows], weight, bias, integers))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("integers", [True, False])
@pytest.mark.parametrize(("outputs", "inputs"), [(100, 576), (7, 1536), (49, 96), (3, 30)])
def test_int8_matches_float64(kernels: QuantizedKernels, dtype: torch.dtype, integers: bool, outputs: int, inputs: int) -> None:
    codes = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
    codes[0] = -128
    x, scales, bias = torch.randn(40, inputs).to(dtype), torch.rand(outputs) * 0.01, torch.randn(outputs).to(dtype)
    packed = kernels.pack_int8(codes, scales, integers)
    weight = codes.double() * scales.double()[:, None]
    for rows in (1, 5, 40):
        assert close(kernels.linear(x[:rows], packed, bias), product(x[:rows], weight, bias, integers))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("outputs", "inputs", "block"),
    [(100, 576, None), (49, 1536, None), (130, 576, (128, 128)), (65, 100, (16, 32)), (5, 320, (1, 256)), (50, 96, (64, 128))],
)
def test_float8_matches_float64(
    kernels: QuantizedKernels, dtype: torch.dtype, outputs: int, inputs: int, block: tuple[int, int] | None
) -> None:
    codes, x, bias = every_e4m3(outputs, inputs), torch.randn(40, inputs).to(dtype), torch.randn(outputs).to(dtype)
    if block is None:
        scales = torch.rand(outputs) * 0.01
        each = scales.double()[:, None]
    else:
        scales = torch.rand(-(-outputs // block[0]), -(-inputs // block[1])) * 0.01
        each = spread(scales.double().repeat_interleave(block[0], 0)[:outputs], block[1], inputs)
    packed = kernels.pack_float8(codes, scales, block)
    for rows in (1, 5, 40):
        assert close(kernels.linear(x[:rows], packed, bias), product(x[:rows], codes.double() * each, bias, False))


def test_every_code_is_exact(kernels: QuantizedKernels) -> None:
    """One input at a time: the weight itself comes out, subnormal e4m3 numbers, zeros 0 and 15 and code -128 included."""
    eye = torch.eye(16)
    codes = torch.arange(16, dtype=torch.uint8).expand(16, 16).contiguous()
    zeros = torch.arange(16, dtype=torch.uint8)[:, None].contiguous()
    for integers in (True, False):
        packed = kernels.pack_int4(codes, torch.ones(16, 1), zeros, 16, integers)
        found = kernels.linear(eye, packed)
        assert torch.allclose(found, (codes.float() - zeros.float()).T, rtol=1e-6, atol=0)
    every = torch.arange(256, dtype=torch.int16).sub(128).to(torch.int8).view(16, 16)
    for integers in (True, False):
        found = kernels.linear(eye, kernels.pack_int8(every, torch.ones(16), integers))
        assert torch.allclose(found, every.float().T, rtol=1e-6, atol=0)
    floats = every_e4m3(16, 16)
    for dtype in DTYPES:
        found = kernels.linear(eye.to(dtype), kernels.pack_float8(floats, torch.ones(16)))
        assert torch.equal(found.float(), floats.float().T)


def test_integer_products_equal_those_of_torch(native_kernels: NativeQuantized) -> None:
    """The products are exact on both sides: with one group and scales of one, equal bits."""
    x = torch.randn(40, 256)
    codes, _, zeros = int4(100, 256, 256)
    eight = torch.randint(-128, 128, (100, 256), dtype=torch.int8)
    reference = TorchQuantized()
    for mine, other in (
        (
            native_kernels.pack_int4(codes, torch.ones(100, 1), zeros, 256),
            reference.pack_int4(codes, torch.ones(100, 1), zeros, 256),
        ),
        (native_kernels.pack_int8(eight, torch.ones(100)), reference.pack_int8(eight, torch.ones(100))),
    ):
        assert torch.equal(native_kernels.linear(x, mine), reference.linear(x, other))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_its_own(native_kernels: NativeQuantized, dtype: torch.dtype) -> None:
    """The same bits alone, in any batch, beside an outlier, and with one or two threads."""
    x = torch.randn(300, 576).to(dtype)
    x[5] *= 1e4
    x[7, 3] = float("inf")
    before = torch.get_num_threads()
    try:
        for packed in packed_kinds(native_kernels):
            torch.set_num_threads(1)
            together = native_kernels.linear(x, packed)
            for threads in (1, 2):
                torch.set_num_threads(threads)
                for begin, rows in ((0, 1), (4, 3), (0, 8), (0, 9), (3, 33), (0, 129), (0, 257), (299, 1)):
                    alone = native_kernels.linear(x[begin : begin + rows], packed)
                    assert torch.equal(alone.nan_to_num(7), together[begin : begin + rows].nan_to_num(7))
    finally:
        torch.set_num_threads(before)


def test_torch_rows_do_not_see_their_neighbours() -> None:
    torch.manual_seed(0)
    kernels = TorchQuantized()
    x = torch.randn(9, 576)
    x[5] *= 1e4
    for packed in packed_kinds(kernels):
        if packed.integers:
            assert torch.equal(kernels.linear(x[:1], packed)[0], kernels.linear(x, packed)[0])


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_rows_that_are_not_finite_or_zero(kernels: QuantizedKernels, wrong: float) -> None:
    x = torch.randn(12, 100)
    x[3, 97], x[4], x[6] = wrong, 0.0, 1e-38
    codes, scales, zeros = int4(30, 100, 32)
    bias = torch.randn(30)
    found = kernels.linear(x, kernels.pack_int4(codes, scales, zeros, 32), bias)
    assert bool(found[3].isnan().all()) and int(found.isnan().sum()) == 30
    assert torch.equal(found[4], bias) and torch.allclose(found[6], bias)


def test_no_rows(kernels: QuantizedKernels) -> None:
    for packed in packed_kinds(kernels):
        assert kernels.linear(torch.empty(0, 576), packed).shape == (0, 130)


def test_memory_is_that_of_the_codes_and_scales() -> None:
    kernels = native("plain")
    codes, scales, zeros = int4(96, 1024, 64)
    assert kernels.pack_int4(codes, scales.bfloat16().float(), None, 64).nbytes == 96 * 1024 // 2 + 96 * 16 * 2
    assert kernels.pack_int4(codes, scales, zeros, 64).nbytes == 96 * 1024 // 2 + 96 * 16 * 5


def test_refusals(kernels: QuantizedKernels) -> None:
    codes, scales, zeros = int4(4, 96, 32)
    with pytest.raises(InvalidArgument, match="group: 36"):
        kernels.pack_int4(codes, scales, None, 36)
    with pytest.raises(InvalidArgument, match="group: 264"):
        kernels.pack_int4(codes.repeat(1, 6), torch.ones(4, 3), None, 264)
    with pytest.raises(InvalidArgument, match="scales"):
        kernels.pack_int4(codes, scales[:, :2], None, 32)
    with pytest.raises(InvalidArgument, match="zeros"):
        kernels.pack_int4(codes, scales, zeros[:, :2], 32)
    with pytest.raises(InvalidArgument, match="codes: 17"):
        kernels.pack_int4(codes.clamp_min(17), scales, None, 32)
    with pytest.raises(InvalidArgument, match="INT8 codes"):
        kernels.pack_int8(codes, scales)
    with pytest.raises(InvalidArgument, match="NaN"):
        kernels.pack_float8(torch.full((2, 8), float("nan")).to(torch.float8_e4m3fn), torch.ones(2))
    with pytest.raises(InvalidArgument, match="scales"):
        kernels.pack_float8(every_e4m3(4, 16), torch.ones(1, 3), (4, 8))


def test_native_kernels_refuse_what_they_cannot_read(native_kernels: NativeQuantized) -> None:
    packed = packed_kinds(native_kernels)[0]
    for x in (torch.randn(576, 2).T, torch.randn(2, 570), torch.randn(2, 576).half()):
        with pytest.raises(ValueError, match="x must"):
            native_kernels.linear(x, packed)
    with pytest.raises(ValueError, match="bias"):
        native_kernels.linear(torch.randn(2, 576), packed, torch.randn(3))


def test_linear_layers() -> None:
    dense = TorchKernels()
    codes, scales, zeros = int4(6, 96, 32)
    bias = torch.randn(6)
    x = torch.randn(3, 96)
    four = QuantizedLinear(dense, GroupedInt4(codes, scales, zeros, 32), bias)
    weight = (codes.double() - spread(zeros.double(), 32, 96)) * spread(scales.double(), 32, 96)
    assert (four.out_features, four.in_features) == (6, 96) and four.nbytes > 0
    assert close(four(x), product(x, weight, bias, True))
    eight = QuantizedLinear(dense, ChannelInt8(torch.ones(6, 96, dtype=torch.int8), torch.ones(6)), integers=False)
    assert close(eight(x), product(x, torch.ones(6, 96).double(), torch.zeros(6), False))
    half = QuantizedLinear(dense, Float8(every_e4m3(6, 96), torch.ones(1, 3), (6, 32)), bias)
    assert close(half(x), product(x, every_e4m3(6, 96).double(), bias, False))
