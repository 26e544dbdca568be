"""What all benchmarks share: one convention for running, measuring, printing and judging.

``make bench-X`` measures fully; ``QUICK=1`` ends within 50 seconds. A benchmark writes ``perf/results/X.json``, prints a
table, and ends with one line that gives figures, bars and ``ok`` or ``short``; the exit status is 1 when short.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from tritone.cache import default_cache
from tritone.deployment import Deployment
from tritone.supervisor import resolve_deployment
from tritone.supervisor.installation import PROJECT

RESULTS = Path(__file__).parent / "results"


def is_quick() -> bool:
    """Whether the benchmark was started with ``--quick``."""
    return "--quick" in sys.argv


def demo_deployment(**changes: Any) -> Deployment:
    """The demo's deployment, resolved, with free ports and these fields changed."""
    written = Deployment.load(PROJECT / "deployments" / "demo-cpu.yaml").model_dump()
    server = written["server"] | {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
    return resolve_deployment(Deployment.parse(written | {"server": server} | changes, "benchmark"), default_cache())


@dataclass(frozen=True)
class Spread:
    """Median, lowest and highest of several measurements."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        return cls(median(values), min(values), max(values), len(values))

    def __str__(self) -> str:
        return f"{self.median:.4g} ({self.low:.4g} … {self.high:.4g})"


def interleave(
    runs: Mapping[str, Callable[[], float]], rounds: int, progress: Callable[[int, int], None] | None = None
) -> dict[str, list[float]]:
    """Each run once a round, in turn, so that a drifting machine moves all alike; values in order of rounds."""
    values: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds):
        for name, run in runs.items():
            values[name].append(run())
        if progress is not None:
            progress(number + 1, rounds)
    return values


def ratios(above: list[float], below: list[float]) -> Spread:
    """Spread of the ratio pair by pair."""
    return Spread.of([a / b for a, b in zip(above, below, strict=True)])


@dataclass(frozen=True)
class Bar:
    """One figure beside what it must reach."""

    name: str
    value: float
    sense: Literal["at least", "at most"]
    limit: float

    @property
    def met(self) -> bool:
        return self.value >= self.limit if self.sense == "at least" else self.value <= self.limit

    def __str__(self) -> str:
        sign = "≥" if self.sense == "at least" else "≤"
        return f"{self.name} {self.value:.3g} ({sign} {self.limit:g}{'' if self.met else ', short'})"


def machine() -> dict[str, Any]:
    model = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
    }


def save(name: str, results: dict[str, Any], bars: list[Bar]) -> None:
    """Write the results. A long benchmark does it after each of its parts too."""
    quick = is_quick()
    RESULTS.mkdir(exist_ok=True)
    body = {
        "benchmark": name,
        "quick": quick,
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        **results,
        "bars": [{"name": b.name, "value": b.value, "sense": b.sense, "limit": b.limit, "met": b.met} for b in bars],
    }
    path = RESULTS / f"{name}{'.quick' if quick else ''}.json"
    path.write_text(json.dumps(body, indent=2) + "\n")


def finish(name: str, results: dict[str, Any], bars: list[Bar]) -> None:
    """Write the results, print the closing line, exit 1 when a bar is not met."""
    save(name, results, bars)
    verdict = "ok" if all(bar.met for bar in bars) else "short"
    print(f"{name}: " + "; ".join(str(bar) for bar in bars) + f" -> {verdict}")
    sys.exit(0 if verdict == "ok" else 1)
