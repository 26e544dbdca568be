"""Clients that do not read: the server keeps their answers, no more than those, and nobody waits for them."""

from __future__ import annotations

from contextlib import ExitStack

from tests.server.helpers import ask, http_post, resident, wait_idle
from tests.server.reference import prose
from tritone.supervisor import Server

TEXT = prose(8, 4)
UNREAD = 4
NOISE = 6 << 20
"""By how much a heap grows and shrinks by itself."""


def test_unread_speech_is_kept_once_and_holds_up_nobody(server: Server, unharmed: None) -> None:
    question = {"content": "What is the capital of France?", "temperature": 0.0, "max_tokens": 20}
    spoken = ask(server, "speech", TEXT, seed=3).audio
    alone = ask(server, "chat", **question)
    kept = UNREAD * len(spoken) * 2 * 4 // 3  # 16-bit samples in base64
    before, rounds = resident(server), []
    for _ in range(2):
        with ExitStack() as clients:
            for _ in range(UNREAD):
                body = {"text": TEXT, "audio_format": "pcm16_base64", "seed": 3}
                clients.enter_context(http_post(server, "/v2/models/speech/generate_stream", body))
            beside = ask(server, "chat", **question)
            # No stage waits for a reader: all is computed, and gone from them.
            wait_idle(server, 60)
            rounds.append({name: size - before[name] for name, size in resident(server).items()})
        wait_idle(server)
        assert beside.text == alone.text
    print(f"{kept >> 10} KiB of speech unread; KiB grown: {[{n: s >> 10 for n, s in grown.items()} for grown in rounds]}")
    first, second = (grown.pop("tritonserver") for grown in rounds)
    assert first < kept + NOISE, "kept once"
    assert second < first + NOISE, "given back when their clients left"
    assert max(max(grown.values()) for grown in rounds) < NOISE, "no stage keeps any of it"


def test_an_unread_http_answer_does_not_hold_up_others(server: Server, unharmed: None) -> None:
    """A client that stops reading, with its connection open."""
    body = {"messages": "Tell me a long story.", "audio_format": "pcm16_base64", "ignore_eos": True, "max_tokens": 200}
    with http_post(server, "/v2/models/omni/generate_stream", body):
        answer = ask(server, "chat", "What is the capital of France?", temperature=0.0, max_tokens=20)
        assert "Paris" in answer.text
