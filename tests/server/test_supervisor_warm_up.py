"""A server says that it is ready once its ensembles have answered: with throw-away models in a real tritonserver."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from tests.server.throwaway import make_server, write_model
from tritone.supervisor import Server, StartError, control

MODEL = """
    class TritonPythonModel(Streams):
        def initialize(self, args):
            from tritone.backend import make_record
            from tritone.deployment import run_directory
            make_record("chat").write(run_directory())

        def execute(self, requests):
            directory = Path(DIRECTORY)
            for request in requests:
                sender = request.get_response_sender()
                (directory / "asked").write_text(request.parameters())
                while not (directory / "answer").exists():
                    if (directory / "beats").exists():
                        sender.send(response(event="waiting"))
                    time.sleep(0.02)
                answer = (directory / "answer").read_text()
                if answer == "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                for event in ("waiting", "text", answer):
                    sender.send(response(event=event, info="why it failed"))
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def chat_server(folder: Path) -> Server:
    """Its model writes the file ``asked``, waits for the file ``answer`` and sends the event named there."""
    write_model(folder, "chat", MODEL.replace("DIRECTORY", repr(str(folder))))
    return make_server(folder, "chat")


def test_ready_means_that_an_answer_came(tmp_path: Path) -> None:
    server = chat_server(tmp_path)
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


@pytest.mark.parametrize("answer", ["audio", "end"])
def test_an_answer_may_end_without_a_sound(answer: str, tmp_path: Path) -> None:
    (tmp_path / "answer").write_text(answer)
    with chat_server(tmp_path) as server:
        assert server.is_ready()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("error", "error: why it failed"),
        ("cancelled", "cancelled: why it failed"),
        ("audio_lost", "audio_lost: why it failed"),
        ("text", "the answer broke off"),
        ("die", ".*the process of this stage has ended"),
    ],
)
def test_a_server_that_cannot_answer_does_not_start(answer: str, reason: str, tmp_path: Path) -> None:
    server = chat_server(tmp_path)
    (tmp_path / "answer").write_text(answer)
    begun = time.monotonic()
    with pytest.raises(StartError, match=rf"\(at most 60\): chat does not answer: {reason}") as caught:
        server.start(60)
    assert str(server.log) in caught.value.message and time.monotonic() - begun < 30


@pytest.mark.parametrize("beats", [False, True])
def test_nobody_waits_for_ever_for_the_first_answer(beats: bool, tmp_path: Path) -> None:
    """Nor for an answer that is always about to come."""
    server = chat_server(tmp_path)
    if beats:
        (tmp_path / "beats").touch()
    try:
        with pytest.raises(StartError, match=r"not ready after \d+ s \(at most 5\): chat does not answer: no answer in time"):
            server.start(5)
    finally:
        (tmp_path / "answer").touch()
