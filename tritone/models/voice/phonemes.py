"""English text to hibari's phonemes, for whatever a model may write."""

from __future__ import annotations

import importlib
import json
import logging
import re
import unicodedata
from pathlib import Path
from typing import Any

_LOG = logging.getLogger(__name__)

_FINAL_A = re.compile(r"\bA$")
_FIGURES = re.compile(r"\d[\d,.]*")
_GROUPED = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?[,.]*")
_LONGEST_NUMBER = 15  # figures; longer ones are card numbers and the like
_LONGEST_GROUPED = 36  # figures; hibari's number words end with decillions
_READ_AS_THEY_ARE = frozenset("½¼¾²³…™")
_AROUND_LETTER = " \"'“”‘’()[].,;:!?"
_SOUNDLESS = frozenset(' ;:,.!?—…"“”()ˈˌ')


class Phonemiser:
    """hibari's rules and lexicon (American English), guarded against text they fail on. Not thread-safe.

    Raises ImportError without the hibari-tts package.
    """

    def __init__(self) -> None:
        # hibari carries no types; importing it by name makes it Any under every mypy configuration.
        hibari_g2p: Any = importlib.import_module("hibari.g2p")
        self._g2p = hibari_g2p.G2P()
        vocabulary = Path(hibari_g2p.__file__).parent.parent / "assets" / "vocab.json"
        self._ids: dict[str, int] = json.loads(vocabulary.read_text(encoding="utf-8"))

    def phonemes(self, clause: str) -> str:
        """Phonemes in misaki's alphabet, words separated by spaces; empty when nothing can be pronounced."""
        text = readable(clause)
        try:
            return str(self._g2p(text))
        except Exception as error:  # any fault of the rules: one odd word must not cost the whole clause
            _LOG.warning("hibari's rules failed on a clause (%s); reading it word by word", type(error).__name__)
            return " ".join(filter(None, map(self._word, text.split())))

    def ids(self, phonemes: str) -> list[int]:
        """The model's input ids with their end marks; empty when there is nothing to hear, only pauses."""
        if not (set(phonemes) & self._ids.keys()) - _SOUNDLESS:
            return []
        return [0, *(self._ids[c] for c in phonemes if c in self._ids), 0]

    def _word(self, word: str) -> str:
        try:
            return str(self._g2p(word))
        except Exception:  # counted in the clause's warning
            return ""


def readable(clause: str) -> str:
    """The clause as hibari's rules read it best.

    Compatibility characters become plain ones (full width, mathematical letters, circled figures); long rows
    of figures are read one by one; a single letter, and a final "A", is a letter and not an article, which a
    full stop tells the rules.
    """
    text = "".join(c if c in _READ_AS_THEY_ARE else unicodedata.normalize("NFKC", c) for c in clause)
    text = "".join(str(unicodedata.decimal(c)) if c.isdecimal() else c for c in text.replace("\u2044", "/"))
    text = _FIGURES.sub(_read_figures, text)
    letter = text.strip(_AROUND_LETTER)
    if len(letter) == 1 and letter.isascii() and letter.isalpha():
        return f"{letter.upper()}."
    return _FINAL_A.sub("A.", text)


def _read_figures(match: re.Match[str]) -> str:
    number = match[0]
    figures = sum(c.isdigit() for c in number)
    if figures <= _LONGEST_NUMBER or (figures <= _LONGEST_GROUPED and _GROUPED.fullmatch(number)):
        return number
    end = number[len(number.rstrip(",.")) :]
    return " ".join(number.rstrip(",.").replace(",", "").replace(".", "")) + end


def pieces(phonemes: str, limit: int) -> list[str]:
    """Pieces of at most ``limit`` phonemes, cut between words where there are any."""
    parts = []
    while phonemes:
        cut = len(phonemes)
        if cut > limit:
            cut = phonemes.rfind(" ", 1, limit + 1)
            cut = limit if cut < 0 else cut
        parts.append(phonemes[:cut].strip())
        phonemes = phonemes[cut:].lstrip()
    return parts
