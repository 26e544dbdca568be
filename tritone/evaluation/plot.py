"""An evaluation as a picture: perplexity increase and KL divergence of each precision, with intervals and bars."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tritone.errors import TritoneError

PANELS = (("perplexity_increase_percent", "perplexity increase, %"), ("kl", "KL divergence to the reference, nats/token"))
# Task, legend, colour, shift from the middle of the row.
SERIES = (("text", "running text", "#1f6f8b", -0.13), ("gsm8k", "GSM8K solutions", "#c8803d", 0.13))
BAR = "#a02c2c"
# The axis of increases is linear up to here, since some are zero or below, and logarithmic from there.
_LINEAR_TO = 0.1


def check_matplotlib() -> None:
    """Raises ``TritoneError`` where matplotlib is not installed, so that this is known before anything is measured."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise TritoneError(
            "matplotlib is missing, which draws evaluation.png: `pip install -r requirements/evaluate.txt`", "NOT_FOUND"
        ) from None


def draw(content: dict[str, Any], path: Path) -> bool:
    """Writes a PNG of what ``to_json`` gave; False, and no file, where no task compares token by token."""
    series = [one for one in SERIES if one[0] in content["tasks"]]
    rows = content["rows"][1:]
    if not series or not rows:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 1.9 + 0.42 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(PANELS), sharey=True)
    for axis, (name, label) in zip(axes, PANELS, strict=True):
        for task, legend, colour, shift in series:
            _points(axis, [row["figures"][task][name] for row in rows], legend, colour, shift)
        _limits(axis, content["bars"], rows, name)
        if name == "kl":
            axis.set_xscale("log")
        else:
            axis.set_xscale("symlog", linthresh=_LINEAR_TO, linscale=0.6)
            axis.axvline(0, color="0.4", linewidth=0.8)
            axis.xaxis.set_major_formatter(lambda value, _: f"{value:+g}" if value else "0")
        axis.set_xlabel(label)
        axis.grid(axis="x", color="0.88")
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(range(len(rows)), [row["precision"] for row in rows])
    axes[0].invert_yaxis()
    axes[-1].legend(loc="lower left", frameon=False, bbox_to_anchor=(0, 1), ncols=len(series) + 1, borderaxespad=0.2)
    figure.suptitle(f"Precisions of {content['evaluation']}: what they cost, with 95 % intervals", x=0.01, ha="left")
    name = content["reference"]["checkpoint"]
    figure.supxlabel(f"reference: {name} in float32", fontsize="small", color="0.35", x=0.01, ha="left")
    figure.savefig(path, dpi=130)
    return True


def _points(axis: Any, figures: list[dict[str, float]], legend: str, colour: str, shift: float) -> None:
    values = [figure["value"] for figure in figures]
    ends = [
        [max(0.0, figure["value"] - figure["low"]) for figure in figures],
        [max(0.0, figure["high"] - figure["value"]) for figure in figures],
    ]
    heights = [index + shift for index in range(len(figures))]
    axis.errorbar(values, heights, xerr=ends, fmt="o", color=colour, markersize=5, capsize=3, linewidth=1.4, label=legend)


def _limits(axis: Any, bars: list[dict[str, Any]], rows: list[dict[str, Any]], name: str) -> None:
    """A mark where the row's figure may be at most; a share of another row's figure becomes a figure again."""
    label = "at most (bar)"
    for height, row in enumerate(rows):
        for bar in bars:
            if bar["precision"] != row["precision"]:
                continue
            limit = bar["at_most"]
            if bar["unit"] == "":
                text = row["figures"]["text"]["perplexity_increase_percent"]["value"]
                limit *= text / bar["value"]
            if (bar["unit"] == "nats") == (name == "kl"):
                axis.plot([limit, limit], [height - 0.36, height + 0.36], color=BAR, linewidth=2, label=label)
                label = "_"
