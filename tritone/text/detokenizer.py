"""Tokens to text, piece by piece, never cutting a character."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

REPLACEMENT = "\ufffd"


def load_tokenizer(directory: Path) -> Tokenizer:
    """The checkpoint's ``tokenizer.json``."""
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


class Detokenizer:
    """The text of one answer. A character whose bytes are not complete yet is held back; bytes that never become a
    character (a model may sample them) are left out, so U+FFFD is never shown. Special tokens have no text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)

    def push(self, token: int) -> str:
        piece = self._stream.step(self._tokenizer, token)
        return (piece or "").replace(REPLACEMENT, "")
