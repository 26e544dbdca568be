"""From decode to the client: the events of a session."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tritone.messages.codec import json_tensor, load, session_tensor
from tritone.messages.requests import BlockRefs, Failure, GenerateRequest
from tritone.messages.specs import Tensors
from tritone.models.omni.heard import Heard

EventKind = Literal["beat", "start", "text", "speak", "frames", "codes", "audio", "end", "error", "cancelled"]

TERMINAL: frozenset[str] = frozenset({"end", "error", "cancelled"})


@dataclass(frozen=True)
class Event:
    """One event of a session's stream.

    - ``start``: first of every session; ``info`` holds ``options`` and ``created``, and ``only_audio`` where the client gets
      no text.
    - ``text``: ``text`` delta; ``hidden`` refers to rows for the Talker, ``rows`` to each (speech requests). The first such
      event brings those of the prompt, and ``heard``, what the checkpoint's Talker reads of it; the last may have no text.
    - ``speak``: start, text and end in one (the ``speech`` ensemble).
    - ``frames``: ``frames`` float32 [F, 131] for the VoiceBox; ``info.last`` ends the segment.
    - ``codes``: ``codes`` int32 [F, codebooks] for the VoiceBox of a Talker that speaks in codes; ``info.last`` ends the
      answer, perhaps without a frame.
    - ``audio``: ``audio`` float32 [samples], 24 kHz.
    - ``end`` / ``error`` / ``cancelled``: last of every session; ``info`` holds finish_reason, usage and timings, or
      code and message.
    - ``beat``: nothing (see :class:`Prefilled`); to the client it may become ``waiting``.

    ``lost`` names the stage whose process has died with the speech of this session: from here on it is text only.
    """

    session: int
    kind: EventKind
    text: str = ""
    info: dict[str, Any] = field(default_factory=dict)
    hidden: tuple[BlockRefs, ...] = ()
    rows: tuple[int, ...] = ()
    heard: Heard | None = None
    frames: npt.NDArray[np.float32] | None = None
    codes: npt.NDArray[np.int32] | None = None
    audio: npt.NDArray[np.float32] | None = None
    lost: str = ""

    @property
    def terminal(self) -> bool:
        return self.kind in TERMINAL

    def header(self) -> npt.NDArray[Any]:
        body: dict[str, Any] = {"kind": self.kind}
        if self.text:
            body["text"] = self.text
        if self.info:
            body["info"] = self.info
        if self.hidden:
            body |= {"hidden": [asdict(refs) for refs in self.hidden], "rows": self.rows}
        if self.heard:
            body["heard"] = self.heard.to_json()
        if self.lost:
            body["lost"] = self.lost
        return json_tensor(body)

    def to_tensors(self) -> Tensors:
        tensors: Tensors = {"session": session_tensor(self.session), "event": self.header()}
        if self.frames is not None:
            tensors["frames"] = np.ascontiguousarray(self.frames, np.float32)
        if self.codes is not None:
            tensors["codes"] = np.ascontiguousarray(self.codes, np.int32)
        if self.audio is not None:
            tensors["audio"] = np.ascontiguousarray(self.audio, np.float32)
        return tensors

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, npt.NDArray[Any]]) -> Event:
        body = load(tensors, "event")
        return cls(
            session=int(tensors["session"][0]),
            kind=body["kind"],
            text=body.get("text", ""),
            info=body.get("info", {}),
            hidden=tuple(BlockRefs.from_json(refs) for refs in body.get("hidden", ())),
            rows=tuple(body.get("rows", ())),
            heard=Heard.from_json(body["heard"]) if "heard" in body else None,
            frames=tensors.get("frames"),
            codes=tensors.get("codes"),
            audio=tensors.get("audio"),
            lost=body.get("lost", ""),
        )


def start_event(request: GenerateRequest) -> Event:
    """The first event of a session: the options its later stages need."""
    return Event(request.session, "start", info={"options": request.options.to_json(), "created": request.created})


def failure_event(session: int, failure: Failure, usage: dict[str, Any] | None = None) -> Event:
    """The last event of a session that failed or was cancelled."""
    info: dict[str, Any] = {"finish_reason": failure.kind}
    if usage:
        info["usage"] = usage
    if failure.kind == "error":
        info |= {"code": failure.code, "message": failure.message}
    return Event(session, failure.kind, info=info)
