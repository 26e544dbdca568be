"""What cannot be answered is refused at once, naming field, value and what is allowed; nothing stays."""

from __future__ import annotations

import http.client
import json
import queue
import random
import re
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as grpc_client
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.server.helpers import (
    Request,
    ask,
    generate,
    http_post,
    in_threads,
    inputs,
    refusal,
    shared_memory,
    wait_idle,
)
from tests.server.serving import MAX_CONTEXT
from tritone.supervisor import Server

SHORT = {"max_tokens": 2, "temperature": 0.0}


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


MESSAGES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "empty": ("", ("messages", "''", "question")),
    "blank": (" \n", ("messages", "question")),
    "no message": ("[]", ("messages", "[]", "at least one")),
    "no object": ("[1]", ("messages[0]", "1", "role")),
    "no json": ("[hello", ("messages", "'['", "not JSON")),
    "no role": ([{"content": "x"}], ("messages[0].role", "None", "system, user, assistant, tool")),
    "unknown role": (
        [{"role": "robot", "content": "x"}],
        ("messages[0].role", "'robot'", "system, user, assistant, tool"),
    ),
    "role of another type": ([{"role": ["user"], "content": "x"}], ("messages[0].role", "['user']")),
    "no content": ([{"role": "user"}], ("messages[0].content", "None", "not empty")),
    "empty content": (user(""), ("messages[0].content", "''", "not empty")),
    "content of another type": (user(5), ("messages[0].content", "5")),
    "an image": (user([{"type": "image_url"}]), ("messages[0].content", "'image_url'", "text")),
    "last is an answer": (
        [*user("x"), {"role": "assistant", "content": "y"}],
        ("messages[1].role", "'assistant'"),
    ),
    "lone surrogate": ('[{"role":"user","content":"a\\ud800b"}]', ("messages[0].content", "U+D800", "at 1")),
    "NUL": ("a\0b", ("messages", "NUL", "at 1")),
    "NUL in json": ('[{"role":"user","content":"a\\u0000b"}]', ("messages[0].content", "NUL", "at 1")),
    "no UTF-8": (b"ab\xff", ("messages", "UTF-8", "byte 2")),
    "nested too deeply": ("[" * 100_000, ("messages", "'['")),
    "objects nested too deeply": ('{"a":' * 100_000, ("messages", "'{'")),
}


@pytest.mark.parametrize("case", MESSAGES)
@pytest.mark.parametrize("model", ["chat", "omni"])
def test_messages(server: Server, model: str, case: str) -> None:
    content, named = MESSAGES[case]
    message = refusal(server, model, content, **SHORT)
    assert "INVALID_ARGUMENT: messages" in message
    assert all(part in message for part in named), message


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("[]", "0 tokens"),
        ("{}", "{}"),
        ("hi", "'hi'"),
        ("[-1]", "-1"),
        ("[49152]", "49152"),
        ("[1.5]", "1.5"),
        ("[true]", "True"),
        ("[NaN]", "nan"),
        ('["a"]', "'a'"),
        (f"[{'9' * 6000}]", "999"),
        ("[" * 100_000, "[[["),
    ],
    ids=lambda value: value[:8],
)
def test_token_ids(server: Server, content: str, named: str) -> None:
    message = refusal(server, "chat", content, input_format="token_ids", **SHORT)
    assert "INVALID_ARGUMENT: messages" in message and named in message
    assert "allowed: a JSON list of integers 0 to 49151" in message or named == "0 tokens"


def test_a_prompt_fills_the_context_and_no_more(server: Server, unharmed: None) -> None:
    ids = [100 + number % 900 for number in range(MAX_CONTEXT)]
    options = {"input_format": "token_ids", "temperature": 0.0}
    message = refusal(server, "chat", json.dumps(ids), **options)
    assert f"the prompt has {MAX_CONTEXT} tokens; allowed: at most {MAX_CONTEXT - 1}" in message
    answer = ask(server, "chat", json.dumps(ids[:-1]), **options)
    answer.check_complete()
    assert (answer.usage["prompt_tokens"], answer.usage["completion_tokens"]) == (MAX_CONTEXT - 1, 1)


def test_an_answer_stops_where_the_context_ends(server: Server) -> None:
    ids = [100 + number % 900 for number in range(MAX_CONTEXT - 10)]
    answer = ask(
        server, "chat", json.dumps(ids), input_format="token_ids", ignore_eos=True, max_tokens=MAX_CONTEXT
    )
    assert answer.info["finish_reason"] == "length"
    assert answer.usage["completion_tokens"] == 10


