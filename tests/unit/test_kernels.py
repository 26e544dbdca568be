"""The native and the torch kernels against float64 references, and a row's independence of its neighbours."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tritone.errors import InvalidArgument
from tritone.kernels import HeadNorm, Kernels, NativeKernels, RopeTable, TorchKernels, build, default_kernels

DTYPES = [torch.float32, torch.bfloat16]
DTYPE_PAIRS = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)]


def native(instruction_set: str) -> NativeKernels:
    try:
        return NativeKernels(build.build_library(), instruction_set)
    except build.BuildError as error:
        pytest.skip(f"no native kernels here: {error}")
    except InvalidArgument as error:
        pytest.skip(f"this CPU lacks {instruction_set}: {error}")


@pytest.fixture(params=["torch", *build.INSTRUCTION_SETS])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    torch.manual_seed(0)
    return TorchKernels() if request.param == "torch" else native(request.param)


@pytest.fixture(params=["avx2", "avx512bf16"])
def native_kernels(request: pytest.FixtureRequest) -> NativeKernels:
    torch.manual_seed(0)
    return native(request.param)


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    unit = 2e-6 if found.dtype == torch.float32 else 2**-8
    return float((found.double() - expected).abs().max()) <= unit * 2.5 * max(1.0, float(expected.abs().max()))


@dataclass
class Paged:
    """A random pool and three kinds of sequences in it; page numbers are shuffled, unused entries are -1."""

    kv: torch.Tensor
    table: torch.Tensor
    starts: torch.Tensor
    contexts: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor


def paged(
    contexts: list[int], new: list[int], kv_heads: int, head_dim: int, page: int, dtype: torch.dtype, layers: int = 2
) -> Paged:
    used = [-(-length // page) for length in contexts]
    pages = torch.randperm(sum(used) + 3)
    table = torch.full((len(contexts), max(used) + 1), -1, dtype=torch.int32)
    begin = 0
    for row, count in enumerate(used):
        table[row, :count] = pages[begin : begin + count].int()
        begin += count
    starts = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32)
    positions = torch.cat([torch.arange(c - n, c) for c, n in zip(contexts, new, strict=True)]).int()
    rows = torch.repeat_interleave(torch.arange(len(new)), torch.tensor(new))
    slots = table[rows, positions.long() // page].long() * page + positions % page
    kv = torch.randn(len(pages), layers, 2, kv_heads, page, head_dim).to(dtype)
    return Paged(kv, table, starts, torch.tensor(contexts, dtype=torch.int32), positions, slots)


def reference_attention(q: torch.Tensor, p: Paged, layer: int, scale: float) -> torch.Tensor:
    out = torch.empty(q.shape, dtype=torch.float64)
    page, group = p.kv.shape[4], q.shape[1] // p.kv.shape[3]
    for s, context in enumerate(p.contexts.tolist()):
        begin, end = int(p.starts[s]), int(p.starts[s + 1])
        ids = p.table[s, : -(-context // page)].long()
        k, v = (p.kv[ids, layer, i].transpose(1, 2).flatten(0, 1)[:context].double() for i in (0, 1))  # [context, kv, d]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q[begin:end].double(), k) * scale
        scores += torch.full_like(scores, float("-inf")).triu(context - (end - begin) + 1)
        out[begin:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    return out


@pytest.mark.parametrize(("dtype", "kv_dtype"), DTYPE_PAIRS)
@pytest.mark.parametrize(
    ("head_dim", "group", "page"), [(64, 3, 32), (80, 1, 16), (96, 8, 64), (128, 4, 32), (128, 30, 16), (20, 2, 16)]
)
def test_attention_matches_float64(
    kernels: Kernels, dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, group: int, page: int
) -> None:
    p = paged([page - 1, page, page + 1, 530, 40], [1, 1, 1, 25, 40], 2, head_dim, page, kv_dtype)
    qkv = torch.randn(int(p.starts[-1]), (group + 2) * 2, head_dim).to(dtype)
    q = qkv[:, : group * 2]
    found = kernels.paged_attention(q, p.kv, 1, p.table, p.starts, p.contexts, head_dim**-0.5)
    assert found.shape == q.shape and found.dtype == dtype
    assert close(found, reference_attention(q, p, 1, head_dim**-0.5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_token_attends_alike_alone_in_a_batch_and_in_a_chunk(
    native_kernels: NativeKernels, dtype: torch.dtype, threads: int
) -> None:
    before = torch.get_num_threads()
    p = paged([17, 600, 1100, 33, *[20] * 13], [1, 1, 70, 33, *[1] * 13], 3, 64, 32, dtype)
    q = torch.randn(int(p.starts[-1]), 9, 64).to(dtype)
    together = native_kernels.paged_attention(q, p.kv, 0, p.table, p.starts, p.contexts, 0.125)
    one = torch.tensor([0, 1], dtype=torch.int32)
    torch.set_num_threads(threads)
    try:
        for s in range(len(p.contexts)):
            for row in range(int(p.starts[s]), int(p.starts[s + 1]), 23):
                context = p.contexts[s : s + 1] - (int(p.starts[s + 1]) - 1 - row)
                alone = native_kernels.paged_attention(q[row : row + 1], p.kv, 0, p.table[s : s + 1], one, context, 0.125)
                assert torch.equal(alone[0], together[row])
    finally:
        torch.set_num_threads(before)


def test_attention_never_reads_past_the_context(native_kernels: NativeKernels) -> None:
    for dtype in DTYPES:
        p = paged([21], [1], 2, 64, 32, dtype)
        q = torch.randn(1, 4, 64).to(dtype)
        args = (p.table, p.starts, p.contexts, 0.125)
        expected = native_kernels.paged_attention(q, p.kv, 0, *args)
        p.kv[p.table[0, 0], :, :, :, 21:] = float("nan")
        assert torch.equal(native_kernels.paged_attention(q, p.kv, 0, *args), expected)


def test_attention_over_a_mapped_strided_pool(kernels: Kernels) -> None:
    p = paged([33, 70], [1, 1], 2, 64, 32, torch.bfloat16)
    pages, *rest = p.kv.shape
    memory = mmap.mmap(-1, 3 * p.kv.nbytes)
    wide = torch.frombuffer(memory, dtype=torch.bfloat16).view(pages, 3, *rest)
    wide[:, 1] = p.kv
    q = torch.randn(2, 4, 64).bfloat16()
    expected = kernels.paged_attention(q, p.kv, 1, p.table, p.starts, p.contexts, 0.125)
    assert torch.equal(kernels.paged_attention(q, wide[:, 1], 1, p.table, p.starts, p.contexts, 0.125), expected)


@pytest.mark.parametrize("wrong", ["page", "length", "empty"])
def test_attention_refuses_what_its_pages_cannot_hold(kernels: Kernels, wrong: str) -> None:
    p = paged([33, 70], [1, 1], 2, 64, 32, torch.float32)
    if wrong == "page":
        p.table[1, 0] = p.kv.shape[0]
    else:
        p.contexts[1] = 32 * p.table.shape[1] + 1 if wrong == "length" else 0
    with pytest.raises(IndexError):
        kernels.paged_attention(torch.randn(2, 4, 64), p.kv, 0, p.table, p.starts, p.contexts, 0.125)


@pytest.mark.parametrize(("dtype", "kv_dtype"), DTYPE_PAIRS)
@pytest.mark.parametrize(("head_dim", "normed"), [(64, False), (80, True), (128, True), (20, False)])
def test_rope_append(kernels: Kernels, dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, normed: bool) -> None:
    p = paged([31, 32, 33, 40], [1, 1, 1, 7], 2, head_dim, 32, kv_dtype)
    before = p.kv.clone()
    qkv = torch.randn(10, 3 * 2 + 4, head_dim).to(dtype)
    angles = torch.randn(64, head_dim // 2)
    rope = RopeTable(angles.cos(), angles.sin())
    norm = HeadNorm(torch.rand(head_dim).to(dtype), torch.rand(head_dim).to(dtype), 1e-6) if normed else None
    x = qkv[:, :8].double()
    if norm is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        x = torch.cat((x[:, :6] * norm.q.double(), x[:, 6:] * norm.k.double()), dim=1)
    a, b = x.chunk(2, dim=-1)
    cos, sin = (t[p.positions.long()].double().unsqueeze(1) for t in (rope.cos, rope.sin))
    expected = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    values = qkv[:, 8:].clone()
    kernels.rope_append(qkv, p.positions, p.slots, rope, p.kv, 1, norm)
    assert close(qkv[:, :8], expected) and torch.equal(qkv[:, 8:], values)
    page, offset = p.slots // 32, p.slots % 32
    assert torch.equal(p.kv[page, 1, 0, :, offset], qkv[:, 6:8].to(kv_dtype))
    assert torch.equal(p.kv[page, 1, 1, :, offset], values.to(kv_dtype))
    p.kv[page, 1, :, :, offset] = before[page, 1, :, :, offset]
    assert torch.equal(p.kv, before), "nothing else is written"


def test_rope_append_refuses_slots_and_positions_out_of_range(kernels: Kernels) -> None:
    p = paged([31], [1], 2, 64, 32, torch.float32)
    rope = RopeTable(torch.ones(31, 32), torch.zeros(31, 32))
    qkv = torch.randn(1, 8, 64)
    with pytest.raises(IndexError):
        kernels.rope_append(qkv, p.positions + 1, p.slots, rope, p.kv, 0)
    with pytest.raises(IndexError):
        kernels.rope_append(qkv, p.positions, p.slots * 0 + p.kv.shape[0] * 32, rope, p.kv, 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [576, 64, 37])
def test_norm_and_gate(kernels: Kernels, dtype: torch.dtype, width: int) -> None:
    x, residual, weight = (torch.randn(5, width).to(dtype) for _ in range(3))
    total = (x + residual).double()
    expected = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-5) * weight[0].double()
    normed, kept = kernels.add_rms_norm(x, residual, weight[0], 1e-5)
    assert kept is residual and torch.equal(residual.double(), total) and close(normed, expected)
    assert torch.equal(kernels.add_rms_norm(residual, None, weight[0], 1e-5)[0], normed)
    alone, _ = kernels.add_rms_norm(residual[3:4].clone(), None, weight[0], 1e-5)
    assert torch.equal(alone[0], normed[3])
    pair = torch.cat((x, weight), dim=1)
    gated = kernels.silu_mul(pair)
    assert close(gated, torch.nn.functional.silu(x.double()) * weight.double())
    assert torch.equal(kernels.silu_mul(pair[2:3].clone())[0], gated[2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(960, 576), (100, 48), (7, 2), (48, 5000)])
def test_linear_and_its_rows_alone(kernels: Kernels, dtype: torch.dtype, outputs: int, inputs: int) -> None:
    weight, bias = (torch.randn(outputs, inputs) * inputs**-0.5).to(dtype), torch.randn(outputs).to(dtype)
    x = torch.randn(300, inputs).to(dtype)
    packed = kernels.pack(weight)
    found = kernels.linear(x, packed, bias)
    assert close(found, x.double() @ weight.double().T + bias.double())
    assert kernels.linear(x[:0], packed).shape == (0, outputs)
    if isinstance(kernels, NativeKernels):
        for rows in (1, 2, 7, 8, 9, 32, 129):
            assert torch.equal(kernels.linear(x[:rows], packed, bias), found[:rows])
        assert torch.equal(kernels.linear(x[299:], packed, bias)[0], found[299])


def test_native_kernels_refuse_other_layouts(native_kernels: NativeKernels) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        native_kernels.silu_mul(torch.randn(4, 8).T)
    with pytest.raises(ValueError, match="weight"):
        native_kernels.add_rms_norm(torch.randn(2, 8), None, torch.randn(8).bfloat16(), 1e-5)
    with pytest.raises(ValueError, match="page_size"):
        p = paged([3], [1], 1, 64, 8, torch.float32)
        native_kernels.paged_attention(torch.randn(1, 1, 64), p.kv, 0, p.table, p.starts, p.contexts, 1.0)


def test_without_a_compiler_torch_takes_over_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CC", "TRITONE_KERNELS", "TRITONE_ISA"):
        monkeypatch.delenv(name, raising=False)
    default_kernels.cache_clear()
    try:
        assert default_kernels().name == "torch"
        assert "apt-get install gcc" in caplog.text
        monkeypatch.setenv("TRITONE_KERNELS", "native")
        default_kernels.cache_clear()
        with pytest.raises(build.BuildError):
            default_kernels()
        monkeypatch.setenv("TRITONE_KERNELS", "cuda")
        with pytest.raises(InvalidArgument, match="TRITONE_KERNELS.*auto, native, torch"):
            default_kernels()
    finally:
        default_kernels.cache_clear()


def test_two_processes_build_at_once(tmp_path: Path) -> None:
    native("plain")
    code = "from tritone.kernels import build; print(build.build_library(['plain']))"
    environment = {**os.environ, "TRITONE_CACHE": str(tmp_path)}
    root = Path(build.__file__).parents[2]
    runs = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, cwd=root, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    printed = [run.communicate(timeout=120)[0].strip() for run in runs]
    (folder,) = (path for path in tmp_path.iterdir() if path.suffix != ".lock")
    assert printed == [str(folder / "library.so")] * 2
