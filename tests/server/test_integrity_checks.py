"""Integrity through a real server: faults end those who asked for them, and the report and /metrics say so."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_client

from tests.server.helpers import (
    EXPORT_SECONDS,
    Scrape,
    ask,
    ask_together,
    fresh,
    generate,
    integrity_report,
    marked,
    markers,
    wait_idle,
    wait_until,
)
from tests.server.serving import FAULTS
from tritone.supervisor import Server

NEIGHBOURS = 5
GREEDY = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
MARKERS = markers(len(FAULTS) + NEIGHBOURS)


@pytest.mark.parametrize("model", ["chat", "omni"])
def test_faults_end_their_carriers_and_nobody_else(server: Server, unharmed: None, model: str) -> None:
    before = integrity_report(server)["mismatches"]
    clean = [answer.text for answer in ask_together(server, "chat", [(marked(m), GREEDY | fresh()) for m in MARKERS])]
    salts = [{"cache_salt": f"fault:{fault}:{model}"} for fault in FAULTS] + [fresh() for _ in range(NEIGHBOURS)]
    asked = [(marked(marker), GREEDY | salt) for marker, salt in zip(MARKERS, salts, strict=True)]
    answers = ask_together(server, model, asked)
    for number, (answer, kind) in enumerate(zip(answers, FAULTS.values(), strict=False)):
        answer.check_complete()
        assert answer.end.kind == "error"
        assert answer.info["message"].startswith(f"integrity: {kind}: "), answer.info
        assert clean[number].startswith(answer.text) and answer.text != clean[number]
    for number in range(len(FAULTS), len(MARKERS)):
        answers[number].check_complete()
        assert answers[number].end.kind == "end"
        assert answers[number].text == clean[number]
    for number, answer in enumerate(answers):
        assert not any(marker in answer.text for other, marker in enumerate(MARKERS) if other != number)
    wait_idle(server)
    after = integrity_report(server)["mismatches"]
    found = {kind: after[kind] - before[kind] for kind in after}
    # A sweep of the audit may come by while a page is damaged, and see it too.
    assert found.pop("content") >= 1
    assert found.pop("table") <= 1
    assert {kind: count for kind, count in found.items() if count} == {
        "stale_tag": 2, "page_table": 1, "out_of_range": 1, "transfer": 2
    }


def test_the_report_says_what_the_metrics_say(server: Server) -> None:
    ask(server, "chat", "Hello.", **GREEDY)
    wait_idle(server)
    found: dict[str, Any] = {}

    def same() -> bool:
        found["report"], found["page"] = integrity_report(server), Scrape(server)
        pools = found["report"]["pools"]
        return all(
            found["page"].value("tritone_integrity_blocks", pool=name, state=state) == count
            for name in ("prefill_pages", "decode_pages")
            for state, count in pools[name]["blocks"].items()
        )

    wait_until(same, "blocks of the report and of /metrics agree", 4 * EXPORT_SECONDS + 5)
    made, page = found["report"], found["page"]
    assert (made["mode"], made["ready"], made["problem"]) == ("raise", True, None)
    assert made["sweeps"] > 0 and made["last_sweep_seconds_ago"] < 10
    for name in ("prefill_pages", "decode_pages"):
        pool, stage = made["pools"][name], name.removesuffix("_pages")
        for what in ("checks", "pages_checked"):
            total = page.value(f"tritone_integrity_{what}_total", pool=name)
            assert total >= pool[what] > 0
            # The report is of the pool that is there, the metric also of those of a stage that died.
            assert total == pool[what] or page.value("tritone_stage_starts_total", stage=stage) > 1
        assert pool["blocks"]["used"] == page.value("tritone_pages", stage=stage, state="used") == 0
        assert sum(pool["blocks"].values()) == sum(
            page.value("tritone_pages", stage=stage, state=state) for state in pool["blocks"]
        )
    assert {"prefill_hidden", "decode_hidden"} < set(made["pools"])
    for kind, count in made["mismatches"].items():
        assert page.value("tritone_integrity_mismatches_total", kind=kind) == count
    assert page.value("tritone_integrity_ready") == 1
    assert page.value("tritone_integrity_sweep_age_seconds") < 10


def test_the_report_over_grpc(server: Server) -> None:
    client = grpc_client.InferenceServerClient(server.grpc_url)
    tensor = grpc_client.InferInput("report", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([b""], dtype=np.object_))
    answer = client.infer("integrity", [tensor])
    assert json.loads(answer.as_numpy("report")[0])["ready"] is True
    client.close()


def test_neither_report_nor_hand_over_is_refused(server: Server) -> None:
    status, body = generate(server, "integrity", {"ids": [1, 2]})
    assert status != 200
    assert "report alone, or a hand-over, which lacks ['handoff', 'request', 'session']" in body["error"]
