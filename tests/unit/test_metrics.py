"""Metrics of a stage: what is counted, set and observed comes out once, with the right labels."""

from __future__ import annotations

import re
import threading

import pytest

from tritone.metrics import METRICS, Metrics

STAGE = ("stage", "decode")


def test_counters_add_up_and_leave_once() -> None:
    metrics = Metrics("decode")
    metrics.count("tritone_requests_total", outcome="stop")
    metrics.count("tritone_requests_total", 4, outcome="stop")
    metrics.count("tritone_requests_total", outcome="error")
    counters, gauges, observed = metrics.drain()
    assert counters == {
        ("tritone_requests_total", (STAGE, ("outcome", "stop"))): 5,
        ("tritone_requests_total", (STAGE, ("outcome", "error"))): 1,
    }
    assert (gauges, observed) == ({}, {})
    assert metrics.drain()[0] == {}


def test_gauges_stay_and_the_last_value_counts() -> None:
    metrics = Metrics("decode")
    metrics.gauge("tritone_sessions", 3)
    metrics.gauge("tritone_sessions", 0)
    metrics.gauges("tritone_pages", {"free": 5, "used": 2})
    expected = {
        ("tritone_sessions", (STAGE,)): 0,
        ("tritone_pages", (STAGE, ("state", "free"))): 5,
        ("tritone_pages", (STAGE, ("state", "used"))): 2,
    }
    assert metrics.drain()[1] == expected
    assert metrics.drain()[1] == expected


def test_observations_keep_order_and_leave_once() -> None:
    metrics = Metrics("decode")
    for value in (0.5, 0.1, 0.5):
        metrics.observe("tritone_stage_seconds", value)
    assert metrics.drain()[2] == {("tritone_stage_seconds", (STAGE,)): [0.5, 0.1, 0.5]}
    assert metrics.drain()[2] == {}


def test_what_was_drained_does_not_change_afterwards() -> None:
    metrics = Metrics("decode")
    metrics.gauge("tritone_sessions", 1)
    _, gauges, _ = metrics.drain()
    metrics.gauge("tritone_sessions", 2)
    assert list(gauges.values()) == [1]


@pytest.mark.parametrize("name", ["tritone_nothing", ""])
def test_an_unknown_name_is_an_error_at_the_call(name: str) -> None:
    metrics = Metrics("decode")
    for call in (metrics.count, metrics.gauge, metrics.observe):
        with pytest.raises(KeyError):
            call(name, 1)


def test_a_metric_is_used_as_its_kind() -> None:
    metrics = Metrics("decode")
    with pytest.raises(KeyError, match="is a gauge, not a counter"):
        metrics.count("tritone_sessions")
    with pytest.raises(KeyError, match="is a counter, not a histogram"):
        metrics.observe("tritone_requests_total", 1)
    with pytest.raises(KeyError, match="is a histogram, not a gauge"):
        metrics.gauge("tritone_stage_seconds", 1)


def test_threads_do_not_lose_counts() -> None:
    metrics = Metrics("decode")

    def work() -> None:
        for _ in range(2000):
            metrics.count("tritone_audio_seconds_total", 1)
            metrics.observe("tritone_stage_seconds", 1.0)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    counted = observed = 0.0
    while any(thread.is_alive() for thread in threads):
        counters, _, values = metrics.drain()
        counted += sum(counters.values())
        observed += sum(len(part) for part in values.values())
    for thread in threads:
        thread.join()
    counters, _, values = metrics.drain()
    assert counted + sum(counters.values()) == 8000
    assert observed + sum(len(part) for part in values.values()) == 8000


def test_names_follow_prometheus() -> None:
    for name, spec in METRICS.items():
        assert re.fullmatch(r"tritone_[a-z0-9]+(_[a-z0-9]+)*", name)
        assert (spec.kind == "counter") == name.endswith("_total")
        assert bool(spec.buckets) == (spec.kind == "histogram")
        assert list(spec.buckets) == sorted(set(spec.buckets))
        assert spec.help


def test_what_the_issue_asks_for_is_measured() -> None:
    wanted = {
        "tritone_time_to_first_token_seconds",
        "tritone_inter_token_latency_seconds",
        "tritone_time_to_first_audio_seconds",
        "tritone_real_time_factor",
        "tritone_queue_requests",
        "tritone_running_requests",
        "tritone_pages",
        "tritone_handover_seconds",
    }
    assert wanted <= set(METRICS)