def test_a_prompt_far_too_long(server: Server) -> None:
    message = refusal(server, "chat", "word " * 50_000, **SHORT)
    assert f"allowed: at most {MAX_CONTEXT - 1}" in message


@pytest.mark.parametrize("model", ["chat", "speech"])
def test_a_request_too_large_to_be_read(server: Server, model: str) -> None:
    text = "word " * 500_000
    assert f"INVALID_ARGUMENT: request: {len(text)} bytes of text and options; allowed: " in refusal(server, model, text)


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "max_tokens 0": ({"max_tokens": 0}, "max_tokens: 0"),
    "max_tokens negative": ({"max_tokens": -1}, "max_tokens: -1"),
    "max_tokens above the context": (
        {"max_tokens": MAX_CONTEXT + 1},
        f"max_tokens: {MAX_CONTEXT + 1} .*1 to {MAX_CONTEXT}",
    ),
    "max_tokens of 64 bits": ({"max_tokens": 2**40}, f"max_tokens: {2**40}"),
    "max_tokens a fraction": ({"max_tokens": 1.5}, "max_tokens: 1.5"),
    "max_tokens a string": ({"max_tokens": "5"}, "max_tokens: '5'"),
    "max_tokens a boolean": ({"max_tokens": True}, "max_tokens: True"),
    "temperature NaN": ({"temperature": float("nan")}, "temperature: nan .*0 to 2"),
    "temperature infinite": ({"temperature": float("inf")}, "temperature: inf"),
    "temperature negative": ({"temperature": -0.1}, "temperature: -0.1 .*0 to 2"),
    "temperature 2.1": ({"temperature": 2.1}, "temperature: 2.1 .*0 to 2"),
    "temperature a string": ({"temperature": "hot"}, "temperature: 'hot'"),
    "top_p": ({"top_p": 0.0}, "top_p: 0.0"),
    "top_k": ({"top_k": -1}, "top_k: -1"),
    "min_p": ({"min_p": 1.5}, "min_p: 1.5"),
    "repetition_penalty": ({"repetition_penalty": 0.0}, "repetition_penalty: 0.0"),
    "presence_penalty": ({"presence_penalty": 3.0}, "presence_penalty: 3.0"),
    "frequency_penalty": ({"frequency_penalty": -3.0}, "frequency_penalty: -3.0"),
    "seed": ({"seed": -1}, "seed: -1"),
    "n": ({"n": 2}, "n: 2 .*allowed: 1"),
    "logprobs": ({"logprobs": 21}, "logprobs: 21 .*0 to 20"),
    "stop empty": ({"stop": ""}, "stop: ''"),
    "stop with an empty one": ({"stop": '["a", ""]'}, "stop: "),
    "stop too many": ({"stop": json.dumps(["a"] * 17)}, "stop: .*up to 16"),
    "tools": ({"tools": "x"}, "tools: 'x'"),
    "tools nested too deeply": ({"tools": "[" * 100_000}, "tools: "),
    "input_format": ({"input_format": "xml"}, "input_format: 'xml' .*chat, text or token_ids"),
    "stream": ({"stream": "yes"}, "stream: 'yes' .*true or false"),
    "ignore_eos": ({"ignore_eos": 1}, "ignore_eos: 1"),
    "unknown": ({"tempratur": 1.0}, "option 'tempratur' is unknown; allowed: .*temperature"),
    "unsupported": ({"logit_bias": "{}"}, "option 'logit_bias' is unknown"),
    "of omni: voice": ({"voice": "heart"}, "option 'voice' is unknown for 'chat'"),
    "of omni: response": ({"response": "text"}, "option 'response' is unknown for 'chat'"),
    "of omni: speed": ({"speed": 1.0}, "option 'speed' is unknown for 'chat'"),
    "of omni: audio_format": ({"audio_format": "float32"}, "option 'audio_format' is unknown for 'chat'"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options(server: Server, case: str) -> None:
    options, pattern = OPTIONS[case]
    message = refusal(server, "chat", "Hi", **(SHORT | options))
    assert "INVALID_ARGUMENT: " in message and "allowed" in message
    assert re.search(pattern, message), message


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"voice": "bob"}, "voice: 'bob' is not allowed; allowed: heart"),
        ({"voice": ""}, "voice: ''"),
        ({"speed": 0.1}, "speed: 0.1 is not allowed; allowed: number 0.5 to 2"),
        ({"audio_format": "mp3"}, "audio_format: 'mp3' is not allowed; allowed: float32 or pcm16_base64"),
    ],
)
@pytest.mark.parametrize("model", ["omni", "speech"])
def test_spoken_options(server: Server, model: str, options: dict[str, Any], named: str) -> None:
    assert named in refusal(server, model, "Hi", **options)


