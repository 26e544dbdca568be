"""What travels between the stages: typed messages, and the Triton tensors that carry them.

This is the one place where a message becomes tensors; the backends and their ``auto_complete_config`` read the same
:data:`STAGES` table, so configuration and code cannot drift apart. Messages hold references to shared blocks, never the
data itself; speech frames and audio, which are small and have one reader, travel as tensors.

numpy only: importable without torch and without Triton.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tritone.errors import InvalidArgument
from tritone.media.features import MediaFeatures
from tritone.options import Options

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
        StageSpec("talker", (_SESSION, _EVENT), (_SESSION, _EVENT, _FRAMES), decoupled=True),
        StageSpec("voicebox", (_SESSION, _EVENT, _FRAMES), (_SESSION, _EVENT, _AUDIO), decoupled=True),
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


def report_tensors(report: Mapping[str, Any]) -> Tensors:
    """The answer of the integrity model to a client that asks for its report."""
    return {"report": _json(report)}


def _string(value: str) -> npt.NDArray[Any]:
    return np.array([value.encode("utf-8")], dtype=np.object_)


def _json(value: Any) -> npt.NDArray[Any]:
    return np.array([json.dumps(value, ensure_ascii=True, separators=(",", ":")).encode()], dtype=np.object_)


def read_bytes(tensors: Mapping[str, npt.NDArray[Any]], name: str) -> bytes:
    """The single BYTES element of ``name``; another shape is an error naming it."""
    array = tensors[name]
    if array.size != 1:
        raise InvalidArgument(f"{name}: shape {list(array.shape)} is not allowed; allowed: [1]")
    value = array.reshape(-1)[0]
    return value.encode("utf-8") if isinstance(value, str) else bytes(value)


def _load(tensors: Mapping[str, npt.NDArray[Any]], name: str) -> Any:
    return json.loads(read_bytes(tensors, name))


def _session(session: int) -> npt.NDArray[Any]:
    return np.array([session], dtype=np.uint64)


@dataclass(frozen=True)
class BlockRefs:
    """Blocks of a pool handed to one reader: small enough for any message.

    The reader checks ``epoch`` and ``tags`` before it uses the blocks and again after it has copied out of them, then
    releases the lease ``(slot, nonce)``. ``shape`` and ``dtype`` describe what one block holds.
    """

    pool: str
    epoch: int
    blocks: tuple[int, ...]
    tags: tuple[int, ...]
    slot: int
    nonce: int
    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> BlockRefs:
        values = dict(data)
        for name in ("blocks", "tags", "shape"):
            values[name] = tuple(values[name])
        return cls(**values)


@dataclass(frozen=True)
class GenerateRequest:
    """A checked request. ``ids`` int32 [T]; ``created`` in seconds of the monotonic clock, the same in all processes.

    ``audio_tokens`` and ``image_tokens`` of the ids stand for ``media``, which goes to prefill and no further.
    """

    session: int
    ids: npt.NDArray[np.int32]
    options: Options
    stop_ids: tuple[int, ...]
    created: float
    audio_tokens: int = 0
    image_tokens: int = 0
    media: MediaFeatures | None = None

    def to_tensors(self) -> Tensors:
        """All but the media, which are :meth:`media_tensor`."""
        body = {
            "options": self.options.to_json(),
            "stop_ids": self.stop_ids,
            "created": self.created,
            "audio_tokens": self.audio_tokens,
            "image_tokens": self.image_tokens,
            "media": self.media.layout() if self.media else None,
        }
        return {"session": _session(self.session), "ids": self.ids, "request": _json(body)}

    def media_tensor(self) -> npt.NDArray[np.uint8]:
        """Empty without media: an ensemble's step waits for every tensor it maps."""
        return self.media.pack() if self.media else np.zeros(0, np.uint8)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, npt.NDArray[Any]]) -> GenerateRequest:
        body = _load(tensors, "request")
        media = tensors.get("media")
        return cls(
            session=int(tensors["session"][0]),
            ids=tensors["ids"].astype(np.int32, copy=False),
            options=Options.from_json(body["options"]),
            stop_ids=tuple(body["stop_ids"]),
            created=body["created"],
            audio_tokens=body["audio_tokens"],
            image_tokens=body["image_tokens"],
            media=MediaFeatures.unpack(body["media"], media) if body["media"] and media is not None else None,
        )


