"""How a stage answers one request; the Triton backend gives the real one, tests a list."""

from __future__ import annotations

from typing import Protocol, TypeVar

from tritone.errors import TritoneError

Message = TypeVar("Message", contravariant=True)


class Reply(Protocol[Message]):
    """The answer to one request: any number of messages, then exactly one :meth:`close`. Thread-safe."""

    def send(self, message: Message, *, last: bool = False) -> None:
        """One message; ``last`` closes with it (one trip to the server instead of two)."""

    def close(self) -> None:
        """No more messages."""

    def is_cancelled(self) -> bool:
        """Whether the client was already gone when this request was handed to the stage."""


class RefusableReply(Reply[Message], Protocol[Message]):
    """Of the first stage of an ensemble, before anything streams."""

    def fail(self, error: TritoneError) -> None:
        """A refusal in place of the first message."""