@pytest.mark.parametrize(
    "text", ["", "  ", "a\0b", b"\xff", "a" * 20_001], ids=["empty", "blank", "NUL", "no UTF-8", "long"]
)
def test_text_to_speak(server: Server, text: str | bytes) -> None:
    assert "INVALID_ARGUMENT: text" in refusal(server, "speech", text)


@pytest.mark.parametrize("option", ["max_tokens", "temperature", "response", "stop"])
def test_options_that_only_a_text_model_has(server: Server, option: str) -> None:
    assert f"option '{option}' is unknown for 'speech'" in refusal(server, "speech", "Hi", **{option: 1})


# -- tensors --------------------------------------


def infer(server: Server, request: service_pb2.ModelInferRequest) -> str:
    """The error of a hand-made request over the raw protocol."""
    with grpc.insecure_channel(server.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            answers = list(stub.ModelStreamInfer(iter([request]), timeout=20))
        except grpc.RpcError as error:
            return str(error.details())
    return " ".join(answer.error_message for answer in answers)


def tensor_request(name: str, datatype: str, shape: list[int], raw: bytes) -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name="chat")
    tensor = request.inputs.add(name=name, datatype=datatype)
    tensor.shape.extend(shape)
    request.raw_input_contents.append(raw)
    return request


ONE = b"\x02\0\0\0Hi"


@pytest.mark.parametrize(
    ("tensor", "named"),
    [
        (("messages", "BYTES", [2], ONE * 2), ("messages", "[1]", "[2]")),
        (("messages", "BYTES", [1, 1], ONE), ("messages", "[1]", "[1,1]")),
        (("messages", "BYTES", [0], b""), ("messages", "[1]", "[0]")),
        (("messages", "INT32", [1], b"\0\0\0\0"), ("messages", "INT32", "BYTES")),
        (("messages", "BYTES", [1], b"\xff\xff\0\0Hi"), ("messages",)),
        (("messages", "BYTES", [1], ONE * 2), ("messages",)),
        (("question", "BYTES", [1], ONE), ("question", "chat")),
    ],
    ids=[
        "shape 2",
        "shape 1x1",
        "shape 0",
        "dtype",
        "length beyond the data",
        "two strings as one",
        "unknown input",
    ],
)
def test_tensors(server: Server, unharmed: None, tensor: Any, named: tuple[str, ...]) -> None:
    message = infer(server, tensor_request(*tensor))
    assert message, "not refused"
    assert all(part.replace(" ", "") in message.replace(" ", "") for part in named), message


@pytest.mark.parametrize(("model", "name"), [("chat", "messages"), ("omni", "messages"), ("speech", "text")])
def test_a_missing_input_is_an_error(server: Server, model: str, name: str) -> None:
    assert name in infer(server, service_pb2.ModelInferRequest(model_name=model))
    for way in ("generate", "generate_stream"):
        with http_post(server, f"/v2/models/{model}/{way}", {"seed": 1}) as response:
            assert response.status == 400
            assert f"missing required input(s) ['{name}']" in response.read().decode()


def test_an_unknown_output_is_an_error(server: Server) -> None:
    request = tensor_request("messages", "BYTES", [1], ONE)
    request.outputs.add(name="embedding")
    assert "embedding" in infer(server, request)


# -- HTTP --------------------------------------


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"messages": ""}, "messages: ''"),
        ({"messages": "Hi", "max_tokens": 0}, "max_tokens: 0"),
        ({"messages": "Hi", "top_q": 1}, "option 'top_q' is unknown"),
        ({"messages": "Hi", "seed": 2**64}, "seed: "),
        ({"messages": ["a", "b"]}, "messages"),
        ({"messages": "Hi", "stop": ["a"]}, "stop"),
    ],
)
def test_http_400(server: Server, body: dict[str, Any], named: str) -> None:
    status, answer = generate(server, "chat", body | {"stream": False})
    assert status == 400
    assert named in answer["error"]


