"""Kernels by themselves: linear layers beside torch and beside the memory's own speed; attention over pages."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from perf.common import Spread, interleave, ratios
from quantization.rounding import quantize_fp8, quantize_int4, quantize_int8
from tritone.kernels import Kernels, QuantizedPages, default_kernels
from tritone.kernels.memory import HugeMemory
from tritone.models.decoder import DenseLinear, Linear
from tritone.models.decoder.linear import QuantizedLinear

SHAPES = ((8192, 2048), (2048, 8192))
"""Outputs and inputs of the matrices, in turn: those of the 1 B model's MLP."""
GROUPS = {"int4": 64, "int4 g128": 128}
SEQUENCES, CONTEXT, PAGE = 32, 4096, 32
Q_HEADS, KV_HEADS, HEAD_DIM = 16, 8, 128
_READ_BYTES = 512 << 20
Report = Callable[[int, int], None]


def read_ceiling() -> Callable[[], float]:
    """Gives a function that reads half a gigabyte once, on huge pages as weights are, and returns bytes a second."""
    memory = HugeMemory().take(_READ_BYTES)
    numbers = memory.fill_(1).view(torch.int64)

    def run() -> float:
        begun = time.perf_counter()
        numbers.sum()
        return memory.nbytes / (time.perf_counter() - begun)

    return run


def linear_layers(batch: int, matrices: int, rounds: int, progress: Report) -> dict[str, Any]:
    """Seconds for all ``matrices`` at this batch by kind of weights, beside torch's and the read ceiling."""
    kernels = default_kernels()
    shapes = [SHAPES[number % len(SHAPES)] for number in range(matrices)]
    dense = [_weight(*shape, number) for number, shape in enumerate(shapes)]
    stacks: dict[str, list[Any]] = {"torch bf16": dense}
    for name in ("bf16", "fp8", "int8", *GROUPS):
        stacks[name] = [_linear(kernels, name, weight) for weight in dense]
    inputs = {columns: torch.randn(batch, columns).bfloat16() for _, columns in SHAPES}

    def run(name: str) -> float:
        begun = time.perf_counter()
        for weight, (_, columns) in zip(stacks[name], shapes, strict=True):
            if name == "torch bf16":
                functional.linear(inputs[columns], weight)
            else:
                weight(inputs[columns])
        return time.perf_counter() - begun

    runs: dict[str, Callable[[], float]] = {"read": read_ceiling()}
    runs |= {name: lambda name=name: run(name) for name in stacks}  # type: ignore[misc]
    for call in runs.values():
        call()
    values = interleave(runs, rounds, progress)
    results: dict[str, Any] = {
        "load": f"{matrices} matrices of {SHAPES[0][0]} x {SHAPES[0][1]}, batch {batch}, int4 in groups of {GROUPS['int4']}",
        "read bytes/s": vars(Spread.of(values["read"])),
    }
    for name, stack in stacks.items():
        size = sum(weight.nbytes for weight in stack)
        rates = [size / seconds for seconds in values[name]]
        results[name] = {
            "seconds": vars(Spread.of(values[name])),
            "bytes": size,
            "faster than torch bf16": vars(ratios(values["torch bf16"], values[name])),
            "share of the read ceiling": vars(ratios(rates, values["read"])),
        }
    return results


def attention(sequences: int, context: int, rounds: int, progress: Report) -> dict[str, Any]:
    """Seconds for one layer's decode attention over FP8 pages, BF16 pages, and by gathering BF16 pages for SDPA."""
    kernels = default_kernels()
    each = context // PAGE
    shape = (sequences * each, 1, 2, KV_HEADS, PAGE, HEAD_DIM)
    draw = torch.Generator().manual_seed(0)
    pages = torch.empty(shape, dtype=torch.bfloat16)
    for page in pages:
        page.copy_(torch.randn(shape[1:], generator=draw))
    codes = QuantizedPages(pages.to(torch.float8_e4m3fn), torch.ones(1, 2, KV_HEADS))
    table = torch.randperm(sequences * each, generator=draw).view(sequences, each).int()
    q = torch.randn(sequences, Q_HEADS, HEAD_DIM, generator=draw).bfloat16()
    starts, lengths = torch.arange(sequences + 1, dtype=torch.int32), torch.full((sequences,), context, dtype=torch.int32)

    def paged(kv: Tensor | QuantizedPages) -> float:
        begun = time.perf_counter()
        kernels.paged_attention(q, kv, 0, table, starts, lengths, HEAD_DIM**-0.5)
        return time.perf_counter() - begun

    def gathered() -> float:
        begun = time.perf_counter()
        held = pages[table.long(), 0].permute(2, 0, 3, 1, 4, 5).reshape(2, sequences, KV_HEADS, context, HEAD_DIM)
        # The queries of a group as rows of one: several times faster than SDPA's own way with fewer KV heads.
        functional.scaled_dot_product_attention(q.view(sequences, KV_HEADS, -1, HEAD_DIM), held[0], held[1])
        return time.perf_counter() - begun

    runs: dict[str, Callable[[], float]] = {
        "fp8 pages": lambda: paged(codes), "bf16 pages": lambda: paged(pages), "gather + SDPA, bf16": gathered
    }
    for call in runs.values():
        call()
    values = interleave(runs, rounds, progress)
    return {
        "load": f"one layer, {sequences} sequences of {context} tokens, {Q_HEADS} query and {KV_HEADS} KV heads of {HEAD_DIM}",
        **{name: {"seconds": vars(Spread.of(found))} for name, found in values.items()},
        "gather + SDPA / fp8 pages": vars(ratios(values["gather + SDPA, bf16"], values["fp8 pages"])),
        "bf16 pages / fp8 pages": vars(ratios(values["bf16 pages"], values["fp8 pages"])),
    }


def _weight(outputs: int, inputs: int, seed: int) -> Tensor:
    return (torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)) * inputs**-0.5).bfloat16()


def _linear(kernels: Kernels, name: str, weight: Tensor) -> Linear:
    """Scales are of 16 bits, as checkpoints store them."""
    if name == "bf16":
        return DenseLinear(kernels, weight)
    if name in GROUPS:
        return QuantizedLinear(kernels, quantize_int4(weight, GROUPS[name], scale_dtype=torch.bfloat16))
    return QuantizedLinear(kernels, (quantize_int8 if name == "int8" else quantize_fp8)(weight, scale_dtype=torch.bfloat16))
