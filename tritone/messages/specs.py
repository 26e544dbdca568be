"""The tensors of each stage's Triton model: the table that backends and their ``auto_complete_config`` read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy.typing as npt

Tensors = dict[str, npt.NDArray[Any]]

FRAME_WIDTH = 131
"""Floats of one speech frame on the wire: 130 acoustic features and the fundamental frequency in Hz."""


@dataclass(frozen=True)
class TensorSpec:
    """One Triton tensor: ``dims`` without a batch dimension, -1 for a free length."""

    name: str
    dtype: str
    dims: tuple[int, ...]
    optional: bool = False

    def as_dict(self, *, output: bool) -> dict[str, Any]:
        entry: dict[str, Any] = {"name": self.name, "data_type": f"TYPE_{self.dtype}", "dims": list(self.dims)}
        if self.optional and not output:
            entry["optional"] = True
        return entry


@dataclass(frozen=True)
class StageSpec:
    """Inputs and outputs of a stage's Triton model; a decoupled one answers a request 0, 1 or many times."""

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    decoupled: bool


_SESSION = TensorSpec("session", "UINT64", (1,))
_IDS = TensorSpec("ids", "INT32", (-1,))
_REQUEST = TensorSpec("request", "STRING", (1,))
_MEDIA = TensorSpec("media", "UINT8", (-1,), optional=True)
_HANDOFF = TensorSpec("handoff", "STRING", (1,))
_REPORT = TensorSpec("report", "STRING", (1,), optional=True)
_EVENT = TensorSpec("event", "STRING", (1,))
_FRAMES = TensorSpec("frames", "FP32", (-1, FRAME_WIDTH), optional=True)
_CODES = TensorSpec("codes", "INT32", (-1, -1), optional=True)
_AUDIO = TensorSpec("audio", "FP32", (-1,), optional=True)

STAGES: dict[str, StageSpec] = {
    spec.name: spec
    for spec in (
        StageSpec(
            "preprocess",
            (TensorSpec("messages", "STRING", (1,)),),
            # Which of chat_request, omni_request and speech_event an ensemble asks for says which it is (see ROLE_OUTPUTS).
            (_SESSION, _IDS, TensorSpec("chat_request", "STRING", (1,)), TensorSpec("omni_request", "STRING", (1,)),
             TensorSpec("speech_event", "STRING", (1,)), _MEDIA),
            # For its queue alone: it answers once.
            decoupled=True,
        ),
        StageSpec("prefill", (_SESSION, _IDS, _REQUEST, _MEDIA), (_SESSION, _IDS, _REQUEST, _HANDOFF), decoupled=True),
        # All optional, so that a client can ask for the report alone; an ensemble maps the others.
        StageSpec(
            "integrity",
            tuple(replace(spec, optional=True) for spec in (_SESSION, _IDS, _REQUEST, _HANDOFF, _REPORT)),
            (_SESSION, _IDS, _REQUEST, _HANDOFF, _REPORT),
            decoupled=False,
        ),
        StageSpec("decode", (_SESSION, _IDS, _REQUEST, _HANDOFF), (_SESSION, _EVENT), decoupled=True),
        StageSpec("talker", (_SESSION, _EVENT), (_SESSION, _EVENT, _FRAMES, _CODES), decoupled=True),
        StageSpec("voicebox", (_SESSION, _EVENT, _FRAMES, _CODES), (_SESSION, _EVENT, _AUDIO), decoupled=True),
        StageSpec(
            "postprocess",
            (_SESSION, _EVENT, _AUDIO),
            (TensorSpec("index", "INT32", (1,)), _EVENT, TensorSpec("text", "STRING", (1,)), _AUDIO,
             TensorSpec("audio_base64", "STRING", (1,)), TensorSpec("info", "STRING", (1,))),
            decoupled=True,
        ),
    )
}

ROLE_OUTPUTS: dict[str, Literal["chat", "omni", "speech"]] = {
    "chat_request": "chat",
    "omni_request": "omni",
    "speech_event": "speech",
}
"""An ensemble maps exactly one of these outputs of preprocess; that tells preprocess which ensemble it serves."""
