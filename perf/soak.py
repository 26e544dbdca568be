"""Many clients for a long time: they ask, leave, and send what is refused, while stages are killed.

Afterwards everything must be back: no request without an end, no page, lease, session or shared file left.
``make soak`` runs ten minutes, ``QUICK=1`` half a minute.
"""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from collections import Counter
from pathlib import Path

from perf.common import Bar, Spread, demo_deployment, finish, is_quick
from tritone.client import Client, RequestError
from tritone.processes import SHARED_MEMORY, read_records
from tritone.sizes import required_shared_memory
from tritone.supervisor import Server
from tritone.supervisor.control import ask

CLIENTS = 12
SECONDS, KILL_SECONDS = (30.0, 7.0) if is_quick() else (600.0, 20.0)
SILENCE_SECONDS = 20.0
"""A stream that says nothing for so long hangs."""
STORY = "Tell me a story about a lighthouse and the people who live in it."
SPEECH = "The library closes at nine in the evening, and it opens again at eight in the morning."
_HELD = re.compile(r'^(tritone_(?:sessions|queue_requests|running_requests|pages|hidden_blocks))\{(.*)\} (\S+)$', re.MULTILINE)


class Soak:
    def __init__(self, server: Server) -> None:
        self.server = server
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.back: list[float] = []
        self._lock = threading.Lock()
        self._over = threading.Event()

    def run(self) -> None:
        begun = time.monotonic()
        clients = [threading.Thread(target=self._client, args=(number,)) for number in range(CLIENTS)]
        for client in clients:
            client.start()
        draw = random.Random(1)
        while (passed := time.monotonic() - begun) < SECONDS:
            time.sleep(KILL_SECONDS / 2)
            self._kill(draw)
            print(f"{passed:5.0f} s  {dict(sorted(self.outcomes.items()))}  wrong {len(self.wrong)}", flush=True)
        self._over.set()
        for client in clients:
            client.join()

    def _kill(self, draw: random.Random) -> None:
        record = draw.choice(sorted(read_records(self.server.run_directory), key=lambda record: record.stage))
        died = time.monotonic()
        os.kill(record.pid, signal.SIGKILL)
        time.sleep(0.5)
        while not self.server.is_ready():
            if time.monotonic() - died > 60:
                self.wrong.append(f"{record.stage} did not come back")
                return
            time.sleep(0.1)
        self.back.append(time.monotonic() - died)
        print(f"         {record.stage} killed, ready after {self.back[-1]:.1f} s", flush=True)

    def _client(self, number: int) -> None:
        draw = random.Random(100 + number)
        with Client(self.server.grpc_url, timeout=SILENCE_SECONDS) as client:
            while not self._over.is_set():
                outcome = self._request(client, draw)
                with self._lock:
                    self.outcomes[outcome] += 1
                if outcome == "unavailable":
                    time.sleep(0.5)

    def _request(self, client: Client, draw: random.Random) -> str:
        kind = draw.choice(("chat", "omni", "speech", "refused"))
        leave = draw.uniform(0, 3) if draw.random() < 0.4 else None
        try:
            if kind == "refused":
                list(client.chat(STORY, max_tokens=-1))
                self.wrong.append("max_tokens -1 was not refused")
                return "not refused"
            if kind == "speech":
                stream = client.speak(SPEECH)
            else:
                stream = client.chat(STORY, model=kind, max_tokens=draw.randint(1, 60), ignore_eos=True)
            with stream:
                for _ in stream:
                    if leave is not None and time.monotonic() - stream.started > leave:
                        return "left"
            return "answered"
        except RequestError as error:
            if kind == "refused" and error.code == "INVALID_ARGUMENT":
                return "refused"
            if error.code != "UNAVAILABLE":
                self.wrong.append(f"{kind}: {error}")
                return "wrong"
            return "unavailable"


def held(server: Server) -> dict[str, float]:
    """Gauges that show something held; empty on an idle server."""
    _, page = ask(server.metrics_url.removeprefix("http://").removesuffix("/metrics"), "GET", "/metrics", 10)
    found = {f"{name} {labels}": float(value) for name, labels, value in _HELD.findall(page)}
    return {key: value for key, value in found.items() if value and 'state="free"' not in key and 'state="cached"' not in key}


def wait_idle(server: Server) -> dict[str, float]:
    """What is still held after a while."""
    deadline = time.monotonic() + 15
    while (left := held(server)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def shared_files(server: Server) -> int:
    """Files of this server in shared memory: those of its run directory, and the regions of its stages' processes."""
    regions = [region for record in read_records(server.run_directory) for region in record.regions]
    return sum((SHARED_MEMORY / region).exists() for region in regions) + sum(1 for _ in server.run_directory.rglob("*"))


def resident(server: Server) -> int:
    """MiB of the tritonserver process that are its own."""
    pages = Path(f"/proc/{server.pid}/statm").read_text().split()
    return (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGESIZE") >> 20


def main() -> None:
    deployment = demo_deployment(max_context=2048, prefill={"pool_tokens": 16384}, decode={"pool_tokens": 16384})
    print(f"{CLIENTS} clients for {SECONDS:.0f} s, a stage killed every few seconds", flush=True)
    with Server(deployment, shared_memory=required_shared_memory) as server:
        with Client(server.grpc_url) as client:
            for _ in range(3):
                list(client.chat(STORY, max_tokens=10))
        wait_idle(server)
        files, memory = shared_files(server), resident(server)
        soak = Soak(server)
        soak.run()
        left = wait_idle(server)
        grown = shared_files(server) - files
        memory = resident(server) - memory
    for fault in soak.wrong[:20]:
        print(f"wrong: {fault}")
    if left:
        print(f"still held: {left}")
    back = Spread.of(soak.back)
    print(f"ready again after {back} s; tritonserver grew by {memory} MiB")
    finish(
        "soak",
        {"outcomes": dict(soak.outcomes), "ready_seconds": soak.back, "grown_mib": memory, "wrong": soak.wrong},
        [
            Bar("wrong ends", len(soak.wrong), "at most", 0),
            Bar("gauges still held", len(left), "at most", 0),
            Bar("shared files left", grown, "at most", 0),
            Bar("seconds until ready again, longest", back.high, "at most", 20),
        ],
    )


if __name__ == "__main__":
    main()
