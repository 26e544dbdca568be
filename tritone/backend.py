"""The glue between a stage and Triton's Python backend, shared by every ``backends/<stage>/model.py``.

Nothing here imports ``triton_python_backend_utils``: the model hands its module in, so the library stays importable
without Triton.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from tritone.errors import TritoneError
from tritone.fatal import before_end, end_if_out_of_memory
from tritone.messages import STAGES, StageSpec, Tensors
from tritone.metrics import METRICS, Metrics
from tritone.processes import ProcessRecord, mark_started

EXPORT_SECONDS = 0.25
PARENT_SECONDS = 1.0
REGION = re.compile(r"triton_\w+_backend_shm_region_[\w-]+")
"""Name of a stub's shared-memory region, one of its arguments."""

log = logging.getLogger(__name__)


def complete_config(config: Any, stage: str) -> Any:
    """Fill a model's config from :data:`STAGES`, the table that the messages are made from."""
    spec = STAGES[stage]
    for tensor in spec.inputs:
        config.add_input(tensor.as_dict(output=False))
    for tensor in spec.outputs:
        config.add_output(tensor.as_dict(output=True))
    config.set_max_batch_size(0)
    if spec.decoupled:
        config.set_model_transaction_policy({"decoupled": True})
    return config


class TritonReply:
    """A :class:`tritone.stages.reply.Reply` over a Triton response sender; closing twice is harmless."""

    def __init__(self, pb_utils: Any, request: Any) -> None:
        self._pb = pb_utils
        self._sender = request.get_response_sender()
        self._cancelled = bool(request.is_cancelled())
        self._closed = False

    def send(self, message: Any, *, last: bool = False) -> None:
        tensors: Tensors = message if isinstance(message, dict) else message.to_tensors()
        response = self._pb.InferenceResponse([self._pb.Tensor(name, array) for name, array in tensors.items()])
        if last:
            self._closed = True
            self._sender.send(response, flags=self._pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        else:
            self._sender.send(response)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._sender.send(flags=self._pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def fail(self, error: TritoneError) -> None:
        """A Triton error in place of an answer; only before anything was sent (see the notes on ensembles)."""
        if self._closed:
            return
        self._closed = True
        response = self._pb.InferenceResponse(output_tensors=[], error=triton_error(self._pb, error))
        self._sender.send(response, flags=self._pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def is_cancelled(self) -> bool:
        return self._cancelled


def triton_error(pb_utils: Any, error: TritoneError) -> Any:
    """The error as Triton's, with its status code where Triton has one."""
    codes = {
        "INVALID_ARGUMENT": pb_utils.TritonError.INVALID_ARG,
        "NOT_FOUND": pb_utils.TritonError.NOT_FOUND,
        "UNAVAILABLE": pb_utils.TritonError.UNAVAILABLE,
        "CANCELLED": pb_utils.TritonError.CANCELLED,
    }
    return pb_utils.TritonError(str(error), codes.get(error.code, pb_utils.TritonError.INTERNAL))


class MetricsExporter:
    """Carries a stage's metrics to Triton's ``/metrics``, in a thread of its own (each call is a trip to the server)."""

    def __init__(self, pb_utils: Any, metrics: Metrics, before: Callable[[], None]) -> None:
        """``before`` is called before each export."""
        self._pb = pb_utils
        self._before = before
        self._metrics = metrics
        self._families: dict[str, Any] = {}
        self._series: dict[Any, Any] = {}
        self._sent: dict[Any, float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while not self._stop.wait(EXPORT_SECONDS):
            try:
                self._before()
            except Exception:
                log.exception("purge")
            self._export()

    def _export(self) -> None:
        counters, gauges, observed = self._metrics.drain()
        for key, value in counters.items():
            self._call(key, "increment", value)
        for key, value in gauges.items():
            if self._sent.get(key) != value and self._call(key, "set", value):
                self._sent[key] = value
        for key, values in observed.items():
            for value in values:
                self._call(key, "observe", value)

    def _call(self, key: Any, method: str, value: float) -> bool:
        # Metrics must never stop a stage, nor one series the others.
        try:
            getattr(self._get(key), method)(value)
        except Exception:
            log.exception("metric %s", key)
            return False
        return True

    def _get(self, key: Any) -> Any:
        series = self._series.get(key)
        if series is None:
            name, labels = key
            spec = METRICS[name]
            if name not in self._families:
                kind = getattr(self._pb.MetricFamily, spec.kind.upper())
                # The family must stay referenced, or its metrics become invalid.
                self._families[name] = self._pb.MetricFamily(name=name, description=spec.help, kind=kind)
            extra = {"buckets": list(spec.buckets)} if spec.kind == "histogram" else {}
            series = self._series[key] = self._families[name].Metric(labels=dict(labels), **extra)
        return series


def end_with_parent() -> None:
    """End this process when the server's is gone: a stub whose server was killed may wait for it for ever.

    The stub gets a moment to end by itself, which also removes its shared memory; the supervisor removes what is left.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_SECONDS)
        time.sleep(PARENT_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def make_record(stage: str) -> ProcessRecord:
    """This process, with the names of the shared-memory regions that Triton made for it."""
    words = Path("/proc/self/cmdline").read_bytes().decode(errors="replace").split("\0")
    return ProcessRecord(stage, os.getpid(), tuple(word for word in words if REGION.fullmatch(word)))


class StageModel:
    """Base of every Triton model: reads tensors, calls :meth:`handle`, turns what it raises into an answer.

    A subclass sets ``pb_utils`` and ``stage``, makes its stage in :meth:`start`, and handles one request at a time.
    """

    pb_utils: ClassVar[Any]
    stage: ClassVar[str]

    def start(self, metrics: Metrics) -> None:
        raise NotImplementedError

    def handle(self, tensors: Tensors, request: Any) -> Any:
        """One request. A plain stage returns its tensors; a decoupled one answers through a :class:`TritonReply`."""
        raise NotImplementedError

    def purge(self) -> None:
        """Forget what the stage holds of cancelled requests that Triton has dropped; called a few times a second."""

    def shut_down(self) -> None:
        """Stop the stage's threads."""

    def initialize(self, args: dict[str, Any]) -> None:
        # Only here: the throw-away process that completes a configuration must start fast.
        from tritone.deployment import run_directory

        logging.basicConfig(level=logging.INFO, format=f"{self.stage}: %(message)s")
        end_with_parent()
        self._run = run_directory()
        self._record = make_record(self.stage)
        self._record.write(self._run)
        before_end.append(lambda reason: replace(self._record, reason=reason).write(self._run))
        self._spec: StageSpec = STAGES[self.stage]
        self.metrics = Metrics(self.stage)
        self.restarted = mark_started(self._run, self.stage)
        """Whether sessions may be under way that an earlier process of this stage knew."""
        self.metrics.count("tritone_stage_starts_total")
        # OpenMP keeps a team for each thread that computed. Where the teams together outnumber the cores, their idle members
        # sleep at once, whatever GOMP_SPINCOUNT says, and each parallel part of a step waits for one to wake. So the thread
        # that loads ends, and its team with it.
        with ThreadPoolExecutor(1) as loading:
            loading.submit(self.start, self.metrics).result()
        self._exporter = MetricsExporter(self.pb_utils, self.metrics, self.purge)

    def execute(self, requests: list[Any]) -> list[Any] | None:
        responses = [self._one(request) for request in requests]
        return None if self._spec.decoupled else responses

    def finalize(self) -> None:
        self.shut_down()
        self._exporter.stop()
        self._record.path(self._run).unlink(missing_ok=True)

    def _one(self, request: Any) -> Any:
        pb = self.pb_utils
        self._reply: TritonReply | None = None
        try:
            tensors: Tensors = {}
            for spec in self._spec.inputs:
                tensor = pb.get_input_tensor_by_name(request, spec.name)
                if tensor is not None:
                    tensors[spec.name] = tensor.as_numpy()
            made = self.handle(tensors, request)
        except Exception as error:  # one request's fault ends that request
            end_if_out_of_memory(self.stage, error)
            if not isinstance(error, TritoneError):
                log.exception("%s", self.stage)
                error = TritoneError(f"{self.stage}: {error!r}")
            if self._spec.decoupled:
                (self._reply or TritonReply(pb, request)).fail(error)
                return None
            return pb.InferenceResponse(output_tensors=[], error=triton_error(pb, error))
        if self._spec.decoupled:
            return None
        return pb.InferenceResponse([pb.Tensor(name, np.asarray(array)) for name, array in made.items()])

    def reply(self, request: Any) -> TritonReply:
        self._reply = TritonReply(self.pb_utils, request)
        return self._reply

    @staticmethod
    def parameters(request: Any) -> dict[str, Any]:
        return dict(json.loads(request.parameters() or "{}"))
