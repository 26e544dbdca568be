"""Requests end to end for every pairing of prefill's weights with decode's weights and keys and values."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from perf.common import Spread, interleave
from perf.precision.kernels import Report
from tritone.deployment import Deployment
from tritone.measure.accuracy import Accuracy, work_directory
from tritone.measure.pairings import Pairing
from tritone.measure.timing import prompt_of, request_time
from tritone.measure.workbench import Workbench
from tritone.models.decoder import load_kv_scales

KV = ("bf16", "fp8")


def requests(bench: Workbench, prompt: int, answer: int, rounds: int, progress: Report) -> dict[str, Any]:
    """Seconds of one request alone: prefill over BF16 pages, the hand-over into decode's pages, decode.

    ``seconds`` are of the pairing's own runs. A phase is the same work in all pairings that share it, so ``by phases``, the
    sum of the phases' medians over all of those, has less noise: it is what pairings are compared by.
    """
    room = prompt + answer + 3 * bench.page_size
    source, targets = bench.pages("bf16", room), {kv: bench.pages(kv, room) for kv in KV}
    ids = prompt_of(prompt, bench.config.vocab_size)
    parts: dict[str, list[Any]] = {}

    def run(name: str, first: str, second: str, kv: str) -> float:
        target = targets[kv]
        prefill, decode = bench.engine(bench.decoders[first], source), bench.engine(bench.decoders[second], target)
        taken = request_time(prefill, source, decode, target, ids, answer)
        parts.setdefault(name, []).append(taken)
        return taken.total

    pairs = {f"{first} > {second} + kv {kv}": (first, second, kv) for first, second, kv in product(*[bench.decoders] * 2, KV)}
    runs = {name: lambda name=name, pair=pair: run(name, *pair) for name, pair in pairs.items()}  # type: ignore[misc]
    values = interleave(runs, rounds, progress)
    rows = {
        name: {
            "prefill weights": first,
            "decode weights": second,
            "decode kv": kv,
            "seconds": vars(Spread.of(values[name])),
            "prefill seconds": vars(Spread.of([part.prefill for part in parts[name]])),
            "hand-over seconds": vars(Spread.of([part.hand_over for part in parts[name]])),
            "decode seconds": vars(Spread.of([part.decode for part in parts[name]])),
        }
        for name, (first, second, kv) in pairs.items()
    }
    for row in rows.values():
        row["by phases"] = (
            _phase(rows, "prefill seconds", row, "prefill weights")
            + _phase(rows, "hand-over seconds", row, "decode kv")
            + _phase(rows, "decode seconds", row, "decode weights", "decode kv")
        )
    return {"load": f"one request of {prompt} + {answer} tokens", "pairings": rows}


def _phase(rows: dict[str, dict[str, Any]], phase: str, of: dict[str, Any], *alike: str) -> float:
    """Median of a phase over the rows that are alike in these columns."""
    return median(row[phase]["median"] for row in rows.values() if all(row[name] == of[name] for name in alike))


def judge(bench: Workbench, results: dict[str, Any], deployment: Deployment, line: Callable[[str], Report]) -> None:
    """Mark the pairing of ``deployment`` and measure what each faster one costs in perplexity, into ``results``.

    ``deployed / fastest`` is its seconds over those of the fastest pairing within the deployment's limit.
    """
    limit = deployment.accuracy.max_perplexity_increase
    asked = (deployment.prefill.weights, deployment.decode.weights, deployment.decode.kv)
    own = Pairing(*("bf16" if name == "auto" else name for name in asked))
    names = ("prefill weights", "decode weights", "decode kv")
    rows = {Pairing(*(row[name] for name in names)): row for row in results["pairings"].values()}
    seconds = {pairing: row["by phases"] for pairing, row in rows.items()}
    rows[own]["deployed"] = True
    fastest = seconds[own]
    scales = dict.fromkeys(bench.decoders, load_kv_scales(bench.checkpoint, bench.config))
    with work_directory() as work:
        accuracy = Accuracy(bench.checkpoint, *[bench.decoders] * 2, scales, limit, Path(work), line("perplexity: reference"))
        for pairing in sorted(rows, key=lambda one: seconds[one]):
            if seconds[pairing] > seconds[own]:
                break
            found = accuracy.increase(pairing, line(f"perplexity: {pairing}"))
            rows[pairing]["perplexity increase %"] = vars(found)
            if found.value <= limit:
                fastest = min(fastest, seconds[pairing])
    results |= {"limit %": limit, "text": accuracy.source, "deployed / fastest": seconds[own] / fastest}
