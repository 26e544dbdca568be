"""How this package refuses: with the field, the value and what is allowed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class QuantizationError(ValueError):
    """A checkpoint, a setting or a tensor that cannot be quantised or read; the message names it and what is allowed."""


def bad(field: str, value: Any, allowed: str) -> QuantizationError:
    """The one form of a refusal: field, value as given (shortened), and what is allowed."""
    shown = repr(value)
    if len(shown) > 120:
        shown = shown[:117] + "..."
    return QuantizationError(f"{field}: {shown} is not allowed; allowed: {allowed}")


def one_of(field: str, value: Any, allowed: Sequence[Any]) -> None:
    """Refuses ``value`` unless it is in ``allowed``."""
    if value not in allowed:
        raise bad(field, value, ", ".join(map(str, allowed)))
