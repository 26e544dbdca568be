"""How values become Triton tensors and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tritone.errors import InvalidArgument
from tritone.messages.specs import Tensors


def string(value: str) -> npt.NDArray[Any]:
    return np.array([value.encode("utf-8")], dtype=np.object_)


def json_tensor(value: Any) -> npt.NDArray[Any]:
    return np.array([json.dumps(value, ensure_ascii=True, separators=(",", ":")).encode()], dtype=np.object_)


def read_bytes(tensors: Mapping[str, npt.NDArray[Any]], name: str) -> bytes:
    """The single BYTES element of ``name``; another shape is an error naming it."""
    array = tensors[name]
    if array.size != 1:
        raise InvalidArgument(f"{name}: shape {list(array.shape)} is not allowed; allowed: [1]")
    value = array.reshape(-1)[0]
    return value.encode("utf-8") if isinstance(value, str) else bytes(value)


def load(tensors: Mapping[str, npt.NDArray[Any]], name: str) -> Any:
    return json.loads(read_bytes(tensors, name))


def session_tensor(session: int) -> npt.NDArray[Any]:
    return np.array([session], dtype=np.uint64)


def report_tensors(report: Mapping[str, Any]) -> Tensors:
    """The answer of the integrity model to a client that asks for its report."""
    return {"report": json_tensor(report)}


def client_tensors(
    index: int,
    kind: str,
    *,
    text: str | None = None,
    audio: npt.NDArray[np.float32] | None = None,
    audio_base64: str | None = None,
    info: dict[str, Any] | None = None,
) -> Tensors:
    """One response to the client; outputs that do not apply are left out."""
    tensors: Tensors = {"index": np.array([index], np.int32), "event": string(kind)}
    if text is not None:
        tensors["text"] = string(text)
    if audio is not None:
        tensors["audio"] = audio
    if audio_base64 is not None:
        tensors["audio_base64"] = string(audio_base64)
    if info is not None:
        tensors["info"] = json_tensor(info)
    return tensors
