"""Pages of e4m3: rounding, attention over them, copies between pools, and what a NaN does."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from tests.unit.test_kernels import Paged, close, native, paged, reference_attention
from tritone.kernels import (
    HeadNorm,
    Kernels,
    NativeKernels,
    QuantizedPages,
    RopeTable,
    TorchKernels,
    build,
)
from tritone.kernels.interface import key_factor, mixed_width
from tritone.kernels.torch_kernels import mixed_keys, mixed_queries

E4M3 = torch.float8_e4m3fn
ACTIVATIONS = [torch.float32, torch.bfloat16]
SPECIAL = [447.0, 448.0, 464.0, 465.0, 1e4, 3e38, float("inf"), 1e-30, 1e-44, 0.0]


@pytest.fixture(params=["torch", *build.INSTRUCTION_SETS])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    torch.manual_seed(0)
    return TorchKernels() if request.param == "torch" else native(request.param)


@pytest.fixture(params=list(build.INSTRUCTION_SETS))
def native_kernels(request: pytest.FixtureRequest) -> NativeKernels:
    torch.manual_seed(0)
    return native(request.param)


def quantized(p: Paged, spread: float = 1.0) -> QuantizedPages:
    """The pages of ``p`` as e4m3, with a scale of its own for each layer, half and head."""
    layers, _, heads = p.kv.shape[1:4]
    scales = spread * torch.rand(layers, 2, heads) + 0.3
    return QuantizedPages((p.kv.float() / scales[..., None, None]).clamp(-448, 448).to(E4M3), scales)


def dequantized(p: Paged, kv: QuantizedPages) -> Paged:
    return Paged(
        kv.codes.float() * kv.scales[..., None, None], p.table, p.starts, p.contexts, p.positions, p.slots
    )


def code_bytes(kv: QuantizedPages) -> torch.Tensor:
    return kv.codes.view(torch.uint8)


def empty_pages(pages: int, planes: tuple[int, int], page: int, head_dim: int, scales: torch.Tensor) -> QuantizedPages:
    codes = torch.zeros(pages, planes[0], 2, planes[1], page, head_dim, dtype=torch.uint8)
    return QuantizedPages(codes.view(E4M3), scales)


def all_numbers() -> torch.Tensor:
    """Every number of the format, every border between two, their neighbours, and what lies outside."""
    finite = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    finite = finite[~finite.isnan()].sort().values
    middle = (finite[1:] + finite[:-1]) / 2
    above, below = (torch.nextafter(middle, torch.tensor(to)) for to in (1e9, -1e9))
    special = torch.tensor(SPECIAL)
    values = torch.cat((finite, middle, above, below, special, -special))
    return torch.cat((values, torch.zeros(-len(values) % 512)))


def nearest(x: torch.Tensor) -> torch.Tensor:
    """To nearest, ties to even, saturating; in float64 by the definition of the format, not by torch's conversion."""
    size = x.double().abs().clamp(max=448.0)
    step = torch.exp2(torch.floor(torch.log2(size.clamp(min=2.0**-6))) - 3)
    return torch.round(size / step) * step * torch.where(torch.signbit(x), -1.0, 1.0)


@pytest.mark.parametrize(("scale", "dtype"), list(product((1.0, 0.25, 0.3, 1e-3), ACTIVATIONS)))
def test_numbers_become_the_nearest_code(kernels: Kernels, scale: float, dtype: torch.dtype) -> None:
    source = (all_numbers() * scale).to(dtype).view(-1, 1, 1, 1, 16, 32).repeat(1, 1, 2, 1, 1, 1)
    count = len(source)
    kv = empty_pages(count, (1, 1), 16, 32, torch.full((1, 2, 1), scale))
    assert kernels.convert_pages(source, range(count), kv, range(count), 16 * count) is None
    codes = kv.codes.float()[:, :, 1]
    assert not codes.isnan().any()
    assert torch.equal(codes.double(), nearest(source[:, :, 1].float() / scale))
    assert torch.equal(torch.signbit(codes), torch.signbit(source[:, :, 1]))
    wide = torch.zeros(source.shape)
    assert kernels.convert_pages(kv, range(count), wide, range(count), 16 * count) is None
    assert torch.equal(wide[:, :, 1], codes * scale)


