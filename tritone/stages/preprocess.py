"""Preprocess: messages and options in, checked token ids out. A refusal names the field, its value and what is allowed."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tritone.deployment import OWN_VOICE, Deployment
from tritone.errors import InvalidArgument, bad
from tritone.media.features import Expanded
from tritone.messages import ROLE_OUTPUTS, Event, GenerateRequest, Tensors
from tritone.models.omni.families import FAMILIES
from tritone.options import Options, Role, Sampling, parse_options
from tritone.text.chat import decode_text, parse_messages
from tritone.text.tokenizer import prompt_tokenizer
from tritone.voices import known_voices

if TYPE_CHECKING:
    from tritone.media.parts import Medium
    from tritone.models.omni.processor import OmniProcessor

OUTPUTS: dict[Role, str] = {role: name for name, role in ROLE_OUTPUTS.items()}
MAX_SPEECH_CHARACTERS = 20_000
MAX_SPEECH_BYTES = 4 * MAX_SPEECH_CHARACTERS
MAX_MEDIA_BYTES = 1_000_000_000
"""Half an hour of stereo at 48 kHz in float32, as base64, and some images."""
JSON_BYTES = 6
"""The most that JSON takes for a byte of text (``\\u0041``)."""


class PreprocessStage:
    """Chat template, tokenization, media and option checks, from the checkpoint's own files."""

    def __init__(self, deployment: Deployment) -> None:
        directory = Path(deployment.checkpoint)
        config = json.loads((directory / "config.json").read_text())
        self._omni = _omni(directory, config)
        self.tokenizer = self._omni.tokenizer if self._omni else prompt_tokenizer(directory)
        self.max_context = deployment.max_context
        self.default_max_tokens = deployment.default_max_tokens
        self.stop_ids, self.sampling = _generation_config(directory, self.tokenizer.eos_token_id)
        self.vocabulary = _vocabulary_size(config, len(self.tokenizer))
        longest = max(len(token.encode()) for token in self.tokenizer.get_vocab())
        text = max(self.max_context * longest * JSON_BYTES, MAX_SPEECH_BYTES)
        self.max_bytes = text + MAX_MEDIA_BYTES if self._omni else text
        """More than that fits into no context: a look at its size refuses it."""
        self._own_voice = deployment.voice == OWN_VOICE
        voices = known_voices(deployment)
        self.voices = voices.names if voices else ()
        self.default_voice = voices.default if voices else ""

    @property
    def takes_media(self) -> bool:
        return self._omni is not None

    def options(self, parameters: Mapping[str, Any], role: Role) -> Options:
        options = parse_options(
            parameters,
            role,
            voices=self.voices,
            default_voice=self.default_voice,
            sampling=self.sampling,
            draw_seed=lambda: secrets.randbits(63),
        )
        if self._own_voice and options.speed != 1.0:
            raise bad("speed", options.speed, "1.0 (the checkpoint's own voice has one pace)")
        return options

    def read(self, role: Role, raw: bytes, parameters: Mapping[str, Any], arrived: float) -> Tensors:
        """The tensors for the ensemble of ``role``; raises :class:`InvalidArgument`. ``arrived`` in monotonic seconds."""
        if role == "speech":
            made = self.speech(raw, parameters, arrived).to_tensors()
            return {"session": made["session"], OUTPUTS[role]: made["event"]}
        request = self.generate(raw, parameters, role, arrived)
        tensors = request.to_tensors()
        return {
            "session": tensors["session"],
            "ids": tensors["ids"],
            OUTPUTS[role]: tensors["request"],
            "media": request.media_tensor(),
        }

    def generate(self, raw: bytes, parameters: Mapping[str, Any], role: Role, created: float) -> GenerateRequest:
        """The request of the ensembles ``chat`` and ``omni``; raises :class:`InvalidArgument`."""
        options = self.options(parameters, role)
        prompt, media = self._prompt(raw, options)
        count, limit = len(prompt.ids), self.max_context - 1
        if count > limit:
            raise InvalidArgument(
                f"messages: the prompt has {count} tokens; allowed: at most {limit} "
                f"(the context of {self.max_context} tokens less one for the answer)"
            )
        if not count:
            raise InvalidArgument("messages: the prompt has 0 tokens; allowed: at least 1")
        room = self.max_context - count
        wanted = options.max_tokens or self.default_max_tokens or room
        if options.max_tokens > self.max_context:
            raise bad("max_tokens", options.max_tokens, f"integer 1 to {self.max_context} (the context length)")
        stop_ids = () if options.ignore_eos else self.stop_ids
        options = Options.from_json({**options.to_json(), "max_tokens": min(wanted, room)})
        return GenerateRequest(
            new_session(),
            prompt.ids,
            options,
            stop_ids,
            created,
            prompt.audio_tokens,
            prompt.image_tokens,
            self._omni.features(media) if self._omni and media else None,
        )

    def speech(self, raw: bytes, parameters: Mapping[str, Any], created: float) -> Event:
        """The request of the ensemble ``speech``: the text to speak, as one event."""
        if self._own_voice:
            raise InvalidArgument("text: the checkpoint's own voice speaks answers alone; allowed: the ensembles omni and chat")
        options = self.options(parameters, "speech")
        text = decode_text(raw, "text")
        if not text.strip():
            raise bad("text", text, "text that is not empty")
        if len(text) > MAX_SPEECH_CHARACTERS:
            raise InvalidArgument(f"text: {len(text)} characters; allowed: at most {MAX_SPEECH_CHARACTERS}")
        info = {"options": options.to_json(), "created": created, "only_audio": True}
        return Event(new_session(), "speak", text=text, info=info)

    def _prompt(self, raw: bytes, options: Options) -> tuple[Expanded, Sequence[Medium]]:
        """The prompt's ids and its media, decoded; only from their sizes yet, since a prompt may be too long."""
        ids, media = self._ids(raw, options)
        return (self._omni.expand(ids, media) if self._omni else Expanded(np.asarray(ids, np.int32))), media

    def _ids(self, raw: bytes, options: Options) -> tuple[list[int], Sequence[Medium]]:
        text = decode_text(raw, "messages")
        if options.input_format == "token_ids":
            return self._given_ids(text), ()
        if options.input_format == "text":
            if options.tools:
                raise InvalidArgument("tools: not allowed with input_format 'text'; allowed: input_format 'chat'")
            return list(self.tokenizer.encode(text)), ()
        parts = self._omni.parts() if self._omni else None
        messages = parse_messages(text, parts)
        try:
            encoded: Any = self.tokenizer.apply_chat_template(
                messages, tools=list(options.tools) or None, add_generation_prompt=True, tokenize=True, return_dict=True
            )
        except Exception as error:  # templates are code of the checkpoint and raise what they like
            raise InvalidArgument(f"messages: refused by the checkpoint's chat template: {error}") from None
        return list(encoded["input_ids"]), parts.media if parts else ()

    def _given_ids(self, text: str) -> list[int]:
        allowed = f"a JSON list of integers 0 to {self.vocabulary - 1}"
        try:
            ids = json.loads(text)
        except (ValueError, RecursionError):
            raise bad("messages", text, allowed) from None
        if not isinstance(ids, list):
            raise bad("messages", ids, allowed)
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.vocabulary:
                raise bad("messages", token, allowed)
        return ids


