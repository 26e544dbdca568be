"""What the supervisor does around a server, each part alone: ports, run directory, backend directory, log, resolution."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tritone.deployment import Deployment, Server
from tritone.errors import TritoneError
from tritone.models.talker.config import HEART
from tritone.processes import SHARED_MEMORY
from tritone.sizes import required_shared_memory
from tritone.supervisor import resolve
from tritone.supervisor.backend_directory import build_backend_directory
from tritone.supervisor.installation import PROJECT, Installation
from tritone.supervisor.log import failure_reason, loaded_models
from tritone.supervisor.orphans import end_processes, processes_of
from tritone.supervisor.ports import choose_ports
from tritone.supervisor.process import MOMENT_SECONDS, ChildProcess
from tritone.supervisor.run_directory import RunDirectory, check_shared_memory, remove_stale
from tritone.voices import known_voices


def test_free_ports_differ_and_fixed_ones_stay() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    chosen = choose_ports(Server(http_port=0, grpc_port=free, metrics_port=0))
    assert chosen.grpc_port == free
    assert len({chosen.http_port, chosen.grpc_port, chosen.metrics_port, 0}) == 4


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        with pytest.raises(TritoneError, match=rf"grpc_port: {port} cannot be used on 127\.0\.0\.1: Address already in use"):
            choose_ports(Server(http_port=0, grpc_port=port, metrics_port=0))


def test_a_port_wanted_twice_is_refused() -> None:
    with pytest.raises(TritoneError, match="grpc_port: 18999 is already http_port"):
        choose_ports(Server(http_port=18999, grpc_port=18999, metrics_port=0))


def test_run_directory_holds_the_deployment_and_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = Deployment(name="x", checkpoint="/somewhere")
    with RunDirectory.create(deployment, tmp_path) as run:
        monkeypatch.setenv("TRITONE_RUN", str(run.path))
        assert Deployment.from_environment() == deployment
        assert remove_stale(tmp_path) == [], "in use"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("make", ["RunDirectory.create(Deployment(), root)", "LockedDirectory.make(root)"])
def test_the_directory_of_a_killed_process_is_removed(tmp_path: Path, make: str) -> None:
    code = f"""
        import os, signal
        from pathlib import Path
        from tritone.deployment import Deployment
        from tritone.locked_directory import LockedDirectory
        from tritone.supervisor.run_directory import RunDirectory
        root = Path({str(tmp_path)!r})
        made = {make}
        (made.path / "pool").write_bytes(b"x")
        os.kill(os.getpid(), signal.SIGKILL)
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=PROJECT, check=False)
    assert ended.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert remove_stale(tmp_path) == [left]
    assert not left.exists()


def test_a_stage_that_outlives_its_server_is_ended(tmp_path: Path) -> None:
    run = tmp_path / "tritone-1-abc"
    run.mkdir()
    region = SHARED_MEMORY / f"triton_test_backend_shm_region_{os.getpid()}"
    region.write_text("")
    arguments = ["/wheel/triton_python_backend_stub", "-Ec", "import time; time.sleep(60)", region.name]

    def start(directory: Path) -> subprocess.Popen[bytes]:
        return subprocess.Popen(arguments, executable=sys.executable, env={"TRITONE_RUN": str(directory)})

    with start(run) as orphan, start(tmp_path / "tritone-1-abcd") as another:
        deadline = time.monotonic() + 5
        while processes_of(run) != [orphan.pid] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert end_processes(run, grace=0) == [orphan.pid]
        assert orphan.wait(5) == -signal.SIGKILL and not region.exists()
        assert another.poll() is None
        another.kill()


def test_a_directory_whose_lock_is_yet_to_come_is_left_alone(tmp_path: Path) -> None:
    young = tmp_path / "tritone-1-abc"
    young.mkdir()
    assert remove_stale(tmp_path) == []
    os.utime(young, (0, 0))
    assert remove_stale(tmp_path) == [young]


