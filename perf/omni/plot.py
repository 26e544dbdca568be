"""The results as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from perf.omni.serving import SYSTEMS

_COLORS = dict(zip(SYSTEMS, ("#1f6f8b", "#e09f3e", "#8d99ae"), strict=True))


def plot(results: dict[str, Any], path: Path) -> None:
    """First audio, audio made in a second, and the real-time factor, by streams. Nothing without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed (pip install -r requirements/evaluate.txt)")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (first, rate, factor) = pyplot.subplots(1, 3, figsize=(14, 4.2))
    rows = results["streams"]
    streams = [int(name) for name in rows]
    for system in SYSTEMS:
        heard = [row[system]["first audio s"] for row in rows.values()]
        _line(first, streams, [one["p50"] for one in heard], system)
        first.plot(streams, [one["p95"] for one in heard], ":", color=_COLORS[system], linewidth=1)
        _line(rate, streams, [row[system]["audio seconds / s"] for row in rows.values()], system)
        _line(factor, streams, [row[system]["real-time factor"] for row in rows.values()], system)
    factor.axhline(1, color="black", linewidth=0.8)
    first.set_yscale("log")
    factor.set_yscale("log")
    rate.set_ylim(bottom=0)
    _label(first, streams, "first audio, seconds (dotted: p95)")
    _label(rate, streams, "seconds of audio made in a second")
    _label(factor, streams, "seconds of an answer / seconds of its audio")
    figure.suptitle(f"{results['tokens']} tokens, {results['seconds of speech']:.1f} s of speech each", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _line(axes: Any, streams: list[int], spreads: list[dict[str, float]], system: str) -> None:
    middle = [one["median"] for one in spreads]
    ends = [[one["median"] - one["low"] for one in spreads], [one["high"] - one["median"] for one in spreads]]
    axes.errorbar(streams, middle, ends, marker="o", capsize=2, color=_COLORS[system], label=system)


def _label(axes: Any, streams: list[int], title: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(streams, [str(number) for number in streams])
    axes.set_xlabel("requests at once")
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8)
