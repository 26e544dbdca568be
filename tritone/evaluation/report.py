"""An evaluation as JSON and as Markdown."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any

import torch

from tritone.evaluation.bars import as_json
from tritone.evaluation.bootstrap import Figure
from tritone.evaluation.evaluate import Evaluation, Row

# Of each task: figure, heading, factor, form.
COLUMNS = {
    "text": (
        ("perplexity", "perplexity", 1, "{:.3f}"),
        ("perplexity_increase_percent", "increase, %", 1, "{:+.2f}"),
        ("kl", "KL, nats/token", 1, "{:.5f}"),
        ("top1", "same top-1, %", 100, "{:.1f}"),
        ("top5", "shared top-5, %", 100, "{:.1f}"),
    ),
    "gsm8k": (
        ("log_likelihood", "log-likelihood, nats/token", 1, "{:.4f}"),
        ("perplexity_increase_percent", "perplexity increase, %", 1, "{:+.2f}"),
        ("kl", "KL, nats/token", 1, "{:.5f}"),
        ("top1", "same top-1, %", 100, "{:.1f}"),
    ),
    "choice": (
        ("accuracy", "accuracy, %", 100, "{:.1f}"),
        ("accuracy_change", "change, points", 100, "{:+.1f}"),
        ("same_choice", "same choice, %", 100, "{:.1f}"),
    ),
    "greedy": (
        ("median_tokens_until_different", "tokens until different, median", 1, "{:.1f}"),
        ("mean_tokens_until_different", "mean", 1, "{:.1f}"),
        ("same_answer", "same to the end, %", 100, "{:.1f}"),
    ),
    "tools": (
        ("valid", "valid calls, %", 100, "{:.1f}"),
        ("valid_change", "change, points", 100, "{:+.1f}"),
        ("same_call", "same call, %", 100, "{:.1f}"),
    ),
}
TITLES = {
    "text": "Running text",
    "gsm8k": "GSM8K solutions",
    "choice": "Multiple choice",
    "greedy": "Greedy answers",
    "tools": "Tool calls",
}


def statement(evaluation: Evaluation, reference: str) -> list[str]:
    """What the figures are compared to, and what must be known to read them."""
    said = [
        f"The reference is {reference} with dense weights, activations, and keys and values in float32, computed by the same "
        "engine. Rows compare other numbers to it on the same tokens.",
    ]
    if evaluation.grid:
        said.append(
            f"Its weights already lie on a 4-bit grid of groups of {evaluation.grid}, as those of a dequantised Q4_1 model do. "
            f"INT4 in groups that divide {evaluation.grid} would lose next to nothing on them; it is refused here, because "
            "that would say nothing about other weights."
        )
    said.append(
        "All tokens of a row, the context's too, are computed with the row's numbers and read from paged keys and values, as "
        "decode does. Calibration text (AWQ, GPTQ) shares no document with the text of the evaluation."
    )
    return said


def to_json(evaluation: Evaluation, reference: str, checkpoint: str) -> dict[str, Any]:
    """``reference`` and ``checkpoint`` are their names."""
    return {
        "evaluation": checkpoint,
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine() | {"kernels": evaluation.kernels},
        "reference": {
            "checkpoint": reference,
            "weights": "float32",
            "activations": "float32",
            "kv": "float32",
            "grid_group": evaluation.grid,
            "statement": statement(evaluation, reference),
        },
        "seed": evaluation.settings.seed,
        "intervals": "95 %, percentile bootstrap over documents or items, paired with the reference",
        "tasks": {task.name: {"source": task.source, **_size(evaluation, task.name)} for task in evaluation.tasks},
        "rows": [_row_json(row) for row in evaluation.rows],
        "bars": [as_json(bar) for bar in evaluation.bars],
    }


def to_markdown(content: dict[str, Any]) -> str:
    """Of what :func:`to_json` gives: bars first, then a table for each task."""
    lines = [f"# Precisions of {content['evaluation']}", ""]
    lines += [f"{part}\n" for part in content["reference"]["statement"]]
    machine = content["machine"]
    lines += [f"Intervals: {content['intervals']}. {machine['cpu']}, kernels {machine['kernels']}, {content['date']}.", ""]
    if content["bars"]:
        lines += ["## Bars", "", "| precision | figure | measured | at most | |", "|---|---|---|---|---|"]
        for bar in content["bars"]:
            unit = f" {bar['unit']}" if bar["unit"] else ""
            measured = _with_interval(Figure(bar["value"], bar["low"], bar["high"]), 1, "{:.4g}")
            verdict = "met" if bar["met"] else "**not met**"
            if bar["low"] <= bar["at_most"] <= bar["high"]:
                verdict += ", the bar lies inside the interval"
            lines.append(f"| {bar['precision']} | {bar['name']} | {measured}{unit} | {bar['at_most']:g}{unit} | {verdict} |")
        lines.append("")
    for task, size in content["tasks"].items():
        lines += [f"## {TITLES[task]}", "", f"{_sentence(task, size)}", ""]
        columns = COLUMNS[task]
        lines.append(f"| precision | weights | activations | KV | {' | '.join(heading for _, heading, _, _ in columns)} |")
        lines.append("|---" * (4 + len(columns)) + "|")
        for row in content["rows"]:
            figures = row["figures"][task]
            cells = [_with_interval(Figure(**figures[name]), factor, form) for name, _, factor, form in columns]
            lines.append(f"| {' | '.join([row['precision'], row['weights'], row['activations'], row['kv'], *cells])} |")
        lines.append("")
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """What computed, and with what."""
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), cpu)
    except OSError:
        pass
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _row_json(row: Row) -> dict[str, Any]:
    words = {"weights": "float32", "activations": "float32", "kv": "float32"}
    if row.precision is not None:
        words = row.precision.describe()
    name = "reference" if row.precision is None else row.precision.name
    if row.precision is not None and row.precision.directory is not None:
        name = name.replace(str(row.precision.directory), row.precision.directory.name)
    figures = {task: {key: vars(figure) for key, figure in found.items()} for task, found in row.figures.items()}
    return {"precision": name, **words, "seconds": {k: round(v, 1) for k, v in row.seconds.items()}, "figures": figures}


def _size(evaluation: Evaluation, task: str) -> dict[str, Any]:
    raw = evaluation.rows[0].raw[task]
    size: dict[str, Any] = {"items": len(next(iter(raw.values())))}
    if "tokens" in raw:
        size["scored_tokens"] = sum(raw["tokens"])
    return size


def _sentence(task: str, size: dict[str, Any]) -> str:
    scored = f", {size['scored_tokens']} tokens scored" if "scored_tokens" in size else ""
    more = {
        "tools": " Valid is the form: a known function with its arguments, of their types; whether the call makes sense is not "
        "judged, and a small model's often does not.",
        "greedy": " An answer that is the same to its end counts with the most tokens there can be.",
    }
    return f"Of {size['source']}; {size['items']} items{scored}.{more.get(task, '')}"


def _with_interval(figure: Figure, factor: float, form: str) -> str:
    value, low, high = (form.format(factor * number) for number in (figure.value, figure.low, figure.high))
    return value if low == value == high else f"{value} ({low} … {high})"
