"""A server says that it is ready once its ensembles have answered: with throw-away models in a real tritonserver."""

from __future__ import annotations

import json
import textwrap
import threading
import time
from pathlib import Path

import pytest

from tritone.deployment import Deployment
from tritone.supervisor import Server, StartError, control

MODEL = """
    import json, os, signal, time
    from pathlib import Path
    import numpy as np
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        @staticmethod
        def auto_complete_config(config):
            config.add_input({"name": "messages", "data_type": "TYPE_STRING", "dims": [1]})
            config.add_output({"name": "event", "data_type": "TYPE_STRING", "dims": [1]})
            config.add_output({"name": "info", "data_type": "TYPE_STRING", "dims": [1]})
            config.set_max_batch_size(0)
            config.set_model_transaction_policy({"decoupled": True})
            return config

        def initialize(self, args):
            from tritone.deployment import run_directory
            from tritone.processes import ProcessRecord
            ProcessRecord("chat", os.getpid(), ()).write(run_directory())

        def execute(self, requests):
            directory = Path(DIRECTORY)
            for request in requests:
                sender = request.get_response_sender()
                (directory / "asked").write_text(request.parameters())
                while not (directory / "answer").exists():
                    time.sleep(0.02)
                answer = (directory / "answer").read_text()
                if answer == "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                for event in ("waiting", "text", answer):
                    sender.send(pb_utils.InferenceResponse([
                        pb_utils.Tensor("event", np.array([event.encode()], dtype=object)),
                        pb_utils.Tensor("info", np.array([b"why it failed"], dtype=object)),
                    ]))
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def make_server(folder: Path) -> Server:
    (folder / "backends" / "chat").mkdir(parents=True)
    code = textwrap.dedent(MODEL).replace("DIRECTORY", repr(str(folder)))
    (folder / "backends" / "chat" / "model.py").write_text(code)
    (folder / "repository" / "chat" / "1").mkdir(parents=True)
    (folder / "repository" / "chat" / "config.pbtxt").write_text('backend: "chat"\ninstance_group [{ kind: KIND_CPU }]\n')
    ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0, "exit_timeout_seconds": 2}
    return Server(
        Deployment.parse({"server": ports}, "test"),
        models=["chat"],
        repositories=[folder / "repository"],
        backends=folder / "backends",
        cache=folder / "cache",
        logs=folder / "logs",
    )


def test_ready_means_that_an_answer_came(tmp_path: Path) -> None:
    server = make_server(tmp_path)
    starting = threading.Thread(target=server.start, args=(60,))
    starting.start()
    try:
        deadline = time.monotonic() + 30
        while not (tmp_path / "asked").exists():
            assert time.monotonic() < deadline and starting.is_alive()
            time.sleep(0.02)
        address = server.http_url.removeprefix("http://")
        for _ in range(20):
            assert control.answers(address, "/v2/health/live")
            assert not control.is_ready(address) and not control.answers(address, "/v2/models/chat/ready")
            time.sleep(0.02)
        assert starting.is_alive()
        (tmp_path / "answer").write_text("end")
        starting.join(20)
        assert not starting.is_alive() and server.is_ready()
        assert control.answers(address, "/v2/models/chat/ready")
        asked = json.loads((tmp_path / "asked").read_text())
        assert (asked["max_tokens"], asked["ignore_eos"]) == (8, True) and len(asked["cache_salt"]) == 32
    finally:
        (tmp_path / "answer").touch()
        starting.join(20)
        server.stop()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("error", "chat does not answer: error: why it failed"),
        ("cancelled", "chat does not answer: cancelled: why it failed"),
        ("text", "chat does not answer: the answer broke off"),
        ("die", "chat does not answer: .*the process of this stage has ended"),
    ],
)
def test_a_server_that_cannot_answer_does_not_start(answer: str, reason: str, tmp_path: Path) -> None:
    server = make_server(tmp_path)
    (tmp_path / "answer").write_text(answer)
    begun = time.monotonic()
    with pytest.raises(StartError, match=reason) as caught:
        server.start(60)
    assert str(server.log) in caught.value.message and time.monotonic() - begun < 30


def test_nobody_waits_for_ever_for_the_first_answer(tmp_path: Path) -> None:
    server = make_server(tmp_path)
    try:
        with pytest.raises(StartError, match="chat does not answer: no answer: TimeoutError"):
            server.start(5)
    finally:
        (tmp_path / "answer").touch()