def test_http_stream_400(server: Server) -> None:
    with http_post(
        server, "/v2/models/chat/generate_stream", {"messages": "Hi", "temperature": 9}
    ) as response:
        assert response.status == 400
        assert "temperature: 9" in response.read().decode()


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"",
        b"[]",
        b'{"messages": "\\ud800"}',
        b'{"messages": 5}',
        b'{"messages": null}',
        b"\xff\xfe",
        b'{"messages": "x"' + b"}" * 5,
    ],
)
def test_http_bodies_that_triton_refuses(server: Server, body: bytes) -> None:
    """Triton's own parser answers 4xx or 5xx with an error in JSON."""
    status, answer = generate(server, "chat", body)
    assert status >= 400
    assert answer["error"]


def test_infer_over_http_is_refused(server: Server) -> None:
    body = {"inputs": [{"name": "messages", "shape": [1], "datatype": "BYTES", "data": ["Hi"]}]}
    with http_post(server, "/v2/models/chat/infer", body) as response:
        assert response.status >= 400
        assert "decoupled" in response.read().decode()


# -- many --------------------------------------

WORKERS = 8
EACH = 125


def malformed_body(draw: random.Random) -> tuple[str, bytes]:
    if draw.random() < 0.1:
        return "chat", bytes(draw.randrange(256) for _ in range(draw.randrange(1, 60)))
    if draw.random() < 0.3:
        content, _ = MESSAGES[draw.choice([name for name in MESSAGES if name != "no UTF-8"])]
        text = content if isinstance(content, str) else json.dumps(content)
        return draw.choice(["chat", "omni"]), json.dumps({"messages": text}).encode()
    if draw.random() < 0.2:
        return "speech", json.dumps({"text": draw.choice(["", " ", "a\0"])}).encode()
    options, _ = OPTIONS[draw.choice(list(OPTIONS))]
    return "chat", json.dumps({"messages": "Hi", **options}).encode()


def test_1000_malformed_requests(server: Server, unharmed: None) -> None:
    """Mixed, over parallel connections, half HTTP and half gRPC, with good requests between them."""
    expected = ask(server, "chat", "What is the capital of France?", temperature=0.0, max_tokens=20).text
    wait_idle(server)
    files = shared_memory(server)

    def over_http(draw: random.Random) -> None:
        connection = http.client.HTTPConnection(server.http_url.removeprefix("http://"), timeout=60)
        for _ in range(EACH):
            model, body = malformed_body(draw)
            connection.request(
                "POST", f"/v2/models/{model}/generate", body, {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            data = response.read()
            assert response.status >= 400, (model, body[:200], data)
            assert json.loads(data)["error"]
        connection.close()

    def over_grpc(draw: random.Random) -> None:
        for number in range(EACH):
            if number % 25 == 0:
                answer = ask(server, "chat", "What is the capital of France?", temperature=0.0, max_tokens=20)
                assert answer.text == expected
            if draw.random() < 0.5:
                refusal(server, draw.choice(["chat", "omni"]), MESSAGES[draw.choice(list(MESSAGES))][0])
            elif draw.random() < 0.5:
                refusal(server, "chat", "Hi", **OPTIONS[draw.choice(list(OPTIONS))][0])
            else:
                shape = draw.choice([[2], [1, 1], [0]])
                assert infer(server, tensor_request("messages", "BYTES", shape, ONE * int(np.prod(shape))))

    in_threads(WORKERS, lambda worker: (over_http if worker % 2 else over_grpc)(random.Random(worker)))
    assert (
        ask(server, "chat", "What is the capital of France?", temperature=0.0, max_tokens=20).text == expected
    )
    wait_idle(server)
    assert shared_memory(server) == files


def test_an_error_does_not_hurt_its_neighbours(server: Server) -> None:
    good = [Request(server, "chat", f"Say {number}.", temperature=0.0, max_tokens=10) for number in range(4)]
    message = refusal(server, "chat", "Hi", max_tokens=0)
    assert "max_tokens" in message
    for request in good:
        request.finish().check_complete()


def test_a_refused_request_does_not_end_its_stream(server: Server) -> None:
    """On one gRPC stream: a good request after a refused one is answered."""
    arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with grpc_client.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(lambda result, error: arrived.put(error or result))
        client.async_stream_infer("chat", inputs("chat", ""), enable_empty_final_response=True)
        assert "messages: ''" in str(arrived.get(timeout=30))
        client.async_stream_infer(
            "chat",
            inputs("chat", "Hi"),
            enable_empty_final_response=True,
            parameters={"stream": False, **SHORT},
        )
        assert arrived.get(timeout=30).as_numpy("event")[0] == b"end"
        client.stop_stream()
