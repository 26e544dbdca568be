"""The names of the precisions that a deployment may ask for."""

from __future__ import annotations

from quantization.errors import one_of

WEIGHTS = ("bf16", "fp8", "int8", "int4", "nvfp4")
KV = ("bf16", "fp8")


def check_weights(name: str, field: str = "weights") -> str:
    """``name`` if it is one of ``WEIGHTS``; fp8 is e4m3."""
    one_of(field, name, WEIGHTS)
    return name


def check_kv(name: str, field: str = "kv") -> str:
    """``name`` if it is one of ``KV``; fp8 is e4m3, and fp8_e5m2 is refused like any other unknown name."""
    one_of(field, name, KV)
    return name