def test_too_little_shared_memory_is_said_before_the_start(tmp_path: Path) -> None:
    check_shared_memory(0, tmp_path)
    with pytest.raises(TritoneError, match="MiB free, this deployment needs 1073741888 MiB") as caught:
        check_shared_memory(1 << 50, tmp_path)
    assert caught.value.code == "RESOURCE_EXHAUSTED"


def test_backend_directory(tmp_path: Path) -> None:
    backends, cache = tmp_path / "backends", tmp_path / "cache"
    for name in ("one", "two"):
        (backends / name).mkdir(parents=True)
        (backends / name / "model.py").write_text("")
    installation = Installation.find()
    built = build_backend_directory(backends, cache, installation)
    library = built / "python" / "libtriton_python.so"
    assert library.is_file() and not library.is_symlink(), "Triton refuses a symlink here"
    assert (built / "python" / "triton_python_backend_stub").is_symlink(), "a copy would not find its libraries"
    assert (built / "python" / "tritone").resolve() == PROJECT / "tritone"
    assert (built / "one" / "model.py").is_file() and (built / "two" / "model.py").is_file()
    before = library.stat()

    (backends / "two" / "model.py").unlink()
    (backends / "three").mkdir()
    (backends / "three" / "model.py").write_text("")
    assert build_backend_directory(backends, cache, installation) == built
    assert sorted(path.name for path in built.iterdir()) == [".lock", "one", "python", "three"]
    assert library.stat().st_ino == before.st_ino, "what is right is left alone: a server may be running on it"