@pytest.mark.parametrize(("head_dim", "width"), [(64, 64), (128, 128), (96, 32), (80, 16), (20, 4), (18, 2), (256, 256)])
def test_keys_are_mixed_by_a_hadamard_matrix(kernels: Kernels, head_dim: int, width: int) -> None:
    assert mixed_width(head_dim) == width
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < width:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
    full = torch.block_diag(*[matrix * key_factor(width)] * (head_dim // width))
    keys = torch.randn(4, 1, 2, 1, 16, head_dim)
    assert close(mixed_keys(keys), keys.double() @ full)
    assert close(mixed_queries(mixed_keys(keys)), keys.double())
    kv = empty_pages(4, (1, 1), 16, head_dim, torch.tensor([[[0.01], [0.02]]]))
    assert kernels.convert_pages(keys, range(4), kv, range(4), 64) is None
    codes = kv.codes.double() * kv.scales[..., None, None]
    assert torch.equal(kv.codes[:, 0, 0].double(), nearest(mixed_keys(keys[:, 0, 0]) / 0.01))
    back = torch.zeros(keys.shape)
    assert kernels.convert_pages(kv, range(4), back, range(4), 64) is None
    assert close(back[:, :, 0], codes[:, :, 0] @ full / key_factor(width) ** 2 / width)
    assert float((back - keys).abs().max()) < 0.4


@pytest.mark.parametrize("dtype", ACTIVATIONS)
def test_infinite_keys_saturate(kernels: Kernels, dtype: torch.dtype) -> None:
    source = torch.zeros(1, 1, 2, 1, 16, 64, dtype=dtype)
    source[..., 0, 3:5], source[..., 1, 3], source[..., 2, 3] = float("inf"), -float("inf"), 465.0 * 8
    kv = empty_pages(1, (1, 1), 16, 64, torch.ones(1, 2, 1))
    assert kernels.convert_pages(source, [0], kv, [0], 16) is None
    codes = kv.codes.float()
    assert not codes.isnan().any()
    assert sorted(codes[0, 0, 0, 0, 0].unique().tolist()) == [-448.0, 0.0, 448.0]
    assert codes[0, 0, 0, 0, 1].abs().eq(448).all() and codes[0, 0, 0, 0, 2].abs().eq(448).all()


@pytest.mark.parametrize("dtype", ACTIVATIONS)
@pytest.mark.parametrize(
    ("head_dim", "normed", "centred"),
    [(64, False, False), (64, False, True), (80, True, True), (128, True, False), (20, False, True)],
)
def test_rope_append_writes_codes(
    kernels: Kernels, dtype: torch.dtype, head_dim: int, normed: bool, centred: bool
) -> None:
    p = paged([31, 32, 33, 40], [1, 1, 1, 7], 2, head_dim, 32, torch.float32)
    kv = quantized(p)
    offsets = 20 * torch.randn(kv.shape[1], 2, head_dim)
    if centred:
        kv = QuantizedPages(kv.codes, kv.scales, offsets)
    before = code_bytes(kv).clone()
    qkv = 30 * torch.randn(10, 3 * 2 + 4, head_dim).to(dtype)
    qkv[4, 9, :10] = torch.tensor(SPECIAL)
    plain = qkv.clone()
    angles = torch.randn(64, head_dim // 2)
    rope = RopeTable(angles.cos(), angles.sin())
    norm = HeadNorm(torch.rand(head_dim).to(dtype), torch.rand(head_dim).to(dtype), 1e-6) if normed else None
    kernels.rope_append(qkv, p.positions, p.slots, rope, kv, 1, norm)
    same_pages = torch.zeros_like(p.kv, dtype=dtype)
    kernels.rope_append(plain, p.positions, p.slots, rope, same_pages, 1, norm)
    assert torch.equal(qkv[:, 6:], plain[:, 6:])
    wide = {torch.float32: 0.0, torch.bfloat16: 2**-8}[dtype] * plain[:, :6].float().abs().max()
    assert float((qkv[:, :6].float() - mixed_queries(plain[:, :6])).abs().max()) <= 1.5 * wide + 1e-3
    page, offset = p.slots // 32, p.slots % 32
    keys = qkv[:, 6:8].float() - offsets[1] if centred else qkv[:, 6:8]
    for half, rows in ((0, mixed_keys(keys)), (1, qkv[:, 8:])):
        found = kv.codes.view(torch.uint8)[page, 1, half, :, offset].view(E4M3).float()
        assert torch.equal(found.double(), nearest(rows.float() / kv.scales[1, half, :, None]))
    after = code_bytes(kv).clone()
    after[page, 1, :, :, offset] = before[page, 1, :, :, offset]
    assert torch.equal(after, before), "nothing else is written"


@pytest.mark.parametrize("dtype", ACTIVATIONS)
@pytest.mark.parametrize(
    ("head_dim", "group", "page"),
    [(64, 3, 32), (80, 1, 16), (96, 8, 64), (128, 4, 32), (128, 30, 16), (20, 2, 16), (32, 4, 48)],
)
def test_attention_matches_float64(kernels: Kernels, dtype: torch.dtype, head_dim: int, group: int, page: int) -> None:
    p = paged([page - 1, page, page + 1, 530, 40], [1, 1, 1, 25, 40], 2, head_dim, page, torch.float32)
    kv = quantized(p)
    q = torch.randn(int(p.starts[-1]), group * 2, head_dim).to(dtype)
    found = kernels.paged_attention(q, kv, 1, p.table, p.starts, p.contexts, head_dim**-0.5)
    assert found.shape == q.shape and found.dtype == dtype
    assert close(found, reference_attention(q, dequantized(p, kv), 1, head_dim**-0.5))


@pytest.mark.parametrize(("dtype", "threads"), list(product(ACTIVATIONS, (1, 2))))
@pytest.mark.parametrize(("group", "head_dim"), [(3, 64), (8, 64), (4, 128)])
def test_a_token_attends_alike_alone_in_a_batch_and_in_a_chunk(
    native_kernels: NativeKernels, dtype: torch.dtype, threads: int, group: int, head_dim: int
) -> None:
    before = torch.get_num_threads()
    p = paged([17, 600, 1100, 33, *[20] * 13], [1, 1, 70, 33, *[1] * 13], 3, head_dim, 32, torch.float32)
    kv = quantized(p)
    q = torch.randn(int(p.starts[-1]), 3 * group, head_dim).to(dtype)
    together = native_kernels.paged_attention(q, kv, 0, p.table, p.starts, p.contexts, 0.125)
    one = torch.tensor([0, 1], dtype=torch.int32)
    torch.set_num_threads(threads)
    try:
        for s in range(len(p.contexts)):
            for row in range(int(p.starts[s]), int(p.starts[s + 1]), 23):
                context = p.contexts[s : s + 1] - (int(p.starts[s + 1]) - 1 - row)
                alone = native_kernels.paged_attention(q[row : row + 1], kv, 0, p.table[s : s + 1], one, context, 0.125)
                assert torch.equal(alone[0], together[row])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("pages", "dtype"), list(product(("same", "e4m3"), ACTIVATIONS)))
@pytest.mark.parametrize("half", [0, 1])
def test_a_nan_reaches_its_own_sequence_alone(kernels: Kernels, pages: str, dtype: torch.dtype, half: int) -> None:
    p = paged([33, 700, 40, 70], [1, 1, 9, 1], 2, 64, 32, dtype)
    kv = quantized(p) if pages == "e4m3" else p.kv
    q = torch.randn(int(p.starts[-1]), 4, 64).to(dtype)
    args = (0, p.table, p.starts, p.contexts, 0.125)
    clean = kernels.paged_attention(q, kv, *args)
    for s, page in ((1, 3), (2, 0)):
        at = (int(p.table[s, page]), 0, half, 1, 7, 5)
        if isinstance(kv, QuantizedPages):
            code_bytes(kv)[at] = 0xFF
        else:
            kv[at] = float("nan")
    found = kernels.paged_attention(q, kv, *args)
    assert torch.equal(found[0], clean[0]) and torch.equal(found[11], clean[11])
    assert found[1, 2:].isnan().any(-1).all() and found[2:11, 2:].isnan().any(-1).all()
    assert not found[:, :2].isnan().any(), "the other head's queries never met it"


def test_offsets_leave_attention_as_it_is_and_spare_error(kernels: Kernels) -> None:
    """Keys that have a large constant in common: attention over float32 pages is the measure."""
    p = paged([40, 90], [40, 90], 2, 64, 16, torch.float32)
    offsets = 4 * torch.randn(2, 2, 64)
    plain = torch.randn(130, 8, 64)
    plain[:, 4:6] += offsets[0]
    rope = RopeTable(torch.ones(128, 32), torch.zeros(128, 32))
    empty = quantized(p).codes.view(torch.uint8).zero_().view(E4M3)
    scales = torch.ones(empty.shape[1], 2, 2)
    offsets = offsets[:1].repeat(empty.shape[1], 1, 1)
    pools = (torch.zeros_like(p.kv), QuantizedPages(empty.clone(), scales), QuantizedPages(empty.clone(), scales, offsets))
    found = []
    for kv in pools:
        qkv = plain.clone()
        kernels.rope_append(qkv, p.positions, p.slots, rope, kv, 0)
        found.append(kernels.paged_attention(qkv[:, :4], kv, 0, p.table, p.starts, p.contexts, 0.125))
    errors = [float((one - found[0]).square().mean().sqrt()) for one in found[1:]]
    assert errors[1] < 0.04 and errors[1] < 0.5 * errors[0]


def test_attention_never_reads_past_the_context(native_kernels: NativeKernels) -> None:
    p = paged([21], [1], 2, 64, 32, torch.float32)
    kv = quantized(p)
    for dtype in ACTIVATIONS:
        q = torch.randn(1, 4, 64).to(dtype)
        args = (p.table, p.starts, p.contexts, 0.125)
        expected = native_kernels.paged_attention(q, kv, 0, *args)
        kv.codes.view(torch.uint8)[p.table[0, 0], :, :, :, 21:] = 0x7F
        assert torch.equal(native_kernels.paged_attention(q, kv, 0, *args), expected)


def make_pool(kind: str, count: int) -> torch.Tensor | QuantizedPages:
    """Pages [count, 2, 2, 3, 16, 20] of random numbers."""
    values = 3 * torch.randn(count, 2, 2, 3, 16, 20)
    if kind in ("e4m3", "centred"):
        kv = quantized(Paged(values, *[torch.empty(0)] * 5))
        return QuantizedPages(kv.codes, kv.scales, torch.randn(2, 3, 20)) if kind == "centred" else kv
    return values.to(torch.bfloat16 if kind == "bf16" else torch.float32)


def numbers_of(pool: torch.Tensor | QuantizedPages) -> torch.Tensor:
    if isinstance(pool, QuantizedPages):
        return pool.codes.float() * pool.scales[..., None, None]
    return pool.float()


def plain_keys(keys: torch.Tensor, pool: torch.Tensor | QuantizedPages) -> torch.Tensor:
    """The keys [layers, heads, tokens, head_dim] that the numbers in the pool stand for."""
    if not isinstance(pool, QuantizedPages):
        return keys
    return mixed_queries(keys) + (0 if pool.offsets is None else pool.offsets[:, :, None])


def stored_keys(keys: torch.Tensor, pool: torch.Tensor | QuantizedPages) -> torch.Tensor:
    """The inverse of ``plain_keys``."""
    if not isinstance(pool, QuantizedPages):
        return keys
    return mixed_keys(keys - (0 if pool.offsets is None else pool.offsets[:, :, None]))


@pytest.mark.parametrize(("source", "target"), list(product(("float32", "bf16", "e4m3", "centred"), repeat=2)))
def test_pages_are_copied_into_any_type(kernels: Kernels, source: str, target: str) -> None:
    read, held = make_pool(source, 5), make_pool(target, 7)
    before = numbers_of(held)
    blocks, pages, tokens = [4, 0, 3], [6, 1, 2], 41
    assert kernels.convert_pages(read, blocks, held, pages, tokens) is None
    expected, wide = before.clone(), numbers_of(read)
    for block, page, rows in zip(blocks, pages, (16, 16, 9), strict=True):
        values = wide[block, ..., :rows, :].clone()
        if {source, target} != {"e4m3"}:  # the mixed keys of two pools without offsets are compared as they are
            values[:, 0] = plain_keys(values[:, 0], read)
            values[:, 0] = stored_keys(values[:, 0], held)
        if isinstance(held, QuantizedPages):
            scales = held.scales[..., None, None]
            values = nearest(values / scales).float() * scales
        else:
            values = values.to(held.dtype).float()
        expected[page, ..., :rows, :] = values
    assert torch.equal(numbers_of(held), expected)


@pytest.mark.parametrize("kind", ["e4m3", "centred"])
def test_same_scales_and_offsets_copy_the_codes(kernels: Kernels, kind: str) -> None:
    read = make_pool(kind, 3)
    assert isinstance(read, QuantizedPages)
    offsets = None if read.offsets is None else read.offsets.clone()
    held = QuantizedPages(torch.zeros_like(read.codes.view(torch.uint8)).view(E4M3), read.scales.clone(), offsets)
    assert kernels.convert_pages(read, [0, 1, 2], held, [0, 1, 2], 48) is None
    assert torch.equal(code_bytes(held), code_bytes(read))


def test_a_copy_tells_of_a_nan_within_the_tokens_only(kernels: Kernels) -> None:
    read, held = make_pool("bf16", 3), make_pool("e4m3", 3)
    assert isinstance(read, torch.Tensor)
    read[2, 1, 0, 2, 9:] = float("nan")
    args = (read, [0, 1, 2], held, [0, 1, 2])
    assert kernels.convert_pages(*args, 32 + 9) is None
    assert kernels.convert_pages(*args, 32 + 10) == 2
    read[0, 0, 1, 1, 15, 19] = float("nan")
    assert kernels.convert_pages(*args, 48) == 0


def test_a_copy_refuses_pages_that_are_not_there(kernels: Kernels) -> None:
    read, held = make_pool("bf16", 3), make_pool("e4m3", 3)
    wrong = (([0, 3], [0, 1], 20), ([0, 1], [0, -1], 20), ([0], [0, 1], 17), ([0, 1], [0], 17), ([0], [0], 0))
    for blocks, pages, tokens in wrong:
        with pytest.raises(IndexError):
            kernels.convert_pages(read, blocks, held, pages, tokens)
    with pytest.raises(ValueError, match="shape"):
        kernels.convert_pages(torch.zeros(3, 2, 2, 3, 32, 20), [0], held, [0], 1)


def test_pages_without_their_scales_are_refused() -> None:
    codes = torch.zeros(2, 3, 2, 4, 16, 32, dtype=torch.uint8).view(E4M3)
    for scales in (torch.ones(3, 2, 1), torch.ones(3, 2, 4, dtype=torch.bfloat16), torch.ones(3, 4, 2).transpose(1, 2)):
        with pytest.raises(ValueError, match="scales"):
            QuantizedPages(codes, scales)
    for offsets in (torch.zeros(3, 4), torch.zeros(3, 4, 32, dtype=torch.float64), torch.zeros(3, 32, 4).transpose(1, 2)):
        with pytest.raises(ValueError, match="offsets"):
            QuantizedPages(codes, torch.ones(3, 2, 4), offsets)
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        QuantizedPages(codes.view(torch.float8_e5m2), torch.ones(3, 2, 4))
    p = paged([3], [1], 4, 32, 16, torch.float32)
    with pytest.raises(ValueError, match="scales"):
        native("plain").paged_attention(torch.randn(1, 4, 32), codes, 0, p.table, p.starts, p.contexts, 1.0)
