"""`tritone doctor`, and how the command line says errors."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from tritone.cli import main
from tritone.commands import checks
from tritone.deployment import Deployment
from tritone.errors import TritoneError

FREE = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]


def test_doctor_finds_what_the_tests_run_on(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json", *FREE])
    report = json.loads(capsys.readouterr().out)
    states = {check["name"]: check["state"] for check in report["checks"]}
    assert code == 0 and report["ok"]
    assert states["python"] == states["tritonserver"] == states["libpython"] == states["ports"] == "ok"
    assert all(check["fix"] for check in report["checks"] if check["state"] == "missing")


def test_what_is_missing_is_named_with_its_cure(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def find() -> None:
        raise TritoneError("the tritonserver binary is missing: install nvidia-pytriton")

    monkeypatch.setattr(checks.Installation, "find", staticmethod(find))
    monkeypatch.setattr(checks, "has_libpython", lambda: False)
    assert main(["doctor", *FREE]) == 1
    shown = capsys.readouterr().out
    assert "missing  tritonserver   the tritonserver binary is missing" in shown
    assert "-> install nvidia-pytriton" in shown and "-> `apt-get install libpython3." in shown
    assert "2 missing" in shown


def test_a_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        assert main(["doctor", "--json", *FREE[2:], "--http-port", str(port)]) == 1
    (ports,) = [check for check in json.loads(capsys.readouterr().out)["checks"] if check["name"] == "ports"]
    assert ports["state"] == "missing" and f"http_port: {port}" in ports["detail"]


def test_requirements_are_those_of_this_python(tmp_path: Path) -> None:
    lines = ["# comment", "numpy==1.26.4", 'a==1 ; python_version < "3"', 'a==2 ; python_version >= "3"']
    (tmp_path / "runtime.txt").write_text("\n".join(lines))
    (tmp_path / "nodeps.txt").write_text("b-c==0.1  # why\n")
    assert checks.required_packages(tmp_path) == [("numpy", "1.26.4"), ("a", "2"), ("b-c", "0.1")]


def test_memory_and_directories(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITONE_CACHE", str(tmp_path))
    report = {check.name: check for check in checks.run_checks(Deployment(checkpoint="/no/such", voice="demo:hibari"))}
    assert report["checkpoint"].state == "missing" and report["voice"].state == "note"
    assert report["/dev/shm"].state == "ok"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["serve", "--deployment", "/no/such.yaml"], "deployment: '/no/such.yaml' is no file"),
        (["serve", "--set", "decode.nothing=1"], "decode.nothing: 1: no such field"),
        (["serve", "--set", "decode"], "FIELD=VALUE"),
        (["serve", "--set", "name.x=1"], "a field of the deployment"),
        (["chat", "--url", "127.0.0.1:1", "hello"], "is `tritone serve` running?"),
        (["chat", "--url", "127.0.0.1:1", "--wav", "/proc/no/x.wav", "hello"], "cannot be written"),
    ],
)
def test_errors_are_told_without_a_traceback(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 1
    shown = capsys.readouterr().err
    assert told in shown and shown.startswith("tritone: ") and "Traceback" not in shown
