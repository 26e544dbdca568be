"""From preprocess to decode: requests, and what prefill hands over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tritone.media.features import MediaFeatures
from tritone.messages.codec import json_tensor, load, read_bytes, session_tensor, string
from tritone.messages.specs import Tensors
from tritone.models.omni.heard import Heard
from tritone.options import Options


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
        return {"session": session_tensor(self.session), "ids": self.ids, "request": json_tensor(body)}

    def media_tensor(self) -> npt.NDArray[np.uint8]:
        """Empty without media: an ensemble's step waits for every tensor it maps."""
        return self.media.pack() if self.media else np.zeros(0, np.uint8)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, npt.NDArray[Any]]) -> GenerateRequest:
        body = load(tensors, "request")
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
class MediaKey:
    """What each engine knows of a prompt with audio or images.

    ``delta``: the answer's tokens are rotated by their place in the sequence plus this. ``begins``: the first place that
    is a medium's. ``digest``: differs where any medium does.
    """

    delta: int
    begins: int
    digest: str


@dataclass(frozen=True)
class Handoff:
    """What prefill gives decode: the first token, and the prompt's KV pages as leased blocks.

    ``hidden`` refers to ``hidden_rows`` rows for the Talker (speech requests): those of the prompt's tokens, where the
    checkpoint has a Talker, and what it gets of the first token (``stages/hidden.py``). ``page_size`` in tokens. ``media``:
    None for a prompt of text. ``heard``: what the checkpoint's Talker reads of the prompt (speech requests). ``digests`` of
    the pages' bytes in the order of their tokens, where the deployment has ``integrity.checksum``.
    """

    first: TokenInfo
    pages: BlockRefs
    page_size: int
    hidden: BlockRefs | None
    cached_tokens: int
    timings: dict[str, float]
    digests: tuple[int, ...] = ()
    hidden_rows: int = 0
    media: MediaKey | None = None
    heard: Heard | None = None

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
            hidden_rows=data["hidden_rows"],
            media=MediaKey(**data["media"]) if data["media"] else None,
            heard=Heard.from_json(data["heard"]) if data["heard"] else None,
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
            return {"session": session_tensor(self.session), "ids": empty, "request": string(""), "handoff": string("")}
        tensors = self.request.to_tensors()
        body = {
            "handoff": asdict(self.handoff) if self.handoff else None,
            "failure": asdict(self.failure) if self.failure else None,
        }
        return {**tensors, "handoff": json_tensor(body)}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, npt.NDArray[Any]]) -> Prefilled:
        session = int(tensors["session"][0])
        if not read_bytes(tensors, "handoff"):
            return cls(None, session)
        body = load(tensors, "handoff")
        return cls(
            request=GenerateRequest.from_tensors(tensors),
            session=session,
            handoff=Handoff.from_json(body["handoff"]) if body["handoff"] else None,
            failure=Failure(**body["failure"]) if body["failure"] else None,
        )
