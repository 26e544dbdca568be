"""Preprocess: messages and options in, checked token ids out. A refusal names the field, its value and what is allowed."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tritone.deployment import Deployment
from tritone.errors import InvalidArgument, bad
from tritone.messages import ROLE_OUTPUTS, Event, GenerateRequest, Tensors
from tritone.options import Options, Role, Sampling, parse_options

OUTPUTS: dict[Role, str] = {role: name for name, role in ROLE_OUTPUTS.items()}
ROLES = ("system", "user", "assistant", "tool")
MAX_SPEECH_CHARACTERS = 20_000
MAX_SPEECH_BYTES = 4 * MAX_SPEECH_CHARACTERS
JSON_BYTES = 6
"""The most that JSON takes for a byte of text (``\\u0041``)."""
_SURROGATE = re.compile("[\ud800-\udfff]")


class PreprocessStage:
    """Chat template, tokenization and option checks, from the checkpoint's own files."""

    def __init__(self, deployment: Deployment) -> None:
        from transformers import AutoTokenizer

        directory = Path(deployment.checkpoint)
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.max_context = deployment.max_context
        self.default_max_tokens = deployment.default_max_tokens
        self.stop_ids, self.sampling = _generation_config(directory, self.tokenizer.eos_token_id)
        self.vocabulary = _vocabulary_size(directory, len(self.tokenizer))
        longest = max(len(token.encode()) for token in self.tokenizer.get_vocab())
        self.max_bytes = max(self.max_context * longest * JSON_BYTES, MAX_SPEECH_BYTES)
        """More text than that fits into no context: a look at its size refuses it."""
        self.voices: tuple[str, ...] = ()
        self.default_voice = ""
        if deployment.voice:
            voice = json.loads((Path(deployment.voice) / "voice.json").read_text())
            self.voices, self.default_voice = tuple(voice["voices"]), voice["default_voice"]

    def options(self, parameters: Mapping[str, Any], role: Role) -> Options:
        return parse_options(
            parameters,
            role,
            voices=self.voices,
            default_voice=self.default_voice,
            sampling=self.sampling,
            draw_seed=lambda: secrets.randbits(63),
        )

    def read(self, role: Role, raw: bytes, parameters: Mapping[str, Any], arrived: float) -> Tensors:
        """The tensors for the ensemble of ``role``; raises :class:`InvalidArgument`. ``arrived`` in monotonic seconds."""
        if role == "speech":
            made = self.speech(raw, parameters, arrived).to_tensors()
            return {"session": made["session"], OUTPUTS[role]: made["event"]}
        made = self.generate(raw, parameters, role, arrived).to_tensors()
        return {"session": made["session"], "ids": made["ids"], OUTPUTS[role]: made["request"]}

    def generate(self, raw: bytes, parameters: Mapping[str, Any], role: Role, created: float) -> GenerateRequest:
        """The request of the ensembles ``chat`` and ``omni``; raises :class:`InvalidArgument`."""
        options = self.options(parameters, role)
        ids = self._ids(raw, options)
        limit = self.max_context - 1
        if len(ids) > limit:
            raise InvalidArgument(
                f"messages: the prompt has {len(ids)} tokens; allowed: at most {limit} "
                f"(the context of {self.max_context} tokens less one for the answer)"
            )
        if not ids:
            raise InvalidArgument("messages: the prompt has 0 tokens; allowed: at least 1")
        room = self.max_context - len(ids)
        wanted = options.max_tokens or self.default_max_tokens or room
        if options.max_tokens > self.max_context:
            raise bad("max_tokens", options.max_tokens, f"integer 1 to {self.max_context} (the context length)")
        stop_ids = () if options.ignore_eos else self.stop_ids
        options = Options.from_json({**options.to_json(), "max_tokens": min(wanted, room)})
        return GenerateRequest(new_session(), np.asarray(ids, np.int32), options, stop_ids, created)

    def speech(self, raw: bytes, parameters: Mapping[str, Any], created: float) -> Event:
        """The request of the ensemble ``speech``: the text to speak, as one event."""
        options = self.options(parameters, "speech")
        text = _decode(raw, "text")
        if not text.strip():
            raise bad("text", text, "text that is not empty")
        if len(text) > MAX_SPEECH_CHARACTERS:
            raise InvalidArgument(f"text: {len(text)} characters; allowed: at most {MAX_SPEECH_CHARACTERS}")
        info = {"options": options.to_json(), "created": created, "only_audio": True}
        return Event(new_session(), "speak", text=text, info=info)

    def _ids(self, raw: bytes, options: Options) -> list[int]:
        text = _decode(raw, "messages")
        if options.input_format == "token_ids":
            return self._given_ids(text)
        if options.input_format == "text":
            if options.tools:
                raise InvalidArgument("tools: not allowed with input_format 'text'; allowed: input_format 'chat'")
            return list(self.tokenizer.encode(text))
        messages = parse_messages(text)
        try:
            encoded: Any = self.tokenizer.apply_chat_template(
                messages, tools=list(options.tools) or None, add_generation_prompt=True, tokenize=True, return_dict=True
            )
        except Exception as error:  # templates are code of the checkpoint and raise what they like
            raise InvalidArgument(f"messages: refused by the checkpoint's chat template: {error}") from None
        return list(encoded["input_ids"])

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


