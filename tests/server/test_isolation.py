"""Many requests at once: each gets its own answer, complete and in order."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tests.server.helpers import (
    Request,
    ask,
    ask_together,
    generate,
    generate_stream,
    in_threads,
    wait_idle,
)
from tritone.supervisor import Server

COUNT = 64
NAMES = (
    "amber birch cobalt dahlia ember falcon garnet heron indigo jasper kestrel lilac maple nectar onyx pearl"
).split()
MARKERS = [f"{name}{number}" for number in (17, 29, 43, 58) for name in NAMES]
GREEDY = {"temperature": 0.0, "max_tokens": 8}
SHORT = {"input_format": "token_ids", "temperature": 0.0, "max_tokens": 4}


def marked(marker: str) -> list[dict[str, str]]:
    shown = {"role": "user", "content": "The code word is zebra11. Repeat the code word only."}
    return [
        shown,
        {"role": "assistant", "content": "zebra11"},
        {"role": "user", "content": f"The code word is {marker}. Repeat the code word only."},
    ]


def test_64_at_once_each_says_its_own_marker(server: Server, unharmed: None) -> None:
    alone = [
        generate(server, "chat", {"messages": json.dumps(marked(m)), "stream": False, **GREEDY})[1]["text"]
        for m in MARKERS
    ]
    said = sum(marker in text for marker, text in zip(MARKERS, alone, strict=True))
    assert said >= 0.75 * COUNT, (
        f"the model repeats too few code words for this test to mean something: {said}"
    )
    answers = ask_together(server, "chat", [(marked(marker), GREEDY) for marker in MARKERS])
    for number, (marker, answer) in enumerate(zip(MARKERS, answers, strict=True)):
        answer.check_complete()
        assert answer.text == alone[number], marker
        others = [
            other
            for other in MARKERS
            if other != marker and other in answer.text and other not in alone[number]
        ]
        assert not others, (marker, answer.text)


def test_16_spoken_at_once_each_gets_its_own_audio(server: Server, unharmed: None) -> None:
    texts = [f"{name} and {NAMES[(number * 7 + 3) % 16]}." for number, name in enumerate(NAMES)]
    alone = [ask(server, "speech", text, seed=5).audio for text in texts]
    together = ask_together(server, "speech", [(text, {"seed": 5}) for text in texts])
    for expected, answer in zip(alone, together, strict=True):
        answer.check_complete()
        assert np.array_equal(answer.audio, expected)


def test_omni_streams_keep_their_order_beside_each_other(server: Server, unharmed: None) -> None:
    """Text and audio of one answer share one numbering; text does not wait for all the audio before it."""
    asked = [
        (f"Tell me about {name}.", {"max_tokens": 24, "seed": number})
        for number, name in enumerate(NAMES[:8])
    ]
    for answer in ask_together(server, "omni", asked):
        answer.check_complete()
        assert answer.usage["audio_seconds"] == pytest.approx(len(answer.audio) / 24000)
        assert {"text", "audio", "end"} <= set(answer.kinds)


def test_200_short_streams_are_numbered_in_order(server: Server, unharmed: None) -> None:
    rounds = in_threads(
        4,
        lambda worker: [
            answer
            for group in range(5)
            for answer in ask_together(
                server, "chat", [(json.dumps([worker, group, n]), SHORT) for n in range(10)]
            )
        ],
    )
    for answer in (answer for answers in rounds for answer in answers):
        answer.check_complete()


def test_two_clients_with_the_same_request_id(server: Server) -> None:
    alone = [ask(server, "chat", marked(marker), **GREEDY).text for marker in MARKERS[:2]]
    requests = [
        Request(server, "chat", marked(marker), request_id="same", **GREEDY) for marker in MARKERS[:2]
    ]
    answers = [request.finish() for request in requests]
    assert [answer.text for answer in answers] == alone
    assert [answer.request_ids for answer in answers] == [{"same"}, {"same"}]
    for answer in answers:
        answer.check_complete()


def test_two_http_clients_with_the_same_request_id(server: Server) -> None:
    alone = [ask(server, "chat", marked(marker), **GREEDY).text for marker in MARKERS[:2]]
    bodies = [{"id": "same", "messages": json.dumps(marked(marker)), **GREEDY} for marker in MARKERS[:2]]
    streams: list[Any] = in_threads(2, lambda number: generate_stream(server, "chat", bodies[number]))
    assert ["".join(event.get("text", "") for event in stream) for stream in streams] == alone
    assert {event["id"] for stream in streams for event in stream} == {"same"}


def test_requests_really_run_side_by_side(server: Server) -> None:
    requests = [
        Request(server, "chat", f"Count to {number}.", ignore_eos=True, max_tokens=40) for number in range(6)
    ]
    for request in requests:
        assert request.wait_for("text").kind == "text"
    answers = [request.finish() for request in requests]
    last_start = max(answer.responses[0].received for answer in answers)
    assert last_start < min(answer.responses[-1].received for answer in answers)
    wait_idle(server)
