"""A small client: one call, one iterator of events.

    client = Client("127.0.0.1:8001")
    for event in client.chat("What is the capital of France?", max_tokens=40):
        print(event.text, end="")

Options are those of the server (max_tokens, temperature, seed, stop, voice, response, stream, ...); it refuses unknown ones by
name. Closing the iterator before its end cancels the request. A client may be shared between threads.
"""

from __future__ import annotations

import json
import queue
import re
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
from tritonclient.grpc import InferResult, service_pb2, service_pb2_grpc
from tritonclient.utils import serialize_byte_tensor

from tritone.errors import CODES, TritoneError

SAMPLE_RATE = 24000
IDLE_SECONDS = 300.0
"""A stream that says nothing for so long is given up."""

Option = str | int | float | bool | Sequence[str] | None
Messages = str | Mapping[str, Any] | Sequence[Mapping[str, Any]]

TERMINAL = ("end", "error", "cancelled")
_MAX_MESSAGE = 1 << 30
_CODE = re.compile(rf"\b({'|'.join(CODES)}): (.*)", re.DOTALL)


class RequestError(TritoneError):
    """The request failed: ``code`` and ``message`` as the server (or the connection) gave them."""


@dataclass(frozen=True)
class Event:
    """One answer of a stream. What does not apply to its kind is empty."""

    index: int
    kind: str
    """``text``, ``audio``, ``audio_lost`` (no more audio will come; ``info`` says why), ``end`` or ``cancelled``; ``error`` is
    raised as RequestError instead, and ``waiting`` is left out (its index is then missing)."""
    text: str = ""
    audio: npt.NDArray[np.float32] | None = None
    """[samples] at 24 kHz, between -1 and 1."""
    audio_base64: str = ""
    """16-bit PCM, when ``audio_format`` asked for it."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """At the end: finish_reason, usage, timings, sample_rate."""
    received: float = 0.0
    """``time.monotonic()`` when it arrived."""


class Client:
    """``url`` is ``host:port`` of the server's gRPC service. ``timeout`` is how many seconds may pass without an event."""

    def __init__(self, url: str = "127.0.0.1:8001", timeout: float = IDLE_SECONDS) -> None:
        self.url = url.split("://", 1)[-1].rstrip("/")
        self.timeout = timeout
        host = self.url.rpartition(":")[0].strip("[]")
        options: list[tuple[str, int]] = [
            ("grpc.max_send_message_length", _MAX_MESSAGE),
            ("grpc.max_receive_message_length", _MAX_MESSAGE),
        ]
        if host in ("localhost", "::1") or host.startswith("127."):
            options.append(("grpc.enable_http_proxy", 0))
        self._channel = grpc.insecure_channel(self.url, options=options)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def chat(
        self,
        messages: Messages,
        *,
        model: str = "omni",
        timeout: float | None = None,
        request_id: str = "",
        **options: Option,
    ) -> Stream:
        """Asks ``model`` (``omni`` answers in text and speech, ``chat`` in text). ``messages`` is one user message as plain
        text, or OpenAI-style messages, [{"role": ..., "content": ...}, ...], also as their JSON."""
        text = messages if isinstance(messages, str) else json.dumps(messages, ensure_ascii=False)
        return self._request(model, "messages", text, timeout, request_id, options)

    def speak(
        self, text: str, *, model: str = "speech", timeout: float | None = None, request_id: str = "", **options: Option
    ) -> Stream:
        """Speaks a given text."""
        return self._request(model, "text", text, timeout, request_id, options)

    def is_ready(self, timeout: float = 5.0) -> bool:
        """Whether the server answers and has all its models loaded."""
        try:
            return bool(self._stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=timeout).ready)
        except grpc.RpcError:
            return False

    def _request(
        self, model: str, name: str, text: str, timeout: float | None, request_id: str, options: Mapping[str, Option]
    ) -> Stream:
        request = build_request(model, name, text, request_id, options)
        call = self._stub.ModelStreamInfer(iter((request,)))
        return Stream(call, self.timeout if timeout is None else timeout)

    def close(self) -> None:
        """Ends all requests of this client."""
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Stream(Iterator[Event]):
    """The events of one request. Raises RequestError when it fails or nothing arrives in time; ``close()`` (also by ``with``,
    or by dropping the last reference) cancels what is still running."""

    def __init__(self, call: Any, timeout: float) -> None:
        self.started = time.monotonic()
        self._timeout = timeout
        self._call = call
        self._arrived: queue.SimpleQueue[tuple[float, Any]] = queue.SimpleQueue()
        self._ended = False
        self._last: Event | None = None
        # The reader must not refer to self, or a dropped stream would never be cancelled.
        threading.Thread(target=_read, args=(call, self._arrived), name="tritone-stream", daemon=True).start()
        self._drop = weakref.finalize(self, call.cancel)

    def __next__(self) -> Event:
        if self._ended:
            raise StopIteration
        try:
            event = self._next()
        except BaseException:
            self.close()
            raise
        if event is None:
            self.close()
            raise StopIteration
        return event

    def _next(self) -> Event | None:
        try:
            received, item = self._arrived.get(timeout=self._timeout)
        except queue.Empty:
            raise RequestError(
                f"no event for {self._timeout:g} s: the server or one of its stages hangs or has died", "DEADLINE_EXCEEDED"
            ) from None
        if isinstance(item, grpc.RpcError):
            raise _rpc_error(item)
        if item is None or _is_empty_final(item):
            if self._last is None or self._last.kind not in TERMINAL:
                raise RequestError("the stream ended without an end event", "INTERNAL")
            return None
        if item.error_message:
            raise _error_of(item.error_message, "INTERNAL")
        event = _event(item.infer_response, received)
        if event.kind == "waiting":
            return self._next()
        if event.kind == "error":
            code = str(event.info.get("code", "INTERNAL"))
            raise RequestError(str(event.info.get("message", "no message")), code if code in CODES else "INTERNAL")
        self._last = event
        return event

    def cancel(self) -> None:
        """Cancels the request; the iterator ends at once, without an event."""
        self.close()

    def close(self) -> None:
        self._ended = True
        self._drop()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def build_request(
    model: str, name: str, text: str, request_id: str, options: Mapping[str, Option]
) -> service_pb2.ModelInferRequest:
    """One BYTES input of shape [1]; options as request parameters (a list as its JSON, None is left out)."""
    try:
        data = serialize_byte_tensor(np.array([text.encode()], dtype=np.object_)).item()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{name}: holds a lone surrogate at position {error.start}; allowed: text that UTF-8 can carry", "INVALID_ARGUMENT"
        ) from None
    request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    tensor = request.inputs.add(name=name, datatype="BYTES")
    tensor.shape.append(1)
    request.raw_input_contents.append(data)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    for key, value in options.items():
        if value is None:
            continue
        parameter = request.parameters[key]
        # bool before int: it is one.
        if isinstance(value, bool):
            parameter.bool_param = value
        elif isinstance(value, int):
            parameter.int64_param = value
        elif isinstance(value, float):
            parameter.double_param = value
        else:
            parameter.string_param = value if isinstance(value, str) else json.dumps(list(value))
    return request


