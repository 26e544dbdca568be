"""Postprocess: the one stage every client stream leaves from. Numbers events, joins them where asked, formats audio.

It is also the eye for cancellation: every event is a fresh step call of the ensemble, so this stage sees a client that
left, and posts it on the cancel board.
"""

from __future__ import annotations

import base64
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tritone.messages import Event, Failure, Tensors, client_tensors, failure_event
from tritone.metrics import Metrics
from tritone.options import Options
from tritone.pools import CancelBoard, Views
from tritone.stages.reply import Reply

SAMPLE_RATE = 24_000

UNKNOWN_INDEX = -1
"""Of an error event whose place in the stream is not known."""

WAITING_SECONDS = 0.3
"""A streamed request that has nothing to say gets a ``waiting`` event this often: Triton's HTTP front end notices that a
client has gone only when it writes, and proxies close connections that stay silent."""


@dataclass
class _Session:
    options: Options
    created: float
    sent: float
    """When something was last sent to the client (at first: when the session began)."""
    seen: float = field(default_factory=time.monotonic)
    """When its last event came."""
    index: int = 0
    samples: int = 0
    first_text: float | None = None
    first_audio: float | None = None
    last_audio: float | None = None
    texts: list[str] = field(default_factory=list)
    audios: list[npt.NDArray[np.float32]] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    only_audio: bool = False
    """Whether the client gets nothing but audio."""
    lost: str = ""
    """The stage that died with the rest of the speech."""


class PostprocessStage:
    """Called by one thread, event by event; answers each at once."""

    def __init__(
        self, board: CancelBoard, views: Views, metrics: Metrics, sample_rate: int = SAMPLE_RATE, restarted: bool = False
    ) -> None:
        """``restarted``: sessions may come that an earlier process of this stage knew; they end with an error."""
        self._board = board
        self._views = views
        self._restarted = restarted
        self._metrics = metrics
        self._sample_rate = sample_rate
        self._sessions: dict[int, _Session] = {}

    def submit(self, event: Event, reply: Reply[Tensors]) -> None:
        if reply.is_cancelled():
            self._board.post(event.session)
        session = self._sessions.get(event.session)
        # The Talker, which releases them, is dead.
        self._views.release(*event.hidden)
        if session is not None:
            session.seen = time.monotonic()
            if event.lost and not session.lost and session.options.speech:
                if session.only_audio:
                    self._board.post(event.session)
                    failure = Failure("error", "UNAVAILABLE", f"{event.lost}: the process of this stage ended; ask once more")
                    self._end(session, failure_event(event.session, failure), reply)
                    return
                self._lose_audio(session, event, reply)
        if event.kind == "start":
            # A stage that was restarted may start a session again.
            if session is None:
                options = Options.from_json(event.info["options"])
                started = _Session(options, event.info["created"], time.monotonic())
                started.only_audio = event.info.get("only_audio", False)
                self._sessions[event.session] = started
                self._metrics.gauge("tritone_sessions", len(self._sessions))
        elif session is None:
            if self._restarted and not self._board.is_cancelled(event.session):
                self._end_unknown(event, reply)
                return
            # It already had its end.
        elif event.terminal:
            self._end(session, event, reply)
            return
        else:
            message = self._one(session, event)
            if message is not None:
                reply.send(message, last=True)
                return
        reply.close()

    def purge(self) -> None:
        """Forget cancelled sessions whose end will not come: Triton drops cancelled requests between two stages."""
        now = time.monotonic()
        for number, session in list(self._sessions.items()):
            if self._board.is_over(number, now - session.seen):
                self._sessions.pop(number, None)
        self._metrics.gauge("tritone_sessions", len(self._sessions))

    def _one(self, session: _Session, event: Event) -> Tensors | None:
        now = time.monotonic()
        if event.kind == "beat":
            if not session.options.stream or now - session.sent < WAITING_SECONDS:
                return None
            return client_tensors(self._next(session), "waiting")
        if event.kind == "text":
            if session.first_text is None and event.text:
                session.first_text = now
            session.texts.append(event.text)
            session.logprobs += event.info.get("logprobs", ())
            # An event may carry hidden states alone, which are not for the client.
            if not session.options.stream or not (event.text or event.info):
                return None
            session.texts.clear()
            return client_tensors(self._next(session), "text", text=event.text, info=event.info or None)
        assert event.kind == "audio" and event.audio is not None, event.kind
        if session.first_audio is None:
            session.first_audio = now
            self._metrics.observe("tritone_time_to_first_audio_seconds", now - session.created)
        session.last_audio = now
        session.samples += len(event.audio)
        if not session.options.stream:
            session.audios.append(event.audio)
            return None
        return client_tensors(self._next(session), "audio", **self._audio(session, event.audio))

    def _lose_audio(self, session: _Session, event: Event, reply: Reply[Tensors]) -> None:
        """Says that no more audio will come."""
        session.lost = event.lost
        self._metrics.count("tritone_audio_lost_total")
        if session.options.stream:
            message = f"{event.lost}: the process of this stage ended; the answer goes on as text"
            info = {"stage": event.lost, "message": message}
            reply.send(client_tensors(self._next(session), "audio_lost", info=info))

    def _end_unknown(self, event: Event, reply: Reply[Tensors]) -> None:
        """A session that the earlier process knew: how far its client had got is not known any more."""
        self._board.post(event.session)
        message = "postprocess: the process of this stage ended and was started again; ask once more"
        info = failure_event(event.session, Failure("error", "UNAVAILABLE", message)).info
        self._metrics.count("tritone_requests_total", outcome="error")
        reply.send(client_tensors(UNKNOWN_INDEX, "error", info=info), last=True)

    def _end(self, session: _Session, event: Event, reply: Reply[Tensors]) -> None:
        self._sessions.pop(event.session, None)
        self._metrics.gauge("tritone_sessions", len(self._sessions))
        now = time.monotonic()
        seconds = session.samples / self._sample_rate
        info = dict(event.info)
        info["usage"] = {**info.get("usage", {}), "audio_seconds": seconds}
        timings = {**info.get("timings", {}), "total": now - session.created}
        if session.first_text is not None:
            timings["first_text"] = session.first_text - session.created
        if session.first_audio is not None and session.last_audio is not None:
            timings["first_audio"] = session.first_audio - session.created
            self._metrics.observe("tritone_real_time_factor", (session.last_audio - session.created) / max(seconds, 1e-3))
        info["timings"] = timings
        if session.samples:
            info["sample_rate"] = self._sample_rate
        if session.lost:
            info["audio_lost"] = session.lost
        self._metrics.count("tritone_requests_total", outcome=str(info.get("finish_reason", event.kind)))
        self._metrics.observe("tritone_request_seconds", now - session.created)
        joined: dict[str, Any] = {}
        if not session.options.stream:
            joined["text"] = "".join(session.texts)
            if session.logprobs:
                info["logprobs"] = session.logprobs
            if session.audios:
                joined |= self._audio(session, np.concatenate(session.audios))
        reply.send(client_tensors(self._next(session), event.kind, info=info, **joined), last=True)

    def _audio(self, session: _Session, audio: npt.NDArray[np.float32]) -> dict[str, Any]:
        if session.options.audio_format == "pcm16_base64":
            pcm = (np.clip(audio, -1.0, 1.0) * 32767.0).round().astype("<i2")
            return {"audio_base64": base64.b64encode(pcm.tobytes()).decode()}
        return {"audio": audio}

    @staticmethod
    def _next(session: _Session) -> int:
        index = session.index
        session.index += 1
        session.sent = time.monotonic()
        return index
