"""What the supervisor asks a tritonserver over HTTP. Not with urllib: it would ask a proxy from the environment."""

from __future__ import annotations

import http.client
import re

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


def holds_requests(metrics_address: str) -> bool:
    """Whether any stage holds a request, by the gauges of /metrics; they are at most a quarter of a second old."""
    try:
        _, page = ask(metrics_address, "GET", "/metrics", 5)
    except (OSError, http.client.HTTPException):
        return False
    return any(float(value) for value in _OPEN.findall(page))
