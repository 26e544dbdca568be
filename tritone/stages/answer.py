"""One answer in the making: tokens in, text that may be shown out."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer

from tritone.messages import GenerateRequest, Handoff, TokenInfo
from tritone.text.detokenizer import Detokenizer
from tritone.text.stops import StopMatcher


class Answer:
    """Text, stop conditions, usage and timings of one request in decode."""

    def __init__(self, request: GenerateRequest, handoff: Handoff, tokenizer: Tokenizer, now: float) -> None:
        self.request = request
        self.handoff = handoff
        self.tokens = 0
        self.finish_reason: str | None = None
        self.arrived = now
        self.last_token = now
        self.last_sent = now
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopMatcher(request.options.stop)
        self._infos: list[TokenInfo] = []

    @property
    def session(self) -> int:
        return self.request.session

    def accept(self, info: TokenInfo) -> str:
        """The text this token makes showable; sets :attr:`finish_reason` when the answer is complete."""
        self.tokens += 1
        if self.request.options.logprobs is not None:
            self._infos.append(info)
        stopped = info.token in self.request.stop_ids
        last = stopped or self.tokens >= self.request.options.max_tokens
        piece = "" if stopped else self._detokenizer.push(info.token)
        if last:
            piece += self._detokenizer.flush()
        text = self._stops.push(piece)
        if self._stops.matched is not None:
            self.finish_reason = "stop"
        elif last:
            self.finish_reason = "stop" if stopped else "length"
            text += self._stops.flush()
        return text

    def take_logprobs(self) -> dict[str, Any]:
        """``info`` of the tokens since the last text event; empty unless log-probabilities were asked for."""
        infos, self._infos = self._infos, []
        if not infos:
            return {}
        return {"logprobs": [self._describe(info) for info in infos]}

    def end_info(self, now: float) -> dict[str, Any]:
        timings = self.handoff.timings
        return {
            "finish_reason": self.finish_reason,
            "usage": self.usage(),
            "timings": {"queue": timings["queue"], "prefill": timings["prefill"], "decode": now - self.arrived},
        }

    def usage(self) -> dict[str, Any]:
        request = self.request
        return {
            "prompt_tokens": len(request.ids),
            "prompt_audio_tokens": request.audio_tokens,
            "prompt_image_tokens": request.image_tokens,
            "cached_tokens": self.handoff.cached_tokens,
            "completion_tokens": self.tokens,
        }

    def _describe(self, info: TokenInfo) -> dict[str, Any]:
        top = [{"token_id": token, "token": self._piece(token), "logprob": value} for token, value in info.top]
        return {"token_id": info.token, "token": self._piece(info.token), "logprob": info.logprob, "top": top}

    def _piece(self, token: int) -> str:
        return str(self._tokenizer.decode([token], skip_special_tokens=False)).replace("\ufffd", "")
