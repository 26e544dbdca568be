"""The results as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_COLORS = {"bf16": "#8d99ae", "fp8": "#1f6f8b", "int8": "#e09f3e", "int4": "#c8553d"}


def plot(results: dict[str, Any], path: Path) -> None:
    """For each model: tokens/s by weights and batch, and of the memory-limited loads. Nothing without matplotlib or models."""
    models = [results[part] for part in ("demo", "large") if {"decode", "kv"} <= results.get(part, {}).keys()]
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed (pip install -r requirements/evaluate.txt)")
        return
    if not models:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(len(models), 3, figsize=(14, 4.2 * len(models)), squeeze=False)
    for row, model in zip(grid, models, strict=True):
        decode = {f"batch {batch}": rows for batch, rows in model["decode"].items()}
        _bars(row[0], f"{model['checkpoint']}: decode", decode, "tokens/s")
        _bars(row[1], "prefill", {"": model["prefill"]}, "tokens/s")
        loads = {
            f"{context}\n{weights}": {kv: load[kv] for kv in ("bf16", "fp8")}
            for context, by_weights in model["kv"]["limited load"].items()
            for weights, load in by_weights.items()
        }
        _bars(row[2], f"KV in {model['kv']['pool bytes'] / 1e6:.0f} MB, by context and weights", loads, "tokens/s")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _bars(axes: Any, title: str, groups: dict[str, dict[str, Any]], key: str) -> None:
    """A group of bars for each of ``groups``, one bar for each precision; lines from lowest to highest."""
    names = list(next(iter(groups.values())))
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        found = [group[name][key] for group in groups.values()]
        places = [place + (number - (len(names) - 1) / 2) * width for place in range(len(groups))]
        middle = [value["median"] for value in found]
        ends = [[value["median"] - value["low"] for value in found], [value["high"] - value["median"] for value in found]]
        axes.bar(places, middle, width * 0.95, color=_COLORS[name], label=name)
        axes.errorbar(places, middle, ends, fmt="none", ecolor="black", capsize=2, linewidth=0.8)
    axes.set_xticks(range(len(groups)), list(groups))
    axes.set_title(title, fontsize=10)
    axes.set_ylabel(key)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