def _read(call: Any, arrived: queue.SimpleQueue[tuple[float, Any]]) -> None:
    try:
        for response in call:
            arrived.put((time.monotonic(), response))
        arrived.put((time.monotonic(), None))
    except grpc.RpcError as error:
        arrived.put((time.monotonic(), error))


def _is_empty_final(item: Any) -> bool:
    response = item.infer_response
    return not item.error_message and not response.outputs and response.parameters["triton_final_response"].bool_param


def _event(response: Any, received: float) -> Event:
    result = InferResult(response)

    def text(name: str) -> str:
        value = result.as_numpy(name)
        return "" if value is None or value.size == 0 else bytes(value.reshape(-1)[0]).decode()

    index, audio, info = result.as_numpy("index"), result.as_numpy("audio"), text("info")
    return Event(
        index=-1 if index is None else int(index.reshape(-1)[0]),
        kind=text("event"),
        text=text("text"),
        # A copy: the array would keep the whole message alive.
        audio=None if audio is None else np.array(audio, dtype=np.float32).reshape(-1),
        audio_base64=text("audio_base64"),
        info=json.loads(info) if info else {},
        received=received,
    )


def _error_of(text: str, otherwise: str) -> RequestError:
    """Triton puts words of its own before a stage's ``CODE: message``."""
    match = _CODE.search(text)
    if match:
        return RequestError(match.group(2), match.group(1))
    return RequestError(text, "NOT_FOUND" if "unknown model" in text else otherwise)


def _rpc_error(error: Any) -> RequestError:
    code, details = error.code().name, error.details() or "the connection failed"
    if code == "UNAVAILABLE" and "failed to connect" in details:
        return RequestError(f"no server answers ({details.rpartition('last error: ')[2]}): is `tritone serve` running?", code)
    return _error_of(details, code if code in CODES else "INTERNAL")
