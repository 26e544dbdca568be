"""Server against a real tritonserver with throw-away models: start, failure, crash, and no trace afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.throwaway import make_server, write_model
from tritone.client import Client, RequestError
from tritone.processes import SHARED_MEMORY
from tritone.supervisor import Server, StartError
from tritone.supervisor.installation import PROJECT
from tritone.supervisor.orphans import processes_of
from tritone.supervisor.run_directory import remove_stale

MODEL = """
    class TritonPythonModel(Streams):
        def initialize(self, args):
            from tritone.deployment import Deployment
            self.name = Deployment.from_environment().name

        def execute(self, requests):
            for request in requests:
                sender = request.get_response_sender()
                text = pb_utils.get_input_tensor_by_name(request, "messages").as_numpy()[0].decode()
                answers = [("text", text), ("text", self.name), ("end", "")]
                for event, value in itertools.repeat(answers[0]) if text == "flood" else answers:
                    sender.send(response(event=event, text=value))
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
BROKEN = """
    class TritonPythonModel:
        def initialize(self, args):
            from tritone.errors import InvalidArgument
            raise InvalidArgument("threads: 'x' is not allowed; allowed: a number")

        def execute(self, requests):
            pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path, "tritonetest", MODEL)
    write_model(tmp_path, "tritonebroken", BROKEN)
    return tmp_path


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    with make_server(folder, "tritonetest") as server:
        yield server


PATTERN = "triton_tritone*_backend_shm_region_*"
BEFORE = frozenset(SHARED_MEMORY.glob(PATTERN))


def regions() -> list[Path]:
    """Regions that these tests have left."""
    return [path for path in SHARED_MEMORY.glob(PATTERN) if path not in BEFORE]


def test_starts_answers_and_leaves_nothing(folder: Path) -> None:
    steps: list[str] = []
    server = make_server(folder, "tritonetest")
    server._progress = lambda line, done=0, total=0: steps.append(line)
    with server:
        run = server.run_directory
        assert (run / "deployment.json").is_file()
        with Client(server.grpc_url) as client:
            assert client.is_ready()
            events = list(client.chat("hé 😀", model="tritonetest"))
        assert [event.text for event in events] == ["hé 😀", "a-name", ""], "the stage read the resolved deployment"
        assert 0 not in (server.deployment.server.http_port, server.deployment.server.grpc_port)
        pid = server.pid
    assert steps and set(steps) == {"loading models"}
    assert not run.exists() and not Path(f"/proc/{pid}").exists() and not regions()
    server.stop()  # once more is harmless


def test_a_failed_start_gives_the_models_own_reason(folder: Path) -> None:
    server = make_server(folder, "tritonebroken")
    before = set(SHARED_MEMORY.glob(f"tritone-{os.getpid()}-*"))
    with pytest.raises(StartError) as caught:
        server.start(60)
    lines = caught.value.message.splitlines()
    assert lines[1] == "model 'tritonebroken': INVALID_ARGUMENT: threads: 'x' is not allowed; allowed: a number"
    assert len(lines) == 3 and str(server.log) in lines[2]
    assert set(SHARED_MEMORY.glob(f"tritone-{os.getpid()}-*")) == before


def test_a_killed_server_ends_its_streams(server: Server) -> None:
    with Client(server.grpc_url) as client, client.chat("flood", model="tritonetest") as stream:
        next(stream)
        os.kill(server.pid, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(RequestError) as caught:
            list(stream)
        assert caught.value.code == "UNAVAILABLE" and time.monotonic() - began < 5
    assert server.wait(5) == -signal.SIGKILL
    assert not server.is_ready()
    server.stop()
    assert not regions(), "a stage that hangs is killed and its shared memory removed"


@pytest.mark.parametrize("busy", [False, True])
def test_a_killed_supervisor_takes_the_server_with_it(folder: Path, busy: bool) -> None:
    code = f"""
        import sys, threading
        from pathlib import Path
        from tests.server.throwaway import make_server
        server = make_server(Path({str(folder)!r}), "tritonetest")
        # From a thread that ends: the server must outlive it.
        starter = threading.Thread(target=server.start)
        starter.start()
        starter.join()
        print(server.pid, server.grpc_url, server.run_directory, flush=True)
        sys.stdin.read()
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, cwd=PROJECT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        pid, url, run = supervisor.stdout.readline().split()
        time.sleep(0.3)
        assert Path(f"/proc/{pid}").exists()
        with Client(url) as client:
            # A stage whose server is killed while it sends hangs; an idle one ends by itself.
            stream = client.chat("flood", model="tritonetest") if busy else None
            if stream is not None:
                next(stream)
            supervisor.kill()
            supervisor.wait()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()
    time.sleep(2)
    assert busy or not processes_of(Path(run))
    assert Path(run) in remove_stale(), "as the next start does"
    time.sleep(0.2)
    assert not processes_of(Path(run)) and not regions()