NOISE = """\
W1129 17:46:55.253746 8876 pinned_memory_manager.cc:273] "Unable to allocate pinned system memory"
E1129 17:46:55.253897 8876 server.cc:241] "CudaDriverHelper has not been initialized."
I1129 17:46:55.254931 8876 model_lifecycle.cc:472] "loading: echo:1"
I1129 17:46:55.254931 8876 model_lifecycle.cc:472] "loading: fine:1"
I1129 17:46:57.720593 8741 model_lifecycle.cc:839] "successfully loaded 'fine'"
+-------+---------+
| Model | Version |
"""


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (
            "E1129 17:46:56.8 8876 model_lifecycle.cc:642] \"failed to load 'echo' version 1: Internal: InvalidArgument: "
            "INVALID_ARGUMENT: voice: 'x' is unknown; allowed: heart\\n\\nAt:\\n  /b/echo/model.py(4): initialize\\n\"",
            "model 'echo': INVALID_ARGUMENT: voice: 'x' is unknown; allowed: heart",
        ),
        (
            "E1129 17:46:57.9 8925 model_lifecycle.cc:642] \"failed to load 'imp' version 1: Internal: ModuleNotFoundError: "
            "No module named 'nosuch'\\n\\nAt:\\n  /b/imp/model.py(1): <module>\\n  <frozen importlib._bootstrap>(241): f\\n\"",
            "model 'imp': ModuleNotFoundError: No module named 'nosuch' (/b/imp/model.py, line 1)",
        ),
        (
            "error: creating server: Invalid argument - load failed for model 'gone': not found;",
            "load failed for model 'gone': not found;",
        ),
        ("terminate called\nSegmentation fault", "terminate called\nSegmentation fault"),
    ],
)
def test_the_reason_of_a_failed_start(tmp_path: Path, lines: str, reason: str) -> None:
    log = tmp_path / "log"
    log.write_text(NOISE + lines + "\n")
    assert failure_reason(log).endswith(reason)
    assert loaded_models(log.read_text()) == (1, 2)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 4096}))
    (directory / "tokenizer.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"")
    return directory


def test_resolution_leaves_nothing_open(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "has_bfloat16", lambda: True)
    deployment = Deployment.parse(
        {"checkpoint": str(checkpoint), "voice": None, "decode": {"pool_tokens": 1024, "threads": 3}}, "test"
    )
    resolved = resolve.resolve_deployment(deployment, tmp_path)
    assert resolved.checkpoint == str(checkpoint) and resolved.voice is None
    assert resolved.prefill.threads == resolve.usable_cores() and resolved.decode.threads == 3
    assert resolved.prefill.dtype == "bfloat16"
    assert resolved.max_context == 1024, "the smaller pool, not the checkpoint's own 4096"
    assert resolve.resolve_deployment(resolved, tmp_path) == resolved


def test_a_trained_voice_has_a_voicebox_and_pages(checkpoint: Path, tmp_path: Path) -> None:
    config = {"model_type": "llama", "max_position_embeddings": 4096, "num_hidden_layers": 1, "num_attention_heads": 1}
    (checkpoint / "config.json").write_text(json.dumps(config | {"head_dim": 16, "hidden_size": 16}))
    box = tmp_path / "box"
    box.mkdir()
    (box / "voice.json").write_text("{}")
    talker = {"dtype": "bfloat16", "pool_tokens": 1000, "hidden_blocks": 16}
    written = {"checkpoint": str(checkpoint), "voice": "demo:heart", "voicebox": {"voice": str(box)}, "talker": talker}
    deployment = resolve.resolve_deployment(Deployment.parse(written, "test"), tmp_path)
    assert deployment.voice == str(HEART) and deployment.voicebox.voice == str(box)
    assert resolve.resolve_deployment(deployment, tmp_path) == deployment
    voices = known_voices(deployment)
    assert voices is not None and (voices.names, voices.default) == (("heart",), "heart")
    # Keys and values of 5 layers with 3 heads of 64 numbers, 2 bytes each, in 31 pages of 32 tokens.
    without = required_shared_memory(deployment.model_copy(update={"voice": str(box)}))
    assert required_shared_memory(deployment) - without == 31 * 32 * 2 * 5 * 3 * 64 * 2
    other = Deployment.parse(written | {"voice": str(box)}, "test")
    assert resolve.resolve_deployment(other, tmp_path).voicebox.voice is None


def test_a_stage_may_have_the_same_model_in_another_precision(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve, "has_bfloat16", lambda: True)
    other = tmp_path / "int4"
    shutil.copytree(checkpoint, other)
    config = json.loads((checkpoint / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    decode = {"checkpoint": str(other), "weights": "float32"}
    written = {"checkpoint": str(checkpoint), "voice": None, "decode": decode}
    resolved = resolve.resolve_deployment(Deployment.parse(written, "test"), tmp_path)
    assert (resolved.prefill.checkpoint, resolved.decode.checkpoint) == (str(checkpoint), str(other))
    assert (resolved.prefill.dtype, resolved.decode.dtype) == ("bfloat16", "float32"), "as the weights say"
    (other / "config.json").write_text(json.dumps(config | {"vocab_size": 7}))
    with pytest.raises(TritoneError, match=r"decode.checkpoint: vocab_size of .*int4: 7 .*allowed: None, as in .*checkpoint"):
        resolve.resolve_deployment(Deployment.parse(written, "test"), tmp_path)


def test_a_checkpoint_without_a_context_length_is_named(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(TritoneError, match="max_position_embeddings: None"):
        resolve.resolve_deployment(Deployment(checkpoint=str(checkpoint), voice=None), tmp_path)


@pytest.mark.parametrize("over", [False, True])
def test_a_server_that_does_not_end_is_killed(over: bool, tmp_path: Path) -> None:
    """At the latest when its time is over; sooner where nothing is left for it to end."""
    command = ["sh", "-c", "trap '' TERM; echo ready; while true; do sleep 0.1; done"]
    child = ChildProcess(command, dict(os.environ), tmp_path / "log", tmp_path)
    while (tmp_path / "log").read_text() != "ready\n":
        time.sleep(0.01)
    timeout = 20.0 if over else 0.5
    begun = time.monotonic()
    assert child.stop(timeout, lambda: over) == -signal.SIGKILL
    took = time.monotonic() - begun
    assert (MOMENT_SECONDS if over else timeout) <= took < 5
