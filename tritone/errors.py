"""Errors that reach a user carry a code of the gRPC family and a message naming field, value and what is allowed."""

from __future__ import annotations

from typing import Any

CODES = ("INVALID_ARGUMENT", "NOT_FOUND", "UNAVAILABLE", "RESOURCE_EXHAUSTED", "INTERNAL", "CANCELLED", "DEADLINE_EXCEEDED")


class TritoneError(Exception):
    """An error with a gRPC-style ``code``; ``str()`` gives ``CODE: message``."""

    code = "INTERNAL"

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        if code is not None:
            if code not in CODES:
                raise ValueError(f"code: {code!r} is unknown; allowed: {', '.join(CODES)}")
            self.code = code

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


class InvalidArgument(TritoneError):
    """The request or a file is wrong; the message names field, value and what is allowed."""

    code = "INVALID_ARGUMENT"


class Unavailable(TritoneError):
    """The stage cannot take the request now; trying again later may work."""

    code = "UNAVAILABLE"


def bad(field: str, value: Any, allowed: str) -> InvalidArgument:
    """The one form of a refusal: field, value as given (shortened), and what is allowed."""
    shown = repr(value)
    if len(shown) > 120:
        shown = shown[:117] + "..."
    return InvalidArgument(f"{field}: {shown} is not allowed; allowed: {allowed}")
