"""Tokens to text, piece by piece, never cutting a character."""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

REPLACEMENT = "\ufffd"


class Detokenizer:
    """The text of one answer. A character whose bytes are not complete yet is held back; bytes that never become a
    character (a model may sample them) are left out, so U+FFFD is never shown. Special tokens have no text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._before: list[int] = []
        """The tokens of the last piece: what is held back may read differently at the start of a text."""
        self._held: list[int] = []

    def push(self, token: int) -> str:
        self._held.append(token)
        try:
            piece = self._stream.step(self._tokenizer, token)
        except Exception:  # a broken character changed how the tokens before it read
            piece = self.flush()
            self._stream = DecodeStream(skip_special_tokens=True)
            self._before, self._held = [], []
            return piece
        if piece is None:
            return ""
        self._before, self._held = self._held, []
        return piece.replace(REPLACEMENT, "")

    def flush(self) -> str:
        """The answer ended: the whole characters among what was held back (a token may end one and begin the next)."""
        before = self._tokenizer.decode(self._before, skip_special_tokens=True)
        whole = self._tokenizer.decode(self._before + self._held, skip_special_tokens=True)
        self._held = []
        return whole.removeprefix(before).replace(REPLACEMENT, "")
