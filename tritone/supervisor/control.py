"""What the supervisor asks a tritonserver over HTTP. Not with urllib: it would ask a proxy from the environment."""

from __future__ import annotations

import http.client
import json
import re

from tritone.errors import TritoneError

LOAD_SECONDS = 300.0
_OPEN = re.compile(r"^tritone_(?:sessions|queue_requests|running_requests)\{[^}]*\} (\S+)$", re.MULTILINE)


def ask(address: str, method: str, path: str, timeout: float) -> tuple[int, str]:
    """Status and body; raises OSError or http.client.HTTPException."""
    connection = http.client.HTTPConnection(address, timeout=timeout)
    try:
        connection.request(method, path, headers={"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")
    finally:
        connection.close()


def is_ready(address: str) -> bool:
    """Whether the server says that it and all its models are ready."""
    return answers(address, "/v2/health/ready")


def answers(address: str, path: str) -> bool:
    try:
        return ask(address, "GET", path, 5)[0] == 200
    except (OSError, http.client.HTTPException):
        return False


def load_model(address: str, model: str) -> None:
    """Returns once the model is loaded; raises TritoneError with Triton's reason."""
    try:
        status, body = ask(address, "POST", f"/v2/repository/models/{model}/load", LOAD_SECONDS)
    except (OSError, http.client.HTTPException) as error:
        raise TritoneError(f"the server does not answer: {error!r}", "UNAVAILABLE") from None
    if status != 200:
        try:
            reason = str(json.loads(body)["error"])
        except (ValueError, KeyError, TypeError):
            reason = body
        raise TritoneError(reason, "UNAVAILABLE")


def holds_requests(metrics_address: str) -> bool:
    """Whether any stage holds a request, by the gauges of /metrics; they are at most a quarter of a second old."""
    try:
        _, page = ask(metrics_address, "GET", "/metrics", 5)
    except (OSError, http.client.HTTPException):
        return False
    return any(float(value) for value in _OPEN.findall(page))
