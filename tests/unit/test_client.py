"""The client against a scripted gRPC service: what it sends, what it makes of the answers, and how it ends."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

from tritone.client import Client, RequestError

Script = Callable[[Any, Any], Iterator[Any]]


def reply(index: int, event: str, audio: np.ndarray | None = None, **texts: str) -> Any:
    """One response with the tensors given, as Triton lays them out."""
    response = service_pb2.ModelInferResponse(model_name="omni")

    def add(name: str, datatype: str, shape: int, raw: bytes) -> None:
        output = response.outputs.add(name=name, datatype=datatype)
        output.shape.append(shape)
        response.raw_output_contents.append(raw)

    add("index", "INT32", 1, np.array([index], np.int32).tobytes())
    for name, value in {"event": event, **texts}.items():
        add(name, "BYTES", 1, serialize_byte_tensor(np.array([value.encode()], dtype=object)).item())
    if audio is not None:
        add("audio", "FP32", audio.size, audio.astype(np.float32).tobytes())
    return service_pb2.ModelStreamInferResponse(infer_response=response)


def final() -> Any:
    response = service_pb2.ModelInferResponse()
    response.parameters["triton_final_response"].bool_param = True
    return service_pb2.ModelStreamInferResponse(infer_response=response)


END = reply(1, "end", info=json.dumps({"finish_reason": "stop"}))


class Service(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers every stream by ``script(request, context)``."""

    def __init__(self) -> None:
        self.script: Script = lambda request, context: iter(())
        self.requests: list[Any] = []

    def ModelStreamInfer(self, request_iterator: Any, context: Any) -> Iterator[Any]:
        for request in request_iterator:
            self.requests.append(request)
            yield from self.script(request, context)

    def ServerReady(self, request: Any, context: Any) -> Any:
        return service_pb2.ServerReadyResponse(ready=True)


@pytest.fixture
def service() -> Iterator[tuple[Service, Client, grpc.Server]]:
    server = grpc.server(ThreadPoolExecutor(8))
    service = Service()
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with Client(f"http://127.0.0.1:{port}", timeout=10) as client:
        yield service, client, server
    server.stop(0).wait()


def test_what_is_sent(service: tuple[Service, Client, grpc.Server]) -> None:
    scripted, client, _ = service
    scripted.script = lambda request, context: iter((END, final()))
    messages = [{"role": "user", "content": "hé"}]
    options: dict[str, Any] = {"max_tokens": 5, "temperature": 0.5, "ignore_eos": True, "stop": ["a", "b"], "voice": "x"}
    list(client.chat(messages, request_id="mine", seed=None, **options))
    list(client.chat("plain text", model="chat"))
    list(client.speak("say this"))
    first, second, third = scripted.requests
    assert (first.model_name, second.model_name, third.model_name) == ("omni", "chat", "speech")
    assert first.id == "mine" and first.inputs[0].name == "messages" and list(first.inputs[0].shape) == [1]
    assert json.loads(deserialize_bytes_tensor(first.raw_input_contents[0])[0]) == messages
    assert deserialize_bytes_tensor(second.raw_input_contents[0])[0] == b"plain text"
    assert third.inputs[0].name == "text"
    sent = {name: getattr(value, value.WhichOneof("parameter_choice")) for name, value in first.parameters.items()}
    assert sent == {
        "triton_enable_empty_final_response": True,
        "max_tokens": 5,
        "temperature": 0.5,
        "ignore_eos": True,
        "stop": '["a", "b"]',
        "voice": "x",
    }


def test_events(service: tuple[Service, Client, grpc.Server]) -> None:
    scripted, client, _ = service
    audio = np.linspace(-1, 1, 7, dtype=np.float32)
    usage = {"usage": {"prompt_tokens": 3}}
    answers = (reply(0, "text", text="héllo"), reply(1, "audio", audio), reply(2, "end", info=json.dumps(usage)), final())
    scripted.script = lambda request, context: iter(answers)
    stream = client.chat("x")
    text, sound, end = stream
    assert (text.index, text.kind, text.text, text.audio) == (0, "text", "héllo", None)
    assert sound.kind == "audio" and sound.audio is not None and np.array_equal(sound.audio, audio)
    assert end.kind == "end" and end.info == usage
    assert stream.started <= text.received <= end.received
    assert list(stream) == []


