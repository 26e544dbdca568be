"""The figures that must reach something."""

from __future__ import annotations

from typing import Any

from perf.common import Bar


def bars(results: dict[str, Any]) -> list[Bar]:
    """Of the parts that were measured."""
    found: list[Bar] = []
    if "kernels" in results:
        found += _kernels(results["kernels"])
    if "deployed / fastest" in results.get("demo", {}).get("pairs", {}):
        slower = results["demo"]["pairs"]["deployed / fastest"]
        found.append(Bar("seconds of the deployed pairing / the fastest within its limit", slower, "at most", 1.03))
    if "large" in results:
        found += _large(results["large"])
    for name, row in results.get("peers", {}).get("comparisons", {}).items():
        found.append(Bar(f"tokens/s / {name}", row["ratio"]["median"], "at least", row["bar"]))
    return found


def _kernels(kernels: dict[str, Any]) -> list[Bar]:
    int4 = kernels["linear layers"]["1"]["int4"]
    attention = kernels["attention"]
    figures = (
        ("INT4 linear layers, batch 1 / torch bf16", int4["faster than torch bf16"], 3.5),
        ("INT4 linear layers, batch 1, share of the read ceiling", int4["share of the read ceiling"], 0.8),
        ("attention, FP8 pages / gather + SDPA", attention["gather + SDPA / fp8 pages"], 10.0),
        ("attention, FP8 pages / BF16 pages", attention["bf16 pages / fp8 pages"], 1.0),
    )
    return [Bar(name, spread["median"], "at least", limit) for name, spread, limit in figures]


def _large(model: dict[str, Any]) -> list[Bar]:
    found = []
    if "decode" in model:
        # The bars of decode are for 1 B parameters: a short model's embedding, which stays dense, is a larger part of it.
        for batch, limit in (("1", 2.5), ("32", 1.5)) if model["parameters"] > 9e8 else ():
            ratio = model["decode"][batch]["int4"]["/ bf16"]["median"]
            found.append(Bar(f"decode, INT4 / BF16 weights, batch {batch}", ratio, "at least", limit))
        found.append(Bar("prefill, FP8 / BF16 weights", model["prefill"]["fp8"]["/ bf16"]["median"], "at least", 0.9))
    if "kv" in model:
        found.append(Bar("tokens that fit, FP8 / BF16 KV", model["kv"]["tokens, fp8 / bf16"], "at least", 2.0))
        best = peak(model["kv"], "fp8") / peak(model["kv"], "bf16")
        found.append(Bar("peak tokens/s of the limited load, FP8 / BF16 KV", best, "at least", 1.41))
    return found


def peak(kv: dict[str, Any], which: str) -> float:
    """The highest median of all limited loads."""
    return max(row[which]["tokens/s"]["median"] for rows in kv["limited load"].values() for row in rows.values())
