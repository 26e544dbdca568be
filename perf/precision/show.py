"""The results as tables."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

SHOWN_PAIRINGS = 12


def show(results: dict[str, Any], console: Console) -> None:
    """Of the parts that were measured; medians, with the range."""
    if "kernels" in results:
        _kernels(results["kernels"], console)
    for part in ("demo", "large"):
        if part in results:
            _model(results[part], console)
    if "peers" in results:
        _peers(results["peers"], console)


def _kernels(kernels: dict[str, Any], console: Console) -> None:
    for layers in kernels["linear layers"].values():
        table = _table(layers["load"], "", "ms", "faster than torch bf16", "share of the read ceiling")
        for name, row in layers.items():
            if isinstance(row, dict) and "bytes" in row:
                seconds = _scaled(row["seconds"], 1000)
                table.add_row(name, seconds, _spread(row["faster than torch bf16"]), _spread(row["share of the read ceiling"]))
        console.print(table)
        console.print(f"read ceiling: {_scaled(layers['read bytes/s'], 1e-9)} GB/s")
    attention = kernels["attention"]
    table = _table(attention["load"], "", "ms")
    for name, row in attention.items():
        if isinstance(row, dict):
            table.add_row(name, _scaled(row["seconds"], 1000) if "seconds" in row else f"{_spread(row)} x")
    console.print(table)


def _model(model: dict[str, Any], console: Console) -> None:
    name = model["checkpoint"]
    if "decode" in model:
        table = _table(f"{name}: tokens/s by weights", "", *model["weight bytes"])
        table.add_row("bytes, MB", *(f"{size / 1e6:.0f}" for size in model["weight bytes"].values()))
        rows = {f"decode, batch {batch}": row for batch, row in model["decode"].items()} | {"prefill": model["prefill"]}
        for title, row in rows.items():
            table.add_row(title, *(f"{_spread(cell['tokens/s'])}  x{cell['/ bf16']['median']:.2f}" for cell in row.values()))
        console.print(table)
    if "kv" in model:
        _kv(name, model["kv"], console)
    if "pairs" in model:
        _pairs(name, model["pairs"], console)


def _kv(name: str, kv: dict[str, Any], console: Console) -> None:
    table = _table(f"{name}: keys and values, a pool of {kv['pool bytes'] / 1e6:.0f} MB", "", "bf16", "fp8", "fp8 / bf16")
    for figure in ("bytes per token", "tokens that fit"):
        values = [kv[which][figure] for which in ("bf16", "fp8")]
        table.add_row(figure, *map(str, values), f"{values[1] / values[0]:.2f}")
    loads = [row for rows in kv["limited load"].values() for row in rows.values()]
    for row in [*loads, kv["growing load"], *([kv["larger pool"]] if "larger pool" in kv else [])]:
        cells = []
        for which in ("bf16", "fp8"):
            cell = row[which]
            cells.append(f"{_spread(cell['tokens/s'])} tok/s, {cell['at once']} at once, {cell['preemptions']} preempted")
        table.add_row(row["load"], *cells, _spread(row["tokens/s, fp8 / bf16"]))
    for row in kv["time per token"].values():
        cells = [_scaled(row[which], 1000) for which in ("bf16", "fp8")]
        table.add_row(f"ms per token, {row['load']}", *cells, _spread(row["fp8 / bf16"]))
    console.print(table)


def _pairs(name: str, pairs: dict[str, Any], console: Console) -> None:
    rows = sorted(pairs["pairings"].values(), key=lambda row: row["by phases"])
    last = next((place for place, row in enumerate(rows) if row.get("deployed")), 0)
    shown = max(SHOWN_PAIRINGS, last + 1)
    title = f"{name}: {pairs['load']}, the fastest {shown} of {len(rows)} pairings; *: deployed"
    table = _table(title, "prefill", "decode", "kv", "s, by phases", "s, its own runs", "perplexity +%")
    for row in rows[:shown]:
        more = row.get("perplexity increase %")
        found = "" if more is None else f"{more['value']:.2f} ({more['low']:.2f} … {more['high']:.2f})"
        mark = " *" if row.get("deployed") else ""
        numbers = (f"{row['by phases']:.3g}", _spread(row["seconds"]))
        table.add_row(row["prefill weights"], row["decode weights"], row["decode kv"] + mark, *numbers, found)
    console.print(table)


def _peers(peers: dict[str, Any], console: Console) -> None:
    for reason in peers["skipped"]:
        console.print(reason, style="yellow")
    if peers["comparisons"]:
        table = _table(f"peers: {peers['checkpoint']}, {peers['date']}, tokens/s", "", "tritone", "peer", "ratio")
        for name, row in peers["comparisons"].items():
            table.add_row(name, *(_spread(row[key]) for key in ("tritone", "peer", "ratio")))
        console.print(table)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="right" if column else "left")
    return table


def _spread(value: dict[str, float]) -> str:
    return f"{value['median']:.3g} ({value['low']:.3g}–{value['high']:.3g})"


def _scaled(value: dict[str, float], factor: float) -> str:
    return _spread({key: value[key] * factor for key in ("median", "low", "high")})