def test_a_final_flag_on_the_last_answer_is_an_end_too(service: tuple[Service, Client, grpc.Server]) -> None:
    scripted, client, _ = service
    last = reply(0, "end", text="all of it")
    last.infer_response.parameters["triton_final_response"].bool_param = True
    scripted.script = lambda request, context: iter((last,))
    assert [event.text for event in client.chat("x", stream=False)] == ["all of it"]


@pytest.mark.parametrize(
    ("answers", "code", "message"),
    [
        (
            [service_pb2.ModelStreamInferResponse(error_message="in ensemble 'omni', INVALID_ARGUMENT: seed: 'x' is bad")],
            "INVALID_ARGUMENT",
            "seed: 'x' is bad",
        ),
        (
            [service_pb2.ModelStreamInferResponse(error_message="Request for unknown model: 'm' is not found")],
            "NOT_FOUND",
            "Request for unknown model: 'm' is not found",
        ),
        ([reply(0, "error", info='{"code": "UNAVAILABLE", "message": "full"}'), final()], "UNAVAILABLE", "full"),
        ([reply(0, "text", text="a"), final()], "INTERNAL", "the stream ended without an end event"),
        ([reply(0, "text", text="a")], "INTERNAL", "the stream ended without an end event"),
    ],
)
def test_errors(service: tuple[Service, Client, grpc.Server], answers: list[Any], code: str, message: str) -> None:
    scripted, client, _ = service
    scripted.script = lambda request, context: iter(answers)
    with pytest.raises(RequestError) as caught:
        list(client.chat("x"))
    assert (caught.value.code, caught.value.message) == (code, message)


def test_text_that_utf8_cannot_carry_is_refused() -> None:
    with Client() as client, pytest.raises(RequestError, match="lone surrogate at position 1"):
        client.chat("a\ud800")


class Endless:
    """One event, then silence until the client has gone."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()

    def __call__(self, request: Any, context: Any) -> Iterator[Any]:
        context.add_callback(self.cancelled.set)
        yield reply(0, "text", text="a")
        self.cancelled.wait(20)


def test_closing_cancels(service: tuple[Service, Client, grpc.Server]) -> None:
    scripted, client, _ = service
    for end in ("cancel", "close"):
        scripted.script = endless = Endless()
        stream = client.chat("x")
        assert next(stream).text == "a"
        getattr(stream, end)()
        assert endless.cancelled.wait(5)
        assert list(stream) == []


def test_a_dropped_stream_is_cancelled(service: tuple[Service, Client, grpc.Server]) -> None:
    scripted, client, _ = service
    scripted.script = endless = Endless()
    for _event in client.chat("x"):
        break
    assert endless.cancelled.wait(5)


def test_silence_ends_by_the_time_out(service: tuple[Service, Client, grpc.Server]) -> None:
    scripted, client, _ = service
    scripted.script = endless = Endless()
    began = time.monotonic()
    with pytest.raises(RequestError) as caught:
        list(client.chat("x", timeout=0.3))
    assert caught.value.code == "DEADLINE_EXCEEDED" and 0.25 < time.monotonic() - began < 5
    assert endless.cancelled.wait(5), "the server hears of it"


def test_a_server_that_goes_away(service: tuple[Service, Client, grpc.Server]) -> None:
    scripted, client, server = service
    scripted.script = Endless()
    stream = client.chat("x")
    next(stream)
    server.stop(0)
    with pytest.raises(RequestError):
        list(stream)
    with pytest.raises(RequestError, match="is `tritone serve` running") as caught:
        list(Client("127.0.0.1:1").chat("x"))
    assert caught.value.code == "UNAVAILABLE" and not Client("127.0.0.1:1").is_ready(1)


def test_many_streams_leave_no_threads(service: tuple[Service, Client, grpc.Server]) -> None:
    scripted, client, _ = service
    scripted.script = lambda request, context: iter((END, final()))
    for _ in range(50):
        list(client.chat("x"))
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and _stream_threads():
        time.sleep(0.01)
    assert _stream_threads() == 0


def _stream_threads() -> int:
    return sum(thread.name == "tritone-stream" for thread in threading.enumerate())
