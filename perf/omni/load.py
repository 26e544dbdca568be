"""Concurrent speech requests, and what their clients saw."""

from __future__ import annotations

import hashlib
import secrets
import threading
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from perf.common import Spread
from tritone.client import Client

PATIENCE = 3600.0
"""Seconds without an event; who waits behind others hears nothing."""


@dataclass(frozen=True)
class Heard:
    """One answer; seconds from its request on."""

    first_text: float
    last_text: float
    first_audio: float
    total: float
    audio_seconds: float
    sound: str
    """Digest of all samples."""

    @property
    def real_time_factor(self) -> float:
        return self.total / self.audio_seconds


@dataclass(frozen=True)
class Burst:
    """Equal requests that began together; ``seconds`` to the end of the last."""

    answers: list[Heard]
    seconds: float

    def middle(self, figure: str) -> float:
        return median(getattr(answer, figure) for answer in self.answers)

    @property
    def audio_rate(self) -> float:
        """Seconds of audio made in a second."""
        return sum(answer.audio_seconds for answer in self.answers) / self.seconds


def ask(client: Client, question: str, tokens: int, **options: Any) -> Heard:
    """One greedy answer of so many tokens. No prompt is known to the prefix cache."""
    stream = client.chat(
        question, model="omni", max_tokens=tokens, temperature=0.0, ignore_eos=True, cache_salt=secrets.token_hex(8), **options
    )
    begun = stream.started
    texts: list[float] = []
    audio: list[float] = []
    digest = hashlib.blake2b()
    for event in stream:
        if event.kind == "text":
            texts.append(event.received - begun)
        elif event.audio is not None:
            audio.append(event.received - begun)
            digest.update(event.audio.tobytes())
    usage = event.info["usage"]
    assert usage["completion_tokens"] == tokens, usage
    total = event.received - begun
    return Heard(texts[0], texts[-1], audio[0], total, usage["audio_seconds"], digest.hexdigest())


def ask_together(url: str, streams: int, question: str, tokens: int) -> Burst:
    """Each request on a connection of its own that is open already."""
    clients = [Client(url, timeout=PATIENCE) for _ in range(streams)]
    answers: list[Heard] = []
    begin = threading.Barrier(streams)

    def one(client: Client) -> None:
        client.is_ready()
        begin.wait()
        answers.append(ask(client, question, tokens))

    threads = [threading.Thread(target=one, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for client in clients:
        client.close()
    if len(answers) != streams:
        raise RuntimeError(f"{streams - len(answers)} of {streams} requests failed")
    return Burst(answers, max(answer.total for answer in answers))


def figures(bursts: list[Burst]) -> dict[str, Any]:
    """Medians of each burst with their spread over the bursts; p95 over the requests of all."""
    answers = [answer for burst in bursts for answer in burst.answers]
    found: dict[str, Any] = {"bursts": len(bursts)}
    for name in ("first_text", "first_audio"):
        values = [getattr(answer, name) for answer in answers]
        p95 = quantiles(values, n=20, method="inclusive")[-1] if len(values) > 1 else values[0]
        found[f"{name.replace('_', ' ')} s"] = {
            "p50": vars(Spread.of([burst.middle(name) for burst in bursts])), "p95": p95
        }
    found["audio seconds / s"] = vars(Spread.of([burst.audio_rate for burst in bursts]))
    found["real-time factor"] = vars(Spread.of([burst.middle("real_time_factor") for burst in bursts]))
    return found
