"""The glue to Triton's Python backend, against a stand-in for its module that refuses what Triton refuses."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from helpers import NUMPY_TYPES, wait_until

from tritone import backend
from tritone.backend import MetricsExporter, StageModel, TritonReply, complete_config, triton_error
from tritone.errors import CODES, InvalidArgument, TritoneError, Unavailable
from tritone.messages import STAGES, Event
from tritone.metrics import METRICS, Metrics
from tritone.processes import read_records

FINAL = 1


class Sender:
    def __init__(self) -> None:
        self.sent: list[tuple[Any, int]] = []
        self.finals = 0

    def send(self, response: Any = None, flags: int = 0) -> None:
        if self.finals:
            raise RuntimeError("Unable to send response. Response sender has been closed.")
        self.finals += flags == FINAL
        self.sent.append((response, flags))


class Request:
    def __init__(self, parameters: str | None = None, cancelled: bool = False, **tensors: Any) -> None:
        self.tensors = {name: FakeTriton.Tensor(name, np.asarray(value)) for name, value in tensors.items()}
        self.sender = Sender()
        self._parameters = parameters
        self._cancelled = cancelled

    def parameters(self) -> str | None:
        return self._parameters

    def is_cancelled(self) -> bool:
        return self._cancelled

    def get_response_sender(self) -> Sender:
        return self.sender


class FakeTriton:
    """The part of triton_python_backend_utils that the library uses."""

    TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL

    class Tensor:
        def __init__(self, name: str, array: Any) -> None:
            assert isinstance(array, np.ndarray)
            self.name, self._array = name, array

        def as_numpy(self) -> Any:
            return self._array

    class TritonError:
        UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = (
            range(8)
        )

        def __init__(self, message: str, code: int = 1) -> None:
            self.text, self.code = message, code

        def message(self) -> str:
            return self.text

    class InferenceResponse:
        def __init__(self, output_tensors: Any, error: Any = None) -> None:
            self.tensors = {tensor.name: tensor.as_numpy() for tensor in output_tensors}
            self.error = error

    class MetricFamily:
        COUNTER, GAUGE, HISTOGRAM = "COUNTER", "GAUGE", "HISTOGRAM"
        made: ClassVar[dict[str, Any]] = {}

        def __init__(self, name: str, description: str, kind: str) -> None:
            assert name not in self.made, f"{name}: Triton keeps one family of a name"
            self.made[name] = self
            self.name, self.description, self.kind = name, description, kind
            self.series: dict[tuple[tuple[str, str], ...], Any] = {}

        def Metric(self, labels: dict[str, str], buckets: Any = None) -> Any:
            assert (buckets is not None) == (self.kind == "HISTOGRAM")
            key = tuple(sorted(labels.items()))
            assert key not in self.series
            self.series[key] = SimpleNamespace(
                calls=[],
                buckets=buckets,
                increment=lambda value: self.series[key].calls.append(("increment", value)),
                set=lambda value: self.series[key].calls.append(("set", value)),
                observe=lambda value: self.series[key].calls.append(("observe", value)),
            )
            return self.series[key]

    @staticmethod
    def get_input_tensor_by_name(request: Request, name: str) -> Any:
        return request.tensors.get(name)


@pytest.fixture(autouse=True)
def quick_and_clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITONE_RUN", str(tmp_path))
    monkeypatch.setattr(backend, "before_end", [])
    monkeypatch.setattr(backend, "EXPORT_SECONDS", 0.01)
    monkeypatch.setattr(FakeTriton.MetricFamily, "made", {})


@pytest.fixture
def model() -> Iterator[Callable[..., StageModel]]:
    made: list[StageModel] = []

    def make(name: str, handler: Callable[..., Any]) -> StageModel:
        class Model(StageModel):
            pb_utils = FakeTriton
            stage = name

            def start(self, metrics: Metrics) -> None:
                self.log: list[str] = ["start"]

            def handle(self, tensors: Any, request: Any) -> Any:
                return handler(self, tensors, request)

            def shut_down(self) -> None:
                self.log.append("shut down")

        made.append(Model())
        made[-1].initialize({})
        return made[-1]

    yield make
    for one in made:
        one.finalize()
    assert not any(thread.name == "metrics" for thread in threading.enumerate())


# Configuration


class Config:
    def __init__(self) -> None:
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []
        self.policy: Any = None
        self.max_batch_size: Any = None
        self.add_input, self.add_output = self.inputs.append, self.outputs.append

    def set_max_batch_size(self, size: int) -> None:
        self.max_batch_size = size

    def set_model_transaction_policy(self, policy: Any) -> None:
        self.policy = policy


@pytest.mark.parametrize("stage", STAGES)
def test_configuration_is_the_stages_table(stage: str) -> None:
    config = Config()
    assert complete_config(config, stage) is config
    assert config.max_batch_size == 0
    assert config.policy == ({"decoupled": True} if STAGES[stage].decoupled else None)
    for entries, specs in ((config.inputs, STAGES[stage].inputs), (config.outputs, STAGES[stage].outputs)):
        assert [(e["name"], e["data_type"], tuple(e["dims"])) for e in entries] == [
            (spec.name, f"TYPE_{spec.dtype}", spec.dims) for spec in specs
        ]
    assert [e["name"] for e in config.inputs if e.get("optional")] == [
        s.name for s in STAGES[stage].inputs if s.optional
    ]
    assert not any("optional" in entry for entry in config.outputs)


@pytest.mark.parametrize("stage", STAGES)
def test_each_backend_is_its_stage(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", FakeTriton)
    path = Path(__file__).parents[2] / "backends" / stage / "model.py"
    spec = importlib.util.spec_from_file_location(f"backend_{stage}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert issubclass(module.TritonPythonModel, StageModel)
    assert module.TritonPythonModel.stage == stage
    config = module.TritonPythonModel.auto_complete_config(Config())
    assert [entry["name"] for entry in config.inputs] == [tensor.name for tensor in STAGES[stage].inputs]


# Plain stages


def test_a_plain_stage_answers_each_request_in_order(model: Callable[..., StageModel]) -> None:
    made = model(
        "integrity", lambda self, tensors, request: {"session": tensors["session"] + 1, "number": [7]}
    )
    responses = made.execute([Request(session=np.array([n], np.uint64)) for n in (1, 2)])
    assert responses is not None
    assert [response.tensors["session"].tolist() for response in responses] == [[2], [3]]
    assert isinstance(responses[0].tensors["number"], np.ndarray)
    assert all(response.error is None for response in responses)


def test_only_tensors_that_came_are_handed_on(model: Callable[..., StageModel]) -> None:
    seen: list[set[str]] = []
    made = model("voicebox", lambda self, tensors, request: seen.append(set(tensors)))
    made.execute([Request(session=np.array([1], np.uint64), stranger=np.zeros(1))])
    assert seen == [{"session"}]


def test_one_plain_request_fails_alone(model: Callable[..., StageModel]) -> None:
    def handle(self: Any, tensors: Any, request: Any) -> Any:
        if tensors["session"][0] == 2:
            raise InvalidArgument("session: 2 is not allowed; allowed: others")
        if tensors["session"][0] == 3:
            raise KeyError("ids")
        return {"session": tensors["session"]}

    made = model("integrity", handle)
    responses = made.execute([Request(session=np.array([n], np.uint64)) for n in (1, 2, 3, 4)])
    assert responses is not None
    errors = [response.error for response in responses]
    assert errors[0] is None and errors[3] is None
    assert errors[1].message() == "INVALID_ARGUMENT: session: 2 is not allowed; allowed: others"
    assert errors[1].code == FakeTriton.TritonError.INVALID_ARG
    assert errors[2].code == FakeTriton.TritonError.INTERNAL
    assert "integrity" in errors[2].message() and "ids" in errors[2].message()
    assert responses[1].tensors == {}


@pytest.mark.parametrize("code", CODES)
def test_codes(code: str) -> None:
    error = triton_error(FakeTriton, TritoneError("why", code))
    expected = {
        "INVALID_ARGUMENT": "INVALID_ARG",
        "NOT_FOUND": "NOT_FOUND",
        "UNAVAILABLE": "UNAVAILABLE",
        "CANCELLED": "CANCELLED",
    }
    assert error.code == getattr(FakeTriton.TritonError, expected.get(code, "INTERNAL"))
    assert error.message() == f"{code}: why"


def test_parameters() -> None:
    assert StageModel.parameters(Request('{"seed": 9223372036854775807, "stop": "é", "stream": false}')) == {
        "seed": 2**63 - 1,
        "stop": "é",
        "stream": False,
    }
    for empty in ("", "{}", None):
        assert StageModel.parameters(Request(empty)) == {}


# Decoupled stages


def test_a_decoupled_stage_answers_through_its_reply(model: Callable[..., StageModel]) -> None:
    def handle(self: Any, tensors: Any, request: Any) -> None:
        reply = self.reply(request)
        reply.send(Event(5, "text", text="é"))
        reply.send({"index": np.array([1], np.int32)})
        reply.send(Event(5, "end"), last=True)

    request = Request()
    assert model("decode", handle).execute([request]) is None
    assert [flags for _, flags in request.sender.sent] == [0, 0, FINAL]
    first, second, last = [response.tensors for response, _ in request.sender.sent]
    assert Event.from_tensors(first) == Event(5, "text", text="é")
    assert second["index"].tolist() == [1]
    assert Event.from_tensors(last).terminal
    for tensors in (first, last):
        for spec in STAGES["decode"].outputs:
            assert tensors[spec.name].dtype == NUMPY_TYPES[spec.dtype]


def test_a_decoupled_stage_may_answer_later(model: Callable[..., StageModel]) -> None:
    replies: list[TritonReply] = []
    request = Request()
    model("decode", lambda self, tensors, request: replies.append(self.reply(request))).execute([request])
    assert request.sender.sent == []
    replies[0].close()
    assert request.sender.sent == [(None, FINAL)]


def test_closing_again_is_harmless() -> None:
    for last in (False, True):
        request = Request()
        reply = TritonReply(FakeTriton, request)
        reply.send(Event(1, "end"), last=last)
        reply.close()
        reply.close()
        assert request.sender.finals == 1


def test_a_reply_knows_whether_the_client_was_gone() -> None:
    assert TritonReply(FakeTriton, Request(cancelled=True)).is_cancelled() is True
    assert TritonReply(FakeTriton, Request()).is_cancelled() is False


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (Unavailable("try later"), FakeTriton.TritonError.UNAVAILABLE, "UNAVAILABLE: try later"),
        (ValueError("odd"), FakeTriton.TritonError.INTERNAL, "INTERNAL: decode: ValueError('odd')"),
    ],
)
def test_a_decoupled_request_fails_alone(
    error: Exception, code: int, text: str, model: Callable[..., StageModel]
) -> None:
    def handle(self: Any, tensors: Any, request: Any) -> None:
        if request is broken:
            raise error
        self.reply(request).close()

    broken, fine = Request(), Request()
    assert model("decode", handle).execute([broken, fine]) is None
    ((response, flags),) = broken.sender.sent
    assert (response.error.code, response.error.message(), flags) == (code, text, FINAL)
    assert fine.sender.sent == [(None, FINAL)]


def test_a_fault_after_the_last_answer_is_no_second_answer(model: Callable[..., StageModel]) -> None:
    def handle(self: Any, tensors: Any, request: Any) -> None:
        self.reply(request).send(Event(1, "end"), last=True)
        if request is broken:
            raise ValueError("too late")

    broken, fine = Request(), Request()
    model("decode", handle).execute([broken, fine])
    assert [request.sender.finals for request in (broken, fine)] == [1, 1]
    assert len(broken.sender.sent) == 1


def test_the_life_of_a_model(model: Callable[..., StageModel]) -> None:
    made = model("decode", lambda self, tensors, request: None)
    assert isinstance(made.metrics, Metrics)
    made.finalize()
    assert made.log == ["start", "shut down"]  # type: ignore[attr-defined]


def test_the_record_of_a_stage_process(model: Callable[..., StageModel], tmp_path: Path) -> None:
    first = model("decode", lambda self, tensors, request: None)
    (record,) = read_records(tmp_path)
    assert (record.stage, record.pid, record.reason) == ("decode", os.getpid(), "")
    assert not first.restarted
    (words,) = backend.before_end
    words("out of memory")
    assert [record.reason for record in read_records(tmp_path)] == ["out of memory"]
    first.finalize()
    assert read_records(tmp_path) == [], "one that ends in order has not died"
    assert model("decode", lambda self, tensors, request: None).restarted
    assert not model("talker", lambda self, tensors, request: None).restarted


# Metrics


@pytest.fixture
def exporter() -> Iterator[tuple[Metrics, Callable[..., Any]]]:
    metrics = Metrics("decode")
    made = MetricsExporter(FakeTriton, metrics, lambda: None)

    def series(name: str, **labels: str) -> Any:
        key = tuple(sorted({"stage": "decode", **labels}.items()))
        wait_until(lambda: name in FakeTriton.MetricFamily.made)
        wait_until(lambda: key in FakeTriton.MetricFamily.made[name].series)
        return FakeTriton.MetricFamily.made[name].series[key]

    yield metrics, series
    made.stop()


def test_counters_are_exported_as_increments(exporter: Any) -> None:
    metrics, series = exporter
    metrics.count("tritone_requests_total", 2, outcome="stop")
    found = series("tritone_requests_total", outcome="stop")
    wait_until(lambda: found.calls == [("increment", 2)])
    metrics.count("tritone_requests_total", outcome="stop")
    metrics.count("tritone_requests_total", outcome="error")
    wait_until(lambda: found.calls == [("increment", 2), ("increment", 1)])
    wait_until(lambda: series("tritone_requests_total", outcome="error").calls == [("increment", 1)])


def test_gauges_are_exported_when_they_change(exporter: Any) -> None:
    metrics, series = exporter
    for value in (3, 0, 5):
        metrics.gauge("tritone_sessions", value)
        metrics.gauge("tritone_queue_requests", value)
        wait_until(lambda value=value: series("tritone_sessions").calls[-1:] == [("set", value)])
    metrics.gauge("tritone_sessions", 5)
    metrics.gauge("tritone_queue_requests", 6)
    wait_until(lambda: series("tritone_queue_requests").calls[-1] == ("set", 6))
    assert series("tritone_sessions").calls == [("set", 3), ("set", 0), ("set", 5)]


def test_histograms_have_their_buckets(exporter: Any) -> None:
    metrics, series = exporter
    for value in (0.5, 0.25):
        metrics.observe("tritone_stage_seconds", value)
    found = series("tritone_stage_seconds")
    wait_until(lambda: found.calls == [("observe", 0.5), ("observe", 0.25)])
    assert found.buckets == list(METRICS["tritone_stage_seconds"].buckets)
    family = FakeTriton.MetricFamily.made["tritone_stage_seconds"]
    assert (family.kind, family.description) == ("HISTOGRAM", METRICS["tritone_stage_seconds"].help)


def test_a_fault_in_exporting_does_not_stop_it(exporter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, series = exporter
    failed = threading.Event()

    def broken(*_: Any, **__: Any) -> Any:
        failed.set()
        raise RuntimeError("expected by the test")

    with monkeypatch.context() as patch:
        patch.setattr(FakeTriton.MetricFamily, "Metric", broken)
        metrics.gauge("tritone_sessions", 1)
        assert failed.wait(5)
    wait_until(lambda: series("tritone_sessions").calls == [("set", 1)])
    metrics.count("tritone_audio_seconds_total", 1.5)
    wait_until(lambda: series("tritone_audio_seconds_total").calls == [("increment", 1.5)])