@dataclass(frozen=True)
class TokenInfo:
    """A chosen token; with ``logprobs`` asked, its log-probability and the likeliest ``(id, logprob)`` pairs."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TokenInfo:
        return cls(data["token"], data["logprob"], tuple((i, p) for i, p in data["top"]))


@dataclass(frozen=True)
class Handoff:
    """What prefill gives decode: the first token, and the prompt's KV pages as leased blocks.

    ``hidden`` refers to the hidden state that made the first token (speech requests). ``page_size`` in tokens.
    ``digests`` of the pages' bytes in the order of their tokens, where the deployment has ``integrity.checksum``.
    """

    first: TokenInfo
    pages: BlockRefs
    page_size: int
    hidden: BlockRefs | None
    cached_tokens: int
    timings: dict[str, float]
    digests: tuple[int, ...] = ()

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Handoff:
        return cls(
            first=TokenInfo.from_json(data["first"]),
            pages=BlockRefs.from_json(data["pages"]),
            page_size=data["page_size"],
            hidden=BlockRefs.from_json(data["hidden"]) if data["hidden"] else None,
            cached_tokens=data["cached_tokens"],
            timings=data["timings"],
            digests=tuple(data["digests"]),
        )


@dataclass(frozen=True)
class Failure:
    """A request that ended before decode: ``kind`` error or cancelled."""

    kind: Literal["error", "cancelled"]
    code: str = ""
    message: str = ""


@dataclass(frozen=True)
class Prefilled:
    """Prefill's answers on their way to decode: a hand-over, a failure, or (both None) a beat.

    Beats exist because a Triton ensemble shows a client's cancellation only to step calls that begin after it: a stage
    that works long sends beats, so that the next stages see the cancellation. The first beat of a session carries its
    request without the ids, so that the stages after decode can know the session; later ones carry nothing.
    """

    request: GenerateRequest | None
    session: int
    handoff: Handoff | None = None
    failure: Failure | None = None

    def to_tensors(self) -> Tensors:
        if self.request is None:
            empty = np.zeros(0, np.int32)
            return {"session": _session(self.session), "ids": empty, "request": _string(""), "handoff": _string("")}
        tensors = self.request.to_tensors()
        body = {
            "handoff": asdict(self.handoff) if self.handoff else None,
            "failure": asdict(self.failure) if self.failure else None,
        }
        return {**tensors, "handoff": _json(body)}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, npt.NDArray[Any]]) -> Prefilled:
        session = int(tensors["session"][0])
        if not read_bytes(tensors, "handoff"):
            return cls(None, session)
        body = _load(tensors, "handoff")
        return cls(
            request=GenerateRequest.from_tensors(tensors),
            session=session,
            handoff=Handoff.from_json(body["handoff"]) if body["handoff"] else None,
            failure=Failure(**body["failure"]) if body["failure"] else None,
        )


EventKind = Literal["beat", "start", "text", "speak", "frames", "audio", "end", "error", "cancelled"]

TERMINAL: frozenset[str] = frozenset({"end", "error", "cancelled"})


@dataclass(frozen=True)
class Event:
    """One event of a session's stream.

    - ``start``: first of every session; ``info`` holds ``options`` and ``created``, and ``only_audio`` where the client gets
      no text.
    - ``text``: ``text`` delta; ``hidden`` refers to the hidden states of its tokens (speech requests).
    - ``speak``: start, text and end in one (the ``speech`` ensemble).
    - ``frames``: ``frames`` float32 [F, 131] for the VoiceBox; ``info.last`` ends the segment.
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
    frames: npt.NDArray[np.float32] | None = None
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
            body["hidden"] = [asdict(refs) for refs in self.hidden]
        if self.lost:
            body["lost"] = self.lost
        return _json(body)

    def to_tensors(self) -> Tensors:
        tensors: Tensors = {"session": _session(self.session), "event": self.header()}
        if self.frames is not None:
            tensors["frames"] = np.ascontiguousarray(self.frames, np.float32)
        if self.audio is not None:
            tensors["audio"] = np.ascontiguousarray(self.audio, np.float32)
        return tensors

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, npt.NDArray[Any]]) -> Event:
        body = _load(tensors, "event")
        return cls(
            session=int(tensors["session"][0]),
            kind=body["kind"],
            text=body.get("text", ""),
            info=body.get("info", {}),
            hidden=tuple(BlockRefs.from_json(refs) for refs in body.get("hidden", ())),
            frames=tensors.get("frames"),
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
    tensors: Tensors = {"index": np.array([index], np.int32), "event": _string(kind)}
    if text is not None:
        tensors["text"] = _string(text)
    if audio is not None:
        tensors["audio"] = audio
    if audio_base64 is not None:
        tensors["audio_base64"] = _string(audio_base64)
    if info is not None:
        tensors["info"] = _json(info)
    return tensors
