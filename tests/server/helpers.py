"""A black-box client for the tests: every response as it came, final flags and times included."""

from __future__ import annotations

import http.client
import json
import os
import queue
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import tritonclient.grpc as grpc_client
from tritonclient.utils import InferenceServerException

from tritone.supervisor import Server
from tritone.supervisor.status import read_statuses

TIMEOUT = 240.0
SHM = Path("/dev/shm")
TERMINAL = ("end", "error", "cancelled")


@dataclass
class Response:
    """One response that held data."""

    received: float
    index: int
    kind: str
    text: str | None
    audio: np.ndarray | None
    audio_base64: str | None
    info: dict[str, Any]


@dataclass
class Answer:
    """All responses of one request; ``finals`` counts final flags, ``after_final`` what came after one."""

    started: float
    responses: list[Response] = field(default_factory=list)
    finals: int = 0
    after_final: int = 0
    error: InferenceServerException | None = None
    request_ids: set[str] = field(default_factory=set)

    @property
    def text(self) -> str:
        assert self.error is None, self.error
        return "".join(r.text or "" for r in self.responses)

    @property
    def audio(self) -> np.ndarray:
        return np.concatenate(
            [r.audio for r in self.responses if r.audio is not None] or [np.zeros(0, np.float32)]
        )

    @property
    def kinds(self) -> list[str]:
        """What the responses were; a slow machine puts ``waiting`` anywhere between them."""
        return [r.kind for r in self.responses if r.kind != "waiting"]

    @property
    def end(self) -> Response:
        assert self.error is None, self.error
        assert self.responses, "no response"
        return self.responses[-1]

    @property
    def info(self) -> dict[str, Any]:
        return self.end.info

    @property
    def usage(self) -> dict[str, Any]:
        return self.info["usage"]

    @property
    def counted(self) -> dict[str, Any]:
        """``usage`` without what depends on earlier requests."""
        return {name: value for name, value in self.usage.items() if name != "cached_tokens"}

    @property
    def logprobs(self) -> list[dict[str, Any]]:
        return [entry for r in self.responses for entry in r.info.get("logprobs", ())]

    @property
    def tokens(self) -> list[int]:
        return [entry["token_id"] for entry in self.logprobs]

    def first(self, kind: str) -> float | None:
        """Seconds from the request to its first response of ``kind``."""
        return next((r.received - self.started for r in self.responses if r.kind == kind), None)

    def check_complete(self) -> None:
        """Indices 0, 1, 2, ...; one end, last; the final flag once, last; no cut character."""
        assert self.error is None, self.error
        assert [r.index for r in self.responses] == list(range(len(self.responses)))
        assert self.responses[-1].kind in TERMINAL, self.kinds
        assert sum(kind in TERMINAL for kind in self.kinds) == 1, self.kinds
        assert (self.finals, self.after_final) == (1, 0)
        assert not any("\ufffd" in f"{r.text}{r.info}" for r in self.responses)


class Request:
    """A request in flight over a gRPC stream of its own."""

    def __init__(
        self, server: Server, model: str, content: Any, *, request_id: str = "", **options: Any
    ) -> None:
        self._client = grpc_client.InferenceServerClient(server.grpc_url)
        self._arrived: queue.SimpleQueue[tuple[Any, Any, float]] = queue.SimpleQueue()
        self._client.start_stream(lambda result, error: self._arrived.put((result, error, time.monotonic())))
        self.answer = Answer(time.monotonic())
        self._client.async_stream_infer(
            model,
            inputs(model, content),
            request_id=request_id,
            parameters=options,
            enable_empty_final_response=True,
        )

    def next(self, timeout: float = TIMEOUT) -> Response | None:
        """The next response with data; None at the end of the stream (or its error)."""
        answer = self.answer
        while not answer.finals:
            result, error, received = self._arrived.get(timeout=timeout)
            if error is not None:
                answer.error = error
                return None
            response = result.get_response()
            answer.request_ids.add(response.id)
            # The final flag comes with the last data, or on a response of its own.
            answer.finals += response.parameters["triton_final_response"].bool_param
            if response.outputs:
                answer.responses.append(_response(result, received))
                return answer.responses[-1]
        return None

    def wait_for(self, kind: str, timeout: float = TIMEOUT) -> Response:
        """The first response of ``kind``, or the terminal one."""
        while (response := self.next(timeout)) is not None:
            if response.kind == kind or response.kind in TERMINAL:
                return response
        raise AssertionError(f"the stream ended without {kind!r}: {self.answer.error or self.answer.kinds}")

    def finish(self, timeout: float = TIMEOUT) -> Answer:
        try:
            while self.next(timeout) is not None:
                pass
        finally:
            self.cancel()
        while not self._arrived.empty():
            result, _, _ = self._arrived.get()
            # The error is that of our own stop_stream.
            self.answer.after_final += result is not None
        return self.answer

    def cancel(self) -> float:
        """stop_stream with cancel; gives the seconds it took."""
        begun = time.monotonic()
        self._client.stop_stream(cancel_requests=True)
        took = time.monotonic() - begun
        self._client.close()
        return took


