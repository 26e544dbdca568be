"""What the engine does for many requests at once.

1. Running streams while a long prompt prefills: time between tokens as a client of `chat` sees it, beside the quiet one.
2. Prefix cache: time to the first token of a prompt seen before, beside that of a new one.
3. Preemption: tokens per second of a load in a pool that holds half of it, beside a pool that holds it all; the answers
   must be the same.
"""

from __future__ import annotations

import json
import random
import tempfile
import threading
import time
import uuid
from itertools import pairwise
from pathlib import Path
from statistics import quantiles
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from perf.common import Bar, Spread, demo_deployment, finish, is_quick, ratios
from tritone.client import Client
from tritone.deployment import Deployment
from tritone.engine.engine import Engine
from tritone.engine.sequence import Sequence
from tritone.options import Sampling
from tritone.sizes import required_shared_memory
from tritone.stages.build import build_engine
from tritone.stages.saved import saver
from tritone.supervisor import Server

STREAMS = 4
LONG_PROMPT = 4096
VOCABULARY = 20000
STORY = "Write a long story about a lighthouse."
console = Console()


def ids(count: int, seed: int) -> str:
    """A prompt of token ids, as JSON."""
    draw = random.Random(seed)
    return json.dumps([draw.randrange(100, VOCABULARY) for _ in range(count)])


class Stream(threading.Thread):
    """A running answer that notes when each of its events came."""

    def __init__(self, url: str, seed: int) -> None:
        super().__init__(daemon=True)
        self.times: list[float] = []
        self.over = threading.Event()
        self._url, self._seed = url, seed

    def run(self) -> None:
        for event in Client(self._url).chat(STORY, model="chat", seed=self._seed, ignore_eos=True):
            self.times.append(event.received)
            if self.over.is_set():
                return

    def gaps(self, begin: float, end: float) -> list[float]:
        """Seconds between events, for those that came in this time."""
        times = list(self.times)
        return [b - a for a, b in pairwise(times) if begin < b <= end]


def first_token(url: str, prompt: str, **options: Any) -> tuple[float, float, int]:
    """When a prompt was sent, when its first token came, and how many of its tokens were cached."""
    client, begun, first, info = Client(url), time.monotonic(), 0.0, {}
    asked = {"input_format": "token_ids", "max_tokens": 2, "temperature": 0.0, "logprobs": 0, "ignore_eos": True}
    for event in client.chat(prompt, model="chat", **(asked | options)):
        first = first or event.received
        info = dict(event.info)
    return begun, first, info["usage"]["cached_tokens"]


def p95(values: list[float]) -> float:
    return quantiles(values, n=20)[-1]


def beside_a_long_prompt(server: Server, rounds: int) -> dict[str, Any]:
    """The 95th percentile of the time between tokens of running streams, quiet and while a prompt prefills, in turn."""
    streams = [Stream(server.grpc_url, seed) for seed in range(STREAMS)]
    for stream in streams:
        stream.start()
    while any(len(stream.times) < 20 for stream in streams):
        time.sleep(0.05)
    quiet, busy, lasted = [], [], []
    for number in track(range(rounds), "long prompt beside streams", console=console, transient=True):
        begin = time.monotonic()
        time.sleep(2)
        quiet.append(p95([gap for stream in streams for gap in stream.gaps(begin, begin + 2)]))
        begin, end, _ = first_token(server.grpc_url, ids(LONG_PROMPT, number), cache_salt=uuid.uuid4().hex)
        busy.append(p95([gap for stream in streams for gap in stream.gaps(begin, end)]))
        lasted.append(end - begin)
    for stream in streams:
        stream.over.set()
        stream.join()
    return {
        "quiet": vars(Spread.of(quiet)),
        f"while {LONG_PROMPT} tokens prefill": vars(Spread.of(busy)),
        "ratio": vars(ratios(busy, quiet)),
        "prefill of it, beside the streams": vars(Spread.of(lasted)),
    }


