"""What of a written text is spoken: Markdown marks and emoji are silent, what they enclose is not."""

from __future__ import annotations

import re
import unicodedata

_LINE_MARK = re.compile(
    r"^\s*(?:>\s*)*"  # quotation
    r"(?:#{1,6}\s+|(?:```|~~~)[\w+-]*(?:\s+|$)"  # heading, fence
    r"|[-*+•‣◦▪]\s+(?:\[[ xX]\]\s+)?)?"  # bullet, task
)
_REPLACEMENTS = [
    (re.compile(r"!?\[([^\]]*)\]\([^)\s]*\)"), r"\1"),  # a link or an image speaks its text
    (re.compile(r"\]\([^)\s]*\)"), ""),  # the end of a link whose text began in an earlier clause
    (re.compile(r"<(https?://[^>\s]+)>"), r"\1"),
    (re.compile(r"</?(?:br|b|i|u|p|em|strong|sub|sup|code|ul|ol|li)\s*/?>", re.IGNORECASE), " "),
    (re.compile(r"(?<=\d)\*\*(?=\d)"), " to the power of "),
    (re.compile(r"(?<=\d)(?:\*| \* )(?=\d)"), " times "),
    (re.compile(r"(?<=\s)--+(?=\s)"), "—"),
    (re.compile(r"\s+#+\s*$"), ""),  # a closed heading
    (re.compile(r"[*`]|~~"), ""),
    (re.compile(r"(?<!\w)_+|_+(?!\w)"), ""),  # emphasis, but not the inside of a_name
    (re.compile(r"[\[\]{}\\]"), " "),
]
_TABLE_BAR = re.compile(r"\s*\|\s*")
_STRAY_SPACE = re.compile(r"\s+([,.;:!?]+)(?=\s|$)")
_SILENT_CATEGORIES = frozenset(["So", "Sk", "Cc", "Cs", "Co", "Cn", "Cf", "Me"])
_SPOKEN_ANYWAY = frozenset("°^")
_SPOKEN_ALONE = frozenset("%&@+=°±×÷")


def clean(raw: str, line_start: bool) -> str:
    """The text to be spoken, on one line with single spaces; empty when nothing in it can be.

    Dropped: Markdown marks, link targets, the language of a code fence, emoji, control and invisible
    characters. Table bars become commas, and * between figures is read. line_start says whether `raw` began a
    line, where # - > and the like are marks.
    """
    text = unicodedata.normalize("NFC", raw)
    if line_start:
        text = _LINE_MARK.sub("", text)
    for pattern, replacement in _REPLACEMENTS:
        text = pattern.sub(replacement, text)
    if "|" in text:
        text = _TABLE_BAR.sub(", ", text).strip(" ,")
    text = "".join(" " if is_silent(c) else c for c in text if not _is_joiner(c))
    text = _STRAY_SPACE.sub(r"\1", " ".join(text.split()))
    return text if is_speakable(text) else ""


def is_speakable(text: str) -> bool:
    """True when something has a sound: a letter or figure, or a symbol that is the whole text."""
    return any(c.isalnum() for c in text) or text.strip() in _SPOKEN_ALONE


def is_silent(char: str) -> bool:
    """True for emoji, other pictures and invisible characters."""
    if char in _SPOKEN_ANYWAY:
        return False
    return unicodedata.category(char) in _SILENT_CATEGORIES or _is_joiner(char)


def _is_joiner(char: str) -> bool:
    """Characters that shape their neighbours and take no room: joiners, variation selectors and the like."""
    return "\ufe00" <= char <= "\ufe0f" or unicodedata.category(char) in ("Cf", "Me")