def inputs(model: str, content: Any) -> list[grpc_client.InferInput]:
    """The one input of an ensemble; messages may be given as a list."""
    data = content if isinstance(content, (str, bytes)) else json.dumps(content)
    raw = data.encode() if isinstance(data, str) else data
    tensor = grpc_client.InferInput("text" if model == "speech" else "messages", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([raw], dtype=np.object_))
    return [tensor]


def _response(result: grpc_client.InferResult, received: float) -> Response:
    def text(name: str) -> str | None:
        value = result.as_numpy(name)
        return None if value is None else value[0].decode()

    audio, info = result.as_numpy("audio"), text("info")
    return Response(
        received=received,
        index=int(result.as_numpy("index")[0]),
        kind=text("event") or "",
        text=text("text"),
        audio=None if audio is None else np.array(audio),
        audio_base64=text("audio_base64"),
        info=json.loads(info) if info else {},
    )


def ask(server: Server, model: str, content: Any, **options: Any) -> Answer:
    """One request from its start to its end."""
    return Request(server, model, content, **options).finish()


def ask_together(server: Server, model: str, asked: Sequence[tuple[Any, dict[str, Any]]]) -> list[Answer]:
    """All at once, each on a stream of its own."""
    requests = [Request(server, model, content, **options) for content, options in asked]
    return [request.finish() for request in requests]


def fresh() -> dict[str, str]:
    """An option that makes a prompt new to the prefix cache."""
    return {"cache_salt": secrets.token_hex(8)}


def markers(count: int) -> list[str]:
    """Words that no answer holds by chance."""
    return [f"QZ{number}X{number * 37 % 91}" for number in range(count)]


def marked(marker: str) -> list[dict[str, str]]:
    """A prompt whose answer repeats its marker."""
    return [{"role": "user", "content": f"The code word is {marker}. Repeat the code word {marker} again and again."}]


def refusal(server: Server, model: str, content: Any, **options: Any) -> str:
    """The message of a request that must be refused, with nothing answered before."""
    answer = ask(server, model, content, **options)
    assert answer.error is not None, f"not refused: {options} -> {answer.text[:80]!r}"
    assert not answer.responses
    return str(answer.error)


# -- HTTP --------------------------------------


@contextmanager
def http_post(server: Server, path: str, body: Any) -> Iterator[http.client.HTTPResponse]:
    """The open response to a POST, closed with the block. ``body``: bytes, or what becomes JSON."""
    connection = http.client.HTTPConnection(server.http_url.removeprefix("http://"), timeout=TIMEOUT)
    try:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", path, data, {"Content-Type": "application/json"})
        yield connection.getresponse()
    finally:
        connection.close()


def generate(server: Server, model: str, body: Any) -> tuple[int, dict[str, Any]]:
    with http_post(server, f"/v2/models/{model}/generate", body) as response:
        return response.status, json.loads(response.read() or b"{}")


def http_get(server: Server, path: str) -> dict[str, Any]:
    connection = http.client.HTTPConnection(server.http_url.removeprefix("http://"), timeout=TIMEOUT)
    try:
        connection.request("GET", path)
        found: dict[str, Any] = json.loads(connection.getresponse().read())
        return found
    finally:
        connection.close()


def server_sent_events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        if line.startswith(b"data: "):
            yield json.loads(line[6:])


def generate_stream(server: Server, model: str, body: Any) -> list[dict[str, Any]]:
    with http_post(server, f"/v2/models/{model}/generate_stream", body) as response:
        assert response.status == 200, response.read()
        return list(server_sent_events(response))


# -- what the server is left with --------------------------------------


def integrity_report(server: Server) -> dict[str, Any]:
    """What the integrity model answers to ``report``."""
    status, body = generate(server, "integrity", {"report": ""})
    assert status == 200, body
    return json.loads(body["report"])  # type: ignore[no-any-return]