def new_session() -> int:
    """A session number: 63 random bits, so that two stages or restarts never mint the same; never 0."""
    return secrets.randbelow(2**63 - 1) + 1


def _omni(directory: Path, config: Mapping[str, Any]) -> OmniProcessor | None:
    """What reads audio and images, for a checkpoint that takes them."""
    if config.get("model_type") not in FAMILIES:
        return None
    from tritone.models.omni.processor import OmniProcessor

    return OmniProcessor(directory)


def _generation_config(directory: Path, eos: int | None) -> tuple[tuple[int, ...], Sampling]:
    """End-of-answer ids and sampling defaults, from ``generation_config.json`` where the checkpoint has one."""
    path = directory / "generation_config.json"
    data: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    ids = data.get("eos_token_id", eos)
    stop_ids = tuple(ids) if isinstance(ids, list) else (ids,) if ids is not None else ()
    if eos is not None and eos not in stop_ids:
        stop_ids = (*stop_ids, eos)
    names = ("temperature", "top_p", "top_k", "repetition_penalty")
    values = {name: data[name] for name in names if data.get(name) is not None}
    return stop_ids, Sampling(**values)


def _vocabulary_size(config: Mapping[str, Any], otherwise: int) -> int:
    text = config.get("thinker_config", {}).get("text_config", config)
    return int(text.get("vocab_size", otherwise))
