"""Chooses the server's ports."""

from __future__ import annotations

import socket

from tritone.deployment import Server
from tritone.errors import TritoneError

FIELDS = ("http_port", "grpc_port", "metrics_port")


def choose_ports(server: Server) -> Server:
    """Replaces each port 0 by a free one; raises TritoneError naming a port that is taken or wanted twice.

    All are held at once while choosing, so they differ; another process may still take one before Triton binds it,
    which the start then reports.
    """
    held: list[socket.socket] = []
    chosen: dict[str, int] = {}
    try:
        # Fixed ports first, so that a free one is never one of them.
        for field in sorted(FIELDS, key=lambda name: getattr(server, name) == 0):
            port: int = getattr(server, field)
            if port and port in chosen.values():
                other = next(name for name, value in chosen.items() if value == port)
                raise TritoneError(f"{field}: {port} is already {other}; allowed: three different ports", "INVALID_ARGUMENT")
            family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
            probe = socket.socket(family, socket.SOCK_STREAM)
            held.append(probe)
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((server.host, port))
            except OSError as error:
                reason = error.strerror or str(error)
                raise TritoneError(
                    f"{field}: {port} cannot be used on {server.host}: {reason}; allowed: a free port, or 0 to take any",
                    "UNAVAILABLE",
                ) from None
            chosen[field] = probe.getsockname()[1]
    finally:
        for probe in held:
            probe.close()
    return server.model_copy(update=chosen)