Labels = tuple[tuple[str, str], ...]
_SAMPLE = re.compile(r"^(tritone_\w+)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
EXPORT_SECONDS = 0.3
"""A little more than the stages' export interval."""


class Scrape:
    """The ``tritone_`` samples of one look at /metrics."""

    def __init__(self, server: Server) -> None:
        host, path = server.metrics_url.removeprefix("http://").split("/", 1)
        connection = http.client.HTTPConnection(host, timeout=10)
        try:
            connection.request("GET", f"/{path}")
            self.page = connection.getresponse().read().decode()
        finally:
            connection.close()
        self.samples: dict[tuple[str, Labels], float] = {}
        for line in self.page.splitlines():
            if match := _SAMPLE.match(line):
                labels = tuple(sorted(_LABEL.findall(match[2] or "")))
                self.samples[match[1], labels] = float(match[3])

    def value(self, name: str, **labels: str) -> float:
        """The sum of all samples of ``name`` that carry ``labels``."""
        wanted = set(labels.items())
        return sum(
            value for (found, held), value in self.samples.items() if found == name and wanted <= set(held)
        )

    def names(self, stage: str) -> set[str]:
        return {name for name, labels in self.samples if ("stage", stage) in labels}

    def gauges(self) -> dict[str, float]:
        """Everything that must come back to where it was once no request is left; cached blocks count as free ones."""
        kept = ("queue_requests", "running_requests", "pages", "hidden_blocks", "sessions")
        found: dict[str, float] = {}
        for (name, labels), value in self.samples.items():
            if name.removeprefix("tritone_") in kept:
                key = f"{name} {' '.join('free' if label == 'cached' else label for _, label in labels)}"
                found[key] = found.get(key, 0) + value
        return found

    def held(self) -> dict[str, float]:
        """The gauges that show something held: empty on an idle server."""
        return {key: value for key, value in self.gauges().items() if value and not key.endswith(" free")}


def wait_idle(server: Server, timeout: float = 10.0) -> float:
    """Seconds until no stage holds anything; an assertion names what is still held."""
    begun = time.monotonic()
    while held := Scrape(server).held():
        if time.monotonic() - begun > timeout:
            raise AssertionError(f"still held after {timeout} s: {held}")
        time.sleep(0.02)
    return time.monotonic() - begun


@contextmanager
def nothing_left_behind(server: Server, timeout: float = 10.0) -> Iterator[None]:
    """Afterwards the server is ready, holds nothing, and has as many free blocks as before.

    A stage's gauges are up to an export interval old: a look may show a request that is over by then, so what is left
    behind is what stays.
    """
    wanted: dict[str, float] = {}

    def is_idle() -> bool:
        look = Scrape(server)
        wanted.clear()
        wanted.update(look.gauges())
        return not look.held() and Scrape(server).gauges() == wanted  # twice the same: not seen amid an export

    wait_until(is_idle, "an idle server", timeout)
    yield
    assert server.is_ready()
    deadline = time.monotonic() + timeout
    while True:
        gauges = Scrape(server).gauges()
        after = {key: gauges[key] for key in wanted}  # a new server has not exported every gauge yet
        if after == wanted or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    assert after == wanted


def wait_until(condition: Callable[[], bool], what: str, timeout: float = 30.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout} s: {what}"
        time.sleep(0.02)


def stage_processes(server: Server) -> dict[str, psutil.Process]:
    """The stages' processes by stage name."""
    found = {}
    for process in psutil.Process(server.pid).children():
        try:
            command = process.cmdline()
        except psutil.NoSuchProcess:
            continue  # it has died and waits to be collected
        if command and command[0].endswith("triton_python_backend_stub"):
            found[Path(command[1]).parents[1].name] = process
    return found


def status_of(server: Server, stage: str) -> dict[str, Any]:
    """What `tritone status` says of a stage."""
    (status,) = (found for found in read_statuses() if found["run_directory"] == str(server.run_directory))
    return status["stages"][stage]  # type: ignore[no-any-return]


def resident(server: Server) -> dict[str, int]:
    """Resident bytes of the stages' processes and of the server, less what they share: a pool's blocks count from
    their first use on."""
    processes = {**stage_processes(server), "tritonserver": psutil.Process(server.pid)}
    infos = {name: process.memory_info() for name, process in processes.items()}
    return {name: info.rss - info.shared for name, info in infos.items()}


def shared_memory(server: Server) -> dict[str, int]:
    """Files of /dev/shm and their sizes; those of other servers on this machine are left out."""
    regions = {word for process in stage_processes(server).values() for word in process.cmdline()}
    sizes = {}
    for folder, _, files in os.walk(SHM):
        for name in files:
            path = Path(folder) / name
            top = path.relative_to(SHM).parts[0]
            foreign_run = top.startswith("tritone-") and SHM / top != server.run_directory
            foreign_stub = re.fullmatch(r"triton_\w+_backend_shm_region_\S+", name) and name not in regions
            if not foreign_run and not foreign_stub:
                try:
                    sizes[str(path)] = path.stat().st_size
                except FileNotFoundError:
                    continue
    return sizes


def in_threads(count: int, call: Callable[[int], Any]) -> list[Any]:
    """``call(0)`` ... ``call(count - 1)``, each in a thread of its own; the first exception is raised."""
    results: list[Any] = [None] * count
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            results[number] = call(number)
        except BaseException as error:  # raised below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
