"""Triton's /metrics: the names are there, by stage, and move by what was really done."""

from __future__ import annotations

import time

import pytest

from tests.server.helpers import EXPORT_SECONDS, Scrape, ask, ask_together, refusal, wait_idle
from tritone.supervisor import Server

HISTOGRAMS = {
    "tritone_time_to_first_token_seconds": ("decode",),
    "tritone_inter_token_latency_seconds": ("decode",),
    "tritone_time_to_first_audio_seconds": ("postprocess",),
    "tritone_real_time_factor": ("voicebox", "postprocess"),
    "tritone_queue_seconds": ("prefill",),
    "tritone_stage_seconds": ("prefill", "decode", "talker"),
    "tritone_handover_seconds": ("decode",),
    "tritone_request_seconds": ("postprocess",),
}
GAUGES = {
    "tritone_queue_requests": ("prefill", "decode", "talker", "voicebox"),
    "tritone_running_requests": ("prefill", "decode"),
    "tritone_pages": ("prefill", "decode"),
    "tritone_hidden_blocks": ("prefill", "decode"),
    "tritone_sessions": ("talker", "voicebox", "postprocess"),
}


def settled(server: Server) -> Scrape:
    """The page once every stage has exported what it counted."""
    wait_idle(server)
    time.sleep(EXPORT_SECONDS)
    return Scrape(server)


@pytest.fixture(scope="module")
def busy(server: Server) -> Scrape:
    ask(server, "omni", "Say hello.", max_tokens=8)
    return settled(server)


@pytest.mark.parametrize("name", HISTOGRAMS)
def test_histograms(busy: Scrape, name: str) -> None:
    assert f"# TYPE {name} histogram" in busy.page
    for stage in HISTOGRAMS[name]:
        count = busy.value(f"{name}_count", stage=stage)
        assert count > 0
        assert busy.value(f"{name}_sum", stage=stage) > 0
        assert busy.value(f"{name}_bucket", stage=stage, le="+Inf") == count
        edges = {
            dict(labels)["le"]
            for (found, labels) in busy.samples
            if found == f"{name}_bucket" and ("stage", stage) in labels
        }
        assert len(edges) >= 12


@pytest.mark.parametrize("name", GAUGES)
def test_gauges(busy: Scrape, name: str) -> None:
    assert f"# TYPE {name} gauge" in busy.page
    for stage in GAUGES[name]:
        assert name in busy.names(stage)


def test_an_idle_server_holds_nothing(busy: Scrape, server: Server) -> None:
    assert busy.held() == {}
    for stage, part in (("prefill", server.deployment.prefill), ("decode", server.deployment.decode)):
        pages = {state: busy.value("tritone_pages", stage=stage, state=state) for state in ("free", "cached", "used", "leased")}
        assert pages["free"] + pages["cached"] == part.pool_tokens // server.deployment.page_size
        assert pages["used"] == pages["leased"] == 0


def test_counts_move_by_what_was_done(server: Server) -> None:
    before = settled(server)
    asked = [(f"Name {count} animals.", {"max_tokens": 6 + count, "temperature": 0.0}) for count in range(5)]
    answers = [*ask_together(server, "chat", asked), ask(server, "omni", "Say hello.", max_tokens=9, seed=1)]
    spoken = ask(server, "speech", "Hello there.")
    refusal(server, "chat", "")
    after = settled(server)

    def moved(name: str, **labels: str) -> float:
        return after.value(name, **labels) - before.value(name, **labels)

    completion = sum(answer.usage["completion_tokens"] for answer in answers)
    prompt = sum(answer.usage["prompt_tokens"] for answer in answers)
    audio = answers[-1].usage["audio_seconds"] + spoken.usage["audio_seconds"]
    assert moved("tritone_tokens_total", stage="decode", kind="completion") == completion
    assert moved("tritone_tokens_total", stage="prefill", kind="prompt") == prompt
    assert moved("tritone_audio_seconds_total", stage="voicebox") == pytest.approx(audio)
    assert moved("tritone_requests_total", stage="postprocess") == len(answers) + 1
    assert moved("tritone_time_to_first_token_seconds_count", stage="decode") == len(answers)
    # Each answer's first token has a time of its own; the others have a time since the one before.
    assert moved("tritone_inter_token_latency_seconds_count", stage="decode") == completion - len(answers)
    assert moved("tritone_time_to_first_audio_seconds_count", stage="postprocess") == 2
    assert moved("tritone_handover_seconds_count", stage="decode") == len(answers)
    assert moved("tritone_request_seconds_count", stage="postprocess") == len(answers) + 1
    for outcome in ("stop", "length"):
        ended = sum(answer.info["finish_reason"] == outcome for answer in [*answers, spoken])
        assert moved("tritone_requests_total", stage="postprocess", outcome=outcome) == ended
    for name in ("tritone_preemptions_total", "tritone_leases_expired_total"):
        assert moved(name) == 0


def test_times_are_those_a_client_sees(server: Server) -> None:
    before = settled(server)
    answer = ask(server, "omni", "Say hello.", max_tokens=12, seed=1)
    after = settled(server)

    def moved(name: str, stage: str) -> float:
        return after.value(name, stage=stage) - before.value(name, stage=stage)

    seen = {"text": answer.first("text"), "audio": answer.first("audio"), "end": answer.first("end")}
    for name, stage, kind in (
        ("tritone_time_to_first_token_seconds_sum", "decode", "text"),
        ("tritone_time_to_first_audio_seconds_sum", "postprocess", "audio"),
        ("tritone_request_seconds_sum", "postprocess", "end"),
    ):
        assert 0 < moved(name, stage) <= seen[kind] < moved(name, stage) + 0.5
    timings = answer.info["timings"]
    assert timings["first_text"] <= timings["first_audio"] <= timings["total"] <= seen["end"]
