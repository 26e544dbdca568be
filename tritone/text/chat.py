"""A request's messages, read and checked: what the chat template is given."""

from __future__ import annotations

import json
from typing import Any, Protocol

from tritone.errors import InvalidArgument, bad

ROLES = ("system", "user", "assistant", "tool")


class Parts(Protocol):
    """Reads what is not text in a message's content (:class:`tritone.media.parts.MediaParts`)."""

    def read(self, field: str, part: Any) -> dict[str, Any]:
        """What the template takes in place of ``part``."""


def parse_messages(text: str, parts: Parts | None = None) -> list[dict[str, Any]]:
    """Plain text is one user message; text that starts with ``[`` or ``{`` must be JSON messages.

    Content becomes one string, or a list of parts where it holds media, which only a user's message may; ``parts`` reads them,
    and without it they are refused.
    """
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
    # Roles first, which are cheap to refuse: media may take seconds to decode.
    for number, message in enumerate(messages):
        _check_role(f"messages[{number}]", message)
    for number, message in enumerate(messages):
        _check_content(f"messages[{number}]", message, parts)
    if messages[-1]["role"] == "assistant":
        raise bad(f"messages[{len(messages) - 1}].role", "assistant", "the last message is of user, tool or system")
    return list(messages)


def decode_text(raw: bytes, name: str) -> str:
    """The UTF-8 text ``raw``."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{name}: not UTF-8 at byte {error.start}; allowed: UTF-8 text") from None
    _check_characters(text, name)
    return text


def _check_role(name: str, message: Any) -> None:
    if not isinstance(message, dict):
        raise bad(name, message, 'an object such as {"role": "user", "content": "..."}')
    role = message.get("role")
    if role not in ROLES:
        raise bad(f"{name}.role", role, ", ".join(ROLES))


def _check_content(name: str, message: dict[str, Any], parts: Parts | None) -> None:
    content = message.get("content")
    if message["role"] == "assistant" and message.get("tool_calls"):
        return
    if isinstance(content, list):
        read = [_part(f"{name}.content", number, part, parts, message["role"]) for number, part in enumerate(content)]
        if any(part["type"] != "text" for part in read):
            message["content"] = read
            return
        message["content"] = content = "".join(part["text"] for part in read)
    if not isinstance(content, str) or not content.strip():
        raise bad(f"{name}.content", content, "text that is not empty")
    _check_characters(content, f"{name}.content")


def _part(name: str, number: int, part: Any, parts: Parts | None, role: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else part
    if kind == "text" and isinstance(part, dict) and isinstance(part.get("text"), str):
        _check_characters(part["text"], name)
        return {"type": "text", "text": part["text"]}
    if parts is None:
        raise bad(name, kind, "text, or a list of parts of type text (this checkpoint takes text only)")
    if role != "user":
        raise bad(f"{name}[{number}].type", kind, f"text in a message of role {role}; media in one of role user")
    return parts.read(f"{name}[{number}]", part)


def _check_characters(text: str, name: str) -> None:
    if "\0" in text:
        raise InvalidArgument(f"{name}: holds a NUL character at {text.index(chr(0))}; allowed: text without NUL")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        at = error.start
        found = f"the lone surrogate U+{ord(text[at]):04X} at {at}"
        raise InvalidArgument(f"{name}: holds {found}; allowed: Unicode text") from None
