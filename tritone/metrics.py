"""Metrics of a stage: counters, gauges and histograms that the stage sets and an exporter carries away.

A call costs a lock and an addition; the exporter (Triton's metrics API in the server, nothing in tests) runs elsewhere.
Names follow Prometheus: base units, ``_seconds``, ``_total``; every metric carries the label ``stage``.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

SECONDS = (0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0)
SESSIONS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
RATIO = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 5.0)


@dataclass(frozen=True)
class MetricSpec:
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    buckets: tuple[float, ...] = ()


METRICS: dict[str, MetricSpec] = {
    "tritone_requests_total": MetricSpec("counter", "Requests ended, by outcome"),
    "tritone_tokens_total": MetricSpec("counter", "Tokens taken in and made, by kind (prompt, completion)"),
    "tritone_speech_frames_total": MetricSpec("counter", "Frames of speech codes made"),
    "tritone_audio_seconds_total": MetricSpec("counter", "Seconds of audio made"),
    "tritone_cached_tokens_total": MetricSpec("counter", "Prompt tokens whose KV was found in the prefix cache"),
    "tritone_preemptions_total": MetricSpec("counter", "Times a sequence gave its pages back and went on later"),
    "tritone_leases_expired_total": MetricSpec("counter", "Hand-over blocks taken back from readers that never released them"),
    "tritone_audio_lost_total": MetricSpec("counter", "Answers whose speech ended early because a stage died"),
    "tritone_stage_starts_total": MetricSpec("counter", "Times a process of the stage started; more than one is a restart"),
    "tritone_queue_requests": MetricSpec("gauge", "Requests waiting in the stage"),
    "tritone_running_requests": MetricSpec("gauge", "Requests being computed in the stage"),
    "tritone_pages": MetricSpec("gauge", "Pages of the KV pool, by state (free, used, cached, leased)"),
    "tritone_hidden_blocks": MetricSpec("gauge", "Blocks of the hidden-state pool, by state (free, used, leased)"),
    "tritone_sessions": MetricSpec("gauge", "Sessions the stage keeps state of"),
    "tritone_integrity_checks_total": MetricSpec("counter", "Checks of a step's pages against the pool's tags, by pool"),
    "tritone_integrity_pages_checked_total": MetricSpec("counter", "Pages compared by these checks, by pool"),
    "tritone_integrity_mismatches_total": MetricSpec("counter", "What was found wrong, by pool and kind"),
    "tritone_integrity_sweeps_total": MetricSpec("counter", "Sweeps of the audit over all pools"),
    "tritone_integrity_sweep_age_seconds": MetricSpec("gauge", "Since the end of the audit's last sweep"),
    "tritone_integrity_ready": MetricSpec("gauge", "1 while every check that is on has run, else 0"),
    "tritone_integrity_blocks": MetricSpec("gauge", "Blocks as the audit last saw them, by pool and state"),
    "tritone_time_to_first_token_seconds": MetricSpec("histogram", "From a request's arrival to its first token", SECONDS),
    "tritone_inter_token_latency_seconds": MetricSpec("histogram", "Between two tokens of a request", SECONDS),
    "tritone_time_to_first_audio_seconds": MetricSpec("histogram", "From a request's arrival to its first audio", SECONDS),
    "tritone_real_time_factor": MetricSpec("histogram", "Seconds of work for a second of audio", RATIO),
    "tritone_batch_sessions": MetricSpec("histogram", "Sessions of one batch of an omni checkpoint's VoiceBox", SESSIONS),
    "tritone_queue_seconds": MetricSpec("histogram", "Waiting before the stage began", SECONDS),
    "tritone_stage_seconds": MetricSpec("histogram", "Work of the stage for one request, clause or chunk", SECONDS),
    "tritone_handover_seconds": MetricSpec("histogram", "From prefill's hand-over to its KV lying in decode's pages", SECONDS),
    "tritone_request_seconds": MetricSpec("histogram", "From a request's arrival to its end", SECONDS),
}

Key = tuple[str, tuple[tuple[str, str], ...]]


class Metrics:
    """Thread-safe; an unknown name is a ``KeyError`` at the call that made the mistake."""

    def __init__(self, stage: str) -> None:
        self.stage = stage
        self._lock = threading.Lock()
        self._counters: dict[Key, float] = {}
        self._gauges: dict[Key, float] = {}
        self._observed: dict[Key, list[float]] = {}

    def count(self, name: str, value: float = 1, **labels: str) -> None:
        key = self._key(name, "counter", labels)
        with self._lock:
            self._counters[key] = self._counters.get(key, 0) + value

    def gauge(self, name: str, value: float, **labels: str) -> None:
        key = self._key(name, "gauge", labels)
        with self._lock:
            self._gauges[key] = value

    def gauges(self, name: str, values: Mapping[str, float]) -> None:
        """One gauge for each state of ``values``, under the label ``state``."""
        for state, value in values.items():
            self.gauge(name, value, state=state)

    def observe(self, name: str, value: float, **labels: str) -> None:
        key = self._key(name, "histogram", labels)
        with self._lock:
            self._observed.setdefault(key, []).append(value)

    def drain(self) -> tuple[dict[Key, float], dict[Key, float], dict[Key, list[float]]]:
        """Counter increments since the last call, current gauges, and values observed since the last call."""
        with self._lock:
            counters, self._counters = self._counters, {}
            observed, self._observed = self._observed, {}
            return counters, dict(self._gauges), observed

    def _key(self, name: str, kind: str, labels: Mapping[str, str]) -> Key:
        if METRICS[name].kind != kind:
            raise KeyError(f"{name} is a {METRICS[name].kind}, not a {kind}")
        return name, (("stage", self.stage), *sorted(labels.items()))