def parse_messages(text: str) -> list[dict[str, Any]]:
    """Plain text is one user message; text that starts with ``[`` or ``{`` must be JSON messages."""
    if not text.strip():
        raise bad("messages", text, "a question as text, or a JSON list of messages")
    if text.lstrip()[0] not in "[{":
        return [{"role": "user", "content": text}]
    try:
        messages = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(
            f"messages: starts with {text.lstrip()[0]!r} but is not JSON ({error}); to ask such a text, send it as "
            '[{"role": "user", "content": "..."}]'
        ) from None
    if isinstance(messages, dict):
        messages = [messages]
    if not messages:
        raise bad("messages", messages, "at least one message")
    for number, message in enumerate(messages):
        _check_message(f"messages[{number}]", message)
    if messages[-1]["role"] == "assistant":
        raise bad(f"messages[{len(messages) - 1}].role", "assistant", "the last message is of user, tool or system")
    return list(messages)


def _check_message(name: str, message: Any) -> None:
    if not isinstance(message, dict):
        raise bad(name, message, 'an object such as {"role": "user", "content": "..."}')
    role = message.get("role")
    if role not in ROLES:
        raise bad(f"{name}.role", role, ", ".join(ROLES))
    content = message.get("content")
    if role == "assistant" and message.get("tool_calls"):
        return
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else part
                raise bad(f"{name}.content", kind, "text, or a list of parts of type text (this checkpoint takes text only)")
        message["content"] = content = "".join(part["text"] for part in content)
    if not isinstance(content, str) or not content.strip():
        raise bad(f"{name}.content", content, "text that is not empty")
    _check_characters(content, f"{name}.content")


def _decode(raw: bytes, name: str) -> str:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{name}: not UTF-8 at byte {error.start}; allowed: UTF-8 text") from None
    _check_characters(text, name)
    return text


def _check_characters(text: str, name: str) -> None:
    if "\0" in text:
        raise InvalidArgument(f"{name}: holds a NUL character at {text.index(chr(0))}; allowed: text without NUL")
    if found := _SURROGATE.search(text):
        code = f"U+{ord(found[0]):04X}"
        raise InvalidArgument(f"{name}: holds the lone surrogate {code} at {found.start()}; allowed: Unicode text")


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


def _vocabulary_size(directory: Path, otherwise: int) -> int:
    config = json.loads((directory / "config.json").read_text())
    return int(config.get("vocab_size", otherwise))