def cold_and_warm(server: Server, rounds: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for length in (512, LONG_PROMPT):
        cold, warm = [], []
        for number in track(range(rounds), f"prefix cache, {length} tokens", console=console, transient=True):
            prompt = ids(length, 1000 * length + number)
            for times in (cold, warm):
                begun, first, _ = first_token(server.grpc_url, prompt)
                times.append(first - begun)
        results[f"{length} tokens"] = {
            "cold": vars(Spread.of(cold)), "warm": vars(Spread.of(warm)), "ratio": vars(ratios(cold, warm))
        }
    return results


class Load:
    """The same sequences through one engine, again and again."""

    def __init__(self, deployment: Deployment, directory: Path, name: str, pages: int, count: int, tokens: int) -> None:
        part = deployment.decode.model_copy(update={"pool_tokens": pages * deployment.page_size, "max_sequences": count})
        self.engine: Engine
        self.engine, self._pages, _ = build_engine(deployment, part, directory, name)
        self._save = saver(self._pages, deployment.page_size)
        self._count, self._tokens = count, tokens

    def run(self) -> tuple[float, int, dict[int, list[int]]]:
        """Tokens a second, preemptions, and the answers."""
        scheduler, draw = self.engine.scheduler, random.Random(1)
        if scheduler.cache is not None:
            scheduler.cache.clear()
        sequences = []
        for session in range(self._count):
            prompt = [draw.randrange(100, VOCABULARY) for _ in range(64)]
            sequences.append(Sequence(session, prompt, 64, Sampling(temperature=0.0), self._tokens, save_kv=self._save))
            scheduler.add(sequences[-1])
        begun = time.perf_counter()
        while len(scheduler):
            for output in self.engine.step():
                if output.sequence.answer_length >= self._tokens:
                    scheduler.remove(output.sequence)
        seconds = time.perf_counter() - begun
        answers = {sequence.session: sequence.tokens for sequence in sequences}
        return self._count * self._tokens / seconds, sum(s.preemptions for s in sequences), answers


def preemption(deployment: Deployment, rounds: int, quick: bool) -> dict[str, Any]:
    count, tokens = (8, 96) if quick else (16, 256)
    whole = count * -(-(64 + tokens + 1) // deployment.page_size)
    with tempfile.TemporaryDirectory(prefix="bench-engine-", dir="/dev/shm") as name:
        loads = {pages: Load(deployment, Path(name), f"p{pages}", pages, count, tokens) for pages in (whole, whole // 2)}
        rates: dict[int, list[float]] = {pages: [] for pages in loads}
        happened, answers = 0, []
        for _ in track(range(rounds), "preemption", console=console, transient=True):
            for pages, load in loads.items():
                rate, preemptions, made = load.run()
                rates[pages].append(rate)
                happened = max(happened, preemptions)
                answers.append(made)
    assert happened, "nothing was preempted"
    assert all(made == answers[0] for made in answers), "an answer depends on the pool"
    return {
        "load": f"{count} sequences of 64 + {tokens} tokens",
        "whole pool": vars(Spread.of(rates[whole])),
        "half of it": vars(Spread.of(rates[whole // 2])),
        "ratio": vars(ratios(rates[whole // 2], rates[whole])),
        "preemptions": happened,
    }


def show(results: dict[str, Any]) -> None:
    table = Table(title="Engine: median (range), in seconds and tokens/s")
    for column in ("", "", ""):
        table.add_column(column)
    rows = {"time between tokens, p95": results["streams"], "preemption": results["preemption"]}
    rows |= {f"time to first token, {name}": row for name, row in results["prefix cache"].items()}
    for name, row in rows.items():
        for figure, value in row.items():
            table.add_row(name, figure, str(Spread(**value) if isinstance(value, dict) else value))
    console.print(table)


def main() -> None:
    quick = is_quick()
    deployment = demo_deployment(voice=None)
    results: dict[str, Any] = {"checkpoint": deployment.name, "decode": deployment.decode.model_dump(exclude={"checkpoint"})}
    with Server(deployment, shared_memory=required_shared_memory) as server:
        results["streams"] = beside_a_long_prompt(server, 1 if quick else 7)
        results["prefix cache"] = cold_and_warm(server, 1 if quick else 5)
    results["preemption"] = preemption(deployment, 1 if quick else 3, quick)
    show(results)
    warm = results["prefix cache"][f"{LONG_PROMPT} tokens"]["ratio"]["median"]
    finish(
        "engine",
        results,
        [
            Bar("p95 between tokens beside a 4k prompt / quiet", results["streams"]["ratio"]["median"], "at most", 2.0),
            Bar("first token of 4k, cold / warm", warm, "at least", 5.0),
            Bar("tokens/s in half the pool / whole", results["preemption"]["ratio"]["median"], "at least", 0.5),
        ],
    )


if __name__ == "__main__":
    main()
