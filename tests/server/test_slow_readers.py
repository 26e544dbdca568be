"""Clients that do not read: the server keeps their answers, no more than those, and nobody waits for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import tritonclient.grpc as grpc_client

from tests.server.helpers import ask, ask_together, http_post, inputs, resident, wait_idle
from tests.server.reference import prose
from tritone.supervisor import Server

TEXT = prose(8, 5)
UNREAD = 4
QUESTION = "What is the capital of France?"
OPTIONS = {"temperature": 0.0, "max_tokens": 20}
# Each on a connection of its own, on which next to nothing of an answer waits.
OPTIONS_OF_CHANNEL = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1 << 16),
]
NOISE = 4 << 20
"""By how much the floor of a heap moves from one round to the next."""


@contextmanager
def unread_speech(server: Server) -> Iterator[None]:
    """A client that takes the first event of its stream and then reads nothing until it leaves."""
    client = grpc_client.InferenceServerClient(server.grpc_url, channel_args=OPTIONS_OF_CHANNEL)
    begun, leaving = threading.Event(), threading.Event()

    def never_return(_result: object, _error: object) -> None:
        begun.set()
        leaving.wait()

    client.start_stream(never_return)
    try:
        client.async_stream_infer("speech", inputs("speech", TEXT), parameters={"seed": 3})
        assert begun.wait(30)
        yield
    finally:
        leaving.set()
        client.stop_stream(cancel_requests=True)
        client.close()


def test_unread_speech_is_kept_once_and_holds_up_nobody(server: Server, unharmed: None) -> None:
    spoken = ask_together(server, "speech", [(TEXT, {"seed": 3})] * UNREAD)[0].audio
    alone = ask(server, "chat", QUESTION, **OPTIONS)
    kept = UNREAD * spoken.nbytes
    before, rounds = resident(server), []
    for _ in range(2):
        with ExitStack() as clients:
            for _ in range(UNREAD):
                clients.enter_context(unread_speech(server))
            # No stage waits for a reader: all is computed, and gone from them.
            wait_idle(server, 60)
            rounds.append({name: size - before[name] for name, size in resident(server).items()})
            beside = ask(server, "chat", QUESTION, **OPTIONS)
        wait_idle(server)
        assert beside.text == alone.text
        assert beside.end.received - beside.started < 1.5 * (alone.end.received - alone.started) + 0.5
    print(f"{kept >> 10} KiB of speech unread; KiB grown: {[{n: s >> 10 for n, s in grown.items()} for grown in rounds]}")
    first, second = (grown.pop("tritonserver") for grown in rounds)
    assert kept / 2 < first < 1.5 * kept + NOISE, "kept, and once"
    assert second < first + kept / 2, "given back when their clients left"
    assert max(max(grown.values()) for grown in rounds) < NOISE, "no stage keeps any of it"


def test_an_unread_http_answer_does_not_hold_up_others(server: Server, unharmed: None) -> None:
    body = {"messages": "Tell me a long story about a lighthouse.", "audio_format": "pcm16_base64", "ignore_eos": True}
    with http_post(server, "/v2/models/omni/generate_stream", {**body, "max_tokens": 200}):
        begun = time.monotonic()
        assert "Paris" in ask(server, "chat", QUESTION, **OPTIONS).text
        print(f"beside an unread answer: {time.monotonic() - begun:.2f} s")
